"""Checkpoints: round trips, and that no crash, full disk or damage ever leaves a run without one."""

import errno
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from complaints import complains
from disks import file_size_limit, names
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.saved import checkpoint
from distgpt.core.saved.checkpoint import (
    State,
    expired_checkpoints,
    latest_valid_checkpoint,
    load_document,
    load_group,
    load_state,
    quarantine_corrupt,
    save_checkpoint,
    verify,
)
from distgpt.core.saved.tensors import read_header
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

FILES = ("manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors")


def groups(value):
    weights = {"wte": np.full((4, 3), value, np.float32), "bias": np.full(3, value, np.float64)}
    moments = {f"{kind}/{name}": array * 2 for name, array in weights.items() for kind in "mv"}
    return {"weights": (weights, {"config": "[model]"}), "optimizer": (moments, {})}


def save(directory, step, value=None, keep=3, **state):
    return save_checkpoint(
        directory, groups(step if value is None else value), State(step, **state), partial(expired_checkpoints, keep)
    )


def loaded(path):
    """The one value that fills every tensor of a checkpoint."""
    values = set()
    for stem, (tensors, _) in groups(-1.0).items():
        load_group(path, stem, tensors)
        flat = np.concatenate([array.ravel() for array in tensors.values()])
        values.update(flat / (2 if stem == "optimizer" else 1))
    (value,) = values
    return value


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_what_a_state_leaves_open_is_not_in_it(directory):
    path = save(directory, 100, bad_steps=3)
    assert load_state(path) == State(100, bad_steps=3) and load_document(path)["bad_steps"] == 3
    assert "shares" in json.loads((path / "state.json").read_text()) and "shares" not in load_document(path)
    other = path.rename(path.with_name("step-00000101"))
    with complains("is from step 100"):
        load_state(other)
    assert load_state(other.rename(path.with_name("kept"))).step == 100


def test_round_trip(directory):
    state = {"seed": 1337, "corpus": "é", "shares": [3, 5], "recent": ((0.1 + 0.2, 1e300),)}
    path = save(directory, 100, **state)
    assert path == directory / "step-00000100" and names(path) == sorted(FILES)
    assert sorted(json.loads((path / "manifest.json").read_text())) == sorted(set(FILES) - {"manifest.json"})
    assert latest_valid_checkpoint(directory) == (path, [])
    verify(path)
    assert load_state(path) == State(100, **state) and loaded(path) == 100
    assert read_header(path / "weights.safetensors").metadata["config"] == "[model]"


STEPS = st.sampled_from([1, 2, 10, 99_999_999, 100_000_000])
NTH = st.integers(0, 3)  # of those that were saved


