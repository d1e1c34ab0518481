"""Saving during training, and failing disks."""

import threading

import numpy as np
import pytest
from distgpt.core.base.errors import StorageError
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import Best, State, load_group, load_state, newest_step, verify
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import read_header, read_rows
from distgpt.core.train import checkpoints as saving
from distgpt.core.train import memory
from distgpt.core.train.checkpoints import Checkpoints

from conftest import SMALL, inside, metrics, refused, summary

WORDS = [*SMALL, "--steps", "8", "--save-every", "2"]
FULL = StorageError("cannot save checkpoint: No space left on device")


@pytest.fixture
def made(tmp_path):
    model = Model(Architecture(preset("microgpt").model), CpuKernels("float32"))
    optimizer = AdamW(model, TrainConfig())
    for value, buffer in enumerate((model.weights, optimizer.m, optimizer.v), 1):
        buffer.flat[...] = value
    said = []

    def make(**settings):
        directory = RunDirectory(tmp_path / "run")
        directory.path.mkdir(exist_ok=True)
        description = Description(RunConfig(model=model.config), None)
        return Checkpoints(model, optimizer, directory, description, TrainConfig(**settings), said.append)

    return make, model, optimizer, said, tmp_path / "run" / "checkpoints"


def saved(path, model):
    verify(path)
    shapes = {name: np.empty_like(array) for name, array in model.weights.items()}
    moments = {prefix + name: array.copy() for prefix in ("m/", "v/") for name, array in shapes.items()}
    load_group(path, "weights", shapes)
    load_group(path, "optimizer", moments)
    return [float(tensors[name].flat[0]) for tensors, name in ((shapes, "wte"), (moments, "m/wte"), (moments, "v/wte"))]


class Gate:
    """Blocks writes of checkpoints or best weights until it is opened, and lets some fail."""

    def __init__(self, monkeypatch, failures=0, name="save_checkpoint", opened=True):
        self.opened, self.reached, self.calls, original = threading.Event(), threading.Event(), 0, getattr(saving, name)
        if opened:
            self.opened.set()

        def held(path, *rest):
            if name == "save_checkpoint" or path.name == "best.safetensors":
                self.calls += 1
                self.reached.set()
                assert self.opened.wait(30)
                if self.calls <= failures:
                    raise FULL
            return original(path, *rest)

        monkeypatch.setattr(saving, name, held)


def test_training_continues_while_a_copy_is_written(made, monkeypatch):
    make, model, optimizer, _, checkpoints = made
    saver, gate = make(save="async"), Gate(monkeypatch, opened=False)
    saver.begin(State(5), best=None, checkpoint=True)
    assert gate.reached.wait(30)
    saver.check(has_lost_disk=False)
    for buffer in (model.weights, optimizer.m, optimizer.v):
        buffer.flat += 10  # simulates the next step
    assert not checkpoints.exists()
    gate.opened.set()
    saver.wait()
    assert saved(checkpoints / "step-00000005", model) == [1, 2, 3] and saver.seconds > 0
    saver.begin(State(6), best=None, checkpoint=True)
    saver.write_now(State(7))  # waits for the previous save
    assert saved(checkpoints / "step-00000006", model) == saved(checkpoints / "step-00000007", model) == [11, 12, 13]


def test_failed_save_is_retried_if_older_checkpoint_exists(made, monkeypatch):
    make, model, _, said, checkpoints = made
    saver = make(save="async")
    saver.write_now(State(1))
    gate = Gate(monkeypatch, failures=2)
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 1e9)
    saver.begin(State(2), best=None, checkpoint=True)
    saver.wait()
    assert said == [f"{FULL}; continuing, with step 1 saved, and trying again"]
    saver.check(has_lost_disk=False)
    assert gate.calls == 1  # not yet
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", -1)
    model.weights.flat += 10
    for _ in range(2):
        saver.check(has_lost_disk=False)
        saver.wait()
    assert gate.calls == 3 and said[1:] == ["the disk is writable again"]
    assert saved(checkpoints / "step-00000002", model)[0] == 1 and saver.disk.lost is None
    saver.check(has_lost_disk=False)
    assert gate.calls == 3
    saver.tolerate(StorageError(FULL))  # again, a moment later
    saver.report_recovery()
    assert len(said) == 2


