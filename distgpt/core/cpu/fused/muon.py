"""Loops of Muon: momentum, orthogonalized updates, and the weight update.

One thread computes a matrix, or all members of a team (teams.py) call the loop. The results are bitwise
identical: a member computes whole rows or whole columns, and sums over them are added in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from distgpt.core.cpu.compiling.barrier import wait_for_all
from distgpt.core.cpu.compiling.jit import FORCED, by_types, get, inline, jit, put
from distgpt.core.cpu.compiling.processor import shape as register_shape
from distgpt.core.cpu.fused.flat import grad_scale
from distgpt.core.cpu.fused.rowwise import round_to
from distgpt.core.cpu.matmul import blocked
from distgpt.core.cpu.matmul.blas import PLAIN, gemm, rows_round_alike, squared
from distgpt.core.cpu.matmul.blocked import copies_rows
from distgpt.core.cpu.matmul.packing import COLUMNS, ROWS, aligned
from distgpt.core.cpu.teams import Cost
from distgpt.core.ops.api import TINY, Array, DType, MuonScalars
from distgpt.core.ops.low_precision import BITS

# From this number of rows and ratio of length to rows on, the steps multiply squares, and the matrix is
# multiplied only once (Gram Newton-Schulz, Dao-AILab 2026). In bfloat16 the squares are float32 too: rounded,
# their small eigenvalues become negative, and the steps amplify them without limit. So only a larger ratio
# pays, and none with AMX, which multiplies bfloat16 several times as fast as float32.
LEAST_ROWS, LEAST_RATIO, LEAST_BFLOAT16_RATIO = 128, 2, 2.5
USES_AMX = register_shape().amx
MOMENTUM, LEARNING_RATE, WEIGHT_DECAY = map(
    MuonScalars._fields.index, ("momentum", "learning_rate", "weight_decay")
)
BLOCK = 16  # rows and columns per transposed block: a cache line of float32
Memory: TypeAlias = "tuple[Array | int | Memory | None, ...]"
HALF = 192  # rows per matmul of a symmetric product, which skips the columns above the diagonal


@jit
def momentum(first, last, m, g, norm, scalars):
    """Elements first … last of m ← μ m + (1 - μ) s g; g ← (1 - μ) s g + μ m, if the norm is finite.

    s is `grad_scale`, and `scalars` are `MuonScalars`.
    """
    scale, is_finite = grad_scale(norm, scalars)
    if not is_finite:
        return
    real = m.dtype.type
    mu = scalars[MOMENTUM]
    keep = real(mu)
    new = real((1 - mu) * scale)
    mi, gi = m[first:last], g[first:last]
    for i in range(mi.shape[0]):
        fresh = new * gi[i]
        moved = keep * mi[i] + fresh
        mi[i] = moved
        gi[i] = fresh + keep * moved


class Part(NamedTuple):
    """A member's part of the matmuls, for a matrix whose rows are its shorter side."""

    top: int  # rows of a square; only the lower half is computed
    bottom: int
    first: int  # columns of the whole matrix
    last: int


