"""Machine code that is kept between starts: assembled once, and used only where it fits."""

import os
import subprocess
import sys

import pytest

from distgpt.kernels.matmul import assembled
from distgpt.kernels.matmul.microkernel import module
from distgpt.kernels.matmul.vectors import AMX, AVX2, AVX512, AVX512_BF16

# Says which files are made on the way to working kernels, and what one of them computes.
START = """
from distgpt import files
before = files.made_once
def watched(path, make):
    return before(path, lambda: print("made", path.name, flush=True) or make())
files.made_once = watched
import numpy as np
from distgpt.kernels.matmul import packing
out = packing.packed(2, 3, "float32")
packing.pack_transposed(0, 3, out, np.arange(6, dtype=np.float32).reshape(3, 2), 0, 2)
print(out[0, :3].tolist(), out[0, packing.COLUMNS :][:3].tolist())
"""
PACKED = "[0.0, 2.0, 4.0] [1.0, 3.0, 5.0]"


def start(folder):
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
    words = [sys.executable, "-c", START]
    return subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(process):
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_two_may_start_at_once_and_the_next_start_assembles_nothing(tmp_path):
    for process in [start(tmp_path) for _ in range(2)]:
        *made, packed = lines_of(process)
        assert packed == PACKED and all(line.startswith("made ") for line in made)
    kept = sorted(path.name for path in tmp_path.rglob("*.o"))
    assert len(kept) == len({name.rsplit("-", 1)[0] for name in kept}) == 4  # three tiles, and moves
    assert not [*tmp_path.rglob("*.tmp")]
    assert lines_of(start(tmp_path)) == [PACKED]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The names of the files that were assembled by `machine_code`, in an empty cache."""
    monkeypatch.setattr(assembled.disk_cache, "folder", lambda: tmp_path)
    names = []

    def code(name="tile"):
        def text():
            names.append(name)
            return module(AVX2, "float32", "float32")

        return assembled.machine_code(name, text)

    code()
    code()
    assert names == ["tile"]
    return names, code


def test_machine_code_is_not_used_for_what_it_was_not_made_for(made, monkeypatch):
    names, code = made
    own, (name, features) = code(), assembled.processor()
    others = [shape for shape in (AVX2, AVX512, AVX512_BF16, AMX) if shape != assembled.shape()]
    for what, other in (
        ("processor", ("sandybridge", "+avx,+sse2")),
        ("processor", (name, f"{features},-avx512bf16")),
        *(("shape", shape) for shape in others),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(assembled, what, lambda other=other: other)
            before = len(names)
            assert code() == code() and len(names) == before + 1, other
            assert code() != own or what == "shape" or other[0] == name
    monkeypatch.setattr(assembled.llvmlite, "__version__", "0.1")
    before = len(names)
    code()
    code("moves")
    assert len(names) == before + 2


def test_what_another_process_wrote_meanwhile_is_replaced_whole(made, tmp_path):
    _, code = made
    expected = code()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for torn in (b"", whole[:40], whole[:-1], whole + b"x", bytes(len(whole))):
        path.write_bytes(torn)
        assert code() == expected and path.read_bytes() == whole
