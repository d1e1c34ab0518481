"""Which matmul float32 uses: asked for, or measured once on a machine and kept there."""

import json
import multiprocessing

import numpy as np
import pytest

from distgpt import files
from distgpt.errors import StorageError
from distgpt.kernels.api import Affine
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.matmul import layers
from distgpt.kernels.matmul.layers import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    BlasMatmuls,
    Chosen,
    OwnMatmuls,
    class_of,
)
from distgpt.kernels.pool import pool_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A machine on which nothing was measured yet."""
    monkeypatch.setattr(layers.disk_cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(layers.disk_cache.site(), "files", {})
    layers._stored_speeds.cache_clear()
    yield tmp_path
    layers._stored_speeds.cache_clear()


def results(kernels, rows, inputs, outputs):
    random = np.random.default_rng(0)
    x, w, b, dy = (
        random.standard_normal(shape).astype(kernels.dtype)
        for shape in ((rows, inputs), (outputs, inputs), outputs, (rows, outputs))
    )
    y, dx, dw, db = (np.full_like(array, np.nan) for array in (dy, x, w, b))
    kernels.linear(y, x, Affine(w, b))
    kernels.linear_backward(dx, dy, w)
    kernels.linear_backward_weights(Affine(dw, db), dy, x, False)
    kernels.linear_backward_weights(Affine(dw, db), dy, x, True)
    expected = x @ w.T + b, dy @ w, 2 * dy.T @ x, 2 * dy.sum(0)
    return (y, dx, dw, db), expected


@pytest.mark.parametrize("matmul", ["auto", "own", "blas"])
def test_each_computes_the_same(matmul):
    for shape in ((5, 3, 70), (100, 64, 2048), (70, 2048, 65), (9, 512, 512)):
        for found, expected in zip(*results(CpuKernels("float32", 2, matmul), *shape), strict=True):
            assert np.abs(found - expected).max() <= 2e-6 * np.abs(expected).max(), shape


def test_what_is_asked_for_is_used(folder):
    assert isinstance(CpuKernels("float32", 2, "own").matmuls, OwnMatmuls)
    assert isinstance(CpuKernels("float32", 2, "blas").matmuls, BlasMatmuls)
    assert isinstance(CpuKernels("float64", 2, "own").matmuls, BlasMatmuls)
    assert not list(folder.iterdir())  # nothing was measured


def test_it_is_measured_once_for_all_numbers_of_threads(folder, monkeypatch):
    first = CpuKernels("float32", 2).matmuls
    (path,) = folder.glob("matmul-*.json")
    monkeypatch.setattr(layers, "_measured", lambda pool: pytest.fail("measured again"))
    layers._stored_speeds.cache_clear()
    second = CpuKernels("float32", 1).matmuls
    assert first.speeds == second.speeds
    classes = {f"{form}, {kind}" for form in (FORWARD, BACKWARD, WEIGHTS) for kind in layers.SAMPLES}
    assert set(first.speeds) == classes - {f"{WEIGHTS}, {layers.CONFLICTING}"}
    assert all(each["own"] > 0 < each["blas"] for each in first.speeds.values())
    monkeypatch.setattr(layers.linear, "blas_core_name", lambda: "another")
    layers._stored_speeds.cache_clear()
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        CpuKernels("float32", 2)
    path.unlink()


def test_the_faster_one_of_each_class_is_taken(folder):
    names = [f"{form}, {kind}" for form in (FORWARD, BACKWARD, WEIGHTS) for kind in layers.SAMPLES]
    speeds = {name: {"own": 2.0, "blas": 1.0} for name in names}
    slow = f"{BACKWARD}, {layers.CONFLICTING}"
    speeds[slow] = {"own": 1.0, "blas": 2.0}
    chosen = Chosen(pool_of(2), speeds)
    used = {name: type(each).__name__ for name, each in chosen._by.items()}
    assert used == {name: "BlasMatmuls" if name == slow else "OwnMatmuls" for name in names}
    assert chosen.words == "own kernels (BLAS in 1 of 12 size classes)"


def test_classes():
    def at(rows, inputs, outputs):
        return class_of(
            FORWARD, np.empty((rows, inputs), np.float32), np.empty((outputs, inputs), np.float32)
        )

    assert at(1000, 100, 100) == "forward, narrow" == at(3, 100, 100)
    assert at(1000, 768, 768) == "forward, wide"
    assert at(10, 768, 768) == "forward, few rows"
    assert at(1000, 3072, 768) == "forward, rows of 4 KB"
    x, w = np.empty((100, 1024), np.float32), np.empty((1024, 1024), np.float32)
    assert class_of(WEIGHTS, x, w) == "into weights, wide"  # packed by both


def test_damage_is_survived(folder, monkeypatch):
    speeds = json.dumps({"forward, wide": {"own": 1.0, "blas": 2.0}}).encode()
    monkeypatch.setattr(layers, "_measured", lambda pool: speeds)
    CpuKernels("float32", 2)
    (path,) = folder.glob("matmul-*.json")
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    layers._stored_speeds.cache_clear()
    assert isinstance(CpuKernels("float32", 2).matmuls, Chosen)
    assert path.read_bytes() == whole


def test_without_room_to_keep_it_the_blas_computes(folder, monkeypatch):
    def full(path):
        raise StorageError("no space left")

    monkeypatch.setattr(layers, "_measured", lambda pool: b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(files, "atomic_file", full)
        assert isinstance(CpuKernels("float32", 2).matmuls, BlasMatmuls)
    for none in (lambda: None, lambda: folder / "gone"):
        monkeypatch.setattr(layers.disk_cache, "folder", none)
        layers._stored_speeds.cache_clear()
        assert isinstance(CpuKernels("float32", 2).matmuls, BlasMatmuls)


def _measure(folder, found):
    layers.disk_cache.folder = lambda: folder
    layers.disk_cache.site().files = {}
    layers._measured = lambda pool: (found.put("measured"), json.dumps({}).encode())[1]
    layers._stored_speeds(pool_of(1))


def test_of_processes_that_start_at_once_one_measures(tmp_path):
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    processes = [context.Process(target=_measure, args=(tmp_path, found)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert found.get(timeout=10) == "measured" and found.empty()
