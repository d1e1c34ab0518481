"""Microkernels as machine code: kept between starts, used only where it fits, with sums in registers."""

import re

import llvmlite.binding as llvm
import pytest
from distgpt.core.cpu.compiling.processor import AMX, AVX2, AVX512, AVX512_BF16
from distgpt.core.cpu.matmul import assembled, widening
from distgpt.core.cpu.matmul.microkernel import Tile, declarations, module
from distgpt.inference.quantized import int4, int8
from distgpt.inference.quantized.int4 import Int4Tile
from distgpt.inference.quantized.int8 import Int8Tile, dot_of


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


def test_every_shape_of_registers_assembles():
    for registers in (AVX2, AVX512, AVX512_BF16, AMX):
        for operand, out in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
            text = assembled.tile_text(registers, operand, out)
            assert assembled._verified(text)
            assert ("dpbf16ps" in text) == (registers.dot and operand == "bfloat16")


PROCESSORS = {"haswell": (AVX2, {"avx2"}), "skylake-avx512": (AVX512, {"avx512bw"})}


def innermost_loop(text, processor):
    """The instructions of the shortest loop with products, as the compiler writes them for a processor."""
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
    return min(filter(products, loops), key=len)


def products(loop):
    return sum("vfmadd" in line or "vpmaddwd" in line for line in loop)


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 by pairs", "int8", "int4"])
def test_the_sums_of_most_rows_stay_in_registers(processor, kind):
    shape, features = PROCESSORS[processor]
    if kind.startswith("int"):
        dot = dot_of(shape, features)
        rows = min(dot.rows, int4.MOST) if kind == "int4" else dot.rows
        tile = (Int8Tile if kind == "int8" else Int4Tile)(shape, dot, rows)
        declared = [*declarations(shape, "float32", "float32"), dot.declaration(f"<{shape.lanes} x i32>")]
        declared += [tile.declaration()] if kind == "int4" else []
    else:
        operand, _, by_pairs = kind.partition(" ")
        declared = declarations(shape, operand, "float32")
        if operand == "bfloat16" and shape == AVX512:
            declared.append(widening.DECLARATIONS)
            tile = widening.BufferedTile(shape, "float32", shape.rows, "tile", not by_pairs)
        else:
            tile = Tile(shape, operand, "float32", shape.rows)
    text = "\n".join([*declared, tile.text().replace("define internal", "define")])
    loop = innermost_loop(text, processor)
    a_row = shape.vectors * {"float32": 1, "int8": 2 * int8.UNROLLED, "int4": 2 * int8.UNROLLED}.get(kind, 2)
    assert products(loop) == tile.rows * a_row
    on_the_stack = [line for line in loop if re.search(r"\(%r[sb]p\)", line) and re.search(r"%[yz]mm", line)]
    assert len(on_the_stack) <= (10 if kind == "int4" else 4), on_the_stack  # of AVX2: table and masks
