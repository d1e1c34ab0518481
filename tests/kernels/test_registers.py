"""Microkernels keep their sums in registers, by the machine code for processors that widen what they read."""

import re

import llvmlite.binding as llvm
import pytest

from distgpt.kernels.matmul import assembled, int8
from distgpt.kernels.matmul.int8 import Int8Tile, dot_of
from distgpt.kernels.matmul.microkernel import Tile, declarations
from distgpt.kernels.matmul.vectors import AVX2, AVX512

PROCESSORS = {"haswell": (AVX2, {"avx2"}), "skylake-avx512": (AVX512, {"avx512bw"})}


def innermost_loop(text, processor):
    """Its instructions, as the compiler writes them for a processor."""
    assembled._machine()  # the compiler is ready
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=processor, opt=3)
    lines = machine.emit_assembly(assembled._verified(text)).splitlines()
    begins, loops = {}, []
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            begins[label[1]] = number
        jump = re.match(r"\s+j\w+\s+(\.L\w+)", line)
        if jump and jump[1] in begins:
            loops.append(lines[begins[jump[1]] : number])
    return min(loops, key=len)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_the_sums_of_most_rows_stay_in_registers(processor, kind):
    shape, features = PROCESSORS[processor]
    if kind == "int8":
        dot = dot_of(shape, features)
        tile = Int8Tile(shape, dot, dot.rows)
        declared = [*declarations(shape, "float32", "float32"), dot.declaration(f"<{shape.lanes} x i32>")]
    else:
        tile = Tile(shape, kind, "float32", shape.at_once(kind))
        declared = declarations(shape, kind, "float32")
    text = "\n".join([*declared, tile.text().replace("define internal", "define")])
    loop = innermost_loop(text, processor)
    products = sum("vfmadd" in line or "vpmaddwd" in line for line in loop)
    assert (
        products == tile.rows * shape.vectors * {"float32": 1, "bfloat16": 2, "int8": 2 * int8.UNROLLED}[kind]
    )
    on_the_stack = [line for line in loop if re.search(r"\(%r[sb]p\)", line) and re.search(r"%[yz]mm", line)]
    assert len(on_the_stack) <= 4, on_the_stack
