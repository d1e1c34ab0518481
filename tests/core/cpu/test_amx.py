"""Use of AMX; test_tiles.py has its microkernel and a run."""

import ctypes
import platform
import sys
from types import SimpleNamespace

import numba
import pytest
from distgpt.core.cpu.compiling import disk_cache, processor
from distgpt.core.cpu.compiling.processor import AMX, ARM64, AVX512, AVX512_BF16
from distgpt.measure.verification import kept

PRESENT = {"avx512f", "avx512bw", "avx512bf16", "amx-bf16", "amx-tile"}
WITHOUT = PRESENT - {"amx-tile"}


@pytest.mark.parametrize("name, features, wanted, granted, expected", [
    ("sapphirerapids", PRESENT, None, True, AMX),
    ("sapphirerapids", PRESENT, "1", True, AMX),
    ("sapphirerapids", PRESENT, None, False, AVX512),
    ("sapphirerapids", PRESENT, "0", True, AVX512),
    ("sapphirerapids", WITHOUT, None, True, AVX512),
    ("znver4", WITHOUT, None, True, AVX512_BF16),  # fast at multiplying pairs
    ("znver4", {"avx512f"}, None, True, AVX512),
    ("generic", {"neon", "dotprod", "bf16"}, None, False, ARM64),
])  # fmt: skip
def test_registers_follow_from_processor_and_variable(name, features, wanted, granted, expected, monkeypatch):
    monkeypatch.setattr(processor, "processor", lambda: (name, ""))
    monkeypatch.setattr(processor, "features", lambda: features)
    monkeypatch.setattr(processor, "amx_granted", lambda: granted)
    monkeypatch.delenv(processor.AMX_VARIABLE, raising=False)
    if wanted is not None:
        monkeypatch.setenv(processor.AMX_VARIABLE, wanted)
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert processor.shape.__wrapped__() == expected
    assert ("does not grant it" in processor.hint()) == (features == PRESENT and not granted)
    assert (processor.hint() == "") == (expected == AMX or features != PRESENT)


@pytest.mark.parametrize("system, machine, answer, asks", [
    ("linux", "x86_64", 0, True),
    ("linux", "x86_64", -1, True),
    ("linux", "aarch64", 0, False),
    ("darwin", "x86_64", 0, False),
])  # fmt: skip
def test_tile_registers_are_requested_from_linux(system, machine, answer, asks, monkeypatch):
    asked = []
    syscall = SimpleNamespace(syscall=lambda *numbers: asked.append(numbers) or answer)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: syscall)
    assert processor.amx_granted.__wrapped__() == (asks and answer == 0)
    assert asked == [(158, 0x1023, 18)] * asks  # arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA


def test_run_records_use_of_amx(monkeypatch):
    found = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(processor, "shape", lambda shape=shape: shape)
        found.append(kept.processor_kind())
    assert found[1] == f"{found[0]}-amx"


def test_loops_with_other_tiles_have_separate_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache, "folder_name", disk_cache.folder_name.__wrapped__)
    folders = []
    for shape in (AVX512_BF16, AMX):
        monkeypatch.setattr(disk_cache, "shape", lambda shape=shape: shape)
        folders.append(disk_cache.folder.__wrapped__())
    assert len(set(folders)) == 2 and all(folder.is_dir() for folder in folders)
