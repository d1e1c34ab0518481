"""doctor --caches: what lies where, and what --empty removes while others run."""

import json
import os
import time

import pytest
from distgpt.core.base import caches
from distgpt.core.cpu.compiling import disk_cache

from conftest import inside, refused


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with something of every kind; a lock that somebody may hold, and what a killed one left."""
    place = tmp_path / "caches"
    monkeypatch.setenv(caches.CACHE, str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(disk_cache, "beside", lambda: tmp_path / "none")
    monkeypatch.setattr(disk_cache, "SITE", tmp_path / "site")
    monkeypatch.setattr(caches, "temporary_folder", lambda: tmp_path / "none")
    own, old = f"caches/{disk_cache.folder_name()}", f"caches/loops-{'0' * 16}"
    names = (f"{own}/a.loop", f"{own}/.a.loop.lock", f"{old}/b.loop", f"{old}/.b.loop.lock")
    names += ("caches/kernels/c.cubin", "caches/models/org--d.safetensors", "site/f.loops", "caches/others/g")
    names += ("caches/kernels/mine.cu", "caches/models/mine.safetensors", "none/distgpt/kernels/h.cubin")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(bytes(100))
    day = time.time() - caches.DAY
    os.utime(tmp_path / old / ".b.loop.lock", (day, day))
    os.utime(tmp_path / old / "b.loop", (day, day))
    return place


def files(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_each_folder_is_shown_with_its_size_its_last_use_and_what_made_it(place):
    result = inside("doctor", "--caches", "--json")
    assert result.returncode == 0, result.stderr
    found = {each["path"]: each for each in json.loads(result.stdout)}
    assert found[str(place.parent / "none" / "distgpt" / "kernels")]["emptied"] == ""  # not in use
    own = found[str(place / disk_cache.folder_name())]
    assert (own["size"], own["files"], own["emptied"]) == (200, 2, "compiled") and "this" in own["what"]
    old = found[str(place / f"loops-{'0' * 16}")]
    assert old["last_use"] < own["last_use"] - caches.DAY / 2 and "another" in old["what"]
    assert found[str(place / "models")]["emptied"] == "all"
    assert str(place.parent / "site") in found and not any("others" in path for path in found)
    shown = inside("doctor", "--caches").stdout
    for path in found:
        assert path in shown
    assert "200 B" in shown and "2 files" in shown


def test_compiled_files_are_removed_and_locks_of_running_processes_stay(place):
    result = inside("doctor", "--caches", "--empty", "compiled")
    assert result.returncode == 0 and "removed 4 files, 400 B" in result.stderr
    assert files(place) == {".a.loop.lock", "org--d.safetensors", "g", "mine.cu", "mine.safetensors"}
    assert not (place / f"loops-{'0' * 16}").exists()
    assert files(place.parent) >= {"f.loops"}


def test_all_means_our_own_files(place, monkeypatch):
    assert inside("doctor", "--caches", "--empty", "all").returncode == 0
    assert files(place) == {".a.loop.lock", "g", "mine.cu", "mine.safetensors"}
    assert files(place.parent) - files(place) == {"f.loops", "h.cubin"}
    monkeypatch.delenv(caches.CACHE)  # then the usual place is emptied
    before = files(place)
    assert inside("doctor", "--caches", "--empty", "all").returncode == 0
    assert files(place) == before and "h.cubin" not in files(place.parent)


def test_folders_of_other_users_and_links_are_left_alone(place, monkeypatch):
    (place / "kernels").rename(place.parent / "elsewhere")
    (place / "kernels").symlink_to(place.parent / "elsewhere")
    assert "removed 3 files" in inside("doctor", "--caches", "--empty", "compiled").stderr
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "removed 0 files," in inside("doctor", "--caches", "--empty", "all").stderr
    assert {"c.cubin", "org--d.safetensors"} <= files(place.parent)


def test_a_report_makes_no_folder_for_a_user_of_the_sites_loops(place, monkeypatch):
    monkeypatch.setattr(disk_cache, "site", lambda: {"a": b""})
    monkeypatch.setattr(disk_cache, "folder", lambda: pytest.fail("it makes one"))
    assert "the site's" in inside("doctor", "--caches").stdout


def test_options_of_the_report_and_of_caches_are_not_mixed():
    refused(inside("doctor", "--empty", "all"), 2, "--caches")
    refused(inside("doctor", "--caches", "--stage", "mpi"), 2, "--stage")