def parts_of(short: int, long: int, members: int, most: int, rows: int, columns: int) -> list[Part]:
    """Split a matrix over a team at multiples of `rows` and `columns`. Members beyond `most` get nothing."""
    n = min(members, most)
    ends = (round(short * (i / n) ** 0.5 / rows) * rows for i in range(n))  # equal areas
    tops = [*(min(end, short) for end in ends), short]
    firsts = [-(-long // columns) * i // n * columns for i in range(n)] + [long]
    result = [Part(*tops[i : i + 2], *firsts[i : i + 2]) for i in range(n)]
    return result + [Part(short, short, long, long)] * (members - n)


def by_squares(short: int, long: int, is_bfloat16: bool = False) -> bool:
    """Return whether the BLAS computes the steps of this shape as products of squares."""
    if is_bfloat16:
        pays = long >= LEAST_BFLOAT16_RATIO * short and not USES_AMX
        return pays and short >= LEAST_ROWS and _rounds_alike((short, long))
    return short >= LEAST_ROWS and long >= LEAST_RATIO * short


def bfloat16_cost(shape: tuple[int, ...]) -> Cost:
    """Return the multiplications of a bfloat16 step; the BLAS's, in float32, take twice as long.

    Each member needs at least 2²² of a square's.
    """
    short, long = sorted(shape)
    squares = by_squares(short, long, is_bfloat16=True)
    work = (3 * long + 13.5 * short) / 5 if squares else (3 * long + short) / 2
    return Cost(work * short**2, max(1, short**3 >> 22))


def blas_cost(shape: tuple[int, ...]) -> Cost:
    """Return the cost with the BLAS, which computes edges and small products differently."""
    return Cost(whole_cost(shape).work, bfloat16_cost(shape).most if _rounds_alike(shape) else 1)


def _rounds_alike(shape: tuple[int, ...]) -> bool:
    """Return whether the BLAS's results do not depend on how a team splits its products.

    It splits a long sum in half at a multiple of about 16, in ssyrk and sgemm at the same one if 32 divides
    it.
    """
    return rows_round_alike() and not any(side % 32 for side in shape)


def whole_cost(shape: tuple[int, ...]) -> Cost:
    """Return the cost of a matrix that must not be split."""
    short, long = sorted(shape)
    work = (3 * long + 17 * short) / 10 if by_squares(short, long) else (3 * long + short) / 2
    return Cost(work * short**2, 1)


def step_cost(shape: tuple[int, ...]) -> Cost:
    """Return the elements. Each member needs about 2²⁰, half a millisecond, to be worth waking."""
    size = prod(shape)
    return Cost(size, max(1, size >> 20))


def bytes_of(memory: Memory) -> int:
    """Return the size of scratch memory, nested tuples of arrays. Arrays that members share count once."""
    return sum(array.nbytes for array in {id(array): array for array in _arrays(memory)}.values())


def _arrays(memory: Memory) -> Iterator[Array]:
    for each in memory:
        if isinstance(each, np.ndarray):
            yield each
        elif isinstance(each, tuple):
            yield from _arrays(each)


class PolarMemory(NamedTuple):
    """A member's memory to orthogonalize a matrix. The team shares everything except packed operands."""

    x: Array
    y: Array
    square: Array
    factor: Array
    product: Array
    spare: Array
    sums: Array  # sums of the matrix's rows
    by_squares: bool
    part: Part
    rounded: Array | None = None  # a square in bfloat16
    long: blocked.Scratch | None = None  # matmuls in bfloat16 over the longer side
    short: blocked.Scratch | None = None


def scratch(short: int, long: int, dtype: str, members: int, most: int) -> tuple[PolarMemory, ...]:
    shared = _shared(short, long, np.dtype(dtype), dtype, by_squares(short, long))
    parts = parts_of(short, long, members, most, BLOCK, BLOCK)
    return tuple(shared._replace(part=part) for part in parts)


def _shared(short: int, long: int, dtype: DType, sums: str, squares: bool) -> PolarMemory:
    """Make two (short, long) buffers and the (short, short) ones. Tall matrices are transposed."""
    x, y = (aligned((short, long), dtype) for _ in range(2))
    made = [aligned((short, short), sums) for _ in range(4 if squares else 2)]
    # Otherwise, each step's factor is also the product of all steps, and no spare is needed.
    square, factor, product, spare = made if squares else (*made, made[1], made[1])
    whole = Part(0, short, 0, long)
    return PolarMemory(x, y, square, factor, product, spare, np.empty(long), squares, whole)


@jit
def orthogonalise(u, memory, coefficients, member):
    """See `Kernels.orthogonalise`. A matrix with more rows than columns is transposed first."""
    x = memory.x
    y = memory.y
    square = memory.square
    top, bottom, first, last = memory.part
    arrivals = _lay_down(x, u, memory.sums, member)
    short, long = x.shape
    together = coefficients.shape[0] if memory.by_squares else 1
    for i in range(0, coefficients.shape[0], together):
        squared(top, bottom, square, x)
        product, arrivals = _factors(square, memory, coefficients[i : i + together], member, arrivals)
        if first < last:
            columns, out = x[:, first:], y[:, first:]
            gemm(PLAIN, PLAIN, short, last - first, short, product, short, columns, long, 0.0, out, long)
        arrivals = wait_for_all(member.counter, arrivals, member.members)
        x, y = y, x
    _put_back(u, x, member)


@inline
def _factors(square, memory, coefficients, member, arrivals):
    """Return the product of the steps' factors, from the lower half of a matrix's square; and arrivals."""
    factor = memory.factor
    product = memory.product
    spare = memory.spare
    this = factor
    top, bottom, _, _ = memory.part
    _mirror(top, bottom, square)
    arrivals = wait_for_all(member.counter, arrivals, member.members)
    for i in range(coefficients.shape[0]):
        if i > 0:  # the square of the matrix after the last step, from the square before it
            arrivals = _multiplied(top, bottom, spare, this, square, member, arrivals)
            arrivals = _multiplied(top, bottom, square, spare, this, member, arrivals)
        squared(top, bottom, factor, square)
        _combine(top, bottom, factor, square, factor, coefficients[i])
        _mirror(top, bottom, factor)
        arrivals = wait_for_all(member.counter, arrivals, member.members)
        this = factor
        if i == 0:
            product, factor = factor, product
        else:
            arrivals = _multiplied(top, bottom, spare, this, product, member, arrivals)
            product, spare = spare, product
    return product, arrivals


@inline
def _multiplied(top, bottom, c, a, b, member, arrivals):
    """Rows top … bottom of c ← a b. All three are symmetric, as polynomials of one square."""
    n = c.shape[0]
    for start in range(top, bottom, HALF):
        stop = min(start + HALF, bottom)
        gemm(PLAIN, PLAIN, stop - start, stop, n, a[start:], n, b, n, 0.0, c[start:], n)
    _mirror(top, bottom, c)
    return wait_for_all(member.counter, arrivals, member.members)


def bfloat16_scratch(short: int, long: int, sums: str, members: int, most: int) -> tuple[PolarMemory, ...]:
    """Make the bfloat16 buffers; sums of matmuls stay float32."""
    shared = _shared(short, long, BITS, sums, by_squares(short, long, is_bfloat16=True))
    rounded = aligned((short, short), BITS.name)
    return tuple(
        shared._replace(
            part=part,
            rounded=rounded,
            long=blocked.scratch(BITS, short, long, copies_rows(shared.x)),
            short=blocked.scratch(BITS, short, short, copies_rows(rounded)),
        )
        for part in parts_of(short, long, members, most, ROWS, COLUMNS)
    )


@jit
def orthogonalise_bfloat16(u, memory, coefficients, member):
    """Orthogonalize u with our own bfloat16 matmuls, and squares of a long matrix with the BLAS."""
    x = memory.x
    y = memory.y
    square = memory.square
    fourth = memory.factor
    rounded = memory.rounded
    top, bottom, first, last = memory.part
    begin = np.int64(0)  # the literal 0 has its own type, for which `backward` would be compiled again
    arrivals = _lay_down(x, u, memory.sums, member)
    # The last step is always separate: it removes the error of rounding the product of the others.
    together = coefficients.shape[0] - 1 if memory.by_squares else 1
    for i in range(0, coefficients.shape[0], together):
        _squared_bfloat16(top, bottom, square, x, memory.long)
        if memory.by_squares and i == 0:
            product, arrivals = _factors(square, memory, coefficients[:together], member, arrivals)
            for row in range(top, bottom):
                round_to(rounded[row], product[row])
        else:
            _round_lower(top, bottom, rounded, square)
            arrivals = wait_for_all(member.counter, arrivals, member.members)
            _squared_bfloat16(top, bottom, fourth, rounded, memory.short)
            arrivals = wait_for_all(member.counter, arrivals, member.members)  # `rounded` is no longer read
            _combine(top, bottom, square, square, fourth, coefficients[i])
            _round_lower(top, bottom, rounded, square)
        arrivals = wait_for_all(member.counter, arrivals, member.members)
        blocked.backward(begin, x.shape[0], first, last, y, rounded, x, memory.short)
        arrivals = wait_for_all(member.counter, arrivals, member.members)
        x, y = y, x
    _put_back(u, x, member)


@inline
def _squared_bfloat16(top, bottom, c, a, scratch):
    """Rows top … bottom of the lower half of c ← a aᵀ, with at most HALF - 1 extra columns."""
    for start in range(top, bottom, HALF):
        stop = min(start + HALF, bottom)
        blocked.forward(start, stop, 0, stop, c, a, a, None, scratch)


@inline
def _combine(top, bottom, out, square, fourth, coefficients):
    """Rows top … bottom of out ← a + b · square + c · fourth, lower halves only."""
    real = square.dtype.type
    ra, rb, rc = real(coefficients[0]), real(coefficients[1]), real(coefficients[2])
    for i in range(top, bottom):
        to, row, other = out[i], square[i], fourth[i]
        for j in range(i + 1):
            to[j] = rb * row[j] + rc * other[j]
        to[i] += ra


@inline
def _mirror(top, bottom, square):
    """Copy rows top … bottom of the lower half to the upper half. No other member writes these columns."""
    for start in range(0, bottom, BLOCK):
        for i in range(max(start, top), bottom):
            for j in range(start, min(start + BLOCK, i)):
                square[j, i] = square[i, j]


@inline
def _round_lower(top, bottom, low, square):
    """Both halves of low ← rows top … bottom of the lower half of a square, rounded."""
    for i in range(top, bottom):
        round_to(low[i, : i + 1], square[i, : i + 1])
    _mirror(top, bottom, low)


@inline
def _own(member, count, grain):
    """Return a member's part of range(count), split at multiples of `grain`."""
    blocks = (count + grain - 1) // grain
    first = blocks * member.number // member.members * grain
    return first, min(blocks * (member.number + 1) // member.members * grain, count)


@by_types(**FORCED)
def _total(sums, count):
    """Return the sum in this order. It is compiled without reordering, or members could round differently."""

    def in_order(sums, count):
        total = 0.0
        for i in range(count):
            total += sums[i]
        return total

    return in_order


@inline
def _lay_down(x, u, sums, member):
    """x ← u / (1.02 ‖u‖), transposed if u has more rows than columns: x xᵀ is then the smaller square.

    Polar Express leaves a margin of 2% because its steps diverge for singular values above 1, even by
    rounding.
    """
    first, last = _own(member, u.shape[0], 1)
    for i in range(first, last):
        row = u[i]
        part = u.dtype.type(0)
        for j in range(row.shape[0]):
            part += row[j] * row[j]
        sums[i] = part
    arrivals = wait_for_all(member.counter, 0, member.members)
    total = _total(sums, u.shape[0])
    scale = u.dtype.type(1 / (1.02 * np.sqrt(total) + TINY))
    if u.shape[0] > u.shape[1]:
        _transpose(x, u, scale, member)
    else:
        _copy(x, u, scale, member)
    return wait_for_all(member.counter, arrivals, member.members)


@inline
def _put_back(u, x, member):
    if u.shape[0] > u.shape[1]:
        _transpose(u, x, u.dtype.type(1), member)
    else:
        _copy(u, x, u.dtype.type(1), member)


@inline
def _copy(y, x, scale, member):
    first, last = _own(member, y.shape[0], 1)
    for i in range(first, last):
        yi, xi = y[i], x[i]
        for j in range(xi.shape[0]):
            put(yi, j, get(xi, j) * scale)


@inline
def _transpose(y, x, scale, member):
    """A member's rows of y ← scale · xᵀ, by blocks that stay in the cache."""
    first, last = _own(member, y.shape[0], BLOCK)
    for start in range(first, last, BLOCK):
        for j in range(y.shape[1]):
            for i in range(start, min(start + BLOCK, last)):
                put(y[i], j, get(x[j], i) * scale)


@jit
def step(p, low, v, u, norm, scalars, of_shape, beta2, sums, member):
    """See `Kernels.muon`. `of_shape` is the learning rate factor; `sums` has two values per row of u."""
    if not grad_scale(norm, scalars)[1]:
        return
    rate = scalars[LEARNING_RATE] * of_shape
    decay = scalars[WEIGHT_DECAY]
    if u.shape[0] >= u.shape[1]:
        arrivals = _by_rows(v, u, beta2, sums, member)
    else:
        arrivals = _by_columns(v, u, beta2, sums, member)
    real = p.dtype.type
    lr = real(rate)
    shrink = real(rate * decay)
    wait_for_all(member.counter, arrivals, member.members)  # the next matrix may use the same sums
    first, last = _own(member, p.shape[0], 1)
    for i in range(first, last):
        pi, ui = p[i], u[i]
        for j in range(pi.shape[0]):
            # Cautious weight decay: only if the step also shrinks the weight.
            kept = shrink * pi[j] if ui[j] * pi[j] >= 0 else real(0)
            pi[j] -= lr * ui[j] + kept
        if low is not None:
            round_to(low[i], pi)


@inline
def _by_rows(v, u, beta2, sums, member):
    """NorMuon: v ← mean squares of rows; u ← each row / √v, then scaled to the previous norm."""
    real = u.dtype.type
    before, after = sums[0], sums[1]
    first, last = _own(member, u.shape[0], 1)
    for i in range(first, last):
        row = u[i]
        part = real(0)
        for j in range(row.shape[0]):
            part += row[j] * row[j]
        v[i] = real(beta2) * v[i] + real(1 - beta2) * (part / real(row.shape[0]))
        before[i] = part
        after[i] = part / (np.sqrt(v[i]) + real(TINY)) ** 2
    arrivals = wait_for_all(member.counter, 0, member.members)
    factor = np.sqrt(_total(before, u.shape[0]) / (_total(after, u.shape[0]) + TINY))
    for i in range(first, last):
        row = u[i]
        scale = real(factor) / (np.sqrt(v[i]) + real(TINY))
        for j in range(row.shape[0]):
            row[j] *= scale
    return arrivals


@inline
def _by_columns(v, u, beta2, sums, member):
    """Do the same by columns. v holds the sums of squares in between."""
    real = u.dtype.type
    old = real(beta2)
    new = real((1 - beta2) / u.shape[0])
    before, after = sums[0], sums[1]
    first, last = _own(member, u.shape[0], 1)
    left, right = _own(member, u.shape[1], BLOCK)
    own = v[left:right]
    for j in range(own.shape[0]):
        own[j] *= old
    for i in range(u.shape[0]):
        if first <= i < last:
            row = u[i]
            part = real(0)
            for j in range(row.shape[0]):
                part += row[j] * row[j]
            before[i] = part
        row = u[i, left:right]
        for j in range(row.shape[0]):
            own[j] += new * (row[j] * row[j])
    arrivals = wait_for_all(member.counter, 0, member.members)
    for i in range(first, last):
        row = u[i]
        part = real(0)
        for j in range(row.shape[0]):
            row[j] /= np.sqrt(v[j]) + real(TINY)
            part += row[j] * row[j]
        after[i] = part
    arrivals = wait_for_all(member.counter, arrivals, member.members)
    factor = real(np.sqrt(_total(before, u.shape[0]) / (_total(after, u.shape[0]) + TINY)))
    for i in range(first, last):
        row = u[i]
        for j in range(row.shape[0]):
            row[j] *= factor
    return arrivals
