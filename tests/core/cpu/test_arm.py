"""Microkernels for arm64, assembled here for the machines they are meant for."""

import platform

import llvmlite.binding as llvm
import numpy as np
import pytest
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import ARM64
from distgpt.core.cpu.matmul import packing
from distgpt.core.cpu.matmul.assembled import tile_text
from distgpt.core.cpu.matmul.vectors import moves
from distgpt.inference.quantized import int4, int8

FLOAT, LOW = "float32", "bfloat16"
C_TYPES = {FLOAT: "float32", LOW: "uint16"}


def assembly(text):
    """Machine code for arm64, as text."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    target = llvm.Target.from_triple("aarch64-linux-gnu")
    parsed.triple = "aarch64-linux-gnu"
    return target.create_target_machine(cpu="generic", features="+neon", opt=3).emit_assembly(parsed)


@pytest.mark.ci
def test_every_kernel_assembles_for_any_processor():
    plain = int8.dot_of(ARM64, {"neon", "dotprod", "i8mm"})
    assert plain.kind == "plain"
    for operand, out in ((FLOAT, FLOAT), (LOW, FLOAT), (LOW, LOW)):
        assert "\tfmla\t" in assembly(tile_text(ARM64, operand, out))
    for of in (int8, int4):
        assert "\ntile:" in assembly(of.module(ARM64, plain))
    assert "\ntranspose:" in assembly(moves(ARM64.lanes))


def test_registers_follow_from_the_machine(monkeypatch):
    monkeypatch.setattr(processor, "features", lambda: {"neon", "dotprod", "bf16"})
    for machine in ("aarch64", "arm64"):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert processor.shape.__wrapped__() is ARM64


def test_packed_rows_wider_than_a_vector_keep_what_the_next_vector_overlaps(monkeypatch):
    """6 columns by vectors of 4: the second vector of a row reaches into the next row."""

    def strip(x, row, to, step, rows):
        for k in range(rows):
            to[k * step // 4 : k * step // 4 + 4] = x[k, :4].view(np.uint32)

    monkeypatch.setattr(packing, "strip", strip)
    monkeypatch.setattr(packing, "LANES", 4)
    w = np.arange(70, dtype=np.float32).reshape(7, 10)
    to = np.zeros(7 * 6 + 4, np.float32)
    packing._columns.py_func(to, w, 0, 7, 1, 6, 6)
    np.testing.assert_array_equal(to[:42].reshape(7, 6), w[:, 1:7])
