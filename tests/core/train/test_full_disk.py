"""A full disk: old checkpoints are deleted for new ones, and space for the final weights is reserved."""

import errno
import os
import re
import time
from functools import partial

import numpy as np
import pytest
from disks import names, raising, small_disk
from distgpt.callbacks.full_disk import FullDiskHandler, allocate
from distgpt.core.base.errors import StorageError
from distgpt.core.base.files import append, storage_errors
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.saved.checkpoint import MARK, State, expired_checkpoints, save_checkpoint
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import checkpoints as saving
from distgpt.core.train.step import Step

from conftest import SMALL, distgpt, inside, logged, losses, needs_mpi, refused, succeeded

WORDS = [*SMALL, "--steps", "60", "--save-every", "5"]
CHECKPOINT, WEIGHTS = 140 << 10, 112 << 10  # bytes: more than one of this model takes, and than is reserved


def given_up(run):
    return [name for event in logged(run, "history") for name in event.get("given_up", [])]


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def fill(path):
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(bytes(4096))


@pytest.mark.ci
@pytest.mark.parametrize("words", [
    ["--save", "sync"],
    ["--save", "async"],
    pytest.param(["--grad-sync", "sharded", "--stage", "mpi"], marks=[pytest.mark.ranks, needs_mpi]),
], ids=["sync", "async", "sharded"])  # fmt: skip
def test_full_disk_keeps_newest_checkpoints(tmp_path, disk, words):
    run = partial(distgpt, ranks=2) if "mpi" in words else inside
    words = ["train", *WORDS, *words]
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
            fill(filler)
        if step == until:
            filler.unlink()
        return launch(self, step, *rest)

    with small_disk(disk, "size=2m"):
        monkeypatch.setattr(Step, "launch", launched)
        ended = succeeded("train", *WORDS, "--save", save, "--config", tmp_path / "keep.toml", "--out", run)
        goes_on = len(re.findall("continuing, with step [0-9]+ saved, and trying again", ended.stdout))
        assert not until or goes_on == ended.stdout.count("the disk is writable again") == 1
        kept = names(run / "checkpoints")
        assert kept[-1] == "step-00000060" and (len(kept) == 1 if until else len(kept) >= 2)
        assert (run / "weights.safetensors").exists() and len(losses(run)) == 60


@pytest.mark.ci
def test_failed_lines_are_retried_whole(tmp_path, disk, monkeypatch):
    with small_disk(disk, "size=8k"):
        append(disk / "lines", b"a" * 4000 + b"\n")
        with pytest.raises(OSError, match="space"):
            append(disk / "lines", b"b" * 9000 + b"\n")
        assert (disk / "lines").read_bytes() == b"a" * 4000 + b"\n"
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
        ended = inside("train", *WORDS, *words, "--out", disk / "run")
        refused(ended, 74, "No space left", *named.split("|"), late=bool(left))
        assert given_up(disk / "run") == [] and not any("tmp" in name for name in names(disk / "run"))
        saved = names(disk / "run" / "checkpoints") if left else []
        assert saved == [f"step-{step:08}" for step in left]
        assert ("weights.safetensors" in names(disk / "run")) == ("weights.safetensors" in named)
        assert ("continuing, with step 5 saved" in ended.stdout) == ("weights.safetensors" in named)


def save(directory, step):
    weights = {"wte": np.full(1000, step, np.float32)}
    groups = {"weights": (weights, {}), "optimizer": (weights, {})}
    return save_checkpoint(directory.checkpoints, groups, State(step), partial(expired_checkpoints, 9))


@pytest.fixture
def made(tmp_path):
    directory, said = RunDirectory(tmp_path / "runs" / "one"), []
    directory.path.mkdir(parents=True)
    for step in range(1, 6):
        save(directory, step)
    return directory, said, lambda **t: FullDiskHandler(directory, TrainConfig(**t), 9000, said.append)


class Writing:
    def __init__(self, *errors):
        self.errors, self.done = list(errors), False

    def __call__(self):
        if self.errors:
            with storage_errors("write", os.devnull):
                raise OSError(self.errors.pop(0), "it is full")
        self.done = True


def test_oldest_checkpoints_are_deleted_first(made):
    directory, said, room = made
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
def test_protected_checkpoints_stay_if_all_writes_fail(made, prepare, error, policy, step, left):
    directory, _, room = made
    if prepare:
        prepare(directory)
    with pytest.raises(StorageError, match="it is full"):
        room(on_disk_error=policy).write(step, 100, Writing(*[error] * 9))
    assert names(directory.checkpoints) == [f"step-{step:08d}" for step in left]


def test_resume_frees_space_for_weights(made, monkeypatch):
    directory, said, room = made
    refused_once = Writing(errno.ENOSPC)
    monkeypatch.setattr("distgpt.callbacks.full_disk.allocate", lambda *_: refused_once())
    with room(keep=5).reserved(SerialComm(), 5):
        assert names(directory.checkpoints)[0] == "step-00000002"
    (line,) = said
    assert line.startswith("the disk is full: deleted step-00000001 for step 5")
    assert names(directory.path) == ["checkpoints", "history.jsonl"]


def test_failed_reports_are_retried(made, monkeypatch):
    directory, said, room = made
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
        assert inside("train", *WORDS, "--steps", "6", "--out", out).returncode == 74
    left = [name for name in names(out) if name.startswith(".weights.safetensors.")]
    assert len(left) == 1 and (out / left[0]).stat().st_size > 40 << 10
    assert inside("train", *WORDS, "--steps", "6", "--out", out, "--resume", "auto").returncode == 0
    assert not [name for name in names(out) if name.startswith(".")]
