"""Local steps: ranks train separately for a round, and then take a common step."""

import os
from dataclasses import replace

import numpy as np
import pytest
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import rank_sequences
from distgpt.core.model.optim import learning_rate
from distgpt.core.model.passes import Pass
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import read_into
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.gathering import stems
from distgpt.core.train.progress import Due, Pace, Progress, due_after
from distgpt.core.train.setup import restore
from distgpt.parallel.choose import Chosen
from steps import CONFIG, MODEL, batches_of, model_of, steps_of, trained
from threadranks import on_all_ranks

LOCAL = replace(CONFIG, outer_every=4)


def rounds_of(t, ranks):
    return Chosen(t, ranks).placement.rounds


def gradients_of(model, rank, ranks, step):
    each = CONFIG.batch_size // (2 * ranks)
    work, x, y = Pass(model, each, 8, training=True), *np.empty((2, each, 8), np.int32)
    for part in (0, 1):
        batches_of().fill(step, rank_sequences(CONFIG.batch_size, rank, ranks, part, 2), x, y)
        work.loss_and_gradients(x.reshape(-1), y.reshape(-1), 0.5, accumulate=part > 0)
    return float(model.grads.flags[0]), model.grads.flat.astype(np.float64)


def by_hand(ranks, steps):
    """Compute the steps in float64 by the formulas, except for the gradients."""
    c, model = LOCAL, model_of()
    weights = [model.weights.flat.astype(np.float64) for _ in range(ranks)]
    m, v = np.zeros((2, ranks, len(weights[0])))
    common, velocity, seen, read = weights[0].copy(), np.zeros(len(weights[0])), [], []
    decayed = np.zeros(len(common))
    for start, stop, decays in model.layout.ranges(lambda spec: spec.is_matrix):
        decayed[start:stop] = decays
    for step in range(steps):
        found = []
        for rank in range(ranks):
            model.weights.flat[...] = weights[rank]
            found.append(gradients_of(model, rank, ranks, step))
        norm, lr = np.sqrt(np.mean([(g**2).sum() for _, g in found])), learning_rate(c, step)
        read.append((np.mean([loss for loss, _ in found]), norm))
        for rank, (_, g) in enumerate(found):
            g *= min(1, c.clip / norm)
            m[rank] = c.beta1 * m[rank] + (1 - c.beta1) * g
            v[rank] = c.beta2 * v[rank] + (1 - c.beta2) * g**2
            first, second = m[rank] / (1 - c.beta1 ** (step + 1)), v[rank] / (1 - c.beta2 ** (step + 1))
            weights[rank] -= lr * (first / (np.sqrt(second) + c.eps) + c.weight_decay * decayed * weights[rank])
        if (step + 1) % c.outer_every == 0 or step + 1 == c.steps:
            gradient = common - np.mean(weights, axis=0)
            velocity = c.outer_momentum * velocity + gradient
            common = common - c.outer_lr * (gradient + c.outer_momentum * velocity)
            weights = [common.copy() for _ in range(ranks)]
        seen.append(np.array(weights))
    return seen, read


@pytest.mark.parametrize("ranks", [2, 3])
def test_rounds_match_the_formula(ranks):
    wanted, known = by_hand(ranks, 10)
    found = on_all_ranks(ranks, lambda comm: trained(comm, LOCAL, 10))
    for rank, (_, seen, read) in enumerate(found):
        assert np.allclose(read, known, rtol=1e-4)
        for step, weights in enumerate(seen):
            assert abs(weights - wanted[step][rank]).max() < 2e-5, step
            same = (weights == found[0][1][step]).all()
            assert same == (rank == 0 or rounds_of(LOCAL, ranks).ends(step + 1)), step


def test_ended_round_ends_once():
    def act(comm):
        work, seen, _ = trained(comm, LOCAL, 4)
        work.gradient_sync.end_round(4)
        return (work.model.weights.flat == seen[-1]).all()

    assert on_all_ranks(2, act) == [True] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modes_and_types_exchange_equal_changes(dtype):
    local = replace(LOCAL, dtype=dtype)
    one_node, two_nodes = (on_all_ranks(4, lambda comm: trained(comm, local, 8), per_node) for per_node in (4, 2))
    near = 1e-5 if dtype == "float32" else 2e-2
    for (_, seen, _), (_, wanted, _) in zip(two_nodes, one_node, strict=True):
        assert abs(seen[7] - wanted[7]).max() < near * abs(wanted[7]).max()
        assert (seen[7] == two_nodes[0][1][7]).all()
    if dtype == "float32":
        narrow = replace(local, gradient_dtype="bfloat16")
        (_, found, _), (_, packed, _) = (
            on_all_ranks(2, lambda comm, c=c: trained(comm, c, 4))[0] for c in (narrow, local)
        )
        moved = abs(packed[3] - model_of().weights.flat).max()
        assert 0 < abs(found[3] - packed[3]).max() < 2**-6 * moved


def test_bad_gradients_of_one_rank_stop_all():
    def rejection_reason(loss, norm):
        return "" if np.isfinite(loss) and np.isfinite(norm) else "not finite"

    def with_fault(comm):
        work = steps_of(comm, LOCAL, rejection_reason=rejection_reason)
        before = work.model.weights.flat.copy()
        if comm.rank == 1:
            work.model.weights["wte"][0, 0] = np.inf
        return work.launch(0, batches_of()).rejected, (work.model.weights.flat == before).all()

    assert on_all_ranks(2, with_fault) == [("not finite", True), ("not finite", False)]


