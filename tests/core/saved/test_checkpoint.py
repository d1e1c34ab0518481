"""Checkpoints: round trips, crashes, full disks and corruption."""

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
from disks import file_size_limit, names, raising
from distgpt.core.base.errors import DataError, StorageError
from distgpt.core.saved import checkpoint
from distgpt.core.saved import checkpoint as saving
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
    return saving.save_checkpoint(
        directory,
        groups(step if value is None else value),
        saving.State(step, **state),
        partial(saving.expired_checkpoints, keep),
    )


def loaded(path):
    values = set()
    for stem, (tensors, _) in groups(-1.0).items():
        saving.load_group(path, stem, tensors)
        flat = np.concatenate([array.ravel() for array in tensors.values()])
        values.update(flat / (2 if stem == "optimizer" else 1))
    (value,) = values
    return value


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_unset_state_fields_are_omitted(directory):
    path = save(directory, 100, bad_steps=3)
    assert saving.load_state(path) == saving.State(100, bad_steps=3) and saving.load_document(path)["bad_steps"] == 3
    assert "shares" in json.loads((path / "state.json").read_text()) and "shares" not in saving.load_document(path)
    other = path.rename(path.with_name("step-00000101"))
    with complains("is from step 100"):
        saving.load_state(other)
    assert saving.load_state(other.rename(path.with_name("kept"))).step == 100


def test_checkpoint_round_trip(directory):
    state = {"seed": 1337, "corpus": "é", "shares": [3, 5], "recent": ((0.1 + 0.2, 1e300),)}
    path = save(directory, 100, **state)
    assert path == directory / "step-00000100" and names(path) == sorted(FILES)
    assert sorted(json.loads((path / "manifest.json").read_text())) == sorted(set(FILES) - {"manifest.json"})
    assert saving.latest_valid_checkpoint(directory) == (path, [])
    saving.verify(path)
    assert saving.load_state(path) == saving.State(100, **state) and loaded(path) == 100
    assert read_header(path / "weights.safetensors").metadata["config"] == "[model]"


STEPS = st.sampled_from([1, 2, 10, 99_999_999, 100_000_000])
DONE = 100  # exit code if fewer changes occurred
NTH = st.integers(0, 3)  # index of a saved checkpoint


