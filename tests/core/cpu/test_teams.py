"""Teams of threads that share a matrix: identical results, and failures of a member."""

import signal
import threading
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from distgpt.core.cpu.fused import muon
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.cpu.matmul.blas import rows_round_alike
from distgpt.core.cpu.pool import Pool
from distgpt.core.cpu.teams import LOSS, Cost, Team, run_in_teams, share_out
from distgpt.core.ops.api import MuonMatrix
from hypothesis import given
from hypothesis import strategies as st

KERNELS = {
    "float32": partial(CpuKernels, "float32"),
    "float64": partial(CpuKernels, "float64"),
    "bfloat16": Bfloat16Kernels,
}
# Wide, tall and square shapes, and sides that do not fill tiles.
SHAPES = {
    "one": [(1024, 320)],
    "a few": [(256, 1024), (1024, 256), (256, 256)],
    "odd": [(333, 500), (301, 287), (7, 3)],
    "equal": [(256, 272)] * 7,
    "sums that the BLAS halves": [(464, 896)],
}

# The gradients' norm, scalars, and a factor of the shape.
HOW = np.array([1.0]), np.array([1.0, 0.0, 0.9, 0.1, 0.2]), 1.0


@pytest.mark.parametrize("kind", ["float32", "bfloat16", pytest.param("float64", marks=pytest.mark.ci)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_muon_update_is_identical_for_any_threads(kind, shapes):
    alone, *others = (updated(KERNELS[kind](threads), shapes) for threads in (1, 2, 5, 16))
    for found in others:
        for array, wanted in zip(found, alone, strict=True):
            np.testing.assert_array_equal(array, wanted)


def updated(k, shapes):
    random = np.random.default_rng(0)
    norm, scalars = np.array([3.0]), np.array([0.5, 0.7, 0.9, 1e-2, 0.3])

    def drawn(*shape):
        return random.standard_normal(shape).astype(k.accum_dtype)

    us = [drawn(*shape) for shape in shapes]
    ms = [drawn(u.size) for u in us]
    k.muon_momentum(ms, [u.reshape(-1) for u in us], norm, scalars)
    found = [*ms, *(u.copy() for u in us)]
    k.orthogonalise(us)
    found += [u.copy() for u in us]
    matrices = [MuonMatrix(drawn(*u.shape), None, drawn(max(u.shape)) ** 2, u) for u in us]
    k.muon(matrices, norm, scalars, 0.95)
    return found + [array for p, _, v, u in matrices for array in (p, v, u)]


def test_matrix_is_shared_if_rows_round_equally():
    members = {kind: share_out(((256, 1024),), 3, make(3).polar_cost)[0].members for kind, make in KERNELS.items()}
    assert members == {"float32": 3 if rows_round_alike() else 1, "float64": 1, "bfloat16": 3}
    assert share_out(((1024, 3072),), 4, muon.step_cost)[0].members == 3


@pytest.mark.parametrize("shape", [(301, 287), (287, 301)])
def test_shared_step_is_identical(shape):
    def stepped(threads):
        random = np.random.default_rng(0)
        ps, us = random.standard_normal((2, 3, *shape)).astype("float32")
        vs = random.standard_normal((3, 301)).astype("float32") ** 2
        lows, sums = np.zeros(ps.shape, np.uint16), np.empty((2, shape[0]))

        def work(i, member):
            muon.step(ps[i], lows[i], vs[i], us[i], *HOW, 0.95, sums, member)

        run_in_teams(Pool(threads), (Team(0, threads, (0, 1, 2)),), work)
        return ps, lows, vs, us

    alone = stepped(1)
    for threads in (2, 5, 16):
        for found, wanted in zip(stepped(threads), alone, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_muon_parts_cover_a_matrix_once():
    for short, long, members, most in ((768, 3072, 5, 9), (768, 768, 128, 108), (300, 301, 7, 3), (24, 24, 1, 1)):
        parts = muon.parts_of(short, long, members, most, 14, 32)
        assert len(parts) == members
        for start, stop, whole in (("top", "bottom", short), ("first", "last", long)):
            cuts = [(getattr(part, start), getattr(part, stop)) for part in parts]
            assert cuts[0][0] == 0 and cuts[-1][1] == whole
            assert all(one[0] <= one[1] == other[0] for one, other in pairwise(cuts))
    areas = [part.bottom**2 - part.top**2 for part in muon.parts_of(768, 3072, 4, 4, 16, 16)]
    assert max(areas) < 1.15 * min(areas)


@pytest.mark.parametrize("works, threads, most, members", [
    ([1] * 48, 16, 100, [1] * 16),
    ([1], 4, 100, [4]),
    ([1], 4, 3, [3]),
    ([1], 4, 1, [1]),
    ([1] * 2, 8, 100, [4, 4]),
    ([1] * 3, 2, 100, [2]),  # a thread each, and one would wait for a quarter of the time
    ([4, 1, 1, 1, 1], 2, 100, [1, 1]),
    ([1] * 17, 16, 1, [1] * 16),
    ([1] * 3, 5, 1, [1] * 3),
    ([100, 1], 3, 100, [3]),
])  # fmt: skip
def test_jobs_are_shared_only_if_threads_would_idle(works, threads, most, members):
    assert [team.members for team in shared(works, threads, most)] == members


def shared(works, threads, most=100):
    teams = share_out(tuple((work, most) for work in works), threads, lambda shape: Cost(shape[0], shape[1]))
    assert sorted(job for team in teams for job in team.jobs) == list(range(len(works)))
    assert all(team.first + team.members <= after.first for team, after in pairwise(teams))
    assert teams[-1].first + teams[-1].members <= threads
    return teams


@given(st.lists(st.integers(1, 99), min_size=1, max_size=60), st.integers(1, 20))
def test_largest_jobs_start_first(works, threads):
    teams = shared(works, threads)
    ends = [sum(works[job] for job in team.jobs) / team.members for team in teams]
    whole = max(sum(works) / threads, max(works) / threads)
    few = 1.34 if len(works) < 2 * threads else 1.15
    assert max(ends) <= few * whole * (1 + LOSS * threads)
    for team in teams:
        assert [works[job] for job in team.jobs] == sorted((works[job] for job in team.jobs), reverse=True)


def within(seconds, work):
    found = []

    def caught():
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "threads wait for one that never comes"
    return found


def matrices(count):
    ones = np.ones((count, 512, 512), "float32")
    return [MuonMatrix(one, None, np.ones(512, "float32"), one.copy()) for one in ones]


def test_member_that_fails_releases_the_others():
    pool, of, sums = Pool(3), matrices(2), np.empty((2, 512))

    def work(i, member):
        if member.number == 1:
            raise ZeroDivisionError
        muon.step(*of[i], *HOW, 0.95, sums, member)

    found = within(20, lambda: run_in_teams(pool, (Team(0, 3, (0, 1)),), work))
    assert [type(error) for error in found] == [ZeroDivisionError]


def test_signal_waits_for_the_team():
    pool, of, sums = Pool(2), matrices(1), np.empty((2, 512))
    seen = []

    def work(i, member):
        if member.number == 0:
            signal.raise_signal(signal.SIGINT)
        muon.step(*of[i], *HOW, 0.95, sums, member)
        seen.append(member.number)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_teams(pool, (Team(0, 2, (0,)),), work)
    finally:
        signal.signal(signal.SIGINT, former)
    assert sorted(seen) == [0, 1]


def test_nested_job_has_no_team():
    k = Bfloat16Kernels(3)
    start = np.random.default_rng(0).standard_normal((4, 256, 272)).astype("float32")
    alone, nested = start.copy(), start.copy()
    k.orthogonalise(list(alone))
    assert not within(20, lambda: k.each(lambda i: k.orthogonalise([nested[i]]), len(nested)))
    np.testing.assert_array_equal(nested, alone)