def saved(comm, out, at, config=LOCAL):
    work, *_ = trained(comm, config, at)
    description, gathering = Description(RunConfig(model=MODEL), None), work.state.gathering(comm)
    how = (work.model, work.optimizer, RunDirectory(out), description, config, lambda text: None, comm)
    saver = Checkpoints(*how, gathering=gathering)
    saver.on_root(lambda: saver.write_now(State(at)))


def resumed(comm, out, at, config=LOCAL, steps=10):
    work = steps_of(comm, config)
    work.model.weights.flat[...] = 7
    restore(comm, work.state, out / "checkpoints" / f"step-{at:08d}")
    seen = []
    for step in range(at, steps):
        work.launch(step, batches_of())
        seen.append(work.model.weights.flat.copy())
    return seen


@pytest.mark.parametrize("at", [3, 4])
def test_resume_within_a_round_is_exact(at, tmp_path):
    wanted = on_all_ranks(3, lambda comm: trained(comm, LOCAL, 10)[1])
    on_all_ranks(3, lambda comm: saved(comm, tmp_path, at))
    found = on_all_ranks(3, lambda comm: resumed(comm, tmp_path, at))
    for seen, whole in zip(found, wanted, strict=True):
        assert all((a == b).all() for a, b in zip(seen, whole[at:], strict=True))
    files = stems(tmp_path / "checkpoints" / f"step-{at:08d}")
    others = {f"replica-{rank:06d}" for rank in range(at % 4 == 0, 3)}
    assert files == {"weights", "optimizer", "outer"} | others


def test_weights_within_a_round_are_the_mean(tmp_path):
    on_all_ranks(3, lambda comm: saved(comm, tmp_path, 6))
    wanted = np.mean([seen[5] for _, seen, _ in on_all_ranks(3, lambda comm: trained(comm, LOCAL, 6))], axis=0)
    model = model_of()
    path = tmp_path / "checkpoints" / "step-00000006"
    read_into(path / "weights.safetensors", dict(model.weights))
    assert abs(model.weights.flat - wanted).max() < 1e-6
    for ranks, outer_every in ((2, 4), (4, 4), (2, 0), (1, 4)):
        config = replace(LOCAL, outer_every=outer_every)

        def act(comm, config=config):
            work = steps_of(comm, config)
            restore(comm, work.state, path)
            begun = work.model.weights.flat.copy()
            return begun, work.optimizer.m.flat.copy(), work.launch(6, batches_of()).wait()[:2]

        found = on_all_ranks(ranks, act)
        for rank, (begun, moment, read) in enumerate(found):
            assert (begun == model.weights.flat).all() and np.isfinite(read).all()
            assert (moment == found[0][1]).all() == (rank % 3 == 0 or not outer_every)


def test_pace_includes_the_exchange():
    t = LOCAL

    def pace(t, ranks, *seconds):
        return Pace(Progress(step=len(seconds), seconds=list(seconds)), rounds_of(t, ranks))

    assert pace(t, 2, 1.0, 1.0).recent() == [1.0, 1.0, 2.0]  # a guess, before the first exchange
    assert pace(t, 2, 1.0, 1.0, 1.0, 9.0).recent() == [1.0, 1.0, 1.0, 9.0]
    assert pace(t, 2, 1.0, 1.0, 1.0, 9.0).usual() == 9.0 and pace(t, 1, 1.0, 1.0, 9.0).usual() == 1.0
    assert pace(t, 2).usual() == 0.0
    assert pace(replace(CONFIG, outer_every=300), 2, *[1.0] * 299, 9.0, *[1.0] * 200).usual() == 9.0
    assert len(pace(replace(CONFIG, outer_every=0), 2, *[1.0] * 500).recent()) == 100
    assert rounds_of(t, 2).typical(0, [1.0, 1.0, 1.0, 9.0, 1.0]) == 3.0
    assert rounds_of(t, 1).typical(0, [1.0, 1.0, 1.0, 9.0, 1.0]) == 1.0
    of_four, of_one = (Chosen(t, ranks).placement for ranks in (4, 1))
    assert [of_four.saved_buffers(is_common) for is_common in (True, False)] == [10, 15]
    assert of_one.saved_buffers(is_common=False) == 3


def test_changes_are_summed_in_shared_memory(monkeypatch):
    def act(comm):
        exchange = steps_of(comm, LOCAL).gradient_sync
        return exchange.name, type(exchange.changes).__name__

    assert on_all_ranks(2, act) == [("shared memory", "SharedSum")] * 2
    monkeypatch.delattr(os, "memfd_create")
    assert on_all_ranks(2, act) == [("allreduce", "Allreduce")] * 2
    assert on_all_ranks(4, act, 2) == [("hierarchical", "Hierarchical")] * 4


def test_plain_runs_start_a_round_on_resume(tmp_path):
    on_all_ranks(2, lambda comm: saved(comm, tmp_path, 5, CONFIG))
    found = on_all_ranks(2, lambda comm: resumed(comm, tmp_path, 5, steps=8))
    assert (found[0][0] != found[1][0]).any() and (found[0][2] == found[1][2]).all()


def test_due_actions_wait_for_end_of_round():
    t = replace(LOCAL, save_every=3, eval_every=5, sample_every=0, verify_every=8, steps=11)
    due = {step: due_after(t, step, rounds_of(t, 2), True, is_last=step == 11) for step in range(1, 12)}
    assert {step: what for step, what in due.items() if what} == {
        4: Due(save=True, compare=True),
        8: Due(save=True, evaluate=True, compare=True),
        11: Due(save=True, evaluate=True, compare=True),
    }
    alone = rounds_of(t, 1)
    assert due_after(t, 3, alone, True, False) == Due(save=True) and not due_after(t, 4, alone, True, False)
