"""The cache of compiled loops: kept where nobody else can write, or not at all."""

import os
import resource
import tempfile

import numpy as np
import pytest
from numba import njit

from distgpt.files import cache_folder
from distgpt.kernels.fused import disk_cache


def doubled(x):
    for i in range(x.shape[0]):
        x[i] *= 2


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The places for a cache, in order: beside the sources, the user's cache, the temporary folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "beside").mkdir()
    own = tmp_path / "tmp" / f"distgpt-{os.geteuid()}"
    return tmp_path / "beside", tmp_path / "cache" / "distgpt", own


def file_in_the_way(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("")


def writable_by_all(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def link_to_elsewhere(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(folder.parent, target_is_directory=True)


def of_somebody_else(folder):
    folder.mkdir(parents=True)
    try:
        os.chown(folder, 65534, 65534)
    except PermissionError:
        pytest.skip("only root can give a folder away")


@pytest.mark.parametrize("spoil", [file_in_the_way, writable_by_all, link_to_elsewhere, of_somebody_else])
def test_the_first_private_place_is_taken(places, spoil):
    beside, user, temporary = places
    for expected in (beside, user, temporary):
        folder = cache_folder("loops", beside)
        assert folder == expected / "loops"
        assert folder.stat().st_mode & 0o077 == 0
        folder.rmdir()
        spoil(folder)
    assert cache_folder("loops", beside) is None


def test_a_place_that_is_asked_for_is_not_open_to_everybody(places):
    beside, user, _ = places
    beside.chmod(0o777)
    assert cache_folder("loops", beside) == user / "loops"
    beside.chmod(0o1777)  # as /tmp: nobody may rename what is another's
    assert cache_folder("loops", beside) == beside / "loops"


def test_a_shared_temporary_folder_of_our_name_is_not_used(places):
    _, user, temporary = places
    file_in_the_way(user)
    writable_by_all(temporary)
    assert cache_folder("loops") is None


def test_any_changed_source_changes_the_folder(tmp_path):
    for folder in disk_cache.SOURCES:
        for path in folder.glob("*.py"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = disk_cache.digest(tmp_path)
    assert before == disk_cache.digest(tmp_path)
    with (tmp_path / "jit.py").open("a") as helpers:
        helpers.write("# changed\n")
    assert disk_cache.digest(tmp_path) != before


def test_loops_of_the_last_versions_stay(tmp_path):
    made = [tmp_path / f"loops-{i}" for i in range(5)]
    for age, folder in enumerate(made):
        folder.mkdir()
        os.utime(folder, (age, age))
    disk_cache._drop_old(made[4])
    assert sorted(tmp_path.iterdir()) == made[2:]


def loop_in(folder, monkeypatch):
    monkeypatch.setattr(disk_cache, "folder", lambda: folder)
    loop = njit(doubled)
    disk_cache.keep_on_disk(loop)
    return loop


def result_of(loop):
    x = np.ones(3)
    loop(x)
    return x.tolist()


def hits(loop):
    return sum(loop.stats.cache_hits.values())


def test_a_loop_is_loaded_by_the_next_start_and_made_again_if_its_files_are_damaged(tmp_path, monkeypatch):
    first = loop_in(tmp_path, monkeypatch)
    assert result_of(first) == [2, 2, 2] and hits(first) == 0
    again = loop_in(tmp_path, monkeypatch)
    assert result_of(again) == [2, 2, 2] and hits(again) == 1
    for pattern, content in (("*.nbc", b""), ("*.nbc", b"\x80no"), ("*.nbi", b""), ("*.nbi", b"\x80no")):
        for path in tmp_path.rglob(pattern):
            path.write_bytes(content)
        assert result_of(loop_in(tmp_path, monkeypatch)) == [2, 2, 2], (pattern, content)
        repaired = loop_in(tmp_path, monkeypatch)
        assert result_of(repaired) == [2, 2, 2] and hits(repaired) == 1, (pattern, content)


def test_without_a_place_or_room_loops_still_run(tmp_path, monkeypatch):
    nowhere = loop_in(None, monkeypatch)
    assert result_of(nowhere) == [2, 2, 2]
    full = loop_in(tmp_path, monkeypatch)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        assert result_of(full) == [2, 2, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.rglob("*.nbc") if path.stat().st_size]


def test_numbas_own_setting_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache.config, "CACHE_DIR", "elsewhere")
    loop_in(tmp_path, monkeypatch)
    assert disk_cache.config.CACHE_DIR == "elsewhere"


def test_the_first_loop_that_is_compiled_is_announced_once(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache, "folder", lambda: tmp_path)
    said = []
    for expected in ([disk_cache.COMPILING], []):
        said.clear()
        disk_cache.announce(said.append)
        for number in (np.float32, np.float64):
            compiled = njit(doubled)
            disk_cache.keep_on_disk(compiled)
            compiled(np.ones(3, number))
        assert said == expected
    disk_cache.announce(lambda text: print(text, file=closed))
    with (tmp_path / "closed").open("w") as closed:
        pass
    compiled(np.ones(3, np.int32))  # nobody hears it
