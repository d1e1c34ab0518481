"""Writers of LLVM IR for vector registers: arithmetic and moves."""

from __future__ import annotations

from distgpt.core.cpu.compiling.processor import BFLOAT16, FLOAT32, Shape

LLVM = {FLOAT32: "float", BFLOAT16: "i16"}
SUFFIX = {FLOAT32: "f32", BFLOAT16: "i16"}
BYTES = {FLOAT32: 4, BFLOAT16: 2}


class Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def add(self, line: str) -> None:
        self.lines.append(line)

    def new(self, expression: str) -> str:
        """Return a new name for the value of an expression."""
        self._count += 1
        name = f"%v{self._count}"
        self.add(f"  {name} = {expression}")
        return name


class Vectors(Writer):
    """A function on float32 vectors."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.vector = f"<{shape.lanes} x float>"

    def everywhere(self, type: str, value: str) -> str:
        """Return a value broadcast to all lanes."""
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
        """Return the nearest bfloat16's bits, ties to even; NaN becomes a quiet NaN."""
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


# Memory moves through registers, for packing. `lanes` is a power of two. Row j of `from` starts at `from + j
# · row` bytes, and row k of `to` at `to + k · step`.
_ARGUMENTS = "ptr %from, i64 %row, ptr %to, i64 %step, i64 %count"


def moves(lanes: int) -> str:
    """Return functions that transpose, zip, copy and prefetch."""
    return "\n".join([transpose(lanes), _zip(lanes), _copy(lanes), _prefetch()])


def transpose(lanes: int) -> str:
    """Transpose squares of 32-bit words: to[k, j] ← from[j, k] for j < lanes, k < lanes · count."""
    vector = f"<{lanes} x i32>"
    lines = [""]
    for j in range(lanes):
        lines.append(f"  %fo{j} = mul i64 %row, {j}")
        lines.append(f"  %fp{j} = getelementptr i8, ptr %f, i64 %fo{j}")
        lines.append(f"  %r0_{j} = load {vector}, ptr %fp{j}, align 2")
    stage, distance = 0, 1
    while distance < lanes:
        for j in range(lanes):
            if not j & distance:
                lines += _exchanged(lanes, stage, j, distance)
        stage, distance = stage + 1, 2 * distance
    for k in range(lanes):
        lines.append(f"  %to{k} = mul i64 %step, {k}")
        lines.append(f"  %tp{k} = getelementptr i8, ptr %t, i64 %to{k}")
        lines.append(f"  store {vector} %r{stage}_{k}, ptr %tp{k}, align 4")
    return _loop("transpose", f"{4 * lanes}, 1", f"%step, {lanes}", "\n".join(lines))


def _exchanged(lanes: int, stage: int, j: int, distance: int) -> list[str]:
    """In rows j and j + distance, exchange the off-diagonal words of each pair of `distance`-wide blocks."""
    vector = f"<{lanes} x i32>"
    a = f"%r{stage}_{j}"
    b = f"%r{stage}_{j + distance}"
    near = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
    far = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
    return [
        f"  %r{stage + 1}_{row} = shufflevector {vector} {a}, {vector} {b}, "
        f"<{lanes} x i32> <{', '.join(f'i32 {lane}' for lane in order)}>"
        for row, order in ((j, near), (j + distance, far))
    ]


def _zip(lanes: int) -> str:
    """Zip two rows of 16-bit words: to[k, j] ← from[2k, j], from[2k + 1, j] for j < lanes, k < count."""
    narrow, wide = f"<{lanes} x i16>", f"<{lanes} x i32>"
    return _loop(
        "zip",
        "%row, 2",
        "%step, 1",
        f"""
  %second = getelementptr i8, ptr %f, i64 %row
  %low = load {narrow}, ptr %f, align 2
  %high = load {narrow}, ptr %second, align 2
  %a = zext {narrow} %low to {wide}
  %b = zext {narrow} %high to {wide}
  %c = shl {wide} %b, splat (i32 16)
  %d = or {wide} %a, %c
  store {wide} %d, ptr %t, align 4""",
    )


def _copy(lanes: int) -> str:
    """Copy rows of 32-bit words: to[k, j] ← from[k, j] for j < lanes, k < count."""
    vector = f"<{lanes} x i32>"
    return _loop(
        "copy",
        "%row, 1",
        "%step, 1",
        f"\n  %a = load {vector}, ptr %f, align 2\n  store {vector} %a, ptr %t, align 4",
    )


def _prefetch() -> str:
    """Prefetch a cache line of each of `count` rows of `from` into the L2 cache. Any address is safe."""
    body = "\n  call void @llvm.prefetch.p0(ptr %f, i32 0, i32 2, i32 1)"
    return "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)\n" + _loop(
        "prefetch", "%row, 1", "%step, 1", body
    )


def _loop(name: str, read: str, written: str, body: str) -> str:
    """Return a loop of `count` iterations. `read` and `written` are the byte steps of %f and %t."""
    return f"""define void @{name}({_ARGUMENTS}) {{
entry:
  %read = mul i64 {read}
  %written = mul i64 {written}
  %some = icmp ne i64 %count, 0
  br i1 %some, label %next, label %done
next:
  %i = phi i64 [0, %entry], [%i1, %next]
  %f = phi ptr [%from, %entry], [%f1, %next]
  %t = phi ptr [%to, %entry], [%t1, %next]{body}
  %f1 = getelementptr i8, ptr %f, i64 %read
  %t1 = getelementptr i8, ptr %t, i64 %written
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %count
  br i1 %more, label %next, label %done
done:
  ret void
}}"""
