"""Tests of a backend's operations against the reference, on odd shapes, with poisoned outputs.

A test module imports everything and defines the fixture `both`: the reference and a backend.
"""

from itertools import product

import numpy as np
from distgpt.core.ops import api
from distgpt.core.ops.activations import ACTIVATIONS

SHAPES = [(3, 7, 24, 3, 13), (1, 1, 8, 2, 5), (2, 33, 40, 5, 31), (5, 130, 16, 4, 70)]  # B, T, C, H, V
# A mean, a gain, a bias; and a residual. Each combination is compiled.
NORMS = [((True, True, True), True), ((True, True, True), False), ((False, True, False), True), ((False,) * 3, False)]
BOTH = (True, False)


def tolerance(kernels):
    if kernels.accum_dtype != kernels.dtype:
        return 2e-2
    return {"float32": 2e-5, "float64": 1e-12}[kernels.dtype.name]


def cases(both, *variants):
    combinations = list(product(*variants))
    for number, shape in enumerate(SHAPES):
        for chosen in (combinations[number % 2 :: 2] if number else combinations) or combinations:
            case = Case(both, shape)
            case.name += f" {chosen}" if chosen else ""
            yield (case, *chosen) if chosen else case


class Wide:
    """Marks numbers or the shape of an output in the wide type."""

    def __init__(self, content):
        self.content = content


class Case:
    def __init__(self, both, shape=SHAPES[0], seed=0):
        self.reference, self.kernels = both
        self.rng = np.random.default_rng(seed)
        self.b, self.t, self.c, self.h, self.v = shape
        self.n = self.b * self.t
        self.name = f"(B, T, C, H, V) = {shape}"

    def random(self, *shape):
        return self.rng.standard_normal(shape)

    def ints(self, high, n):
        return self.rng.integers(0, high, n).astype(np.int32)

    def check(self, work, outputs, *inputs, strict=1.0):
        """Compare an operation, by its name or a function of the backend; return the reference's outputs.

        Outputs are shapes, which are poisoned, or initial numbers, also in named tuples."""
        results = []
        for k in (self.reference, self.kernels):
            outs = [self._array(k, out, poisoned=True) for out in outputs]
            ins = [self._array(k, value) for value in inputs]
            getattr(k, work)(*outs, *ins) if isinstance(work, str) else work(k, *outs, *ins)
            results.append([np.array(k.to_host(out), np.float64) for out in flat(outs)])
        for expected, got in zip(*results, strict=True):
            assert np.isfinite(got).all(), self.name
            limit = tolerance(self.kernels) * max(1.0, float(np.abs(expected).max())) * strict
            np.testing.assert_allclose(got, expected, rtol=0, atol=limit, err_msg=self.name)
        return results[0]

    def _array(self, k, value, poisoned=False):
        if hasattr(value, "_fields"):
            return type(value)(*(self._array(k, part, poisoned) for part in value))
        wide = isinstance(value, Wide)
        value = value.content if wide else value
        if poisoned and isinstance(value, tuple):
            value = np.full(value, np.nan)
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype.kind == "i":
            return k.integers(value, value.dtype.name)
        if isinstance(value, Scalars):
            array = k.scalars(len(value))
            k.put(array, np.asarray(value))
            return array
        rounded = self.kernels.accum_zeros(*value.shape) if wide else self.kernels.zeros(*value.shape)
        self.kernels.put(rounded, value)
        array = k.accum_zeros(*value.shape) if wide else k.zeros(*value.shape)
        k.put(array, self.kernels.to_host(rounded))
        return array


class Scalars(np.ndarray):
    """Numbers that are float64 everywhere."""


def flat(outputs):
    for out in outputs:
        if hasattr(out, "_fields"):
            yield from flat(out)
        elif out is not None:
            yield out


def test_add_low_rank(both):
    for case in cases(both):
        w, factors = case.random(case.h, case.v), {1: 0.5, 2: 2.0, 3: 1.0, 4: 0.1, 9: 3.0}
        for rank, scale in factors.items():
            b, a = case.random(case.h, rank), case.random(rank, case.v)
            case.check("add_low_rank", [w.shape], w, b, a, scale)
        case.check("add_low_rank", [w.shape], w, None, None, 1.0)


