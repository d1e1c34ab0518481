"""Which checkpoints stay: the newest, some for good, young ones."""

import os

from click.testing import CliRunner
from distgpt.callbacks.full_disk import Retention
from distgpt.commands.train import train
from distgpt.core.config import TrainConfig
from distgpt.core.saved.checkpoint import MARK, drop, expired_checkpoints, saved_checkpoints

from conftest import SMALL, inside


def saving(folder, t, steps, seconds=60.0, now=None):
    """Save at these steps, `seconds` apart, and drop what may go. Return the steps that are left."""
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


def test_one_in_every_so_many_steps_stays_for_good(tmp_path):
    assert saving(tmp_path, TrainConfig(keep=2, keep_every=100), range(30, 400, 30)) == [120, 210, 300, 360, 390]
    # With other settings, too, what is marked stays, and what is not marked any more goes.
    (tmp_path / "step-00000120" / MARK).unlink()
    assert saving(tmp_path, TrainConfig(keep=1), [420]) == [210, 300, 420]
    assert [int(path.name[5:]) for path in expired_checkpoints(0, saved_checkpoints(tmp_path))] == [
        420
    ]  # without a guard


def test_one_in_every_so_many_minutes_stays_for_good_also_in_a_copy(tmp_path):
    t = TrainConfig(keep=1, keep_every_minutes=5)
    assert saving(tmp_path, t, range(1, 13)) == [1, 6, 11, 12]
    for path in saved_checkpoints(tmp_path):  # copied without their times
        os.utime(path / "manifest.json", (10**6, 10**6))
    assert saving(tmp_path, t, [13, 14], seconds=1) == [1, 6, 11, 14]


def test_the_newest_stay_whatever_is_asked(tmp_path):
    assert saving(tmp_path, TrainConfig(keep=2), range(1, 11)) == [9, 10]
    assert saving(tmp_path, TrainConfig(keep=1, keep_every=1000), [11, 12]) == [12]


def test_a_run_keeps_what_its_options_ask_for_and_its_final_weights(tmp_path):
    options = ("--keep", 1, "--keep-every", 4, "--save-every", 1, "--save", "sync", "--steps", 6)
    done = inside("train", *SMALL, *map(str, options), "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert left(tmp_path / "run" / "checkpoints") == [4, 6]
    assert (tmp_path / "run" / "weights.safetensors").exists()
    shown = CliRunner().invoke(train, ["--keep-every", "soon"])
    assert "a number of steps, a time such as 10m, or never" in str(shown.exception)
