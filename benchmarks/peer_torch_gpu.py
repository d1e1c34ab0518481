"""The PyTorch opponent of the GPU benchmark: answers each line of JSON on standard input with one.

    {"do": "train", …}     builds a model, compiles it and takes the first steps
    {"do": "steps", …}     takes more of them: seconds of each
    {"do": "study", …}     mean loss over names in batches of equal length
    {"do": "decode", …}    greedy decoding by Hugging Face's GPT-2
    {"do": "versions"}

What fails is answered with {"error": …}. The model is `peer_gpt.py` in `distgpt/measure/peer`, trained in the
usual way: float32 parameters, autocast to bfloat16, fused AdamW, TF32 allowed, clipping, padded vocabulary.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distgpt" / "measure" / "peer"))

import numpy as np
import torch
from peer_gpt import GPT, Shape, fill
from peer_torch import mean_loss
from torch import Tensor, nn


class Peer:
    """What was built last, and the device it is on."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        torch.zeros(1, device=self.device)  # a device that cannot be used ends the program here
        self._turn: Callable[[], Tensor] | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        actions = {
            "train": self.train,
            "steps": self.steps,
            "study": self.study,
            "decode": self.decode,
            "versions": versions,
        }
        return actions[request.pop("do")](**request)

    # -- training

    def train(
        self, shape: dict[str, Any], batch: int, precision: str, compile: str, attention: str
    ) -> dict[str, Any]:
        began = time.perf_counter()
        self.forget()
        torch.manual_seed(1)
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        model = GPT(Shape(**shape), None).to(self.device)
        self._turn = training_step(model, batches(Shape(**shape), batch, self.device), precision, compile)
        self._attention = attention
        first = self.steps(1)["loss"]
        self.steps(4)  # what is compiled is also recorded and tuned in the first few
        return {"first_loss": first, "prepare_s": time.perf_counter() - began}

    def steps(self, steps: int) -> dict[str, Any]:
        assert self._turn is not None, "nothing was built"
        marks, loss = [self.mark()], None
        with attention_by(self._attention, self.device):
            for _ in range(steps):
                loss = self._turn()
                marks.append(self.mark())
        final = float(loss)
        seconds = [self.between(a, b) for a, b in pairwise(marks)]
        return {
            "seconds": seconds,
            "loss": final,
            "peak_bytes": self.peak(),
            "allocated_bytes": self.allocated(),
        }

    # -- the forward pass over names

    def study(
        self, shape: dict[str, Any], weights: str, names: str, most: int, tf32: bool, repeats: int
    ) -> dict[str, Any]:
        self.forget()
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        model = GPT(Shape(**shape), None).to(self.device).eval()
        fill(model, np.load(weights))
        stored = np.load(names)
        tokens, lengths = stored["tokens"], stored["lengths"]
        loss, seconds = float("nan"), []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                self.wait()
                began = time.perf_counter()
                loss = mean_loss(model, tokens, lengths, most, self.device)
                seconds.append(time.perf_counter() - began)
        return {"seconds": seconds[1:], "loss": loss, "peak_bytes": self.peak()}

    # -- decoding

    def decode(
        self, shape: dict[str, Any], dtype: str, prompt: int, new: int, repeats: int
    ) -> dict[str, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        self.forget()
        torch.set_float32_matmul_precision("highest")
        config = GPT2Config(
            vocab_size=shape["vocab_size"],
            n_positions=shape["seq_len"],
            n_embd=shape["n_embd"],
            n_layer=shape["n_layer"],
            n_head=shape["n_head"],
            activation_function="gelu_pytorch_tanh",  # as "gelu_new", in one fused kernel
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
        model = GPT2LMHeadModel(config).eval().to(self.device, getattr(torch, dtype))
        tokens = torch.randint(shape["vocab_size"], (1, prompt), device=self.device)
        options = {"do_sample": False, "use_cache": True, "min_new_tokens": new, "max_new_tokens": new}
        seconds = []
        with torch.inference_mode():
            for _ in range(repeats + 1):
                self.wait()
                began = time.perf_counter()
                produced = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
                self.wait()
                seconds.append(time.perf_counter() - began)
                assert produced.shape == (1, prompt + new)
        best = statistics.median(seconds[1:])
        return {"seconds": seconds[1:], "tokens_per_s": new / best, "peak_bytes": self.peak()}

    # -- the device

    def forget(self) -> None:
        """Let go of the model before, with its compiled code and its memory."""
        self._turn = None
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        if self.device.type != "cuda":
            return second - first
        second.synchronize()
        return first.elapsed_time(second) / 1000

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self.device.type == "cuda" else None

    def allocated(self) -> int | None:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None


def training_step(
    model: GPT, batch: Callable[[], tuple[Tensor, Tensor]], precision: str, compile: str
) -> Callable[[], Tensor]:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    kind = parameters[0].device.type
    loss_of: Any = torch.compile(model, mode=compile, dynamic=False) if compile else model

    def step() -> Tensor:
        tokens, targets = batch()
        if compile == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(kind, torch.bfloat16) if precision == "bfloat16" else nullcontext():
            loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        found = loss.detach().clone()
        optimizer.zero_grad(set_to_none=True)
        return found

    return step


def batches(shape: Shape, batch: int, device: torch.device) -> Callable[[], tuple[Tensor, Tensor]]:
    """Windows of random tokens, sent from pinned memory as they are asked for."""
    text = torch.from_numpy(np.random.default_rng(1).integers(0, shape.vocab_size, 1 << 20))
    length, on_gpu = shape.seq_len, device.type == "cuda"
    count = min(16, (len(text) - 1) // (batch * length))
    sides = [text[i : i + count * batch * length].view(count, batch, length) for i in (0, 1)]
    sides = [side.contiguous().pin_memory() if on_gpu else side.contiguous() for side in sides]
    turn = 0

    def following() -> tuple[Tensor, Tensor]:
        nonlocal turn
        turn = (turn + 1) % count
        tokens, targets = (side[turn].to(device, non_blocking=True) for side in sides)
        return tokens, targets

    return following


def attention_by(which: str, device: torch.device) -> Any:
    if which == "default" or device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {"torch_cuda": torch.version.cuda, "torch_cudnn": torch.backends.cudnn.version()}
    try:
        import transformers

        found["transformers"] = transformers.__version__
    except ImportError:
        found["transformers"] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    peer = Peer(args.device)
    for line in sys.stdin:
        try:
            found = peer.answer(json.loads(line))
        except Exception as error:
            with suppress(Exception):  # a broken device breaks this too
                peer.forget()
            lines = str(error).strip().splitlines() or [""]
            found = {"error": f"{type(error).__name__}: {lines[0]}"[:500]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
