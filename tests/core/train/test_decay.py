"""--decay-from: an end for a run whose learning rate is constant, from any of its checkpoints."""

import shutil

import distgpt as library
import pytest

from conftest import SMALL, inside, metrics, refused

STEPS = ("--steps", "6", "--save-every", "3")


def trained(out, *args):
    done = inside("train", *SMALL, *args, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def weights(run):
    """The last ones in the file."""
    return (run / "weights.safetensors").read_bytes()[-2048:]


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("decay") / "run", *STEPS, "--schedule", "constant")


def test_the_new_run_is_that_of_a_schedule_which_falls_from_there(constant, tmp_path):
    checkpoint = constant / "checkpoints" / "step-00000003"
    done = inside("train", "--decay-from", checkpoint, "--steps", "4", "--threads", "1")
    assert done.returncode == 0, done.stderr
    found = constant.with_name("run-decayed")
    rates = [line["lr"] for line in metrics(found).values()]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025]) and list(metrics(found)) == [4, 5, 6, 7]
    whole = trained(tmp_path / "whole", "--steps", "7", "--schedule", "wsd", "--set", f"decay_fraction={4 / 7}")
    assert weights(found) == weights(whole)
    by_python = library.train(decay_from=str(constant), steps=1, out=tmp_path / "python", threads=1)
    assert [line["step"] for line in by_python.metrics] == [7]  # from the newest checkpoint


def test_what_has_no_constant_learning_rate_is_refused(constant, tmp_path):
    falling = trained(tmp_path / "falling", *STEPS, "--schedule", "wsd", "--set", "decay_fraction=0.5", "--warmup", "4")
    empty, unsaved = tmp_path / "empty", tmp_path / "unsaved"
    empty.mkdir()
    shutil.copytree(constant, unsaved, ignore=shutil.ignore_patterns("step-*"))
    for args, code, words in (
        ((empty,), 65, "empty is neither a checkpoint nor a run directory"),
        ((unsaved,), 65, "unsaved has no checkpoint yet to begin a new run from"),
        ((falling,), 2, "the learning rate is not constant there"),
        ((falling / "checkpoints" / "step-00000003",), 2, "the learning rate is not constant there"),
        ((constant, "--out", constant), 2, "another --out"),
        ((constant, "--resume", "auto"), 2, "--resume exclude each other"),
        ((constant, "--set", "train_minutes=1"), 2, "train_minutes"),
        ((tmp_path / "nothing",), 65, "no such checkpoint"),
    ):
        refused(inside("train", "--decay-from", *args, "--steps", "3", cwd=tmp_path), code, words)
    refused(inside("train", "--decay-from", constant, cwd=tmp_path), 2, "--steps")
    assert {path.name for path in tmp_path.iterdir()} == {"falling", "empty", "unsaved"}
