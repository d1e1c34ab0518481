"""A full disk: old checkpoints are given up for new ones, and the final weights have room from the start."""

import errno
import json
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

from conftest import SMALL, distgpt, inside, losses, needs_mpi, refused

WORDS = [*SMALL, "--steps", "60", "--save-every", "5"]
CHECKPOINT, WEIGHTS = 140 << 10, 112 << 10  # bytes: more than one of this model takes, and than is reserved


def history(run):
    return [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]


def given_up(run):
    return [name for event in history(run) for name in event.get("given_up", [])]


@pytest.fixture
def disk(tmp_path):
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def fill(path):
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(bytes(4096))


@pytest.mark.ci
@pytest.mark.parametrize(
    "words",
    [
        ["--save", "sync"],
        ["--save", "async"],
        pytest.param(["--grad-sync", "sharded", "--stage", "mpi"], marks=[pytest.mark.ranks, needs_mpi]),
    ],
    ids=["sync", "async", "sharded"],
)
def test_a_full_disk_keeps_the_newest(tmp_path, disk, words):
    """Of three to keep two fit: the run ends as it does elsewhere, and says so once."""
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
def test_a_disk_that_somebody_else_fills(tmp_path, disk, monkeypatch, save, until):
    """A run goes on and ends with everything: if there is room again, or old checkpoints can be given up."""
    launch, filler, run = Step.launch, disk / "filler", disk / "run"
    monkeypatch.setattr(saving, "SECONDS_BETWEEN_ATTEMPTS", 0.001)
    (tmp_path / "keep.toml").write_text(f"keep = {1 if until else 3}\n")  # one: none that could be given up

    def launched(self, step, *rest):
        if step == 17:
            third, end = run / "checkpoints" / "step-00000015", time.monotonic() + 30
            while not third.exists() and time.monotonic() < end:  # it may still be written
                time.sleep(0.01)
            fill(filler)
        if step == until:
            filler.unlink()
        return launch(self, step, *rest)

    with small_disk(disk, "size=2m"):
        monkeypatch.setattr(Step, "launch", launched)
        ended = inside("train", *WORDS, "--save", save, "--config", tmp_path / "keep.toml", "--out", run)
        assert ended.returncode == 0, ended.stderr
        goes_on = len(re.findall("continuing, with step [0-9]+ saved, and trying again", ended.stdout))
        assert not until or goes_on == ended.stdout.count("the disk is writable again") == 1
        kept = names(run / "checkpoints")
        assert kept[-1] == "step-00000060" and (len(kept) == 1 if until else len(kept) >= 2)
        assert (run / "weights.safetensors").exists() and len(losses(run)) == 60