class Checkpoints(RuleBasedStateMachine):
    """A directory through saves, damage, killed saves and resumes, next to a plain model of it."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name) / "checkpoints"
        self.directory.mkdir()
        (self.directory / "step-1").mkdir()  # no checkpoint of ours
        self.saved, self.aside, self.half = {}, set(), set()  # the value of each step, None if it is damaged

    @rule(step=STEPS, value=st.integers(0, 99), keep=st.integers(1, 3))
    def save(self, step, value, keep):
        """Later steps stay: a run may have resumed from an earlier one, since those are damaged."""
        save(self.directory, step, value, keep)
        self.saved[step] = value
        for old in sorted((other for other in self.saved if other <= step), reverse=True)[keep:]:
            del self.saved[old]
        self.half.clear()

    @precondition(lambda self: self.saved)
    @rule(nth=NTH)
    def damage(self, nth):
        step = sorted(self.saved)[nth % len(self.saved)]
        (self.directory / f"step-{step:08}" / "state.json").unlink(missing_ok=True)
        self.saved[step] = None

    @rule(step=STEPS)
    def leave_half(self, step):
        (self.directory / f".tmp-step-{step:08}").mkdir(exist_ok=True)
        self.half.add(step)

    @precondition(lambda self: self.saved)
    @rule(nth=NTH)
    def resume(self, nth):
        step = sorted(self.saved)[nth % len(self.saved)]
        quarantine_corrupt(self.directory, step)
        gone = {other for other, value in self.saved.items() if value is None and other >= step}
        self.aside |= gone
        self.saved = {other: value for other, value in self.saved.items() if other not in gone}

    @rule(most=STEPS)
    def look(self, most):
        steps = sorted((step for step in self.saved if step <= most), reverse=True)
        whole = [step for step in steps if self.saved[step] is not None]
        if steps and not whole:
            with complains("is valid"):
                latest_valid_checkpoint(self.directory, most)
        else:
            found = latest_valid_checkpoint(self.directory, most)
            assert (found is None) == (not steps)
            assert not found or (loaded(found[0]), len(found[1])) == (self.saved[whole[0]], steps.index(whole[0]))

    @invariant()
    def holds_what_the_model_does(self):
        expected = {"step-1", *(f"step-{step:08}" for step in self.saved)}
        expected |= {f"damaged-step-{step:08}" for step in self.aside} | {f".tmp-step-{step:08}" for step in self.half}
        assert {*names(self.directory)} == expected

    def teardown(self):
        self.folder.cleanup()


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=12, stateful_step_count=15)


def test_what_cannot_be_read_for_a_moment_is_not_set_aside(directory, monkeypatch):
    for step in (1, 2):
        save(directory, step)

    def fails(*args):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "open_regular", fails)
        quarantine_corrupt(directory, 1)
    assert names(directory) == ["step-00000001", "step-00000002"]


# Damage


def check_found_damaged(path, file, what=""):
    """It is named, and the older checkpoint is used instead."""
    older, lines = latest_valid_checkpoint(path.parent)
    assert older.name == "step-00000001"
    assert len(lines) == 1 and str(path / file) in lines[0] and what in lines[0] and "\n" not in lines[0]
    with pytest.raises(DataError, match=re.escape(str(path / file))):
        verify(path)


@pytest.fixture
def two(directory):
    """An older and a newer checkpoint; the newer one is about to suffer."""
    save(directory, 1)
    return save(directory, 2)


@pytest.mark.ci
def test_any_damage_is_detected_and_named(two):
    for file in FILES:
        intact = (two / file).read_bytes()
        for place in range(0, 8 * len(intact), 3 if file.endswith("json") else 11):
            flipped = bytearray(intact)
            flipped[place // 8] ^= 1 << place % 8
            (two / file).write_bytes(flipped)
            with pytest.raises(DataError):
                verify(two)
                pytest.fail(f"bit {place} of {file} was flipped")
        assert latest_valid_checkpoint(two.parent)[0].name == "step-00000001"
        if file.endswith("safetensors"):
            (two / file).write_bytes(intact[:-1] + b"\x01")
            check_found_damaged(two, file, "checksum")
            (two / file).write_bytes(intact[:-1])
            check_found_damaged(two, file, f"{len(intact) - 1} bytes, not {len(intact)}")
        (two / file).write_bytes(intact)
        for length in reversed(range(len(intact))):
            os.truncate(two / file, length)
            with pytest.raises(DataError):
                verify(two)
                pytest.fail(f"{length} bytes of {file} were left")
        check_found_damaged(two, file)
        (two / file).unlink()
        check_found_damaged(two, file, "No such file")
        (two / file).write_bytes(intact)
        assert latest_valid_checkpoint(two.parent) == (two, [])


def test_bad_manifest(two):
    """One that lists too little, too: a file that it leaves out could be anything."""
    listed = json.loads((two / "manifest.json").read_text())
    for content in (
        *("", "{}", '{"state.json": 3}', '{"state.json": {}}'),
        '{"../x": {"bytes": 0, "sha256": ""}}',
        '{"a\\u0000": {"bytes": 0, "sha256": ""}}',
    ):
        (two / "manifest.json").write_text(content)
        check_found_damaged(two, "manifest.json")
    for left_out in listed:
        fewer = {name: entry for name, entry in listed.items() if name != left_out}
        (two / "manifest.json").write_text(json.dumps(fewer))
        check_found_damaged(two, "manifest.json", f"does not list {left_out}")
    (two / "manifest.json").write_text(json.dumps({**listed, "more.json": listed["state.json"]}))
    check_found_damaged(two, "more.json", "No such file")
    (two / "manifest.json").write_text(json.dumps(listed))
    assert latest_valid_checkpoint(two.parent) == (two, [])
    for path in two.parent.iterdir():
        (path / "manifest.json").unlink()
    with complains("no checkpoint in", "0002/man", "0001/man"):
        latest_valid_checkpoint(two.parent)


def test_damaged_group_leaves_the_destination(two):
    """Also where only the manifest's hash shows it: the metadata are not in the checksum of the data."""
    weights = two / "weights.safetensors"
    intact = weights.read_bytes()
    for damaged in (intact[:-1] + b"\x01", intact.replace(b"[model]", b"[medal]")):
        weights.write_bytes(damaged)
        (tensors, _) = groups(-1.0)["weights"]
        with pytest.raises(DataError, match="checksum"):
            load_group(two, "weights", tensors)
        assert all((array == -1).all() for array in tensors.values())
    with pytest.raises(DataError, match=r"manifest\.json does not list ema\.safetensors"):
        load_group(two, "ema", {})