@pytest.mark.parametrize("older, policy", [(False, "keep-going"), (True, "stop")])
def test_failed_save_ends_the_run(made, monkeypatch, older, policy):
    make, _, _, said, _ = made
    for save in ("sync", "async"):
        saver = make(save=save, on_disk_error=policy)
        if older:
            saver.write_now(State(1))
        with monkeypatch.context() as patch:
            Gate(patch, failures=1)
            saver.begin(State(2), best=None, checkpoint=True)
            saver.wait()
        assert saver.disk.lost is FULL and said == []


def test_other_errors_in_saver_thread_are_raised(made, monkeypatch):
    saver = made[0](save="async")
    monkeypatch.setattr(saving, "save_checkpoint", lambda *args: 1 / 0)
    saver.begin(State(1), best=None, checkpoint=True)
    with pytest.raises(ZeroDivisionError):
        saver.wait()


def best_in(checkpoints):
    path, first = checkpoints.with_name("best.safetensors"), np.empty((1, 16), np.float32)
    if not path.exists():
        return None
    read_rows(path, header := read_header(path), "wte", first)
    return Best.from_metadata(header.metadata), first[0, 0]


@pytest.mark.parametrize("save", ["sync", "async"])
@pytest.mark.parametrize("failures, has_it", [(1, True), (2, False)])
def test_best_loss_matches_weights_on_disk(made, monkeypatch, save, failures, has_it):
    """A failed save of best weights is retried once; otherwise the older weights stay the best."""
    make, model, _, said, checkpoints = made
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 1e9)
    saver = make(save=save)
    first, second, third = (Best(loss, 9, step) for step, loss in ((1, 2.0), (2, 1.0), (4, 1.5)))
    saver.write_now(State(1), first)
    Gate(monkeypatch, failures, "write_tensors")
    model.weights.flat += 10
    assert saver.is_best(1.0) and not saver.is_best(2.0)
    saver.begin(State(2), second, checkpoint=False)
    model.weights.flat += 10
    saver.begin(State(3), None, checkpoint=True)
    saver.wait()
    kept = second if has_it else first
    assert best_in(checkpoints) == (kept, 11 if has_it else 1) and saver.best == kept
    assert load_state(checkpoints / "step-00000003").best == kept
    assert saver.is_best(1.5) is not has_it and len(said) == (0 if has_it and save == "sync" else 2)
    saver.begin(State(4), third, checkpoint=False)
    saver.wait()
    assert best_in(checkpoints) == (third, 21) and saver.best == third


def test_pending_best_weights_count_and_are_retried(made, monkeypatch):
    make, *_, checkpoints = made
    saver = make(save="async")
    saver.write_now(State(1))
    Gate(monkeypatch, 1, "write_tensors")
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 1e9)
    saver.begin(State(2), Best(1.0, 9, 2), checkpoint=False)
    saver.wait()
    assert saver.best is None and not saver.is_best(1.5) and best_in(checkpoints) is None
    saver.write_now(State(3))
    assert saver.best == Best(1.0, 9, 2) == load_state(checkpoints / "step-00000003").best


def test_first_and_last_checkpoint_must_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 0)
    words, run = [*WORDS, "--out", tmp_path / "run"], tmp_path / "run"
    assert inside("train", *words, "--steps", "2").returncode == 0
    Gate(monkeypatch, failures=99)
    refused(inside("train", *WORDS, "--out", tmp_path / "first"), 74, FULL, late=True)
    assert summary(tmp_path / "first")["stop"] == "failed"
    ended = inside("train", *words, "--resume", "auto")
    assert ended.returncode == 74 and f"{FULL}; continuing, with step 2 saved" in ended.stdout
    assert newest_step(run / "checkpoints") == 2 and max(metrics(run)) == 8


def test_copy_is_made_if_memory_allows(tmp_path, monkeypatch):
    assert "not enough memory" not in inside("train", *WORDS, "--out", tmp_path / "much").stdout
    monkeypatch.setattr(memory, "copy_bytes", lambda *about: 1 << 60)
    assert "not enough memory" in inside("train", *WORDS, "--out", tmp_path / "little").stdout
    result = inside("train", *WORDS, "--save", "async", "--out", tmp_path / "none")
    refused(result, 2, "--save async requires", "use sync")
    assert "not enough memory" not in inside("train", *WORDS, "--save", "sync", "--out", tmp_path / "sync").stdout
