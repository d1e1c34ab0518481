"""Microkernels for arm64, assembled here for the machines they are meant for: what is chosen, no spills."""

import ctypes
import platform
import re
import sys
from types import SimpleNamespace

import llvmlite.binding as llvm
import numpy as np
import pytest
from fake_macos import pretend_macos

from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.matmul import packing
from distgpt.core.cpu.matmul.vectors import moves
from distgpt.experimental.arm64 import arm, mmla
from distgpt.experimental.arm64.arm import NEON, NEON_BF16
from distgpt.experimental.arm64.neon import module
from distgpt.rounded.loops import int4, int8

FLOAT, LOW = "float32", "bfloat16"
DOTS, SQUARES = (int8.dot_of(NEON, {"dotprod", *more}) for more in ((), ("i8mm",)))
# What a loop over k holds: its IR, the feature it needs, its instruction, and how many a step has.
LOOPS = {
    "float32": (lambda: module(NEON, FLOAT, FLOAT), "neon", "fmla", 24),
    "bfloat16 by squares": (lambda: mmla.module(NEON_BF16, LOW, LOW), "bf16", "bfmmla", 24),
    "bfloat16 widened": (lambda: module(NEON, LOW, FLOAT), "neon", "fmla", 48),
    "int8": (lambda: int8.module(NEON, DOTS), "dotprod", "sdot", 16 * 12),
    "int8 by squares": (lambda: int8.module(NEON, SQUARES), "i8mm", "smmla", 3 * 8),
    "int4 by squares": (lambda: int4.module(NEON, SQUARES), "i8mm", "smmla", 3 * 8),
}


def assembly(text, features):
    """Machine code for arm64, as text."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    target = llvm.Target.from_triple("aarch64-linux-gnu")
    parsed.triple = "aarch64-linux-gnu"
    return target.create_target_machine(cpu="generic", features=features, opt=3).emit_assembly(parsed)


def loops(text):
    lines, begins = text.splitlines(), {}
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            begins[label[1]] = number
        jump = re.match(r"\s+(?:b\.\w+|cbn?z\s+\w+,)\s+(\.L\w+)", line)
        if jump and jump[1] in begins:
            yield lines[begins[jump[1]] : number]


@pytest.mark.parametrize("kind", LOOPS)
def test_the_sums_of_most_rows_stay_in_registers(kind):
    text, feature, instruction, count = LOOPS[kind]
    found = [*loops(assembly(text(), f"+{feature}"))]
    most = [loop for loop in found if sum(f"\t{instruction}\t" in line for line in loop) == count]
    innermost = min(most, key=len)
    assert not [line for line in innermost if "[sp" in line]
    if instruction != "smmla":  # others take A from a lane
        assert not [line for line in innermost if "ld1r" in line or "\tdup\t" in line]


def test_every_kernel_assembles_without_instructions_that_the_processor_lacks():
    plain = int8.dot_of(NEON, set())
    assert plain.kind == "plain" and DOTS.kind == "signed" and DOTS.offset == 0
    for text in (
        *(module(NEON, operand, out) for operand, out in ((FLOAT, FLOAT), (LOW, FLOAT), (LOW, LOW))),
        *(of.module(NEON, plain) for of in (int8, int4)),
        moves(4),
    ):
        assert not re.search(r"\t(bfmmla|bfdot|bfcvtn|sdot|smmla)\t", assembly(text, "+neon"))
    assert "\tsdot\t" in assembly(int4.module(NEON, DOTS), "+dotprod")


def features_on(monkeypatch, bits):
    def getauxval(entry):
        return bits.get(entry, 0)

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=getauxval))
    return processor.unlisted_features.__wrapped__()


def test_features_are_read_from_linux_and_macos(monkeypatch):
    if platform.machine() == "x86_64":
        assert processor.unlisted_features.__wrapped__() == []
    assert features_on(monkeypatch, {16: 1 << 1}) == ["neon"]
    assert features_on(monkeypatch, {16: 1 << 1 | 1 << 20}) == ["neon", "dotprod"]
    assert features_on(monkeypatch, {16: 1 << 1 | 1 << 20, 26: 3 << 13}) == [
        "neon",
        "dotprod",
        "bf16",
        "i8mm",
    ]
    m1 = {"hw.optional.AdvSIMD": 1, "hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_BF16": 0}
    pretend_macos(monkeypatch, m1)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert arm.features() == ["neon", "dotprod"]


def test_registers_follow_from_the_features(monkeypatch):
    for features, shape in (({"neon"}, NEON), ({"neon", "dotprod", "bf16"}, NEON_BF16)):
        monkeypatch.setattr(processor, "features", lambda features=features: features)
        assert processor.shape.__wrapped__() is shape


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
