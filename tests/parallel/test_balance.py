"""Ranks that take more sequences than others, by how fast they are."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.saved.checkpoint import State, load_state
from distgpt.core.train.plan import refuse_unsuited
from distgpt.parallel import balance
from distgpt.parallel.balance import Balanced, hosts_checksum, measured_shares, shares_by, shares_so_far
from steps import build_step, state_for
from test_local_steps import CONFIG, batches, model_of
from threadranks import on_all_ranks

from conftest import SMALL, distgpt, losses, needs_mpi

PLAIN = replace(CONFIG, outer_every=0)


def test_shares_follow_speed_and_no_split_is_faster():
    assert shares_by([1, 1], 8) == [4, 4] and shares_by([1, 3], 8) == [6, 2]
    assert shares_by([1, 1000], 8) == [7, 1] and shares_by([5, 4, 3], 3) == [1, 1, 1]
    assert shares_by([100, 101], 8) == [4, 4] and shares_by([100, 120], 64) == [35, 29]
    random = np.random.default_rng(1)
    for _ in range(50):
        seconds, total = random.integers(1, 100, 2).tolist(), int(random.integers(2, 40)) * 2
        shares = shares_by(seconds, total)
        took = max(a * b for a, b in zip(shares, seconds, strict=True))
        best = min(max(n * seconds[0], (total - n) * seconds[1]) for n in range(1, total))
        assert sum(shares) == total and min(shares) >= 1 and took == best


@pytest.mark.parametrize("shares", [[1, 11], [5, 2, 5]])
@pytest.mark.parametrize("mode", ["allreduce", "sharded", "overlapped"])
def test_unlike_shares_learn_the_same(shares, mode):
    def trained(comm, shares=None):
        config = replace(PLAIN, grad_sync=mode)
        model = model_of(ranks=comm.size)
        micro_batches = shares and Balanced(config, comm.size, comm.rank, shares)
        work = build_step(state_for(model, config, comm), comm, config, micro_batches=micro_batches)
        read = [work.launch(step, batches()).wait()[:2] for step in range(4)]
        return model.weights.flat.copy(), read

    even = on_all_ranks(len(shares), trained)
    found = on_all_ranks(len(shares), lambda comm: trained(comm, shares))
    for weights, read in found:
        assert (weights == found[0][0]).all()
        assert abs(weights - even[0][0]).max() < 1e-5
        assert np.allclose(read, even[0][1], rtol=1e-5)


def test_shares_are_measured_on_all_ranks_and_the_same_there(monkeypatch):
    monkeypatch.setattr(balance, "_seconds", lambda model, rows, t, comm: 0.1 * (1 + comm.rank))
    found = on_all_ranks(2, lambda comm: measured_shares(model_of(), PLAIN, comm))
    assert found == [[8, 4], [8, 4]]
    monkeypatch.undo()
    (first, second) = on_all_ranks(2, lambda comm: balance._seconds(model_of(), 6, PLAIN, comm))
    assert 0 < first < 10 and 0 < second < 10


def test_known_shares_are_used_where_they_fit():
    state = State(3, ranks=2, shares=[8, 4], hosts=7)
    known = partial(shares_so_far, state)
    assert known(PLAIN, 2, 7) == [8, 4] and known(PLAIN, 3, 7) is None
    assert known(PLAIN, 2, 8) is None and known(replace(PLAIN, grad_accum=4), 2, 7) is None
    assert shares_so_far(State(), PLAIN, 2, 7) is None
    first, other = (on_all_ranks(2, lambda comm, n=n: hosts_checksum(comm, n + comm.rank)) for n in (1, 2))
    assert first[0] == first[1] != other[0]


def test_what_needs_equal_parts_is_refused():
    for how, named in (
        ({"reproducible_parts": 8}, r"--deterministic \(reproducible parts\)"),
        ({"outer_every": 4}, "--outer-every"),
    ):
        config = replace(PLAIN, grad_accum=0, balance="auto", **how)
        with pytest.raises(UsageError, match=f"--balance auto and {named} exclude"):
            refuse_unsuited(config, 2, on_gpu=False)
        refuse_unsuited(config, 1, on_gpu=False)


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
