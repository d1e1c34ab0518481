"""Checkpoints: round trips, and that no crash, full disk or damage ever leaves a run without one."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from test_weightsfile import file_size_limit, names, small_disk, unprivileged

from distgpt.errors import DataError, StorageError
from distgpt.saved.checkpoint import load_group, load_state, newest_intact, save_checkpoint, verify
from distgpt.saved.tensors import describe, description, read_header

FILES = ("manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors")


def groups(value):
    weights = {"wte": np.full((4, 3), value, np.float32), "bias": np.full(3, value, np.float64)}
    moments = {f"{kind}/{name}": array * 2 for name, array in weights.items() for kind in "mv"}
    return {
        "weights": (weights, description("[model]\n", "{}")),
        "optimizer": (moments, {}),
    }


def save(directory, step, value=None, keep=3, **state):
    return save_checkpoint(directory, step, groups(step if value is None else value), state, keep)


def loaded(path):
    """The one value that fills every tensor of a checkpoint."""
    values = set()
    for stem, (tensors, _) in groups(-1.0).items():
        load_group(path, stem, tensors)
        factor = 2 if stem == "optimizer" else 1
        values.update(float(number) / factor for array in tensors.values() for number in array.flat)
    (value,) = values
    return value


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


def test_round_trip(directory):
    state = {"tokens": 10**12, "seed": 1337, "rng": [2**200, "é"], "lr": 0.1 + 0.2}
    path = save(directory, 100, **state)
    assert path == directory / "step-00000100"
    assert names(path) == sorted(FILES)
    assert sorted(json.loads((path / "manifest.json").read_text())) == sorted(set(FILES) - {"manifest.json"})
    assert newest_intact(directory) == (path, [])
    assert verify(path) == load_state(path) == {**state, "step": 100}
    assert loaded(path) == 100
    weights = path / "weights.safetensors"
    assert describe(read_header(weights), weights) == ("[model]\n", "{}")


def test_no_checkpoints(directory):
    assert newest_intact(directory) is None
    directory.mkdir(parents=True)
    (directory / "notes.txt").touch()
    (directory / "step-1").mkdir()
    assert newest_intact(directory) is None


def test_keeps_the_newest(directory):
    for step in (1, 2, 10, 99_999_999, 100_000_000):
        save(directory, step, keep=2)
    assert names(directory) == ["step-100000000", "step-99999999"]
    assert newest_intact(directory)[0].name == "step-100000000"


def test_keeping_never_drops_what_was_just_saved(directory):
    """Resumed from step 1 since the newer ones are damaged: they must not push out the new step 2."""
    for step in (1, 5, 6):
        save(directory, step)
    for step in (5, 6):
        (directory / f"step-{step:08d}" / "state.json").unlink()
    path = save(directory, 2, keep=1)
    assert newest_intact(directory)[0] == path
    assert names(directory) == ["step-00000002", "step-00000005", "step-00000006"]
    save(directory, 6, keep=1)
    assert names(directory) == ["step-00000006"]


def test_saving_the_same_step_again(directory):
    save(directory, 7, value=1)
    path = save(directory, 7, value=2)
    assert names(directory) == ["step-00000007"]
    assert loaded(path) == 2


def test_leftovers_of_killed_runs_go(directory):
    save(directory, 1)
    shutil.copytree(directory / "step-00000001", directory / ".tmp-step-00000002")
    shutil.copytree(directory / "step-00000001", directory / ".tmp-step-00000003")
    assert newest_intact(directory)[0].name == "step-00000001"
    save(directory, 3)
    assert names(directory) == ["step-00000001", "step-00000003"]


# Damage


def check_found_damaged(directory, path, file, what=""):
    older, lines = newest_intact(directory)
    assert older.name == "step-00000001"
    assert len(lines) == 1 and str(path / file) in lines[0] and what in lines[0] and "\n" not in lines[0]
    with pytest.raises(DataError, match=re.escape(str(path / file))):
        verify(path)


@pytest.fixture
def two(directory):
    """An older and a newer checkpoint; the newer one is about to suffer."""
    save(directory, 1)
    return save(directory, 2)


@pytest.mark.parametrize("file", FILES)
def test_any_damage_is_detected_and_named(two, file):
    intact = (two / file).read_bytes()
    for place in range(0, 8 * len(intact), 3 if file.endswith("json") else 11):
        flipped = bytearray(intact)
        flipped[place // 8] ^= 1 << place % 8
        (two / file).write_bytes(flipped)
        with pytest.raises(DataError):
            verify(two)
            pytest.fail(f"bit {place} was flipped")
    assert newest_intact(two.parent)[0].name == "step-00000001"
    (two / file).write_bytes(intact)
    assert newest_intact(two.parent) == (two, [])
    for length in reversed(range(len(intact))):
        os.truncate(two / file, length)
        with pytest.raises(DataError):
            verify(two)
            pytest.fail(f"{length} bytes were left")
    check_found_damaged(two.parent, two, file)
    (two / file).unlink()
    check_found_damaged(two.parent, two, file, "No such file")


def test_damage_is_described(two):
    weights = two / "weights.safetensors"
    intact = weights.read_bytes()
    weights.write_bytes(intact[:-1])
    check_found_damaged(two.parent, two, weights.name, f"{len(intact) - 1} bytes, {len(intact)} were written")
    weights.write_bytes(intact[:-1] + b"\x01")
    check_found_damaged(two.parent, two, weights.name, "SHA-256")


def test_bad_manifest(two):
    for content in (
        *("", "[]", "{}", "null", "[" * 100_000, '{"state.json": 3}', '{"state.json": {}}'),
        '{"../x": {"bytes": 0, "sha256": ""}}',
        '{"a\\u0000": {"bytes": 0, "sha256": ""}}',
    ):
        (two / "manifest.json").write_text(content)
        check_found_damaged(two.parent, two, "manifest.json")


def test_all_damaged(two):
    (two / "state.json").unlink()
    (two.parent / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"no checkpoint in .* is intact: .*state\.json.*; .*manifest\.json"):
        newest_intact(two.parent)


def test_damaged_group_leaves_the_destination(two):
    """Also where only the manifest's hash shows it: the metadata are not in the checksum of the data."""
    weights = two / "weights.safetensors"
    intact = weights.read_bytes()
    for damaged in (intact[:-1] + b"\x01", intact.replace(b"[model]", b"[medal]")):
        weights.write_bytes(damaged)
        (tensors, _) = groups(-1.0)["weights"]
        with pytest.raises(DataError, match="damaged"):
            load_group(two, "weights", tensors)
        assert all((array == -1).all() for array in tensors.values())


