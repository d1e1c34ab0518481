"""The microkernel for AMX: what its machine code computes, and when it is used.

On processors without AMX its instructions are emulated, one by one (tests/amx/emulated.cpp).
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
from dataclasses import replace

import emulatedamx
import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from distgpt.core.cpu.compiling import disk_cache, processor
from distgpt.core.cpu.compiling.processor import AMX, AVX512, AVX512_BF16, BFLOAT16
from distgpt.core.cpu.matmul import amx
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.low_precision import to_bfloat16
from distgpt.measure.verification import kept
from test_matmul import GUARD
from test_tiles import OUT, check_not_finite, check_sums, compiled, loaded

ROWS, COLUMNS = AMX.rows, AMX.columns
NAN = GUARD["uint16"]
# Rounded as this processor can: LLVM rounds to bfloat16 by itself only for those with the instruction.
SHAPE = replace(AMX, dot="avx512bf16" in processor.features())
IS_THERE = processor.has_amx()
emulated = pytest.mark.skipif(
    not IS_THERE and (emulatedamx.COMPILER is None or platform.machine() != "x86_64" or sys.platform != "linux"),
    reason="needs AMX, or Linux, an x86 processor and g++ to emulate it",
)


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    """The library that carries out AMX's instructions; None where the processor does."""
    return None if IS_THERE else emulatedamx.library(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="module")
def machine(emulation):
    """What makes machine code for this processor and AMX, which this process can run from now on."""
    if emulation is None:
        assert processor.amx_granted()
    else:
        ctypes.CDLL(str(emulation))
    name = processor.processor()[0]
    target = llvm.Target.from_default_triple()
    return lambda: target.create_target_machine(cpu=name, features=emulatedamx.features(), opt=3)


@pytest.fixture(scope="module")
def tiles(machine):
    """`tile` for each type of C."""
    found, alive = compiled({out: amx.module(SHAPE, BFLOAT16, out) for out in OUT}, machine)
    yield found
    assert alive


@pytest.mark.ci
@emulated
@pytest.mark.parametrize("out", OUT)
def test_sums_of_small_integers_are_exact(tiles, out):
    check_sums(tiles[out], AMX, BFLOAT16, out, (0, 1, 2, 31, 32, 33, 63, 64, 65, 97))


@pytest.mark.ci
@emulated
def test_nan_and_infinity_stay_in_their_row(tiles):
    check_not_finite(tiles["float32"], AMX, 20)


