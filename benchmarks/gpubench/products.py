"""The matrix products of a GPT-2 124M step with B = 64, kind by kind: TFLOP/s, and what `fastest` chose."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from distgpt.gpu.api import Product
from distgpt.gpu.kernels import CudaKernels
from distgpt.model.model import Model
from distgpt.model.passes import Pass
from gpubench.machine import Machine
from gpubench.section import Section
from gpubench.training import gpt2

DTYPE = "bfloat16"
CHOICES = ("fused", "apart")  # in the order that `Linears` offers them


class Listening:
    """Passes everything on, and remembers one call of each kind."""

    def __init__(self, products: Any) -> None:
        self.products = products
        self.calls: dict[Product, tuple[Any, ...]] = {}

    def can(self, product: Product) -> bool:
        return bool(self.products.can(product))

    def run(self, product: Product, *arrays: Any, bias: Any = None, aux: Any = None) -> None:
        self.calls.setdefault(product, (*arrays, bias, aux))
        self.products.run(product, *arrays, bias=bias, aux=aux)

    def again(self, product: Product) -> None:
        self.products.run(product, *self.calls[product])


def products(section: Section) -> None:
    shape, machine, report = gpt2(section), section.machine, section.report
    n_seq = 2 if section.quick else 64
    listening = Listening(machine.products())
    kernels: CudaKernels = machine.kernels(DTYPE, products=listening)
    model = Model(shape, kernels)
    model.initialise(1)
    tokens = np.random.default_rng(3).integers(0, shape.vocab_size, n_seq * shape.seq_len)
    ids = kernels.integers(tokens)
    work = Pass(model, n_seq, shape.seq_len, training=True, recompute="none")
    _skip_attention(kernels, machine)
    work.loss_and_gradients(ids, ids, 1.0, accumulate=False)
    chosen = getattr(machine.device, "_fastest", {})
    for product in listening.calls:
        with report.attempt(label(product)):
            seconds = machine.seconds(partial(listening.again, product))
            tflops = 2 * product.m * product.n * product.k / seconds / 1e12
            report.row(label(product), seconds=seconds, tflops=tflops)
            if product in chosen:
                report.row(label(product), chosen=CHOICES[chosen[product]])


def _skip_attention(kernels: Any, machine: Machine) -> None:
    """It asks for no products, and takes longer than all else. What it would write is filled with numbers."""

    def attention(y: Any, lse: Any, qkv: Any, seq_len: int) -> None:
        machine.device.copy(y, qkv.reshape(-1)[: y.size])

    def attention_backward(dqkv: Any, dy: Any, y: Any, lse: Any, qkv: Any, seq_len: int) -> None:
        machine.device.copy(dqkv, qkv)

    kernels.attention, kernels.attention_backward = attention, attention_backward


def label(product: Product) -> str:
    turned = "".join("T" if turned else "N" for turned in (product.transpose_a, product.transpose_b))
    words = [f"{product.m}x{product.n}x{product.k} {turned}"]
    words += [product.epilogue] if product.epilogue != "none" else []
    words += ["+ bias"] if product.has_bias else []
    words += ["accumulating"] if product.accumulate else []
    words += [f"to {product.out_type}"] if product.out_type != product.in_type else []
    return " ".join(words)
