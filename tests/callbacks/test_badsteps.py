"""Nonfinite or outlying losses and gradients: the run stops, skips the step or rolls back."""

import json
import math
import os
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from distgpt.callbacks.bad_steps import ENOUGH, BadSteps
from distgpt.callbacks.full_disk import Retention
from distgpt.commands.train import train
from distgpt.core.base.errors import NonFiniteError, OutlierError
from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import (
    MARK,
    State,
    drop,
    expired_checkpoints,
    latest_valid_checkpoint,
    load_state,
    saved_checkpoints,
)
from distgpt.core.train.progress import Finished, Progress
from distgpt.core.train.step import Step

from conftest import SMALL, inside, logged, losses, metrics, refused, succeeded, summary, validations

WORDS = [*SMALL, "--steps", "8", "--save-every", "3"]


def run(*words):
    return inside("train", *map(str, words))


@pytest.fixture
def ruined(monkeypatch):
    """Multiply some gradients of some steps, counted from 1 in this process; by NaN the loss as well."""

    def ruin(calls, factor):
        count, forward_backward = [0], Step.forward_backward

        def gradients(self, adds, sends):
            forward_backward(self, adds, sends)
            self.model.kernels.between(lambda: multiply(self.model.grads))  # also in a captured pass

        def multiply(grads):
            count[0] += 1
            if count[0] in calls:
                for some in (grads["blocks.0.attn.qkv.w"], grads.flags[: 1 if math.isnan(factor) else 0]):
                    with np.errstate(invalid="ignore"):
                        np.multiply(some, np.float32(factor), out=some)

        monkeypatch.setattr(Step, "forward_backward", gradients)

    return ruin


def history(out):
    return logged(out, "history")[2:]


def weights(out):
    return (out / "weights.safetensors").read_bytes()


def finished(loss, norm, rejected=None):
    return Finished(loss, norm, lr=0.1, rejected=rejected, flags=[], rank_seconds=[])


def test_bad_steps_detect_nonfinite_and_outliers():
    bad = BadSteps(TrainConfig(spike_zscore=4.0), Progress())
    assert bad.rejection_reason(math.nan, math.nan) == "the loss is not finite"
    assert bad.rejection_reason(1.0, math.inf) == "the gradient is not finite"
    for step in range(ENOUGH):
        assert bad.rejection_reason(1000.0, 1000.0) == ""  # too few to compare with
        assert bad.check_step(finished(5 + step % 2, 1.0)) == ""
    assert bad.rejection_reason(7.4, 1.0) == "" and bad.rejection_reason(0.0, 0.0) == ""
    assert bad.rejection_reason(7.6, 1.0) == "the loss is an outlier: 7.6, but 5.5 ± 0.5 in the last 20 steps"
    assert bad.rejection_reason(5.5, 1.003) == "" and bad.rejection_reason(5.5, 1.005).startswith(
        "the gradient is an outlier"
    )


def test_bad_step_stops_the_run(ruined, tmp_path):
    ruined({5}, math.inf)
    ended = run(*WORDS, "--out", tmp_path / "run")
    refused(ended, 76, "not finite at step 5", "--on-bad-step skip", late=True)
    assert summary(tmp_path / "run")["stop"] == "not finite"
    for clip, advice in ((1.0, "a smaller --clip"), (0.0, "--clip 1")):
        with pytest.raises(NonFiniteError, match=advice):
            BadSteps(TrainConfig(clip=clip), Progress()).check_step(finished(math.nan, 1.0))
    with pytest.raises(OutlierError) as found:
        BadSteps(TrainConfig(spike_zscore=3.0), Progress()).check_step(finished(1.0, 9.0, "why"))
    assert found.value.exit_code == 76


