"""The cache of compiled loops: kept where nobody else can write, or not at all."""

import ast
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from distgpt.files import cache_folder
from distgpt.kernels.fused import disk_cache

PACKAGE = Path(disk_cache.__file__).parents[3]


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


def constants_in(loops):
    """Each constant that these files define or import: the file where it is assigned, and how."""
    found = set()
    for path in loops:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt"):
                source = Path(*node.module.split(".")).with_suffix(".py")
                found |= {(PACKAGE / source, name.name) for name in node.names if name.name.isupper()}
    for path in {*loops, *(path for path, _ in found)}:
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            wanted = {name for file, name in found if file == path}
            if names & wanted or (path in loops and any(name.isupper() for name in names)):
                yield path, ast.get_source_segment(path.read_text(), node)


def test_every_constant_that_a_loop_may_hold_changes_the_folder(tmp_path, monkeypatch):
    """Numba freezes what a loop finds under a global name, also where that was imported."""
    sources = disk_cache.sources()
    copies = {path: tmp_path / path.relative_to(disk_cache.KERNELS) for path in sources}
    for path, copy in copies.items():
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(disk_cache, "KERNELS", tmp_path)
    before, tried = disk_cache.digest(disk_cache.sources()), set()
    loops = [path for path in sources if path.parent.name in disk_cache.FOLDERS]
    for path, text in constants_in(loops):
        assert path in sources, f"{path} has {text}, which a loop may hold"
        content = copies[path].read_text()
        copies[path].write_text(content.replace(text, f"{text} + 1"))
        assert disk_cache.digest(disk_cache.sources()) != before, (path, text)
        copies[path].write_text(content)
        tried |= {text.partition(" ")[0]}
    assert disk_cache.digest(disk_cache.sources()) == before
    assert {"PIECE", "QK_SCALE", "TINY", "MOST", "LINEAR"} <= tried


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
