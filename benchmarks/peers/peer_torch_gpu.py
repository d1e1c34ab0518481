"""PyTorch on a GPU as the benchmarks' peer: takes a request as JSON, prints the answer as JSON.

    {"do": "train", …}     train on random tokens: tokens per second
    {"do": "forward", …}   the mean loss over names in batches of equal length: seconds of a pass
    {"do": "decode", …}    greedy decoding by Hugging Face's GPT-2: tokens per second

The model is `peer_gpt.py`, trained in the usual way: float32 parameters, autocast
to bfloat16, fused AdamW, TF32 allowed, clipping, padded vocabulary.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from peer_gpt import GPT, Shape
from peer_torch import greedy, hugging_face, mean_loss
from peer_training import adamw
from torch import nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
WARM_UP = 5  # steps; compiled code is also recorded and tuned in the first ones


def timed(work: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def train(
    shape: dict[str, Any], batch: int, precision: str, steps: int, compile: str, attention: str = ""
) -> dict[str, Any]:
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    model = GPT(Shape.of(shape), None).to(DEVICE)
    loss_of: Any = torch.compile(model, mode=compile, dynamic=False)
    parameters = list(model.parameters())
    optimizer = adamw(parameters, SimpleNamespace(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1))
    windows = torch.randint(shape["vocab_size"], (batch, shape["seq_len"] + 1))
    windows = windows.pin_memory() if ON_GPU else windows
    losses = []

    def step() -> None:
        sent = windows.to(DEVICE, non_blocking=True)
        if compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(DEVICE.type, torch.bfloat16) if precision == "bfloat16" else nullcontext():
            loss = loss_of(sent[:, :-1].contiguous(), sent[:, 1:].contiguous())
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        losses.append(loss.detach().clone())
        optimizer.zero_grad(set_to_none=True)

    def several() -> None:
        for _ in range(steps):
            step()

    with attention_by(attention):
        prepared = timed(lambda: [step() for _ in range(WARM_UP)])
        seconds = [timed(several) / steps for _ in range(3)]
    speed = batch * shape["seq_len"] / min(seconds)
    found = {"tokens_per_s": speed, "step_s": seconds, "prepare_s": prepared}
    return found | {"first_loss": float(losses[0]), "final_loss": float(losses[-1])}


def attention_by(which: str) -> Any:
    """Use PyTorch's choice of attention, or only cuDNN's."""
    if which != "cudnn" or not ON_GPU:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def forward(shape: dict[str, Any], names: str, precision: str, most: int = 512) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    model = GPT(Shape.of(shape), None).to(DEVICE).eval()
    stored = np.load(names)
    work: list[float] = []
    with torch.inference_mode():
        seconds = [
            timed(lambda: work.append(mean_loss(model, stored["tokens"], stored["lengths"], most, DEVICE)))
            for _ in range(6)
        ]
    return {"seconds": statistics.median(seconds[1:]), "loss": work[-1]}


def decode(shape: dict[str, Any], new: int, prompt: int = 4) -> dict[str, Any]:
    sizes = {key: shape[key] for key in ("vocab_size", "n_embd", "n_layer", "n_head")}
    model = hugging_face(max(shape["seq_len"], prompt + new), **sizes).to(DEVICE, torch.bfloat16)
    tokens = torch.randint(shape["vocab_size"], (1, prompt), device=DEVICE)
    with torch.inference_mode():
        seconds = [timed(lambda: greedy(model, tokens, new)) for _ in range(3)]
    return {"tokens_per_s": new / statistics.median(seconds[1:])}


def main() -> None:
    request = json.loads(sys.argv[1])
    found = {"train": train, "forward": forward, "decode": decode}[request.pop("do")](**request)
    found["peak_bytes"] = torch.cuda.max_memory_reserved() if ON_GPU else None
    print(json.dumps(found | {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}))


if __name__ == "__main__":
    main()
