"""Time the kernels and matmuls of a GPT-2 124M training step on a GPU one by one, or kinds of matmul.

    python benchmarks/gpu_kernels.py step|ablation [--quick] [--host]

Prints one JSON object per row. `--quick`: toy sizes; `--host`: on the CUDA emulator.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.core.config import GpuConfig, ModelConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Pass
from distgpt.gpu.compiling import storage_define
from distgpt.gpu.device import STORAGE
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import Matmul
from distgpt.gpu.stage import kernels_on, open_device

TOY = ModelConfig(vocab_size=13, seq_len=8, n_layer=2, n_head=3, n_embd=24, vocab_multiple=8)
CHOICES = ("fused", "apart")  # the order of `LinearKernels`
LONG_SERIES = 0.3  # seconds
# Array arguments that a kernel reads and writes, which count twice, and arguments that it reads in part.
TWICE = {"cross_entropy": (1,), "adamw": (0, 2, 3), "rope": (0,), "norm_backward": (4,)}
ONCE = ("add_up_tiles",)  # cannot be repeated, since it changes its input
PARTLY = {"embed": (2,), "token_gradient": (0,), "token_gradient_across": (0,)}

TILE = 16  # threads per side of a block in matmul.cu
NAME_ROWS, NAMES = 8, 512
LAYERS = {"S": (64, 256), "L": (256, 1024), "XL": (512, 2048)}  # inputs and outputs of an MLP's first layer
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 2e-2}

Row = dict[str, Any]


def first_calls(of: Any, method: str, key: int) -> dict[Any, Any]:
    """Record the first call of a method for each value of argument number `key`, to repeat it later."""
    found: dict[Any, Any] = {}
    call = getattr(of, method)

    def keeping(*args: Any, **named: Any) -> None:
        found.setdefault(args[key], partial(call, *args, **named))
        call(*args, **named)

    setattr(of, method, keeping)
    return found


def opened(host: bool) -> Any:
    if host:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
        import hostgpu

        hostgpu.install()
    return open_device(0, GpuConfig())


def complain(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(device: Any, work: Callable[[], None], repeats: int = 5) -> float:
    """Return the median seconds of a call in three series, which are shorter for slow calls."""

    def series(count: int) -> float:
        start = device.mark()
        for _ in range(count):
            work()
        return max(1e-9, float(device.mark().seconds_since(start)) / count)

    work()
    count = max(1, min(repeats, int(LONG_SERIES / series(1))))
    return statistics.median(series(count) for _ in range(3))


def copy_bandwidth(device: Any, size: int) -> float:
    source, target = (device.zeros((size,), np.dtype(np.uint8)) for _ in range(2))
    return 2 * size / seconds(device, lambda: device.copy(target, source), 10)


def filled(kernels: CudaKernels, *shape: int) -> Any:
    """Return random values: a GPU uses less power for zeros, so they would be too fast."""
    array = kernels.zeros(*shape)
    kernels.put(array, np.random.default_rng(7).standard_normal(shape, np.float32) / math.sqrt(shape[0]))
    return array


def step(host: bool, quick: bool) -> Iterator[Row]:
    """Time each kernel and each kind of matmul of a training step in bfloat16, B = 64."""
    device = opened(host)
    copy = copy_bandwidth(device, 1 << 16 if quick else 1 << 31)
    yield {"row": "copy", "bytes_per_s": copy}
    shape, n_seq = (TOY, 2) if quick else (preset("gpt2").model, 64)
    kernels = kernels_on(device, "bfloat16", GpuConfig(), complain)
    model = Model(Architecture(shape), kernels)
    model.allocate_master_weights()
    model.initialise(1)
    tokens = np.random.default_rng(3).integers(0, shape.vocab_size, n_seq * shape.seq_len)
    ids = kernels.integers(tokens)
    work = Pass(model, n_seq, shape.seq_len, training=True, recompute="none")
    work.loss_and_gradients(ids, ids, 1.0, accumulate=False)  # also tries and checks the kernels
    launches = first_calls(device, "launch", 1)
    matmuls = first_calls(kernels.matmuls, "run", 0)
    work.loss_and_gradients(ids, ids, 1.0, accumulate=False)
    AdamW(model, TrainConfig(clip=1.0)).step(0, 1.0)
    for kernel, again in list(launches.items()):
        if kernel in ONCE:
            continue
        took, moved = seconds(device, again), traffic(kernel, again.args[5])
        yield {"row": f"kernel {kernel}", "seconds": took, "bytes": moved, "of_copy": moved / took / copy}
    for kind, again in list(matmuls.items()):
        took, flops = seconds(device, again), 2 * kind.m * kind.n * kind.k
        row = {"row": f"matmul {label(kind)}", "seconds": took, "tflops": flops / took / 1e12}
        chosen = device.choices.get(kind)
        yield row if chosen is None else row | {"chosen": CHOICES[chosen]}


def traffic(kernel: str, args: Any) -> int:
    """Return the bytes of a kernel's arrays: twice if read and written, less if read in part."""
    name = kernel.removesuffix("_packed").removesuffix("_single")
    arrays = {
        i: arg for i, arg in enumerate(args) if hasattr(arg, "nbytes") and i not in PARTLY.get(name, ())
    }
    return sum(int(arg.nbytes) * (1 + (i in TWICE.get(name, ()))) for i, arg in arrays.items())


