"""Fine-tuning in transformers: a plain loop on PyTorch, a step for each line that comes.

Rows are packed by whoever asks: no padding, causal attention over the whole row, labels -100 where nothing is
learned. The settings are a JSON object, the only argument. It answers each line with the seconds of a step.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from peer_torch import keep_freed_memory
from transformers import LlamaConfig, LlamaForCausalLM


def main(job: SimpleNamespace) -> None:
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    keep_freed_memory()
    model = LlamaForCausalLM(LlamaConfig(**job.shape, attn_implementation="sdpa"))
    model.allocate_master_weights()
    if job.mode != "autocast":
        model.to(torch.bfloat16)
    rounded = torch.autocast("cpu", torch.bfloat16) if job.mode == "autocast" else nullcontext()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    step = torch.compile(model) if job.mode == "compile" else model
    tokens = torch.randint(job.shape["vocab_size"], (job.rows, job.seq_len + 1))
    learned = torch.tensor(job.learned).expand(job.rows, -1)
    labels = torch.where(learned == 1, tokens[:, :-1], -100)
    for _ in sys.stdin:
        began = time.perf_counter()
        with rounded:
            loss = step(input_ids=tokens[:, :-1], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "loss": loss.item(), "peak": peak}), flush=True)


if __name__ == "__main__":
    main(SimpleNamespace(**json.loads(sys.argv[1])))