def test_gradients_from_columns_of_a_wider_array(both):
    for case in cases(both):
        dy, w, x = case.random(case.n, case.c), case.random(5, case.h), case.random(case.n, case.v)
        for begin in (0, 3, case.c - 5):
            own = slice(begin, begin + 5)
            case.check(lambda k, dx, *a: k.linear_backward(dx, a[0][:, own], a[1]), [(case.n, case.h)], dy, w)  # noqa: B023

            def weights(k, dw, dy, x, own=own):
                k.linear_backward_weights(api.Affine(dw, None), dy[:, own], x, False)

            case.check(weights, [Wide((5, case.v))], dy, x)
        rows = case.random(2, case.c)  # so few that each row could be taken for the next one
        case.check(lambda k, dx, *a: k.linear_backward(dx, a[0][:, :5], a[1]), [(2, case.h)], rows, w)


def side_by_side(case):
    begins = case.rng.random((case.b, case.t)) < 4 / case.t
    begins[:, 0] = True
    place = np.arange(case.t)
    return (place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)).reshape(-1).astype(np.int32)


def test_embed(both):
    for case, positions in cases(both, BOTH):
        wpe = case.random(case.t + 3, case.c) if positions else None
        inputs = [case.ints(case.v, case.n), case.random(case.v, case.c), wpe, case.t]
        for start in starts(case, 3):
            case.check("embed", [(case.n, case.c)], *inputs, start)
        case.check("embed", [(case.n, case.c)], *inputs, None, side_by_side(case))