@pytest.mark.ci
def test_a_line_is_whole_or_not_there(tmp_path, disk, monkeypatch):
    """Lines of metrics that fail are written with the next."""
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
@pytest.mark.parametrize(
    ("size", "words", "named", "left"),
    [
        (WEIGHTS + 3 * CHECKPOINT // 2, [], "step-00000060|/run/weights.safetensors", [5]),  # only one fits
        (WEIGHTS + 5 * CHECKPOINT // 2, ["--set", "on_disk_error=stop", "--save", "sync"], "step-00000015", [5, 10]),
        (WEIGHTS // 2, [], "cannot reserve|for the final weights in", []),  # no run begins
    ],
    ids=["small", "stop", "tiny"],
)
def test_a_disk_that_is_too_small_ends_the_run(size, words, named, left, disk):
    """The newest intact checkpoint is never given up, and the weights have room."""
    with small_disk(disk, f"size={size}"):
        ended = inside("train", *WORDS, *words, "--out", disk / "run")
        refused(ended, 74, "No space left", *named.split("|"), late=bool(left))
        assert given_up(disk / "run") == [] and not any("tmp" in name for name in names(disk / "run"))
        saved = names(disk / "run" / "checkpoints") if left else []
        assert saved == [f"step-{step:08}" for step in left]
        assert ("weights.safetensors" in names(disk / "run")) == ("weights.safetensors" in named)
        assert ("continuing, with step 5 saved" in ended.stdout) == ("weights.safetensors" in named)


# What is given up, and what is not: one run's directory, without a run


def save(directory, step):
    weights = {"wte": np.full(1000, step, np.float32)}
    groups = {"weights": (weights, {}), "optimizer": (weights, {})}
    return save_checkpoint(directory.checkpoints, groups, State(step), partial(expired_checkpoints, 9))


@pytest.fixture
def made(tmp_path):
    """A run with checkpoints of steps 1 to 5, and what makes its room, which says into a list."""
    directory, said = RunDirectory(tmp_path / "runs" / "one"), []
    directory.path.mkdir(parents=True)
    for step in range(1, 6):
        save(directory, step)
    return directory, said, lambda **t: FullDiskHandler(directory, TrainConfig(**t), 9000, said.append)


class Writing:
    """Fails with these errors, one after the other, and then does not."""

    def __init__(self, *errors):
        self.errors, self.done = list(errors), False

    def __call__(self):
        if self.errors:
            with storage_errors("write", os.devnull):
                raise OSError(self.errors.pop(0), "it is full")
        self.done = True


def test_the_oldest_go_first_and_a_quota_is_a_full_disk(made):
    directory, said, room = made
    disk, write = room(keep=5), Writing(errno.EDQUOT, errno.ENOSPC)
    disk.write(6, 100, write)
    assert write.done and names(directory.checkpoints) == ["step-00000003", "step-00000004", "step-00000005"]
    assert said == []  # in a thread, perhaps
    disk.report()
    (line,), (event,) = said, history(directory.path)
    assert line.startswith("the disk is full: deleted step-00000001, step-00000002 for step 6; 3 of 5 ")
    assert event["given_up"] == ["step-00000001", "step-00000002"] and event["step"] == 6
    disk.report()
    disk.write(7, 100, Writing(errno.ENOSPC))
    disk.report()
    assert len(said) == 2 and "2 of 5" in said[1] and len(history(directory.path)) == 2


def damaged(directory):
    """From step 4 on, all are of an earlier attempt. The run would resume from step 2."""
    (directory.checkpoints / "step-00000003" / "state.json").write_text("{")
    (directory.checkpoints / "damaged-step-00000009").mkdir()


def begun_with(directory):
    """By two other runs."""
    branch, tuned = (RunDirectory(directory.path.with_name(name)) for name in ("branch", "tuned"))
    for other in (branch, tuned):
        other.path.mkdir()
    branch.remember({"step": 2, "from": str(directory.checkpoints / "step-00000002"), "branch": True})
    init = str(directory.checkpoints / "step-00000003" / "weights.safetensors")
    tuned.config.write_text(RunConfig(train=TrainConfig(init=init)).to_toml())
    (directory.path.with_name("other")).write_text("no run")


def marked(directory):
    """For good."""
    (directory.checkpoints / "step-00000002" / MARK).touch()


@pytest.mark.parametrize(
    ("prepare", "error", "policy", "step", "left"),
    [
        (None, errno.EIO, "keep-going", 6, (1, 2, 3, 4, 5)),
        (None, errno.ENOSPC, "stop", 6, (1, 2, 3, 4, 5)),
        (None, errno.ENOSPC, "keep-going", 6, (5,)),
        (damaged, errno.ENOSPC, "keep-going", 3, (2, 3, 4, 5)),
        (begun_with, errno.ENOSPC, "keep-going", 6, (2, 3, 5)),
        (marked, errno.ENOSPC, "keep-going", 6, (2, 5)),
    ],
)
def test_checkpoints_that_stay_if_all_writes_fail(made, prepare, error, policy, step, left):
    directory, _, room = made
    if prepare:
        prepare(directory)
    with pytest.raises(StorageError, match="it is full"):
        room(on_disk_error=policy).write(step, 100, Writing(*[error] * 9))
    assert names(directory.checkpoints) == [f"step-{step:08d}" for step in left]


def test_room_for_the_weights_of_a_resumed_run_is_made_and_told(made, monkeypatch):
    directory, said, room = made
    refused_once = Writing(errno.ENOSPC)
    monkeypatch.setattr("distgpt.callbacks.full_disk.allocate", lambda *_: refused_once())
    with room(keep=5).reserved(SerialComm(), 5):
        assert names(directory.checkpoints)[0] == "step-00000002"
    (line,) = said
    assert line.startswith("the disk is full: deleted step-00000001 for step 5")
    assert names(directory.path) == ["checkpoints", "history.jsonl"]


def test_what_cannot_be_told_now_is_told_later(made, monkeypatch):
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
def test_reserved_room_is_on_the_disk(tmp_path, disk):
    with (tmp_path / "file").open("wb") as file:
        allocate(file, (9 << 20) + 5)
    found = (tmp_path / "file").stat()
    assert found.st_size == (9 << 20) + 5 and 512 * found.st_blocks >= found.st_size
    with small_disk(disk), (disk / "file").open("wb") as file, pytest.raises(OSError, match="space"):
        allocate(file, 2 << 20)


def test_a_killed_run_leaves_its_room_to_the_next_start(disk, monkeypatch):
    """The file it was kept in is hidden, and goes as the run resumes."""
    out = disk / "run"
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda self, **how: None)  # as if killed before it
        patch.setattr(saving.Checkpoints, "write_last", raising(StorageError("gone")))
        assert inside("train", *WORDS, "--steps", "6", "--out", out).returncode == 74
    left = [name for name in names(out) if name.startswith(".weights.safetensors.")]
    assert len(left) == 1 and (out / left[0]).stat().st_size > 40 << 10
    assert inside("train", *WORDS, "--steps", "6", "--out", out, "--resume", "auto").returncode == 0
    assert not [name for name in names(out) if name.startswith(".")]
