"""Caches: where they lie, how large they become, and how many processes make the same."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from disks import raising
from distgpt.core.base import caches
from distgpt.core.base.caches import alone, cache_folder, keep, made_by_one, misplaced, read_checked
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import storage_errors


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home, a temporary folder, and nothing requested."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (caches.CACHE, caches.LIMIT, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


# Places


def test_one_variable_moves_all_caches_and_may_hold_others(home, tmp_path, monkeypatch):
    beside = tmp_path / "beside"
    assert cache_folder("loops", beside) == beside / "loops"
    assert cache_folder("kernels") == home / ".cache" / "distgpt" / "kernels"
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv(caches.CACHE, "$SCRATCH/caches")
    asked = tmp_path / "scratch" / "caches"
    for found in (cache_folder("loops", beside), cache_folder("kernels")):
        assert found.parent == asked and found.stat().st_mode & 0o077 == 0 and not misplaced(found)
    monkeypatch.setenv(caches.CACHE, "~/mine")
    assert cache_folder("kernels") == home / "mine" / "kernels"


def test_a_place_that_others_may_write_to_is_left_for_the_temporary_folder_and_not_for_the_home(
    home, tmp_path, monkeypatch
):
    monkeypatch.setenv(caches.CACHE, str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = cache_folder("kernels")
    assert found == caches.temporary_folder() / "kernels" and not home.exists()
    assert str(tmp_path / "open") in misplaced(found) and str(found.parent) in misplaced(found)
    monkeypatch.setenv(caches.CACHE, str(tmp_path / "$NOT_SET_HERE" / "mine"))
    assert cache_folder("kernels") == found and "$NOT_SET_HERE" in misplaced(found)
    assert not (tmp_path / "$NOT_SET_HERE").exists()


def test_without_any_place_nothing_is_kept_and_all_is_made(home, tmp_path, monkeypatch):
    home.write_text("")
    monkeypatch.setattr(tempfile, "gettempdir", raising(FileNotFoundError(2, "No usable temporary directory")))
    assert caches.temporary_folder() is None and cache_folder("kernels") is None
    assert made_by_one(tmp_path / "none" / "there", lambda: b"made") == b"made"
    monkeypatch.setenv(caches.CACHE, "$NOT_SET_HERE")
    assert caches.places() == [] and cache_folder("kernels") is None


@pytest.mark.ci
def test_importing_survives_a_working_directory_that_is_gone(tmp_path):
    """An error of one rank before it has joined the others would leave them waiting."""
    code = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); import distgpt.commands.cli"
    env = {**os.environ, caches.CACHE: "relative"}
    assert subprocess.run([sys.executable, "-P", "-c", code], env=env).returncode == 0


def test_a_file_of_another_user_is_not_read(tmp_path):
    path = tmp_path / "file"
    caches.write_checked(path, b"x")
    assert read_checked(path) == b"x"
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")
    assert read_checked(path) is None


# Bounds


def test_what_was_not_used_for_longest_goes_that_of_other_versions_first(tmp_path, monkeypatch):
    monkeypatch.setenv(caches.LIMIT, "3K")
    new, old = (tmp_path / f"loops-{digit * 16}" for digit in "ab")
    others = tmp_path / "loops-of-mine"
    kernels = tmp_path / "kernels"
    for folder in (old, others, kernels):
        folder.mkdir()
    for age, path in enumerate((old / "1", old / "2", kernels / "3.cubin", others / "4", kernels / "mine.cu")):
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 + age, 1e9 + age))
    (old / "1").touch()  # used today
    keep(new / "5", bytes(968))
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["1", "3.cubin", "4", "5", "mine.cu"]
    os.utime(new / "5", (1, 1))  # old, and of the version in use
    keep(new / "6", bytes(1968))
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["4", "5", "6", "mine.cu"]


def test_the_number_of_files_is_bounded_too(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "MOST_FILES", 3)
    for name in "12345":
        keep(path := tmp_path / "kernels" / f"{name}.choice", b"")
        os.utime(path, (int(name), int(name)))
    assert sorted(path.stem for path in tmp_path.glob("*/*")) == ["3", "4", "5"]


def test_a_limit_that_is_no_size_is_refused(monkeypatch):
    monkeypatch.setenv(caches.LIMIT, "much")
    with pytest.raises(UsageError, match=f"{caches.LIMIT}.*much"):
        caches.cache_limit()


def test_reading_notes_the_use_once_a_day(tmp_path):
    path, now = tmp_path / "file", time.time()
    caches.write_checked(path, b"x")
    for age, is_noted in ((0.5, False), (2, True)):
        os.utime(path, (now - age * caches.DAY,) * 2)
        assert read_checked(path) == b"x"
        assert (path.stat().st_mtime > now - caches.DAY / 4) == is_noted


# Turns


def process(act):
    """Run this in a process of its own. Return its number."""
    if (child := os.fork()) == 0:
        code = 9
        try:
            code = act() or 0
        finally:
            os._exit(code)
    return child


def codes(children):
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def made_in(folder):
    return len(list(folder.glob("made-*")))


def maker(path, seconds=0.05):
    """Return what makes the content slowly, and leaves a trace of that."""

    def make():
        time.sleep(seconds)
        (path.parent.parent / f"made-{os.getpid()}").touch()
        return b"content"

    return make


@pytest.fixture
def path(home, tmp_path):
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels" / "file"


def start_eight(path):
    def act():
        return int(made_by_one(path, maker(path)) != b"content")

    assert codes([process(act) for _ in range(8)]) == [0] * 8


@pytest.mark.ci
def test_of_many_that_start_at_once_one_makes_it(path, tmp_path):
    start_eight(path)
    assert made_in(tmp_path) == 1 and [*path.parent.iterdir()] == [path]


@pytest.mark.ci
def test_where_no_disk_has_locks_all_make_it(path, tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "lock", lambda descriptor, kind: None)
    start_eight(path)
    assert made_in(tmp_path) >= 1 and read_checked(path) == b"content"


@pytest.mark.ci
def test_one_that_was_killed_is_followed_by_the_next_and_leaves_nothing_that_blocks(path, tmp_path):
    ready, told = os.pipe()

    def stuck():
        with alone(path):
            os.write(told, b"x")
            time.sleep(100)

    holder = process(stuck)
    os.read(ready, 1)
    waiting = process(lambda: int(made_by_one(path, maker(path)) != b"content"))
    os.kill(holder, signal.SIGKILL)
    assert codes([holder, waiting]) == [-signal.SIGKILL, 0]
    assert made_in(tmp_path) == 1 and [*path.parent.iterdir()] == [path]


@pytest.mark.ci
def test_one_that_is_stuck_is_waited_for_with_a_bound(path, monkeypatch):
    monkeypatch.setattr(caches, "PATIENCE", 0.02)
    with alone(path):
        assert codes([process(lambda: int(made_by_one(path, maker(path)) != b"content"))]) == [0]
        assert read_checked(path) == b"content"


def until_there_are_four(folder):
    end = time.monotonic() + 30
    while len([*folder.iterdir()]) < 4 and time.monotonic() < end:
        time.sleep(0.005)
    return b"content" if len([*folder.iterdir()]) == 4 else b"too late"


@pytest.mark.ci
def test_what_can_not_be_kept_is_made_by_all_at_once(path, tmp_path, monkeypatch):
    """One after the other they would wait for as many times as there are processes."""
    inside, waiting, real = tmp_path / "inside", tmp_path / "waiting", caches.lock
    inside.mkdir()
    waiting.mkdir()

    def full(path, content):
        with storage_errors("write", path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def noted(descriptor, kind):
        if (got := real(descriptor, kind)) is False:
            (waiting / f"{os.getpid()}").touch()
        return got

    def make():
        (inside / f"{os.getpid()}").touch()
        return until_there_are_four(inside)

    monkeypatch.setattr(caches, "write_checked", full)
    monkeypatch.setattr(caches, "lock", noted)
    ready, told = os.pipe()

    def first():
        os.write(told, b"x")
        return until_there_are_four(waiting)

    begun = process(lambda: int(made_by_one(path, first) != b"content"))
    os.read(ready, 1)
    others = [process(lambda: int(made_by_one(path, make) != b"content")) for _ in range(4)]
    assert codes([begun, *others]) == [0] * 5
    assert len([*inside.iterdir()]) == 4 and not [*path.parent.iterdir()]


def test_a_folder_that_was_removed_meanwhile_is_made_again(path):
    path.parent.rmdir()
    assert made_by_one(path, lambda: b"new") == b"new" and read_checked(path) == b"new"