# Crashes


def save_in_child(number, act, *args, **kwargs):
    """Save in a process of its own that does `act` just before its `number`-th change of the file system."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    changes = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
    count, code = 0, 70

    def before(event, _):
        nonlocal count
        count += event in changes
        if event in changes and count == number:
            act()

    try:
        sys.addaudithook(before)
        save(*args, **kwargs)
        code = 0 if number <= count else DONE
    except StorageError as error:
        code = error.exit_code if "Input/output error" in str(error) else 70
    finally:
        os._exit(code)


DONE = 100  # there were fewer changes than that


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_):
    raise OSError(errno.EIO, "Input/output error")


def after_each_change(directory, step, act):
    """Let a save go wrong at each of its changes in turn: the exit code and what there is afterwards."""
    for number in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 1, value=5)
        code = save_in_child(number, act, directory, step, value=6, keep=1)
        if code == DONE:
            break
        path, lines = latest_valid_checkpoint(directory)
        assert lines == []
        yield code, loaded(path)
    assert 20 < number < 199


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_killed_before_any_change_and_any_failing_change(directory, step):
    """Whenever a save dies, the old or the new checkpoint is there, whole, and saving works again.

    A failing operation is a StorageError or does no harm; nothing is lost, and nothing half-done stays.
    """
    for code, value in after_each_change(directory, step, die):
        assert code == -signal.SIGKILL and value in (5, 6)
        path = save(directory, step, value=7, keep=1)
        assert names(directory) == [path.name] and loaded(path) == 7
    codes = []
    for code, value in after_each_change(directory, step, fail):
        assert (code, value) in ((0, 6), (StorageError.exit_code, 5), (StorageError.exit_code, 6))
        path = save(directory, step, value=7, keep=1)
        assert names(directory) == [path.name] and loaded(path) == 7
        codes.append(code)
    assert codes.count(StorageError.exit_code) > 10


# Storage


def check_failed_save(directory, reason):
    big = {"weights": ({"w": np.zeros(1 << 19, np.float32)}, {})}  # 2 MiB
    with pytest.raises(StorageError, match=reason):
        save_checkpoint(directory, big, State(2), partial(expired_checkpoints, 1))
    assert names(directory) == ["step-00000001"] and latest_valid_checkpoint(directory)[1] == []


def test_a_full_disk_and_a_path_that_is_a_file(directory, tmp_path):
    save(directory, 1)
    with file_size_limit(1 << 16):
        check_failed_save(directory, r"cannot write .*weights\.safetensors: File too large")
    (tmp_path / "file").touch()
    with complains("cannot save checkpoint", kind=StorageError):
        save(tmp_path / "file", 1)
    with complains("cannot read", kind=StorageError):
        latest_valid_checkpoint(tmp_path / "file")
