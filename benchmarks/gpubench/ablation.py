"""What tiles, a library, narrower types and batching bring in a matrix product, each alone and together."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from distgpt.gpu.api import Product
from distgpt.gpu.sources import storage_define
from gpubench.section import Section

TILE = 16  # threads to a side, as in matmul.cu
ROWS = 8  # of a name
NAMES = 512  # in a batch
LAYERS = {"S": (64, 256), "L": (256, 1024), "XL": (512, 2048)}  # inputs and outputs of a layer: fc
IN_A_ROW = 16  # products that are recorded together
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 2e-2}


def ablation(section: Section) -> None:
    layers = {"S": (24, 40)} if section.quick else LAYERS
    names = 3 if section.quick else NAMES
    for layer, (k, n) in layers.items():
        for dtype in ("float64", "float32", "bfloat16"):
            for batched in (False, True):
                name = f"{layer} {n}x{k}/{dtype}, {'batched' if batched else 'unbatched'}"
                with section.report.attempt(name):
                    _products(section, name, dtype, ROWS * names if batched else ROWS, n, k)


def _products(section: Section, name: str, dtype: str, m: int, n: int, k: int) -> None:
    machine, products = section.machine, section.machine.products()
    a, b = machine.array((m, k), dtype), machine.array((k, n), dtype, k**-0.5)
    out = machine.array((m, n), dtype)
    read = machine.kernels(dtype).to_host
    grid = (-(-n // TILE), -(-m // TILE), 1)
    launch: Any = partial(
        machine.device.launch, "matmul", defines=(storage_define(dtype),), grid=grid, block=(TILE, TILE)
    )
    ways = {
        "naive": partial(launch, kernel="matmul_naive", args=(out, a, b, m, n, k)),
        "tiled": partial(launch, kernel="matmul_tiled", args=(out, a, b, m, n, k)),
        "cuBLASLt": partial(products.run, Product(m, n, k, False, False, dtype, dtype), out, a, b),
    }
    expected = None
    for way, work in ways.items():
        with section.report.attempt(f"{name}, {way}"):
            machine.device.zero(out)
            repeat = machine.device.record(partial(_several, work))
            repeat()
            repeat()
            seconds = machine.seconds(repeat, 2) / IN_A_ROW
            found = np.array(read(out), np.float64)
            expected = found if expected is None else expected
            distance = float(np.abs(found - expected).max() / np.abs(expected).max())
            tflops = 2 * m * n * k / seconds / 1e12
            section.report.row(
                f"{name}/{way}", us_per_name=seconds * ROWS / m * 1e6, tflops=tflops, distance=distance
            )
            if not distance < TOLERANCE[dtype]:
                section.report.error(f"{name}, {way}", f"differs from the first way by {distance:.2g}")


def _several(work: Any) -> None:
    for _ in range(IN_A_ROW):
        work()
