"""The vector registers of a processor, and functions of LLVM IR that are written for them line by line."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32, BFLOAT16 = "float32", "bfloat16"
LLVM = {FLOAT32: "float", BFLOAT16: "i16"}
SUFFIX = {FLOAT32: "f32", BFLOAT16: "i16"}
BYTES = {FLOAT32: 4, BFLOAT16: 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """The use of a processor's registers.

    `lanes` float32 a register, `vectors` registers of B by at most `rows` rows of A: rows · vectors sums,
    the B of one step, and one element of A must fit the register file.
    """

    lanes: int
    vectors: int
    rows: int
    dot: bool  # pairs of bfloat16 are multiplied by an instruction for them (AVX512_BF16)
    amx: bool = False  # bfloat16 has tile registers (amx.py), which hold more rows than the others

    @property
    def columns(self) -> int:
        return self.lanes * self.vectors

    def at_once(self, factor: str) -> int:
        """Return the rows whose sums fit the vector registers; a tile of more is computed in parts."""
        if self.amx:
            return AVX512_BF16.rows
        return WIDENING if self.widens(factor) and self.lanes == 16 else self.rows

    def widens(self, factor: str) -> bool:
        """Return whether factors become float32 before they are multiplied."""
        return factor == BFLOAT16 and not self.dot


WIDENING = 12  # rows of bfloat16 that is widened, in registers of 16 lanes: more would not stay in them
AVX512 = Shape(lanes=16, vectors=2, rows=14, dot=False)
AVX512_BF16 = Shape(lanes=16, vectors=2, rows=14, dot=True)
AVX2 = Shape(lanes=8, vectors=2, rows=6, dot=False)
AMX = Shape(lanes=16, vectors=2, rows=32, dot=True, amx=True)


class Writer:
    """The lines of a function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def add(self, line: str) -> None:
        self.lines.append(line)

    def new(self, expression: str) -> str:
        """Return a fresh name for the value of an expression."""
        self._count += 1
        name = f"%v{self._count}"
        self.add(f"  {name} = {expression}")
        return name


class Vectors(Writer):
    """A function that computes in vectors of float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.vector = f"<{shape.lanes} x float>"

    def everywhere(self, type: str, value: str) -> str:
        """Return a value in all lanes."""
        n = self.shape.lanes
        first = self.new(f"insertelement <{n} x {type}> poison, {type} {value}, i32 0")
        return self.new(
            f"shufflevector <{n} x {type}> {first}, <{n} x {type}> poison, <{n} x i32> zeroinitializer"
        )

    def fma(self, a: str, b: str, total: str) -> str:
        n = self.shape.lanes
        v = self.vector
        return self.new(f"call {v} @llvm.fma.v{n}f32({v} {a}, {v} {b}, {v} {total})")

    def rounded(self, value: str) -> str:
        """Return the bits of the nearest bfloat16, ties to even; NaN becomes a quiet one."""
        n = self.shape.lanes
        if self.shape.dot:
            low = self.new(f"fptrunc {self.vector} {value} to <{n} x bfloat>")
            return self.new(f"bitcast <{n} x bfloat> {low} to <{n} x i16>")
        ints = f"<{n} x i32>"
        bits = self.new(f"bitcast {self.vector} {value} to {ints}")
        upper = self.new(f"lshr {ints} {bits}, splat (i32 16)")
        odd = self.new(f"and {ints} {upper}, splat (i32 1)")
        half = self.new(f"add {ints} {odd}, splat (i32 32767)")
        up = self.new(f"lshr {ints} {self.new(f'add {ints} {bits}, {half}')}, splat (i32 16)")
        quiet = self.new(f"or {ints} {upper}, splat (i32 64)")
        nan = self.new(f"fcmp uno {self.vector} {value}, zeroinitializer")
        chosen = self.new(f"select <{n} x i1> {nan}, {ints} {quiet}, {ints} {up}")
        return self.new(f"trunc {ints} {chosen} to <{n} x i16>")