@pytest.mark.ci
@emulated
def test_a_tile_of_packed_rows_is_that_of_pairs(tiles, machine):
    engine = loaded(amx.packed_by_rows(), machine)
    rearrange = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("rows"))
    random = np.random.default_rng(3)
    for rows, k in ((32, 64), (32, 70), (7, 33), (16, 32), (17, 1), (31, 95)):
        pairs, whole = -(-k // 2), -(-k // amx.DEPTH)
        panel, packed = aligned((pairs, COLUMNS, 2), "uint16"), aligned((whole * 16, ROWS, 2), "uint16")
        panel[...] = to_bfloat16(random.standard_normal(panel.shape))
        packed[...] = NAN
        packed[:pairs, :rows] = to_bfloat16(random.standard_normal((pairs, rows, 2)))
        if k % 2:
            panel[-1, :, 1] = packed[pairs - 1, :rows, 1] = 0
        made = []
        for row in (4, 64):
            if row == 64:
                rearrange(packed.ctypes.data, whole)
            c = np.full((rows, COLUMNS), np.nan, np.float32)
            at = (array.ctypes.data for array in (packed, panel, c))
            a, b, to = at
            tiles["float32"](rows, k, a, row, 4 * ROWS, b, to, c.strides[0], COLUMNS, b, 0)
            made.append(c)
        assert np.array_equal(*made) and np.isfinite(made[0]).all(), (rows, k)


# Linear layers by blocked.py, attention and its gradients, by the loops of users.
SMALL = "--preset tiny --n-layer 1 --n-embd 96 --n-head 2 --seq-len 80 --batch-size 2 --steps 2 --eval-every 0"


GRADIENTS = """
import sys
import numpy as np
import distgpt

tokens = np.arange(160).reshape(2, 80) ** 2 % 251
gradients = distgpt.load(sys.argv[1], dtype="bfloat16").gradients(tokens, np.roll(tokens, -1, 1))
np.savez(sys.argv[2], **gradients)
"""


@emulated
@pytest.mark.skipif(not {"avx512bf16", "avx512bw"} <= processor.features(), reason="needs AVX512_BF16 beside AMX")
@pytest.mark.slow
def test_a_run_computes_with_it_and_loses_what_others_lose(emulation, tmp_path):
    losses, gradients = {}, {}
    for name in ("without", "amx"):
        counts = tmp_path / f"{name}.txt"
        environ = {**os.environ, processor.AMX_VARIABLE: "0"}
        if name == "amx":
            environ = emulatedamx.environment(emulation, counts)
        words = [*SMALL.split(), "--dtype", "bfloat16", "--threads", "2", "--out", str(tmp_path / name)]
        command = [sys.executable, "-m", "distgpt", "train", *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[name] = json.loads((tmp_path / name / "summary.json").read_text())["loss"]
        saved = tmp_path / f"{name}.npz"
        words = [str(tmp_path / "without" / "weights.safetensors"), str(saved)]
        subprocess.run([sys.executable, "-c", GRADIENTS, *words], env=environ, timeout=300, check=True)
        gradients[name] = np.load(saved)
        assert emulation is None or (emulatedamx.products(counts) > 1000) == (name == "amx")
    assert losses["amx"] == pytest.approx(losses["without"], rel=2e-3) and losses["amx"] != losses["without"]
    for name, without in gradients["without"].items():
        # Queries, keys and values apart: of keys come gradients so small that the others would hide them.
        parts = np.split(without, 3) if "qkv" in name else [without]
        for part, own in zip(parts, np.split(gradients["amx"][name], len(parts)), strict=True):
            assert np.linalg.norm(own - part) < 0.03 * np.linalg.norm(part), name


def test_it_is_used_only_where_it_is_there_wanted_and_granted(monkeypatch):
    present = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
    for name, features, wanted, granted, expected in (
        ("sapphirerapids", present, None, True, AMX),
        ("sapphirerapids", present, "1", True, AMX),
        ("sapphirerapids", present, None, False, AVX512),
        ("sapphirerapids", present, "0", True, AVX512),
        ("sapphirerapids", present - {"amx-tile"}, None, True, AVX512),
        ("znver4", present - {"amx-tile"}, None, True, AVX512_BF16),  # fast at multiplying pairs
        ("znver4", {"avx512f"}, None, True, AVX512),
    ):
        monkeypatch.setattr(processor, "processor", lambda name=name: (name, ""))
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        monkeypatch.setattr(processor, "amx_granted", lambda granted=granted: granted)
        monkeypatch.delenv(processor.AMX_VARIABLE, raising=False)
        if wanted is not None:
            monkeypatch.setenv(processor.AMX_VARIABLE, wanted)
        assert processor.shape.__wrapped__() == expected
        assert ("does not grant it" in processor.hint()) == (features == present and not granted)
    monkeypatch.undo()
    assert processor.amx_granted() in (True, False)  # any processor can be asked


def test_a_record_of_a_run_tells_whether_it_was_used(monkeypatch):
    """Or a replay would promise the bits of a run that was computed otherwise."""
    found = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(processor, "shape", lambda shape=shape: shape)
        found.append(kept._processor())
    assert found[1] == f"{found[0]}-amx"


def test_loops_with_other_tiles_lie_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "folder_name", disk_cache.folder_name.__wrapped__)
    folders = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(disk_cache, "shape", lambda shape=shape: shape)
        folders.append(disk_cache.folder.__wrapped__())
    assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)