class Checkpoints(RuleBasedStateMachine):
    """A directory through saves, corruption, killed saves and resumes, compared with a plain model."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name) / "checkpoints"
        self.directory.mkdir()
        (self.directory / "step-1").mkdir()  # not a checkpoint
        self.saved, self.aside, self.half = {}, set(), set()  # the value of each step, None if corrupt

    @rule(step=STEPS, value=st.integers(0, 99), keep=st.integers(1, 3))
    def save(self, step, value, keep):
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
        saving.quarantine_corrupt(self.directory, step)
        gone = {other for other, value in self.saved.items() if value is None and other >= step}
        self.aside |= gone
        self.saved = {other: value for other, value in self.saved.items() if other not in gone}

    @rule(most=STEPS)
    def look(self, most):
        steps = sorted((step for step in self.saved if step <= most), reverse=True)
        whole = [step for step in steps if self.saved[step] is not None]
        if steps and not whole:
            with complains("is valid"):
                saving.latest_valid_checkpoint(self.directory, most)
        else:
            found = saving.latest_valid_checkpoint(self.directory, most)
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


def test_temporary_read_errors_do_not_quarantine(directory, monkeypatch):
    for step in (1, 2):
        save(directory, step)

    def fails(*args):
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "open_regular", fails)
        saving.quarantine_corrupt(directory, 1)
    assert names(directory) == ["step-00000001", "step-00000002"]


def check_found_damaged(path, file, what=""):
    older, lines = saving.latest_valid_checkpoint(path.parent)
    assert older.name == "step-00000001"
    assert len(lines) == 1 and str(path / file) in lines[0] and what in lines[0] and "\n" not in lines[0]
    with pytest.raises(DataError, match=re.escape(str(path / file))):
        saving.verify(path)


@pytest.fixture
def two(directory):
    save(directory, 1)
    return save(directory, 2)


@pytest.mark.ci
def test_any_corruption_is_detected(two):
    for file in FILES:
        intact = (two / file).read_bytes()
        for place in range(0, 8 * len(intact), 3 if file.endswith("json") else 11):
            flipped = bytearray(intact)
            flipped[place // 8] ^= 1 << place % 8
            (two / file).write_bytes(flipped)
            with pytest.raises(DataError):
                saving.verify(two)
                pytest.fail(f"bit {place} of {file} was flipped")
        assert saving.latest_valid_checkpoint(two.parent)[0].name == "step-00000001"
        if file.endswith("safetensors"):
            (two / file).write_bytes(intact[:-1] + b"\x01")
            check_found_damaged(two, file, "checksum")
            (two / file).write_bytes(intact[:-1])
            check_found_damaged(two, file, f"{len(intact) - 1} bytes, not {len(intact)}")
        (two / file).write_bytes(intact)
        for length in reversed(range(len(intact))):
            os.truncate(two / file, length)
            with pytest.raises(DataError):
                saving.verify(two)
                pytest.fail(f"{length} bytes of {file} were left")
        check_found_damaged(two, file)
        (two / file).unlink()
        check_found_damaged(two, file, "No such file")
        (two / file).write_bytes(intact)
        assert saving.latest_valid_checkpoint(two.parent) == (two, [])


def test_invalid_manifests_are_detected(two):
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
    assert saving.latest_valid_checkpoint(two.parent) == (two, [])
    for path in two.parent.iterdir():
        (path / "manifest.json").unlink()
    with complains("no checkpoint in", "0002/man", "0001/man"):
        saving.latest_valid_checkpoint(two.parent)


def test_corrupt_group_keeps_the_destination(two):
    """The checksum of the data omits metadata; the manifest's hash covers them."""
    weights = two / "weights.safetensors"
    intact = weights.read_bytes()
    for damaged in (intact[:-1] + b"\x01", intact.replace(b"[model]", b"[medal]")):
        weights.write_bytes(damaged)
        (tensors, _) = groups(-1.0)["weights"]
        with pytest.raises(DataError, match="checksum"):
            saving.load_group(two, "weights", tensors)
        assert all((array == -1).all() for array in tensors.values())
    with pytest.raises(DataError, match=r"manifest\.json does not list ema\.safetensors"):
        saving.load_group(two, "ema", {})


def save_in_child(number, act, *args, **kwargs):
    """Save in a child that calls `act` before its `number`-th change of the file system."""
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


def after_each_change(directory, step, act):
    """Interrupt a save at each change; yield the exit code and the value that remains."""
    for number in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 1, value=5)
        code = save_in_child(number, act, directory, step, value=6, keep=1)
        if code == DONE:
            break
        path, lines = saving.latest_valid_checkpoint(directory)
        assert lines == []
        yield code, loaded(path)
    assert 20 < number < 199


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_killed_or_failing_saves_keep_a_checkpoint(directory, step):
    for code, value in after_each_change(directory, step, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        assert code == -signal.SIGKILL and value in (5, 6)
        path = save(directory, step, value=7, keep=1)
        assert names(directory) == [path.name] and loaded(path) == 7
    codes = []
    for code, value in after_each_change(directory, step, raising(OSError(errno.EIO, "Input/output error"))):
        assert (code, value) in ((0, 6), (StorageError.exit_code, 5), (StorageError.exit_code, 6))
        path = save(directory, step, value=7, keep=1)
        assert names(directory) == [path.name] and loaded(path) == 7
        codes.append(code)
    assert codes.count(StorageError.exit_code) > 10


def test_full_disk_and_file_in_the_way_are_storage_errors(directory, tmp_path):
    save(directory, 1)
    big = {"weights": ({"w": np.zeros(1 << 19, np.float32)}, {})}  # 2 MiB
    with (
        file_size_limit(1 << 16),
        pytest.raises(StorageError, match=r"cannot write .*weights\.safetensors: File too large"),
    ):
        saving.save_checkpoint(directory, big, saving.State(2), partial(saving.expired_checkpoints, 1))
    assert names(directory) == ["step-00000001"] and saving.latest_valid_checkpoint(directory)[1] == []
    (tmp_path / "file").touch()
    with complains("cannot save checkpoint", kind=StorageError):
        save(tmp_path / "file", 1)
    with complains("cannot read", kind=StorageError):
        saving.latest_valid_checkpoint(tmp_path / "file")
