"""The peaks: real work, counted right, on whichever backend."""

import itertools
import time
from unittest.mock import Mock

import numpy as np
import pytest

from distgpt.core.cpu.kernels import CpuKernels
from distgpt.measure.doctor import speed
from distgpt.measure.doctor import speed as peaks
from distgpt.measure.doctor.speed import measure_peaks


@pytest.mark.timing
@pytest.mark.parametrize("threads,dtype", [(2, "float32")])
def test_peaks_are_what_a_matmul_and_a_sum_reach(threads, dtype):
    """NumPy's are counted and timed here: no other count or unit would come within this factor."""
    x, y = np.full((2, 512, 512), 1 / 512, dtype)
    a, b = np.ones((2, peaks.MEMORY_BYTES // 8), dtype)
    for _ in range(10):  # other processes may disturb either side
        meet = Mock()
        found = measure_peaks(CpuKernels(dtype, threads), 0.1, meet)
        assert found.dtype == dtype and meet.call_count == 2
        ratios = (
            found.gflops * 1e9 / rate(2 * 512**3, lambda: np.matmul(x, x, out=y)),
            found.gbytes_per_s * 1e9 / rate(3 * a.nbytes, lambda: np.add(a, b, out=a)),
        )
        if all(1 / 6 < ratio < 6 for ratio in ratios):
            return
    raise AssertionError(ratios)


def rate(amount, work):
    """Per second, the best of a few."""
    seconds = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return amount / min(seconds)


class Counted(CpuKernels):
    """Every call is over in an instant of its own clock; what is done in it is written down."""

    def __init__(self, seconds):
        super().__init__("float32", 2)
        self.seconds, self.calls, self.at = seconds, [], 0.0

    def add(self, y, a, b):
        assert y.nbytes == 2 * peaks.MEMORY_BYTES and (y is a or b is a)
        self.calls.append("add")
        self.at += self.seconds["add"]

    def linear(self, y, x, wb):
        assert np.isfinite(x).all() and x.any()
        self.calls.append(len(x))
        self.at += self.seconds["linear"] * (len(x) / 512) ** 3


@pytest.mark.parametrize("product,moved", [(5e-5, 1e-3), (3e-3, 0.5)])
def test_rates_are_counted_right(product, moved, monkeypatch):
    kernels = Counted({"linear": product, "add": moved})
    monkeypatch.setattr(speed, "SIDES", (512, 1024, 2048))
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: kernels.at)
    found = measure_peaks(kernels)
    assert found.gflops == pytest.approx(2 * 512**3 / product / 1e9, rel=1e-3)
    assert found.gbytes_per_s == pytest.approx(2 * 3 * peaks.MEMORY_BYTES / moved / 1e9, rel=1e-3)
    sizes = [size for size, _ in itertools.groupby(call for call in kernels.calls if call != "add")]
    assert sizes == list(speed.SIDES[: len(sizes)])
    assert kernels.at < 2 * peaks.SECONDS  # slow ones stop at small sizes
