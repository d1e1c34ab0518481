"""PyTorch on cores as the benchmarks' peer: the same GPT, every fused option on; prints one JSON line.

    peer_torch.py train|names REQUEST

The request is JSON. Tried on two cores and of no help: flushing denormals, inter-op threads, binding or
spinning OpenMP threads, clipping without foreach; in bfloat16 also weights and moments of 16 bits (no faster
than float32 ones, and not the same training), and float32 arrays with matmul of precision "medium".
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages; PyTorch reads this at the start
sys.path += map(str, Path(__file__).resolve().parents[1:3])  # this Python does not have distgpt

import torch
from peer_gpt import GPT, Shape, fill
from peer_training import Training
from timing import timed
from torch import Tensor, nn

from distgpt.cluster.affinity.machine import read_machine
from distgpt.core.comm.resources import peak_memory

SEED = 1337
RANKS, RANK = (int(os.environ.get(name, alone)) for name, alone in (("WORLD_SIZE", 1), ("RANK", 0)))
WARM_UP = 2  # warm-up steps, not measured


def batches(job: SimpleNamespace, shape: Shape, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        drawn = torch.randint(shape.vocab_size, (job.batch_size, shape.seq_len + 1))
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of measured steps after a warm-up."""
    job = SimpleNamespace(**request)
    shape = Shape.of(job.shape)
    if job.keep_freed:
        keep_freed_memory()
    job.ranks = RANKS
    if RANKS > 1:  # torchrun has started ranks, which share the cores and the batch
        torch.distributed.init_process_group("gloo")
        job.batch_size //= RANKS
    training = Training(shape, job)
    if RANKS > 1:  # all ranks start with the same weights and train on different tokens
        torch.manual_seed(SEED + RANK)
    total = WARM_UP + job.steps
    seconds, losses = [], []
    for step, (tokens, targets) in enumerate(batches(job, shape, total)):
        began = time.perf_counter()
        lr = job.lr * (1 - step / total) if job.schedule == "linear" else job.lr
        losses.append(training.step(tokens, targets, lr))
        seconds.append(time.perf_counter() - began)
    measured = seconds[WARM_UP:]
    median = statistics.median(measured)
    return {
        "tokens_per_s": RANKS * job.batch_size * shape.seq_len / median,
        "step_s_median": median,
        "step_s_min": min(measured),
        "step_s_mean": statistics.mean(measured),
        "steps": job.steps,
        "warmup_steps": WARM_UP,
        "warmup_s": sum(seconds[:WARM_UP]),
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "parameters": sum(p.numel() for p in training.parameters),
    }


def hugging_face(length: int, **sizes: int) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    # The same function as "gelu_new", in one fused kernel.
    options: dict[str, Any] = {"activation_function": "gelu_pytorch_tanh", "attn_implementation": "sdpa"}
    config = GPT2Config(n_positions=length, bos_token_id=None, eos_token_id=None, **options, **sizes)
    return GPT2LMHeadModel(config).eval()


def greedy(model: Any, prompt: Tensor, new: int) -> Tensor:
    options: dict[str, Any] = {
        "do_sample": False,
        "use_cache": True,
        "attention_mask": torch.ones_like(prompt),
    }
    produced: Tensor = model.generate(prompt, min_new_tokens=new, max_new_tokens=new, **options)
    return produced


def mean_loss(model: GPT, tokens: Any, lengths: Any, most: int, device: torch.device) -> float:
    """Return the mean loss in batches of up to `most` names of equal length; synchronize once."""
    starts = np.cumsum(lengths) - lengths
    total = torch.zeros((), dtype=torch.float64, device=device)
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        for first in range(0, len(at), most):
            rows = torch.from_numpy(tokens[at[first : first + most]]).to(device, non_blocking=True)
            scores = model.scores(rows[:, :-1]).float()
            total += nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return float(total) / (len(tokens) - len(lengths))


def names(request: dict[str, Any]) -> dict[str, Any]:
    """Return the mean loss over names, in batches of equal length or one by one."""
    keep_freed_memory()  # distgpt also does this; it is the faster way for PyTorch
    model = GPT(Shape.of(request["shape"]), None).eval()
    fill(model, np.load(request["weights"]))
    model = model.to(getattr(torch, request["dtype"]))
    stored, device = np.load(request["names"]), torch.device("cpu")
    tokens, lengths = stored["tokens"], stored["lengths"]

    def work(count: int) -> float:
        own = lengths[:count]
        return mean_loss(model, tokens[: own.sum()], own, request["most"], device)

    with torch.inference_mode():
        found = timed(work, len(lengths), request["repeats"], request["patience"])
    return found | {"peak_memory": [peak_memory()]}


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks instead of unmapping them: fewer page faults, a higher peak."""
    if sys.platform != "linux":
        return
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, -1)  # never unmap: the largest size


def take_own_cores() -> None:
    """Bind this rank to one of equal blocks of cores, with one CPU per core, so that ranks share no core."""
    seats = [core[0].number for core in read_machine(allowed=os.sched_getaffinity(0)).cores]
    if len(seats) >= RANKS:
        each = len(seats) // RANKS
        os.sched_setaffinity(0, seats[RANK * each : (RANK + 1) * each])


def main(command: str, request: dict[str, Any]) -> None:
    if RANKS > 1:
        take_own_cores()
    torch.set_num_threads(request["threads"])
    torch.manual_seed(SEED)
    result = {"train": train, "names": names}[command](request)
    result |= {
        "command": command,
        "peak_rss_bytes": peak_memory(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if RANK == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
