"""Training steps of PyTorch on CPUs in different dtypes, with options for speed and memory.

Weights, moments and updates are always in float32. In bfloat16 the model is a 16-bit copy of the weights,
renewed after each update, or `torch.autocast` rounds them. Which one is faster depends on the processor.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from peer_gpt import GPT, Shape
from torch import Tensor, nn


class Training:
    def __init__(self, shape: Shape, job: SimpleNamespace) -> None:
        chunked = nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)
        model = GPT(shape, chunked if job.chunked_head else None)
        narrow = job.dtype == "bfloat16"
        self._autocast = torch.autocast("cpu", torch.bfloat16) if narrow and job.autocast else nullcontext()
        self.parameters = list(model.parameters())
        self._copies: list[Tensor] = []  # 16-bit copies of the weights
        if narrow and not job.autocast:
            self.parameters = [p.detach().clone().requires_grad_() for p in self.parameters]
            self._copies = list(model.to(torch.bfloat16).parameters())
        if job.ranks > 1:
            model = nn.parallel.DistributedDataParallel(model)
        self._clip = job.clip
        self._optimizer = adamw(self.parameters, job)
        self._loss: Any = model
        if job.compile or job.autotune:
            self._loss = torch.compile(model, dynamic=False, mode="max-autotune" if job.autotune else None)

    def step(self, tokens: Tensor, targets: Tensor, lr: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with self._autocast:
            loss = self._loss(tokens, targets)
        loss.backward()
        for wide, narrow in zip(self.parameters, self._copies, strict=False):
            wide.grad = torch.empty_like(wide) if wide.grad is None else wide.grad
            wide.grad.copy_(narrow.grad)
            narrow.grad = None
        if self._clip:
            nn.utils.clip_grad_norm_(self.parameters, self._clip, foreach=True)
        self._optimizer.step()
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self.parameters)
        else:
            self._optimizer.zero_grad(set_to_none=True)
        return float(loss)


def adamw(parameters: list[nn.Parameter] | list[Tensor], job: SimpleNamespace) -> torch.optim.AdamW:
    """Return PyTorch's fused AdamW with weight decay only on matrices."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": job.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (job.beta1, job.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], job.lr, betas, job.eps, fused=True)
