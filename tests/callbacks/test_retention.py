"""Retention of checkpoints: the newest, and some permanently."""

import os

from click.testing import CliRunner
from distgpt.callbacks.full_disk import Retention
from distgpt.commands.train import train
from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import MARK, drop, expired_checkpoints, saved_checkpoints

from conftest import SMALL, succeeded


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


def test_newest_checkpoints_stay(tmp_path):
    assert saving(tmp_path, TrainConfig(keep=2), range(1, 11)) == [9, 10]
    assert saving(tmp_path, TrainConfig(keep=1, keep_every=1000), [11, 12]) == [12]


def test_run_keeps_selected_checkpoints_and_weights(tmp_path):
    options = ("--keep", 1, "--keep-every", 4, "--save-every", 1, "--save", "sync", "--steps", 6)
    succeeded("train", *SMALL, *map(str, options), "--out", str(tmp_path / "run"))
    assert left(tmp_path / "run" / "checkpoints") == [4, 6] and (tmp_path / "run" / "weights.safetensors").exists()
    shown = CliRunner().invoke(train, ["--keep-every", "soon"])
    assert "a number of steps, a time such as 10m, or never" in str(shown.exception)
