"""Saving during training, failing disks, and a full disk, on which old checkpoints are deleted for new ones."""

import errno
import os
import re
import threading
import time
from functools import partial

import numpy as np
import pytest
from disks import names, raising, small_disk
from distgpt.callbacks.full_disk import FullDiskHandler, allocate
from distgpt.core.base.errors import StorageError
from distgpt.core.base.files import storage_errors
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import (
    MARK,
    Best,
    State,
    expired_checkpoints,
    load_group,
    load_state,
    newest_step,
    save_checkpoint,
    verify,
)
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.saved.tensors import read_header, read_rows
from distgpt.core.train import checkpoints as saving
from distgpt.core.train import memory
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.step import Step

from conftest import SMALL, distgpt, inside, logged, losses, metrics, needs_mpi, refused, succeeded, summary

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


LONG = [*SMALL, "--steps", "60", "--save-every", "5"]
CHECKPOINT, WEIGHTS = 140 << 10, 112 << 10  # bytes: more than one of this model takes, and than is reserved


def given_up(run):
    return [name for event in logged(run, "history") for name in event.get("given_up", [])]


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.ci
@pytest.mark.parametrize("words", [
    ["--save", "sync"],
    ["--save", "async"],
    pytest.param(["--grad-sync", "sharded", "--stage", "mpi"], marks=[pytest.mark.ranks, needs_mpi]),
], ids=["sync", "async", "sharded"])  # fmt: skip
def test_full_disk_keeps_newest_checkpoints(tmp_path, disk, words):
    run = partial(distgpt, ranks=2) if "mpi" in words else inside
    words = ["train", *LONG, *words]
    plain = run(*words, "--out", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    with small_disk(disk, f"size={WEIGHTS + 5 * CHECKPOINT // 2}"):
        ended = run(*words, "--out", disk / "run")
        assert ended.returncode == 0, ended.stderr
        assert names(disk / "run" / "checkpoints") == ["step-00000055", "step-00000060"]
        assert given_up(disk / "run") == [f"step-{step:08d}" for step in range(5, 55, 5)]
        assert ended.stdout.count("the disk is full: deleted step-00000005 for step 15; 2 of 3") == 1
        assert ended.stdout.count("the disk is full") == 1 and "continuing" not in ended.stdout
        assert losses(disk / "run") == losses(tmp_path / "plain")
        result = disk / "run" / "weights.safetensors"
        assert result.stat().st_size == (tmp_path / "plain" / "weights.safetensors").stat().st_size
        assert not [name for name in names(disk / "run") if name.startswith(".")]


@pytest.mark.ci
@pytest.mark.parametrize(("save", "until"), [("sync", 40), ("async", 40), ("async", None)])
def test_run_survives_disk_filled_by_others(tmp_path, disk, monkeypatch, save, until):
    launch, filler, run = Step.launch, disk / "filler", disk / "run"
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 0.001)
    (tmp_path / "keep.toml").write_text(f"keep = {1 if until else 3}\n")  # 1: none to delete

    def launched(self, step, *rest):
        if step == 17:
            third, end = run / "checkpoints" / "step-00000015", time.monotonic() + 30
            while not third.exists() and time.monotonic() < end:  # may still be in progress
                time.sleep(0.01)
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
                while True:
                    file.write(bytes(4096))
        if step == until:
            filler.unlink()
        return launch(self, step, *rest)

    with small_disk(disk, "size=2m"):
        monkeypatch.setattr(Step, "launch", launched)
        ended = succeeded("train", *LONG, "--save", save, "--config", tmp_path / "keep.toml", "--out", run)
        goes_on = len(re.findall("continuing, with step [0-9]+ saved, and trying again", ended.stdout))
        assert not until or goes_on == ended.stdout.count("the disk is writable again") == 1
        kept = names(run / "checkpoints")
        assert kept[-1] == "step-00000060" and (len(kept) == 1 if until else len(kept) >= 2)
        assert (run / "weights.safetensors").exists() and len(losses(run)) == 60