@pytest.mark.ci
def test_bad_step_is_skipped(ruined, tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    ruined({5}, math.nan)
    ended = run(*WORDS, "--on-bad-step", "skip", "--out", out)
    assert ended.returncode == 0 and "the loss is not finite at step 5: skipped" in ended.stdout
    assert [step for step, line in metrics(out).items() if line.get("skipped")] == [5]
    assert losses(out)[4] is None and None not in losses(out)[5:]
    (event,) = history(out)
    assert (event["step"], event["bad"]) == (4, "the loss is not finite at step 5")
    assert load_state(latest_valid_checkpoint(out / "checkpoints")[0]).bad_steps == 1
    ruined({5}, math.nan)
    assert run(*WORDS, "--on-bad-step", "skip", "--out", other).returncode == 0
    (other / "checkpoints" / "step-00000008" / "manifest.json").write_text("damaged")
    ruined(set(), 1)
    assert run("--resume", other, "--threads", "1").returncode == 0 and weights(out) == weights(other)


def test_bad_steps_allowed_limits_skips(ruined, tmp_path):
    ruined({3, 5, 6}, math.nan)
    words = [*WORDS, "--on-bad-step", "skip", "--set", "bad_steps_allowed=2"]
    ended = run(*words, "--out", tmp_path / "run")
    refused(ended, 76, "not finite at step 6", "more than 2 bad steps", late=True)
    ended = run("--resume", tmp_path / "run", "--threads", "1", "--set", "bad_steps_allowed=3")
    assert ended.returncode == 0  # one step before the checkpoint counts


def test_rollback_skips_bad_batches(ruined, tmp_path):
    out, whole = tmp_path / "run", tmp_path / "whole"
    ruined({5}, math.nan)
    ended = run(*WORDS, "--on-bad-step", "rollback", "--out", out)
    assert ended.returncode == 0 and "the loss is not finite at step 5: rolled back to step 3" in ended.stdout
    assert list(metrics(out)) == list(range(1, 9)) and None not in losses(out)
    event = history(out)[0]
    assert (event["step"], event["back_to"], event["skipped"]) == (3, 3, 2)
    state = load_state(latest_valid_checkpoint(out / "checkpoints")[0])
    assert (state.step, state.skipped, state.bad_steps) == (8, 2, 1)
    plain = tmp_path / "plain"
    assert run(*WORDS, "--steps", "10", "--out", plain).returncode == 0
    assert losses(out)[:3] == losses(plain)[:3] and losses(out)[3] != losses(plain)[3]
    shutil.copytree(out, whole)
    for number in (6, 8):  # a resumed run is identical
        (out / "checkpoints" / f"step-{number:08}" / "manifest.json").write_text("")
    assert run("--resume", out, "--threads", "1").returncode == 0
    assert losses(whole) == losses(out) and weights(whole) == weights(out)


def test_rollback_without_checkpoint_uses_first_weights(ruined, tmp_path):
    ruined({2}, math.nan)
    out = tmp_path / "run"
    assert run(*WORDS, "--on-bad-step", "rollback", "--eval-every", "4", "--val-fraction", "0.1", "--out", out)
    assert list(metrics(out)) == list(range(1, 9)) and history(out)[0]["back_to"] == 0
    assert [*validations(out)] == [0, 4, 8]


def test_rollback_ignores_later_checkpoints(ruined, tmp_path):
    out = tmp_path / "run"
    assert run(*WORDS, "--save-every", "4", "--out", out).returncode == 0
    ruined({2}, math.nan)
    first = out / "checkpoints" / "step-00000004"
    assert run("--resume", first, "--threads", "1", "--on-bad-step", "rollback").returncode == 0
    assert history(out)[-1]["back_to"] == 4 and list(metrics(out)) == list(range(1, 9))


def test_spike_does_not_reach_weights(ruined, tmp_path):
    ruined({30}, 1e4)
    words = [*SMALL, "--steps", "40", "--clip", "0", "--on-bad-step", "skip"]
    ended = run(*words, "--set", "spike_zscore=8", "--out", tmp_path / "run")
    assert ended.returncode == 0 and "is an outlier" in ended.stdout and "at step 30" in ended.stdout
    last = losses(tmp_path / "run")
    assert last[31] < 1.1 * last[28]
    ruined({30}, 1e4)
    ended = run(*words, "--on-bad-step", "stop", "--set", "spike_zscore=8", "--out", tmp_path / "stopped")
    refused(ended, 76, "is an outlier", "at step 30", late=True)
    assert summary(tmp_path / "stopped")["stop"] == "outlier"


def test_spike_statistics_survive_resume():
    before, after = Progress(), Progress()
    first, second = (BadSteps(TrainConfig(spike_zscore=3.0), progress) for progress in (before, after))
    for step in range(120):
        first.check_step(finished(3.0 + step % 3, 1.0))
    after.load(State.from_json(json.loads(json.dumps(State(recent=tuple(before.recent)).to_json()))))
    assert after.recent == before.recent and len(after.recent) == 100
    assert second.rejection_reason(9.0, 1.0) == first.rejection_reason(9.0, 1.0) != ""


def saving(folder, t, steps, seconds=60.0, now=None):
    """Save at these steps, `seconds` apart, and delete expired checkpoints. Return the remaining steps."""
    for number, step in enumerate(steps):
        manifest = folder / f"step-{step:08d}" / "manifest.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.touch()
        os.utime(manifest, (seconds * number,) * 2)
        for path in Retention(t)(saved_checkpoints(folder, step)):
            drop(path)
    return left(folder)


def left(folder):
    return [int(path.name[5:]) for path in reversed(saved_checkpoints(folder))]


def test_keep_every_keeps_marked_checkpoints(tmp_path):
    assert saving(tmp_path, TrainConfig(keep=2, keep_every=100), range(30, 400, 30)) == [120, 210, 300, 360, 390]
    # Marks decide, regardless of the settings.
    (tmp_path / "step-00000120" / MARK).unlink()
    assert saving(tmp_path, TrainConfig(keep=1), [420]) == [210, 300, 420]
    assert [int(path.name[5:]) for path in expired_checkpoints(0, saved_checkpoints(tmp_path))] == [
        420
    ]  # the core's default


def test_keep_every_minutes_survives_copy(tmp_path):
    t = TrainConfig(keep=1, keep_every_minutes=5)
    assert saving(tmp_path, t, range(1, 13)) == [1, 6, 11, 12]
    for path in saved_checkpoints(tmp_path):  # copied without their times
        os.utime(path / "manifest.json", (10**6, 10**6))
    assert saving(tmp_path, t, [13, 14], seconds=1) == [1, 6, 11, 14]


def test_run_keeps_selected_checkpoints_and_weights(tmp_path):
    options = ("--keep", 1, "--keep-every", 4, "--save-every", 1, "--save", "sync", "--steps", 6)
    succeeded("train", *SMALL, *map(str, options), "--out", str(tmp_path / "run"))
    assert left(tmp_path / "run" / "checkpoints") == [4, 6] and (tmp_path / "run" / "weights.safetensors").exists()
    shown = CliRunner().invoke(train, ["--keep-every", "soon"])
    assert "a number of steps, a time such as 10m, or never" in str(shown.exception)
