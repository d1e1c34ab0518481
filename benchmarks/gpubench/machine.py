"""The device that our side is measured on: a GPU, or the tests' stand-in for one, which takes no GPU."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.config import GpuConfig
from distgpt.gpu.accelerator import kernels_on, open_device
from distgpt.gpu.api import Array, Product, Products, Work
from distgpt.gpu.dtypes import STORAGE
from distgpt.gpu.kernels import CudaKernels

ROOT = Path(__file__).resolve().parents[2]
LONG_SERIES = 0.3  # seconds
DATASHEET_TFLOPS = 990  # bfloat16, dense, of an H100 or H200 SXM


class Machine:
    """A device, its clock and its memory. With `host` nothing of CUDA is loaded."""

    def __init__(self, host: bool, note: Callable[[str], None], graphs: bool = True) -> None:
        self.host, self._note, self._graphs = host, note, graphs
        if host:
            sys.path.insert(0, str(ROOT / "tests" / "gpu"))
            from hostdevice import HostDevice

            self.device: Any = HostDevice(deterministic=False)
        else:
            self.device = open_device(0, GpuConfig(graphs=graphs))

    def kernels(self, dtype: str, tf32: bool = False, products: Products | None = None) -> CudaKernels:
        """With `products`, ours run on those and with our own attention."""
        if products is not None:
            return CudaKernels(self.device, products, dtype)
        if self.host:
            from hostproducts import HostProducts

            return CudaKernels(self.device, HostProducts(self.device), dtype)
        return kernels_on(self.device, dtype, GpuConfig(graphs=self._graphs, tf32=tf32), self._note)

    def products(self, tf32: bool = False) -> Any:
        """A library for matrix products, planned anew."""
        return self.kernels("float32", tf32).linears.products

    # -- time

    def mark(self) -> Any:
        """A point in the device's queue."""
        if self.host:
            return time.perf_counter()
        event = self.device.xp.cuda.Event()
        event.record(self.device.stream)
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds; waits for the second."""
        if self.host:
            return float(second - first)
        second.synchronize()
        return float(self.device.xp.cuda.get_elapsed_time(first, second)) / 1000

    def seconds(self, work: Work, repeats: int = 5) -> float:
        """Of one call when it is repeated: the median of three series, shorter where a call takes long."""
        work()
        once = self._series(work, 1)
        if self.host:
            return once
        return statistics.median(
            self._series(work, max(1, min(repeats, int(LONG_SERIES / once)))) for _ in range(3)
        )

    def _series(self, work: Work, count: int) -> float:
        start = self.mark()
        for _ in range(count):
            work()
        return max(1e-9, self.between(start, self.mark()) / count)

    # -- memory

    def array(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Array:
        """Random numbers, some of which repeat: zeros would flatter a GPU, which saves power on them."""
        array = self.device.zeros(shape, STORAGE[dtype])
        flat, done = array.reshape(-1), min(array.size, 999_983)
        some = np.random.default_rng(7).standard_normal(done, np.float32) * np.float32(scale)
        self.kernels(dtype, products=NoProducts()).put(flat[:done], some)
        while done < array.size:
            more = min(done, array.size - done)
            self.device.copy(flat[done : done + more], flat[:more])
            done += more
        return array

    def used(self) -> int | None:
        """The most bytes that were taken from the device since `free`."""
        return None if self.host else int(self.device.xp.get_default_memory_pool().total_bytes())

    def free(self) -> None:
        """Give back what nobody holds any more."""
        gc.collect()
        if not self.host:
            self.device.synchronize()
            self.device.xp.get_default_memory_pool().free_all_blocks()

    # -- what the machine can do at best

    def peak_tflops(self, size: int) -> float:
        """A large square product in bfloat16, through our own way to the library."""
        a, b, out = (self.array((size, size), "bfloat16", 0.1) for _ in range(3))
        product = Product(size, size, size, False, True, "bfloat16", "bfloat16")
        products = self.products()
        return 2 * size**3 / self.seconds(lambda: products.run(product, out, a, b), 20) / 1e12

    def copy_bandwidth(self, size: int) -> float:
        """Bytes a second read and written in a copy on the device."""
        source, target = (self.device.zeros((size,), np.dtype(np.uint8)) for _ in range(2))
        return 2 * size / self.seconds(lambda: self.device.copy(target, source), 10)


class NoProducts:
    """A library that computes nothing: what is left of an operation are our own kernels."""

    def can(self, product: Product) -> bool:
        return product.epilogue == "none"

    def run(
        self, product: Product, out: Array, a: Array, b: Array, bias: Any = None, aux: Any = None
    ) -> None:
        """Leaves `out` as it is."""
