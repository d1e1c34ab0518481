"""Caches: directories, size limits, and concurrent processes or threads."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from disks import raising
from distgpt.core.base import caches
from distgpt.core.base.caches import alone, cache_folder, compute_once, keep, misplaced, own_folders, read_checked
from distgpt.core.base.errors import StorageError, UsageError

from conftest import wait_for


@pytest.fixture
def places(tmp_path, monkeypatch):
    for name in (caches.CACHE, caches.LIMIT, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("tmp", "beside"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "beside", tmp_path / "home/.cache/distgpt", tmp_path / "tmp" / f"distgpt-{os.geteuid()}"


def give_away(path):
    try:
        os.chown(path, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give a file away")


SPOILED = {
    "a file in the way": lambda folder: folder.write_text(""),
    "writable by all": lambda folder: (folder.mkdir(), folder.chmod(0o777)),
    "a link to elsewhere": lambda folder: folder.symlink_to(folder.parent, target_is_directory=True),
    "another user's": lambda folder: (folder.mkdir(), give_away(folder)),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_cache_uses_first_private_directory(places, spoil):
    beside = places[0]
    for expected in places:
        folder = cache_folder("loops", beside)
        assert folder == expected / "loops" and folder.stat().st_mode & 0o077 == 0
        folder.rmdir()
        spoil(folder)
    assert cache_folder("loops", beside) is None


def test_cache_avoids_directories_of_others(places):
    beside, user, temporary = places
    beside.chmod(0o777)
    assert cache_folder("loops", beside) == user / "loops"
    beside.chmod(0o1777)  # sticky like /tmp
    assert cache_folder("loops", beside) == beside / "loops"
    SPOILED["another user's"](beside / "shared")  # the owner may replace its entries
    (beside / "shared").chmod(0o1777)
    assert cache_folder("loops", beside / "shared") == user / "loops"
    (beside / "shared" / "loops").mkdir(mode=0o700)
    (temporary / "loops").mkdir(mode=0o700, parents=True)
    temporary.chmod(0o700)
    assert own_folders("loops", beside / "shared") == [user / "loops", temporary / "loops"]


def test_variables_move_all_caches(places, tmp_path, monkeypatch):
    beside, user, temporary = places
    assert cache_folder("kernels") == user / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("kernels") == tmp_path / "xdg" / "distgpt" / "kernels"
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv(caches.CACHE, "$SCRATCH/caches")
    for found in (cache_folder("loops", beside), cache_folder("kernels")):
        assert found.parent == tmp_path / "scratch" / "caches" and found.stat().st_mode & 0o077 == 0
        assert not misplaced(found)
    monkeypatch.setenv(caches.CACHE, "~/mine")
    assert cache_folder("kernels") == tmp_path / "home" / "mine" / "kernels"
    # A shared directory is replaced by the temporary directory, not by the home.
    monkeypatch.setenv(caches.CACHE, str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    found = cache_folder("kernels")
    assert found == temporary / "kernels" and str(tmp_path / "open") in misplaced(found)
    assert str(found.parent) in misplaced(found)
    monkeypatch.setenv(caches.CACHE, str(tmp_path / "$NOT_SET_HERE" / "mine"))
    assert cache_folder("kernels") == found and "$NOT_SET_HERE" in misplaced(found)
    assert not (tmp_path / "$NOT_SET_HERE").exists()


def test_cache_without_directory_keeps_nothing(places, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    SPOILED["writable by all"](places[2])
    assert cache_folder("kernels") is None
    monkeypatch.setattr(tempfile, "gettempdir", raising(FileNotFoundError(2, "No usable temporary directory")))
    assert caches.temporary_folder() is None and cache_folder("kernels") is None
    assert compute_once(tmp_path / "none" / "there", lambda: b"made") == b"made"
    monkeypatch.setenv(caches.CACHE, "$NOT_SET_HERE")
    assert caches.places() == [] and cache_folder("kernels") is None


@pytest.mark.ci
def test_import_survives_deleted_working_directory(tmp_path):
    code = f"import os; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); import distgpt.commands.cli"
    env = {**os.environ, caches.CACHE: "relative"}
    assert subprocess.run([sys.executable, "-P", "-c", code], env=env).returncode == 0


def test_cache_ignores_corrupt_and_foreign_files(tmp_path):
    path = tmp_path / "file"
    caches.write_checked(path, b"x")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + b"y", whole + b"x"):
        path.write_bytes(damaged)
        assert read_checked(path) is None, damaged
    path.write_bytes(whole)
    assert read_checked(path) == b"x"
    give_away(path)
    assert read_checked(path) is None


def test_cache_evicts_least_recently_used(tmp_path, monkeypatch):
    monkeypatch.setenv(caches.LIMIT, "3K")
    new, old = (tmp_path / f"loops-{digit * 16}" for digit in "ab")
    others, kernels = tmp_path / "loops-of-mine", tmp_path / "kernels"
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
    monkeypatch.setattr(caches, "MOST_FILES", 3)
    for name in "789":
        keep(path := kernels / f"{name}.choice", b"")
        os.utime(path, (3e9 + int(name),) * 2)
    assert {path.stem for path in kernels.glob("*.choice")} == {"7", "8", "9"} and not [*new.iterdir()]


def test_invalid_cache_limit_is_rejected(monkeypatch):
    monkeypatch.setenv(caches.LIMIT, "much")
    with pytest.raises(UsageError, match=f"{caches.LIMIT}.*much"):
        caches.cache_limit()


def test_reading_updates_use_time_daily(tmp_path):
    path, now = tmp_path / "file", time.time()
    caches.write_checked(path, b"x")
    for age, is_noted in ((0.5, False), (2, True)):
        os.utime(path, (now - age * caches.DAY,) * 2)
        assert read_checked(path) == b"x" and (path.stat().st_mtime > now - caches.DAY / 4) == is_noted


@pytest.fixture
def path(places, tmp_path):
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels" / "file"


@pytest.mark.parametrize("has_locks", [True, False])
def test_concurrent_callers_compute_once(path, monkeypatch, has_locks):
    made = []

    def make():
        time.sleep(0.05)
        made.append(threading.get_ident())
        return b"content"

    if not has_locks:
        monkeypatch.setattr(caches, "lock", lambda descriptor, kind: None)
    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(lambda _: compute_once(path, make), range(8))} == {b"content"}
    assert read_checked(path) == b"content" and made
    assert not has_locks or (len(made) == 1 and [*path.parent.iterdir()] == [path])


@pytest.mark.ci
def test_killed_holder_releases_cache_lock(path):
    ready, told = os.pipe()
    if not (holder := os.fork()):
        with alone(path):
            os.write(told, b"x")
            time.sleep(100)
    os.read(ready, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compute_once, path, lambda: b"content")
        time.sleep(0.05)
        assert not waiting.done()
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert waiting.result(20) == b"content"
    assert [*path.parent.iterdir()] == [path]


def test_stuck_holder_is_waited_for_with_a_limit(path, monkeypatch):
    monkeypatch.setattr(caches, "PATIENCE", 0.02)
    with alone(path):
        assert compute_once(path, lambda: b"content") == b"content" and read_checked(path) == b"content"


def test_unwritable_results_are_computed_concurrently(path, monkeypatch):
    waiting, ready, together, real = set(), threading.Event(), threading.Barrier(4, timeout=20), caches.lock

    def noted(descriptor, kind):
        if (got := real(descriptor, kind)) is False:
            waiting.add(threading.get_ident())
        return got

    def first():
        ready.set()
        wait_for(lambda: len(waiting) == 4)
        return b"first"

    def other():
        together.wait()
        return b"other"

    monkeypatch.setattr(caches, "write_checked", raising(StorageError("No space left on device")))
    monkeypatch.setattr(caches, "lock", noted)
    with ThreadPoolExecutor(5) as pool:
        begun = pool.submit(compute_once, path, first)
        ready.wait(20)
        others = [pool.submit(compute_once, path, other) for _ in range(4)]
        assert [each.result(30) for each in (begun, *others)] == [b"first", *[b"other"] * 4]
    assert not [*path.parent.iterdir()]


def test_removed_cache_directory_is_recreated(path):
    path.parent.rmdir()
    assert compute_once(path, lambda: b"new") == b"new" and read_checked(path) == b"new"