def test_unknown_group(two):
    with pytest.raises(DataError, match=r"manifest\.json lists no ema\.safetensors"):
        load_group(two, "ema", {})


# Crashes


def save_in_child(number, act, *args, **kwargs):
    """Save in a process of its own that does `act` just before its `number`-th change of the file system."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    changes = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
    count = 0

    def before(event, _):
        nonlocal count
        count += event in changes
        if event in changes and count == number:
            act()

    code = 70
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


def fail():
    raise OSError(errno.EIO, "Input/output error")


def after_each_change(directory, step, act):
    """Let a save go wrong at each of its changes in turn: the exit code and what there is afterwards."""
    for number in range(1, 200):
        shutil.rmtree(directory, ignore_errors=True)
        save(directory, 1, value=5)
        code = save_in_child(number, act, directory, step, value=6, keep=1)
        if code == DONE:
            assert number > 20
            return
        path, lines = newest_intact(directory)
        assert lines == []
        yield code, loaded(path)
    pytest.fail("the save never came through")


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
        assert not [name for name in names(directory) if name.startswith(".tmp")]
        codes.append(code)
    assert codes.count(StorageError.exit_code) > 10


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "same step"])
def test_any_failing_sync(directory, step, monkeypatch):
    save(directory, 1, value=5)
    fsync, failures = os.fsync, 0
    for number in range(1, 30):
        calls = iter(range(1, 100))

        def failing(descriptor, calls=calls, number=number):
            if next(calls) == number:
                fail()
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            save(directory, step, value=5)
        except StorageError:
            failures += 1
        monkeypatch.setattr(os, "fsync", fsync)
        assert loaded(newest_intact(directory)[0]) == 5
        assert not [name for name in names(directory) if name.startswith(".tmp")]
    assert failures == 10  # four files, their directory after each, the new name, and the directory of all


SAVE_IN_A_LOOP = """
import sys
from pathlib import Path
import numpy as np
from distgpt.saved.checkpoint import newest_intact, save_checkpoint
directory, size = Path(sys.argv[1]), 50_000
found = newest_intact(directory)
step = int(found[0].name[5:13]) if found else 0
while True:
    for _ in range(2):  # the second time it replaces the first
        weights = {"w": np.full(size, step, np.float32)}
        save_checkpoint(directory, step, {"weights": (weights, {})}, {"tokens": step}, keep=2)
    step += 1
"""


@pytest.mark.slow
def test_killed_at_random_while_saving(directory):
    rng, reached = random.Random(5), []
    for _ in range(6):
        child = subprocess.Popen([sys.executable, "-c", SAVE_IN_A_LOOP, str(directory)])
        while child.poll() is None and not (directory.exists() and any(directory.glob(".tmp-*"))):
            time.sleep(0.001)
        time.sleep(rng.random() * 0.2)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        found = newest_intact(directory)
        if found is None:
            continue
        path, lines = found
        weights = {"w": np.empty(50_000, np.float32)}
        load_group(path, "weights", weights)
        step = load_state(path)["step"]
        assert lines == [] and (weights["w"] == step).all()
        assert not reached or step >= reached[-1]
        reached.append(step)
    assert reached[-1] > 0


# Storage


def big():
    return {"weights": ({"w": np.zeros(1 << 19, np.float32)}, {})}  # 2 MiB


def check_failed_save(directory, reason):
    with pytest.raises(StorageError, match=reason):
        save_checkpoint(directory, 2, big(), {}, keep=1)
    assert names(directory) == ["step-00000001"]
    assert newest_intact(directory)[1] == []


def test_small_and_full_disks(directory, tmp_path):
    save(directory, 1)
    with file_size_limit(1 << 16):
        check_failed_save(directory, r"cannot write .*weights\.safetensors: File too large")
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk):
        save(disk / "checkpoints", 1)
        check_failed_save(disk / "checkpoints", "No space left on device")


def test_missing_rights():
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        directory = Path(name, "checkpoints")
        save(directory, 1)
        directory.chmod(0o555)
        with unprivileged():
            check_failed_save(directory, "cannot save checkpoint .*step-00000002: Permission denied")
            with pytest.raises(StorageError, match="Permission denied"):
                save(directory / "deeper", 1)
        directory.chmod(0o755)


def test_path_that_is_a_file(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError, match="cannot save checkpoint"):
        save(tmp_path / "checkpoints", 1)
    with pytest.raises(StorageError, match="cannot read"):
        newest_intact(tmp_path / "checkpoints")