def label(kind: Matmul) -> str:
    turned = "".join("T" if turned else "N" for turned in (kind.transpose_a, kind.transpose_b))
    words = [f"{kind.m}x{kind.n}x{kind.k} {turned}"]
    words += [kind.epilogue] if kind.epilogue != "none" else []
    words += ["+ bias"] if kind.has_bias else []
    words += ["+ residual"] if kind.onto else []
    words += ["accumulating"] if kind.accumulate else []
    words += [f"to {kind.out_type}"] if kind.out_type != kind.in_type else []
    return " ".join(words)


def ablation(host: bool, quick: bool) -> Iterator[Row]:
    """Time naive, tiled and cuBLASLt matmuls in each type, for one name and for a batch."""
    device = opened(host)
    for layer, (k, n) in ({"S": (24, 40)} if quick else LAYERS).items():
        for dtype in STORAGE:
            kernels = kernels_on(device, dtype, GpuConfig(), complain)
            for m in (NAME_ROWS, NAME_ROWS * (3 if quick else NAMES)):
                a, b, out = filled(kernels, m, k), filled(kernels, k, n), kernels.zeros(m, n)
                expected = None
                for way, work in ways(device, kernels, dtype, out, a, b).items():
                    device.zero(out)
                    took = seconds(device, work, 100)
                    found = np.array(kernels.to_host(out), np.float64)
                    expected = found if expected is None else expected
                    distance = float(np.abs(found - expected).max() / np.abs(expected).max())
                    row = {"row": f"{layer} {n}x{k}, {dtype}, {m} rows, {way}", "distance": distance}
                    row |= {"us_per_name": took * NAME_ROWS / m * 1e6, "tflops": 2 * m * n * k / took / 1e12}
                    wrong = not distance < TOLERANCE[dtype]
                    yield row | ({"error": f"differs from the naive way by {distance:.2g}"} if wrong else {})


def ways(
    device: Any, kernels: CudaKernels, dtype: str, out: Any, a: Any, b: Any
) -> dict[str, Callable[[], None]]:
    (m, k), n = a.shape, b.shape[1]
    where = {"defines": (storage_define(dtype),), "grid": (-(-n // TILE), -(-m // TILE), 1)}
    args = (out, a, b, m, n, k)
    own: Any = partial(device.launch, "matmul", **where, block=(TILE, TILE), args=args)
    library = partial(kernels.matmuls.run, Matmul(m, n, k, False, False, dtype, dtype), out, a, b)
    return {"naive": partial(own, "matmul_naive"), "tiled": partial(own, "matmul_tiled"), "cuBLASLt": library}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("step", "ablation"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    for row in {"step": step, "ablation": ablation}[args.what](args.host, args.quick):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
