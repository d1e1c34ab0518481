"""Ranks that take more sequences than others, by how fast they are."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from distgpt.core.saved.checkpoint import State, load_state
from distgpt.parallel import balance
from distgpt.parallel.balance import Balanced, hosts_checksum, measured_shares, shares_by, shares_so_far
from hypothesis import given
from hypothesis import strategies as st
from steps import CONFIG, model_of, steps_of, trained
from threadranks import on_all_ranks

from conftest import SMALL, distgpt, losses, needs_mpi


def test_shares_follow_speed_and_no_split_is_faster():
    assert shares_by([1, 1], 8) == [4, 4] and shares_by([1, 3], 8) == [6, 2]
    assert shares_by([1, 1000], 8) == [7, 1] and shares_by([5, 4, 3], 3) == [1, 1, 1]
    assert shares_by([100, 101], 8) == [4, 4] and shares_by([100, 120], 64) == [35, 29]


@given(seconds=st.tuples(st.integers(1, 99), st.integers(1, 99)), total=st.integers(2, 80))
def test_no_split_is_faster(seconds, total):
    shares = shares_by(seconds, total)
    took = max(a * b for a, b in zip(shares, seconds, strict=True))
    assert sum(shares) == total and min(shares) >= 1
    assert took == min(max(n * seconds[0], (total - n) * seconds[1]) for n in range(1, total))


@pytest.mark.parametrize("shares", [[1, 11], [5, 2, 5]])
@pytest.mark.parametrize("mode", ["allreduce", "sharded", "overlapped"])
def test_unlike_shares_learn_the_same(shares, mode):
    config = replace(CONFIG, grad_sync=mode)

    def uneven(comm):
        micro_batches = Balanced(config, comm.size, comm.rank, shares)
        return trained(comm, config, 4, steps_of(comm, config, micro_batches=micro_batches))

    (_, even, known), *_ = on_all_ranks(len(shares), lambda comm: trained(comm, config, 4))
    found = on_all_ranks(len(shares), uneven)
    for _, seen, read in found:
        assert (seen[-1] == found[0][1][-1]).all() and abs(seen[-1] - even[-1]).max() < 1e-5
        assert np.allclose(read, known, rtol=1e-5)


def test_shares_are_measured_on_all_ranks_and_the_same_there(monkeypatch):
    monkeypatch.setattr(balance, "seconds_of", lambda model, rows, t, comm: 0.1 * (1 + comm.rank))
    assert on_all_ranks(2, lambda comm: measured_shares(model_of(), CONFIG, comm)) == [[8, 4], [8, 4]]
    monkeypatch.undo()
    (first, second) = on_all_ranks(2, lambda comm: balance.seconds_of(model_of(), 6, CONFIG, comm))
    assert 0 < first < 10 and 0 < second < 10


def test_known_shares_are_used_where_they_fit():
    state = State(3, ranks=2, shares=[8, 4], hosts=7)
    known = partial(shares_so_far, state)
    assert known(CONFIG, 2, 7) == [8, 4] and known(CONFIG, 3, 7) is None
    assert known(CONFIG, 2, 8) is None and known(replace(CONFIG, grad_accum=4), 2, 7) is None
    assert shares_so_far(State(), CONFIG, 2, 7) is None
    first, other = (on_all_ranks(2, lambda comm, n=n: hosts_checksum(comm, n + comm.rank)) for n in (1, 2))
    assert first[0] == first[1] != other[0]


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_a_run_measures_says_and_keeps_its_shares(tmp_path):
    words = ["--schedule", "constant", "--balance", "auto", "--batch-size", "8"]
    commands = [
        ["train", *SMALL, "--stage", "mpi", "--out", tmp_path, "--steps", steps, *words, *more]
        for steps, more in (("3", ()), ("5", ("--resume", "auto")))
    ]
    result = [distgpt(*command, ranks=2) for command in commands]
    assert [each.returncode for each in result] == [0, 0], result
    assert "measured now" in result[0].stdout and "as before" in result[1].stdout
    states = [load_state(path) for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert [state.shares for state in states] == [states[0].shares] * 2
    assert sum(states[0].shares) in (8, 4, 2) and len(losses(tmp_path)) == 5