def test_embed_backward(both):
    for case, positions, packed in cases(both, BOTH, BOTH):
        dwpe = Wide(case.random(case.t + 2, case.c)) if positions else None
        tokens = case.ints(case.v, case.n)
        tokens[case.n // 3 :] = tokens[0]  # one that is very frequent
        outs, dx = [Wide(case.random(case.v, case.c)), dwpe], case.random(case.n, case.c)
        case.check(embed_backward, outs, dx, tokens, case.t, side_by_side(case) if packed else None)


def embed_backward(k, dwte, dwpe, dx, tokens, seq_len, positions=None):
    in_order = k.sort_tokens(tokens, len(dwte))
    for _ in range(2):
        k.embed_backward(dwte, dwpe, dx, in_order, seq_len, positions)


def test_previous_tokens(both):
    def added(k, x, tokens, w, *of):
        previous = k.integers(np.full(len(tokens), -1))
        k.previous_tokens(previous, tokens, *of)
        k.add_embedding(x, previous, w)

    for case in cases(both):
        inputs = [case.random(case.n, case.c)], case.ints(case.v, case.n), case.random(case.v, case.c), case.t
        for of in ((None,), (case.ints(case.v, case.b),), (None, side_by_side(case))):
            case.check(added, *inputs, *of)


def test_add_embedding(both):
    for case in cases(both):
        tokens, w = case.ints(case.v, case.n), case.random(case.v, case.c)
        x = case.random(case.n, 3 * case.c + case.h)
        case.check("add_embedding", [x], tokens, w)
        case.check(embed_backward, [Wide(case.random(case.v, case.c)), None], x, tokens, case.t)


def check_norms(case, kind, residual):
    mean, gain, bias = kind
    stats = api.Stats(Wide(case.random(case.n)) if mean else None, Wide(np.abs(case.random(case.n)) + 0.1))
    wb, rows = (
        api.Affine(case.random(case.c) if gain else None, case.random(case.c) if bias else None),
        (case.n, case.c),
    )
    x, dy, s = (case.random(*rows) for _ in range(3))
    few = min(case.c, 40)  # inputs of a linear layer, whose weights would take the time
    r = case.random(*rows) if residual else None
    found = api.Stats(None if stats.mean is None else Wide((case.n,)), Wide((case.n,)))
    case.check("add_norm", [rows, rows if residual else x, found], x, r, wb, 1e-5)
    for again in (rows, None) if residual else (None,):
        case.check("norm_backward", [rows, again, None], dy, r, s, stats, wb)

    def weights(k, dwb, of_linear, dy, r, s, x, stats, wb, accumulate):
        sums = k.accum_zeros(k.capabilities.norm_sum_rows, 3 * case.c) if k.capabilities.norm_sum_rows else None
        if sums is not None:
            k.put(sums, np.full(sums.shape, np.nan))
        dx = k.zeros(*rows)
        k.norm_backward(dx, None, sums, dy, r, s, stats, wb)
        k.norm_backward_weights(dwb, sums, dy, s, stats, accumulate)
        k.linear_backward_weights(of_linear, dx, x, accumulate, sums)

    for accumulate in BOTH if wb.w is not None else ():
        linear = api.Affine(case.random(case.c, few), case.random(case.c))
        outs = [gradients(each, accumulate) for each in (wb, linear)]
        case.check(weights, outs, dy, r, s, case.random(case.n, few), stats, wb, accumulate)


def gradients(wb, accumulate):
    return api.Affine(*(None if part is None else Wide(part if accumulate else part.shape) for part in wb))


def test_norms(both):
    for case, (kind, residual) in cases(both, NORMS):
        check_norms(case, kind, residual)


def test_linear(both):
    for case, bias in cases(both, BOTH):
        wb = api.Affine(case.random(case.v, case.c), case.random(case.v) if bias else None)
        dy, x = case.random(case.n, case.v), case.random(case.n, case.c)
        case.check("linear", [(case.n, case.v)], x, wb)
        case.check("linear", [(3, case.v)], case.random(3, case.c), wb)
        case.check("linear", [(case.n, case.v)], x, wb, case.random(case.n, case.v))
        case.check("linear", [(3, case.v)], case.random(3, case.c), wb, case.random(3, case.v))
        case.check("linear_backward", [(case.n, case.c)], dy, wb.w)
        for accumulate in BOTH:
            case.check("linear_backward_weights", [gradients(wb, accumulate)], dy, x, accumulate)


def test_linear_act(both):
    for case, act, hidden in cases(both, ACTIVATIONS, [11, 16]):
        wide = 2 * hidden if ACTIVATIONS[act].gated else hidden
        x, w, b = case.random(case.n, case.c), case.random(wide, case.c), case.random(wide)
        for bias in (b, None):
            outs = [(case.n, hidden), (case.n, wide)]
            _, pre = case.check("linear_act", outs, x, api.Affine(w, bias), act)
        dy, w2 = case.random(case.n, case.c), case.random(case.c, hidden)

        def backward(k, dpre, y, db, dy, w, pre, again, accumulate, act=act):
            if k.capabilities.overwrites_pre:
                k.put(dpre, k.to_host(pre))
                pre = dpre
            k.linear_backward_act(dpre, y, dy, w, pre, act, again, into(db, accumulate))
            if not again:
                k.zero(y)

        for again in BOTH:
            for db, accumulate in bias_gradients(case, wide):
                outs = [(case.n, wide), (case.n, hidden), db]
                case.check(backward, outs, dy, w2, pre, again, accumulate)


def into(db, accumulate):
    return None if db is None else api.BiasGradient(db, accumulate)


def bias_gradients(case, width):
    start = Wide(case.random(width))
    return [(None, False), *[(Wide((width,)), False), (start, True)] * case.kernels.capabilities.sums_bias_gradients]


def grouped(both, *variants):
    for case, *chosen in cases(both, (1, 2, 3, 4, 5), *variants):
        if case.h % (kv := chosen.pop(0)) == 0:
            yield (case, kv, (case.h + 2 * kv) * (case.c // case.h), *chosen)


def test_rope(both):
    for case, kv, wide, inverse in grouped(both, BOTH):
        angle = case.random(case.t + 2, case.c // case.h // 2)
        angles = api.Angles(Wide(np.cos(angle)), Wide(np.sin(angle)))
        qkv = case.random(case.n, wide)
        for start in starts(case, 2):
            case.check("rope", [qkv], angles, case.h + kv, case.t, start, inverse)


def test_attention(both):
    def work(k, y, dqkv, db, dy, qkv, case, accumulate, positions, window):
        lse = k.accum_zeros(case.n, case.h)
        mask = api.AttentionMask(case.t, positions, window)
        k.attention(y, lse, qkv, mask)
        k.attention_backward(dqkv, dy, y, lse, qkv, mask, into(db, accumulate))

    for case, _, wide, packed, window in grouped(both, BOTH, [0, 2]):
        if case.t == 1 and (packed or window):
            continue  # a GPU's source is compiled for each, and one position sees itself in all
        qkv, dy = case.random(case.n, wide), case.random(case.n, case.c)
        positions = side_by_side(case) if packed else None
        for db, accumulate in bias_gradients(case, wide):
            outs, of = [dy.shape, qkv.shape, db], (case, accumulate, positions, window)
            case.check(work, outs, dy, qkv, *of, strict=2.0)


def test_qk_norm(both):
    for case, kv, wide in grouped(both):
        heads, size = (case.n, case.h + kv), case.c // case.h
        case.check("qk_norm", [case.random(case.n, wide), Wide(heads)], size, 1e-5)
        inputs = [case.random(case.n, wide), Wide(case.random(*heads)), size]
        case.check("qk_norm_backward", [case.random(case.n, wide)], *inputs)


def test_qk_norm_gain(both):
    for case, kv, wide in grouped(both):
        heads, size = (case.n, case.h + kv), case.c // case.h
        shape, gain = (case.n, heads[1] * size), 1 + 0.3 * case.random(2 * size)
        outs = [case.random(case.n, wide), shape, Wide(heads)]
        case.check("qk_norm_gain", outs, gain, 1e-5)
        outs = [case.random(case.n, wide), Wide((case.n, 2 * size))]
        case.check("qk_norm_gain_backward", outs, case.random(*shape), Wide(case.random(*heads)), gain)


def test_sum_rows(both):
    for case, accumulate in cases(both, BOTH):
        total = Wide(case.random(case.c) if accumulate else (case.c,))
        for x in (Wide(case.random(case.n, case.c)), case.random(case.n, case.c)):
            case.check("sum_rows", [total], x, accumulate, strict=4.0)


def starts(case, most):
    return None, np.array([most], np.int32), np.arange(most, most - case.b, -1, np.int32).clip(0)


def test_attention_cached(both):
    """Sequences have separate positions and other lanes; one may be absent."""
    for case, kv, wide, new, window in grouped(both, [1, 4, 5], [0, 1, 3]):
        cache = case.random(2, case.b, kv, 5 + new + 3, case.c // case.h)
        outs, qkv = [(case.b * new, case.c), cache], case.random(case.b * new, wide)
        case.check("attention_cached", outs, qkv, np.array([5], np.int32), window)
    for case, kv, wide, new, window, absent in grouped(both, [1, 5], [0, 3], BOTH):
        start = np.array([(7 * i + 2) % 6 for i in range(case.b)], np.int32)
        lanes = np.arange(case.b, 0, -1, np.int32)
        if absent:
            lanes[-1], start[-1] = -1, 0
        cache = case.random(2, case.b + 2, kv, 5 + new + 3, case.c // case.h)
        outs, qkv = [(case.b * new, case.c), cache], case.random(case.b * new, wide)
        y, after = case.check("attention_cached", outs, qkv, start, window, lanes)
        assert y[-new:].any() != absent
        kept = np.delete(np.arange(case.b + 2), lanes[lanes >= 0])
        np.testing.assert_allclose(after[:, kept], cache[:, kept], atol=4 * tolerance(case.kernels))


def test_move_cached(both):
    for case, kv, _ in grouped(both):
        size, length = case.c // case.h, 40
        angles = api.Angles(*(Wide(case.random(length, size // 2)) for _ in range(2)))
        for target, source, count, kept in ((2, 0, 0, 35), (1, 1, 3, 35), (0, 2, 5, 1)):
            cache = case.random(3, 2, 3, kv, length, size)
            for turn in (angles, None) if size % 2 == 0 else (None,):
                case.check("move_cached", [cache], target, source, count, kept, turn)


def test_likeliest(both):
    for case, k in cases(both, [1, 5]):
        for vocab in (case.v, 2500):
            scores = np.round(4 * case.random(case.n, vocab + 3)) / 4
            scores[:, vocab:] = 1000

            def ask(kernels, tokens_and_found, scores, vocab=vocab, k=k):
                tokens = kernels.integers(np.full((len(scores), k), -1))
                found = kernels.accum_zeros(len(scores), k + 1)
                kernels.topk_logits(tokens, found, scores, vocab)
                both = np.concatenate((kernels.to_host(tokens), kernels.to_host(found)), axis=1)
                kernels.put(tokens_and_found, both)

            case.check(ask, [Wide((case.n, 2 * k + 1))], scores)


def test_drawn(both):
    """Include random numbers at both ends of the range."""
    for case in cases(both):
        for vocab, spread in ((case.v, 1), (1, 1), (2500, 1), (2500, 30)):
            scores = spread * case.random(case.n, vocab + 3)
            scores[:, vocab:] = 1000
            how = np.stack((case.rng.uniform(0.2, 2, case.n), case.rng.random(case.n)), axis=1)
            lowest = 0 if spread == 1 else 0.01  # the first token's chance may be 0 in float32
            how[:3, 1] = [lowest, 1 - 2.0**-53, 0.5][: case.n]

            def draw(kernels, tokens_and_logs, scores, vocab=vocab, how=how):
                tokens = kernels.integers(np.full(len(scores), -1))
                found, given = (kernels.scalars(how.size).reshape(how.shape) for _ in range(2))
                kernels.put(given, how)
                kernels.drawn(tokens, found, scores, vocab, given)
                of_token, total = np.asarray(kernels.to_host(found)).T
                results = kernels.to_host(tokens), of_token, np.log(total)
                kernels.put(tokens_and_logs, np.stack(results, axis=1))

            case.check(draw, [Wide((case.n, 3))], scores)


def test_nonfinite_rows_are_reported(both):
    case = Case(both)
    for bad, kernels in product((np.nan, np.inf, -np.inf), both):
        scores, found = kernels.zeros(3, 40), kernels.accum_zeros(3, 3)
        host = case.random(3, 40)
        host[1, 37] = bad
        kernels.put(scores, host)
        kernels.topk_logits(kernels.integers(np.zeros((3, 2))), found, scores, 38)
        assert np.isfinite(kernels.to_host(found)[:, 2]).tolist() == [True, False, True], bad


def check_cross_entropy(case, chunk, accumulate, ignored=0.0):
    padded = case.v + 3
    dw = case.random(padded, case.c)
    dw[case.v :] = 0
    head = api.Head(case.random(padded, case.c), np.zeros((min(chunk, case.n), padded)), case.v)
    targets = np.where(case.rng.random(case.n) < ignored, np.int32(api.IGNORE_INDEX), case.ints(case.v, case.n))
    inputs = [case.random(case.n, case.c), head, targets, 0.37, accumulate]
    outs = [Wide((case.n,)), (case.n, case.c), Wide(dw if accumulate else np.zeros_like(dw))]
    losses, dx, _ = case.check("linear_cross_entropy", outs, *inputs, strict=2.0)
    assert not losses[targets == api.IGNORE_INDEX].any() and not dx[targets == api.IGNORE_INDEX].any()
    case.check("linear_cross_entropy", [Wide((case.n,)), None, None], *inputs, strict=2.0)


def test_linear_cross_entropy(both):
    for case, chunk, accumulate, ignored in cases(both, [1000, 9], BOTH, [0.0, 0.6, 1.0]):
        check_cross_entropy(case, chunk, accumulate, ignored)


def scalars(*numbers):
    return np.array(numbers).view(Scalars)


def test_adamw(both):
    """Two groups of parameters, and in between a stretch that is another optimizer's."""
    for n in (30_032, 48):
        case = Case(both)
        case.name, a, b = f"{n} parameters", n // 3 // 16 * 16, n // 2 // 16 * 16
        stretches = np.array([(0, a, 1, 0), (a, b, -1, a), (b, b + 16, 0, a + 16), (b + 16, n, 1, a + 32)])
        p, m, g = case.random(n), case.random(n), Wide(case.random(n))
        v = case.random(n - b + a + 16) ** 2
        low = (n,) if both[1].dtype != both[1].accum_dtype else None
        constants, norm = api.AdamConstants(0.9, 0.95, 1e-8), scalars((g.content**2).sum())

        def work(k, p, low, m, v, g, stretches, norm, step, constants=constants):
            k.adamw(api.AdamState(p, low, m, v, g, stretches), norm, step, constants)

        for clip in (0, 1.0, 1e6):
            step = scalars(0.5, clip, 1.7, 1e-2, 0.99, 2e-2, 1.0)
            outs = [Wide(p), low and np.zeros(n), Wide(m), Wide(v)]
            changed = case.check(work, outs, g, stretches, norm, step)
            assert np.array_equal(changed[-2][a:b], m[a:b].astype(both[1].accum_dtype))
        for broken in (np.inf, np.nan):
            outs = [Wide(p), None, Wide(m), Wide(v)]
            kept = case.check(work, outs, g, stretches, scalars(broken), step)
            np.testing.assert_allclose(kept[0], p, rtol=1e-6)


MATRICES = [(24, 24), (16, 33), (40, 8), (1, 5), (5, 1)]


def test_muon(both):
    for shape in MATRICES:
        case = Case(both)
        case.name = f"{shape}"
        rows, columns = shape
        norm, step = scalars(3.0), scalars(0.5, 0.7, 0.9, 1e-2, 0.3)
        m, g = (Wide(case.random(rows * columns)) for _ in range(2))

        def momentum(k, m, g, norm, step):
            cut = min(7, m.size)
            k.muon_momentum([m[:cut], m[cut:]], [g[:cut], g[cut:]], norm, step)

        case.check(momentum, [m, g], norm, step)
        # Rounding decides where near 1 a row's only value ends.
        if 1 not in shape or both[1].accum_dtype == both[1].dtype:
            check_orthogonalised(both, case.random(*shape))
        low = shape if both[1].dtype != both[1].accum_dtype else None
        outs = [Wide(case.random(*shape)), low, Wide(case.random(max(shape)) ** 2)]

        def work(k, p, low, v, u, norm, step):
            k.muon([api.MuonMatrix(p, low, v, u)], norm, step, 0.95)

        u = Wide(case.random(*shape))
        case.check(work, outs, u, norm, step)
        broken = scalars(np.nan)
        outs[1] = None
        kept = case.check(work, outs, u, broken, step)
        np.testing.assert_allclose(kept[0], outs[0].content, rtol=1e-6)
        kept = case.check(momentum, [m, g], broken, step)
        np.testing.assert_allclose(kept[0], m.content, rtol=1e-6)


def check_orthogonalised(both, matrix, times=3):
    """Compare norms, because errors of small singular values grow 300 times. Return the result."""
    exact, found = (k.accum_zeros(*matrix.shape) for k in both)
    for k, u in zip(both, (exact, found), strict=True):
        k.put(u, matrix)
        k.orthogonalise([u])
    found = np.array(both[1].to_host(found), np.float64)
    distance = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert distance < times * tolerance(both[1]), (matrix.shape, distance)
    return found


def check_memory_to_orthogonalise(k, kept):
    """`kept` returns the sizes of allocated scratch memory."""
    shapes = [*MATRICES, (24, 24), (33, 16), (8, 40)]
    assert not kept()
    updates = [k.accum_zeros(*shape) for shape in shapes]
    k.orthogonalise(updates)
    k.to_host(updates[0])  # they have to live until it is done
    total = sum(kept())  # before the next call adds to it
    assert k.orthogonalise_bytes(shapes) == total


def test_nesterov(both):
    for n in (30_011, 7):
        case = Case(both)
        case.name = f"{n} parameters"
        low = (n,) if both[1].dtype != both[1].accum_dtype else None
        common, velocity, change = (Wide(case.random(n)) for _ in range(3))

        def work(k, p, low, common, velocity, change):
            k.nesterov(api.NesterovState(p, low, common, velocity, change), 0.25, 0.7, 0.9)

        case.check(work, [Wide((n,)), low, common, velocity], change)
        case.check("subtract", [Wide((n,))], common, change)


def test_sums(both):
    for n in (30_011, 7):
        case = Case(both)
        case.name, g = f"{n} elements", Wide(case.random(n))
        case.check("sum_squares", [scalars(np.nan)], g)
        case.check("sum_squares", [scalars(np.nan)], case.random(n))
        pieces = np.full(-(-n // api.PIECE), np.nan).view(Scalars)
        for summed in (g, case.random(n)):
            (found,) = case.check("squares", [pieces], summed)
            case.check("add_up", [scalars(np.nan)], found.view(Scalars))
        case.check("sum", [Wide((1,))], g, 0.3, False)
        case.check("sum", [Wide(np.ones(1))], g, 0.3, True)
        case.check("cast_down", [(n,)], g)
        case.check("add", [(n, 3)], case.random(n, 3), case.random(n, 3))


def test_later_returns_earlier_values(both):
    k = both[1]
    array = k.accum_zeros(3)
    k.put(array, np.array([1.0, 2.0, 3.0]))
    taken = k.to_host_async(array)
    k.zero(array)
    np.testing.assert_array_equal(taken(), [1, 2, 3])
    np.testing.assert_array_equal(k.to_host(array), [0, 0, 0])
