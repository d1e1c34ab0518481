"""The bfloat16 microkernel for AMX, as LLVM IR: sums in tile registers of 16 × 16.

The interface is microkernel.py's, for up to 32 rows and 32 columns, with A stored by rows (step 4) or by
pairs of k (row 4). A register of B is 16 pairs of k by 16 columns, half of a packed panel. A register of A is
16 rows by 32 k. A is read in place if it is stored by rows, and otherwise transposed in a buffer. The last
rows and the last k, which do not fill a register, also go through zero-padded buffers. So all registers keep
one size, which a thread configures once; each tile only checks it.

Tests also run this machine code with an emulation of the tile instructions.
"""

from __future__ import annotations

from distgpt.core.cpu.compiling.processor import BFLOAT16, FLOAT32, Shape
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, ARGUMENTS, BIAS, Tile, declarations
from distgpt.core.cpu.matmul.vectors import Writer, transpose

SIDE, DEPTH = 16, 32  # rows (or columns), and k, of a tile register
LINE = 64  # bytes per row of a tile register
BLOCK = SIDE * LINE
PANEL = 2 * LINE  # bytes of a pair of k in a panel of B, and of a row of sums
C, A, B = ((0, 1), (2, 3)), (4, 5), (6, 7)  # tile register numbers; C by rows, then by columns

INTRINSICS = {
    "sttilecfg": "ptr",
    "ldtilecfg": "ptr",
    "tilezero": "i8",
    "tileloadd64": "i8, ptr, i64",
    "tdpbf16ps": "i8, i8, i8",
    "tilestored64": "i8, ptr, i64",
}
_HALVES, _MASK = f"<{DEPTH} x i16>", f"<{DEPTH} x i1>"
_LINE = f"<{LINE // 4} x i32>"
# Palette 1 has eight registers. Each gets 64 bytes per row (a 16-bit number each) and 16 rows.
_SIZES = bytes([1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8])
_CONFIG = (
    f"@config = internal constant <{LINE} x i8> <{', '.join(f'i8 {size}' for size in _SIZES)}>, align {LINE}"
)


def module(shape: Shape, operand: str, out: str) -> str:
    """Return the IR of `tile` for bfloat16."""
    declared = [_CONFIG, *(f"declare void @llvm.x86.{name}({types})" for name, types in INTRINSICS.items())]
    declared.append(f"declare {_HALVES} @llvm.masked.load.v{DEPTH}i16.p0(ptr, i32, {_MASK}, {_HALVES})")
    buffers = [transpose(SIDE), _by_rows(), _by_pairs()]
    tiles = [_AmxTile(shape, out, high).text() for high in (1, 2)]
    return "\n".join([*declarations(shape, BFLOAT16, out), *declared, *buffers, *tiles, _CHOICE])


_CHOICE = f"""define void @tile({ARGUMENTS}) {{
  %some = icmp ne i64 %rows, 0
  br i1 %some, label %any, label %none
any:
  %two = icmp ugt i64 %rows, {SIDE}
  br i1 %two, label %high, label %low
high:
  tail call void @tile2({ARGUMENTS})
  ret void
low:
  tail call void @tile1({ARGUMENTS})
  ret void
none:
  ret void
}}"""


def _by_rows() -> str:
    """Fill a tile of 16 rows (stride `apart` bytes) with k bfloat16 of the given rows, padded with zeros."""
    to = Writer()
    to.add("define internal void @by_rows(ptr %from, i64 %row, i64 %rows, i64 %k, ptr %to, i64 %apart) {")
    seen = _below(to, list(range(DEPTH)), "%k")
    for i in range(SIDE):
        there = to.new(f"icmp ult i64 {i}, %rows")
        _line(to, i, "%row", to.new(f"select i1 {there}, {_MASK} {seen}, {_MASK} zeroinitializer"), "%apart")
    return "\n".join([*to.lines, "  ret void\n}"])