def test_failed_lines_are_retried_whole(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("distgpt.core.saved.rundir.append", raising(OSError(errno.EIO, "broken")))
        for step in (1, 2):
            with pytest.raises(StorageError, match="broken"):
                directory.record({"step": step})
    directory.record({"step": 3})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


@pytest.mark.ci
@pytest.mark.parametrize(("size", "words", "named", "left"), [
    (WEIGHTS + 3 * CHECKPOINT // 2, [], "step-00000060|/run/weights.safetensors", [5]),  # only one fits
    (WEIGHTS + 5 * CHECKPOINT // 2, ["--set", "on_disk_error=stop", "--save", "sync"], "step-00000015", [5, 10]),
    (WEIGHTS // 2, [], "cannot reserve|for the final weights in", []),  # no run starts
], ids=["small", "stop", "tiny"])  # fmt: skip
def test_too_small_disk_ends_the_run(size, words, named, left, disk):
    with small_disk(disk, f"size={size}"):
        ended = inside("train", *LONG, *words, "--out", disk / "run")
        refused(ended, 74, "No space left", *named.split("|"), late=bool(left))
        assert given_up(disk / "run") == [] and not any("tmp" in name for name in names(disk / "run"))
        saved = names(disk / "run" / "checkpoints") if left else []
        assert saved == [f"step-{step:08}" for step in left]
        assert ("weights.safetensors" in names(disk / "run")) == ("weights.safetensors" in named)
        assert ("continuing, with step 5 saved" in ended.stdout) == ("weights.safetensors" in named)


def save_step(directory, step):
    weights = {"wte": np.full(1000, step, np.float32)}
    groups = {"weights": (weights, {}), "optimizer": (weights, {})}
    return save_checkpoint(directory.checkpoints, groups, State(step), partial(expired_checkpoints, 9))


@pytest.fixture
def on_full_disk(tmp_path):
    directory, said = RunDirectory(tmp_path / "runs" / "one"), []
    directory.path.mkdir(parents=True)
    for step in range(1, 6):
        save_step(directory, step)
    return directory, said, lambda **t: FullDiskHandler(directory, TrainConfig(**t), 9000, said.append)


class Writing:
    def __init__(self, *errors):
        self.errors, self.done = list(errors), False

    def __call__(self):
        if self.errors:
            with storage_errors("write", os.devnull):
                raise OSError(self.errors.pop(0), "it is full")
        self.done = True


def test_oldest_checkpoints_are_deleted_first(on_full_disk):
    directory, said, room = on_full_disk
    disk, write = room(keep=5), Writing(errno.EDQUOT, errno.ENOSPC)
    disk.write(6, 100, write)
    assert write.done and names(directory.checkpoints) == ["step-00000003", "step-00000004", "step-00000005"]
    assert said == []  # may run in a thread
    disk.report()
    (line,), (event,) = said, logged(directory.path, "history")
    assert line.startswith("the disk is full: deleted step-00000001, step-00000002 for step 6; 3 of 5 ")
    assert event["given_up"] == ["step-00000001", "step-00000002"] and event["step"] == 6
    disk.report()
    disk.write(7, 100, Writing(errno.ENOSPC))
    disk.report()
    assert len(said) == 2 and "2 of 5" in said[1] and len(logged(directory.path, "history")) == 2


def damaged(directory):
    """Checkpoints from step 4 belong to an earlier attempt. The run would resume from step 2."""
    (directory.checkpoints / "step-00000003" / "state.json").write_text("{")
    (directory.checkpoints / "damaged-step-00000009").mkdir()


def begun_with(directory):
    branch, tuned = (RunDirectory(directory.path.with_name(name)) for name in ("branch", "tuned"))
    for other in (branch, tuned):
        other.path.mkdir()
    branch.remember({"step": 2, "from": str(directory.checkpoints / "step-00000002"), "branch": True})
    init = str(directory.checkpoints / "step-00000003" / "weights.safetensors")
    tuned.config.write_text(RunConfig(train=TrainConfig(init=init)).to_toml())
    (directory.path.with_name("other")).write_text("no run")


@pytest.mark.parametrize(("prepare", "error", "policy", "step", "left"), [
    (None, errno.EIO, "keep-going", 6, (1, 2, 3, 4, 5)),
    (None, errno.ENOSPC, "stop", 6, (1, 2, 3, 4, 5)),
    (None, errno.ENOSPC, "keep-going", 6, (5,)),
    (damaged, errno.ENOSPC, "keep-going", 3, (2, 3, 4, 5)),
    (begun_with, errno.ENOSPC, "keep-going", 6, (2, 3, 5)),
    (lambda directory: (directory.checkpoints / "step-00000002" / MARK).touch(), errno.ENOSPC, "keep-going", 6, (2, 5)),
])  # fmt: skip
def test_protected_checkpoints_stay_if_all_writes_fail(on_full_disk, prepare, error, policy, step, left):
    directory, _, room = on_full_disk
    if prepare:
        prepare(directory)
    with pytest.raises(StorageError, match="it is full"):
        room(on_disk_error=policy).write(step, 100, Writing(*[error] * 9))
    assert names(directory.checkpoints) == [f"step-{step:08d}" for step in left]


def test_resume_frees_space_for_weights(on_full_disk, monkeypatch):
    directory, said, room = on_full_disk
    refused_once = Writing(errno.ENOSPC)
    monkeypatch.setattr("distgpt.callbacks.full_disk.allocate", lambda *_: refused_once())
    with room(keep=5).reserved(SerialComm(), 5):
        assert names(directory.checkpoints)[0] == "step-00000002"
    (line,) = said
    assert line.startswith("the disk is full: deleted step-00000001 for step 5")
    assert names(directory.path) == ["checkpoints", "history.jsonl"]


def test_failed_reports_are_retried(on_full_disk, monkeypatch):
    directory, said, room = on_full_disk
    disk = room(keep=5)
    disk.write(6, 100, Writing(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr("distgpt.core.saved.rundir.append", raising(OSError(errno.ENOSPC, "it is full")))
        disk.report()
    assert len(said) == 1 and not directory.history.exists()
    disk.write(7, 100, Writing(errno.ENOSPC))
    disk.report()
    assert given_up(directory.path) == ["step-00000001", "step-00000002"]


@pytest.mark.ci
def test_allocate_reserves_disk_space(tmp_path, disk):
    with (tmp_path / "file").open("wb") as file:
        allocate(file, (9 << 20) + 5)
    found = (tmp_path / "file").stat()
    assert found.st_size == (9 << 20) + 5 and 512 * found.st_blocks >= found.st_size
    with small_disk(disk), (disk / "file").open("wb") as file, pytest.raises(OSError, match="space"):
        allocate(file, 2 << 20)


def test_killed_run_leaves_reserved_space(disk, monkeypatch):
    out = disk / "run"
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda self, **how: None)  # simulates a kill
        patch.setattr(saving.Checkpoints, "write_last", raising(StorageError("gone")))
        assert inside("train", *LONG, "--steps", "6", "--out", out).returncode == 74
    left = [name for name in names(out) if name.startswith(".weights.safetensors.")]
    assert len(left) == 1 and (out / left[0]).stat().st_size > 40 << 10
    assert inside("train", *LONG, "--steps", "6", "--out", out, "--resume", "auto").returncode == 0
    assert not [name for name in names(out) if name.startswith(".")]