def _by_pairs() -> str:
    """Fill a tile of 16 rows with k bfloat16 of rows of an A stored by pairs of k, padded with zeros."""
    to = Writer()
    to.add("define internal void @by_pairs(ptr %from, i64 %step, i64 %rows, i64 %k, ptr %to) {")
    seen = _below(to, [half // 2 for half in range(DEPTH)], "%rows")
    for i in range(SIDE):
        there = _below(to, [2 * i + half % 2 for half in range(DEPTH)], "%k")
        _line(to, i, "%step", to.new(f"and {_MASK} {seen}, {there}"), str(LINE))
    to.add(f"  call void @transpose(ptr %to, i64 {LINE}, ptr %to, i64 {LINE}, i64 1)")
    return "\n".join([*to.lines, "  ret void\n}"])


def packed_by_rows() -> str:
    """Return the IR of `rows`: reorder packed pairs of k to rows, `count` times for 32 k of 32 rows.

    16 pairs of 32 rows, 128 bytes each, become 32 rows of 64 bytes. A tile reads them with `row` = 64 and the
    step of pairs. Doing this once for all tiles of these rows spares each tile a transpose.
    """
    to = Writer()
    to.add("define void @rows(ptr %packed, i64 %count) {\nentry:")
    to.add(f"  %buffer = alloca [{2 * BLOCK} x i8], align {LINE}")
    to.add("  %some = icmp ne i64 %count, 0\n  br i1 %some, label %block, label %done\nblock:")
    to.add("  %i = phi i64 [0, %entry], [%i1, %block]\n  %at = phi ptr [%packed, %entry], [%at1, %block]")
    for offset in range(0, 2 * BLOCK, LINE):
        value = to.new(f"load {_LINE}, ptr {to.new(f'getelementptr i8, ptr %at, i64 {offset}')}, align 4")
        place = to.new(f"getelementptr i8, ptr %buffer, i64 {offset}")
        to.add(f"  store {_LINE} {value}, ptr {place}, align {LINE}")
    for half in range(2):
        of = to.new(f"getelementptr i8, ptr %buffer, i64 {half * LINE}")
        place = to.new(f"getelementptr i8, ptr %at, i64 {half * BLOCK}")
        to.add(f"  call void @transpose(ptr {of}, i64 {PANEL}, ptr {place}, i64 {LINE}, i64 1)")
    to.add(f"  %at1 = getelementptr i8, ptr %at, i64 {2 * BLOCK}\n  %i1 = add i64 %i, 1")
    to.add("  %more = icmp ult i64 %i1, %count\n  br i1 %more, label %block, label %done")
    return "\n".join([transpose(SIDE), *to.lines, "done:\n  ret void\n}"])


def _below(to: Writer, numbers: list[int], limit: str) -> str:
    """Return a mask of the numbers below a limit of at most 32."""
    narrow = to.new(f"trunc i64 {limit} to i16")
    first = to.new(f"insertelement {_HALVES} poison, i16 {narrow}, i32 0")
    every = to.new(f"shufflevector {_HALVES} {first}, {_HALVES} poison, <{DEPTH} x i32> zeroinitializer")
    listed = ", ".join(f"i16 {number}" for number in numbers)
    return to.new(f"icmp ult {_HALVES} <{listed}>, {every}")


def _line(to: Writer, i: int, stride: str, mask: str, apart: str) -> None:
    """Line i of a buffer ← the elements under the mask, and zeros; other elements are not read."""
    offset = to.new(f"mul i64 {stride}, {i}")
    place = to.new(f"getelementptr i8, ptr %from, i64 {offset}")
    value = to.new(
        f"call {_HALVES} @llvm.masked.load.v{DEPTH}i16.p0"
        f"(ptr {place}, i32 2, {_MASK} {mask}, {_HALVES} zeroinitializer)"
    )
    offset = to.new(f"mul i64 {apart}, {i}")
    place = to.new(f"getelementptr i8, ptr %to, i64 {offset}")
    to.add(f"  store {_HALVES} {value}, ptr {place}, align {LINE}")


class _AmxTile(Tile):
    """Writer of the function for up to 16 rows, or for 17 to 32, with `high` tile registers of A."""

    def __init__(self, shape: Shape, out: str, high: int) -> None:
        super().__init__(shape, BFLOAT16, out, high)
        self.high = range(high)

    def text(self) -> str:
        self.add(f"define internal void @tile{self.rows}({ARGUMENTS}) {{\nentry:")
        self._configure()
        self._sum()
        for h in self.high:
            for v in range(2):
                place = self._offset("%sums", h * SIDE * PANEL + v * LINE)
                self._tile("tilestored64", f"i8 {C[h][v]}, ptr {place}, i64 {PANEL}")
        self._write()
        return "\n".join([*self.lines, "  ret void\n}"])

    def _tile(self, name: str, arguments: str) -> None:
        self.add(f"  call void @llvm.x86.{name}({arguments})")

    def _offset(self, pointer: str, offset: int | str) -> str:
        return self.new(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def _configure(self) -> None:
        """Set the size of this thread's tile registers if it differs, and zero C's registers."""
        self.add(f"  %held = alloca [{LINE} x i8], align {LINE}")
        for name, blocks in (("of_a", 2), ("of_b", 2), ("sums", 4)):
            self.add(f"  %{name} = alloca [{blocks * BLOCK} x i8], align {LINE}")
        self._tile("sttilecfg", "ptr %held")
        held, wanted = (self.new(f"load {_LINE}, ptr {at}, align {LINE}") for at in ("%held", "@config"))
        differ = self.new(f"icmp ne {_LINE} {held}, {wanted}")
        some = self.new(f"icmp ne i16 {self.new(f'bitcast <{LINE // 4} x i1> {differ} to i16')}, 0")
        self.add(f"  br i1 {some}, label %configure, label %configured\nconfigure:")
        self._tile("ldtilecfg", "ptr @config")
        self.add("  br label %configured\nconfigured:")
        for h in self.high:
            for register in C[h]:
                self._tile("tilezero", f"i8 {register}")

    def _sum(self) -> None:
        self.add(f"""  %far = mul i64 %step, {SIDE}
  %high = mul i64 %row, {SIDE}
  %plain = icmp eq i64 %step, 4
  %packed = icmp eq i64 %row, {LINE}
  %lies = or i1 %plain, %packed
  %full = icmp eq i64 %rows, {SIDE * len(self.high)}
  %fills = and i1 %lies, %full
  %some = icmp ne i64 %k, 0
  br i1 %some, label %loop, label %summed
loop:
  %left = phi i64 [%k, %configured], [%left1, %multiply]
  %pa = phi ptr [%a, %configured], [%pa1, %multiply]
  %pb = phi ptr [%b, %configured], [%pb1, %multiply]
  %whole = icmp uge i64 %left, {DEPTH}
  %now = select i1 %whole, i64 {DEPTH}, i64 %left
  %direct = and i1 %whole, %fills
  br i1 %direct, label %multiply, label %collect
collect:""")
        self._collect()
        self.add(f"""  br label %multiply
multiply:
  %ma = phi ptr [%pa, %loop], [%of_a, %collected], [%of_a, %last]
  %apart = phi i64 [%row, %loop], [{LINE}, %collected], [{LINE}, %last]
  %mb = phi ptr [%pb, %loop], [%pb, %collected], [%of_b, %last]""")
        for v in range(2):
            self._tile("tileloadd64", f"i8 {B[v]}, ptr {self._offset('%mb', v * LINE)}, i64 {PANEL}")
        for h in self.high:
            place = self._offset("%ma", self.new(f"mul i64 %apart, {h * SIDE}"))
            self._tile("tileloadd64", f"i8 {A[h]}, ptr {place}, i64 %apart")
            for v in range(2):
                self._tile("tdpbf16ps", f"i8 {C[h][v]}, i8 {A[h]}, i8 {B[v]}")
        self.add(f"""  %pa1 = getelementptr i8, ptr %pa, i64 %far
  %pb1 = getelementptr i8, ptr %pb, i64 {SIDE * PANEL}
  %left1 = sub i64 %left, %now
  %more = icmp ne i64 %left1, 0
  br i1 %more, label %loop, label %summed
summed:""")

    def _collect(self) -> None:
        """Copy partial registers and A by pairs to buffers, padded with zeros."""
        first = str(SIDE) if len(self.high) > 1 else "%rows"
        heights = [first, self.new(f"sub i64 %rows, {SIDE}")]
        self.add("  br i1 %lies, label %rows_of_a, label %pairs_of_a")
        for label, function, stride, more in (
            ("rows_of_a", "by_rows", "%row", f", i64 {LINE}"),
            ("pairs_of_a", "by_pairs", "%step", ""),
        ):
            self.add(f"{label}:")
            for h in self.high:
                place = self._offset("%pa", "%high") if h else "%pa"
                given = f"ptr {place}, i64 {stride}, i64 {heights[h]}, i64 %now"
                self.add(f"  call void @{function}({given}, ptr {self._offset('%of_a', h * BLOCK)}{more})")
            self.add("  br label %collected")
        self.add("collected:\n  br i1 %whole, label %multiply, label %last\nlast:")
        pairs = self.new(f"lshr i64 {self.new('add i64 %now, 1')}, 1")
        for v in range(2):
            given = f"ptr {self._offset('%pb', v * LINE)}, i64 {PANEL}, i64 {pairs}, i64 {DEPTH}"
            self.add(f"  call void @by_rows({given}, ptr {self._offset('%of_b', v * LINE)}, i64 {PANEL})")

    def _write(self) -> None:
        """Row by row, add bias and C if requested, and store the valid columns."""
        masks, asked = [self._mask(v) for v in range(2)], {}
        for flag in (BIAS, ACCUMULATE):
            wanted = self.asked(flag)
            n = f"<{self.shape.lanes} x i1>"
            asked[flag] = [self.new(f"select i1 {wanted}, {n} {mask}, {n} zeroinitializer") for mask in masks]
        biases = [self._loaded("%bias", v, asked[BIAS]) for v in range(2)]
        self.add("  br label %row_of_c\nrow_of_c:")
        self.add("  %r = phi i64 [0, %summed], [%r1, %row_of_c]")
        of = self._offset("%sums", self.new(f"mul i64 %r, {PANEL}"))
        to = self._offset("%c", self.new("mul i64 %r, %ldc"))
        for v in range(2):
            total = self.new(f"load {self.vector}, ptr {self._offset(of, v * LINE)}, align {LINE}")
            total = self.new(f"fadd {self.vector} {total}, {biases[v]}")
            if self.out == FLOAT32:
                total = self.new(f"fadd {self.vector} {total}, {self._loaded(to, v, asked[ACCUMULATE])}")
            self._store(total, to, v, masks)
        self.add("  %r1 = add i64 %r, 1\n  %again = icmp ult i64 %r1, %rows")
        self.add("  br i1 %again, label %row_of_c, label %done\ndone:")
