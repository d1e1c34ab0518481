"""The cache of compiled loops: kept where nobody else can write, or not at all."""

import ast
import os
import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.caches import cache_folder, own_folders
from distgpt.core.base.errors import StorageError
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.compiling.jit import inline, jit
from numba import njit

PACKAGE = Path(disk_cache.__file__).parents[4]
COMPILED = {"jit", "inline", "by_types", "also_for", "intrinsic"}  # what decorates a loop or a part of one


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


def test_a_place_whose_owner_is_another_user_is_not_used(places):
    """He may put a folder of his own there, at any time."""
    beside, user, temporary = places
    of_somebody_else(beside / "shared")
    (beside / "shared").chmod(0o1777)
    assert cache_folder("loops", beside / "shared") == user / "loops"
    (beside / "shared" / "loops").mkdir(mode=0o700)
    (temporary / "loops").mkdir(mode=0o700, parents=True)
    temporary.chmod(0o700)
    assert own_folders("loops", beside / "shared") == [user / "loops", temporary / "loops"]


def test_a_shared_temporary_folder_of_our_name_is_not_used(places):
    _, user, temporary = places
    file_in_the_way(user)
    writable_by_all(temporary)
    assert cache_folder("loops") is None


def compiled_in(tree):
    """Each top function of a file that Numba compiles."""
    for node in tree.body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        names = {name.id for each in decorators for name in ast.walk(each) if isinstance(name, ast.Name)}
        if names & COMPILED:
            yield node


@pytest.mark.ci
def test_whatever_a_loop_uses_lies_in_what_is_hashed_for_it():
    """That is all of `sources`; of a file that is not there, the file itself, whose digest is in the name.

    Numba freezes constants, too: what a loop finds under a global name, also where that was imported.
    """
    sources, seen = set(disk_cache.sources()), set()
    for path in sorted((PACKAGE / "distgpt").rglob("*.py")):
        tree = ast.parse(path.read_text())
        from_where = {
            name.asname or name.name: Path(PACKAGE, *f"{node.module}.{name.name}".split(".")).with_suffix(".py")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt")
            for name in node.names
        }
        for loop in compiled_in(tree):
            seen |= {*path.parts}
            for name in (node.id for node in ast.walk(loop) if isinstance(node, ast.Name)):
                if module := from_where.get(name):  # a module, or a name in one
                    file = module if module.exists() else module.parent.with_suffix(".py")
                    assert file in sources, f"{path}: {loop.name} uses {name}, which no digest has"
    assert seen >= {"compiling", "matmul", "fused", "decoding", "quantized", "tokenizers"}


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
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (b"", b"\x80no", whole[:-1], flipped):
        path.write_bytes(content)
        again = loop_in(tmp_path, monkeypatch)
        assert result_of(again) == [2, 2, 2] and hits(again) == 0, content[:9]
        repaired = loop_in(tmp_path, monkeypatch)
        assert result_of(repaired) == [2, 2, 2] and hits(repaired) == 1, content[:9]


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
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]


@pytest.mark.ci
def test_of_processes_that_start_at_once_one_compiles_a_loop(tmp_path, monkeypatch):
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            code = 9
            try:
                loop = loop_in(tmp_path, monkeypatch)
                code = hits(loop) if result_of(loop) == [2, 2, 2] else 8
            finally:
                os._exit(code)
        children.append(child)
    loaded = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(loaded) == [0, 1, 1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A cache of one's own, with nothing known of it."""
    monkeypatch.setenv("DISTGPT_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(disk_cache, "_full", [])
    known = disk_cache.folder, disk_cache._own_folders
    for each in known:
        each.cache_clear()
    yield disk_cache.folder()
    for each in known:
        each.cache_clear()


def test_a_full_disk_is_reported_in_one_line_and_read_on(own, monkeypatch):
    said = []
    first_use.announce(said.append)
    disk_cache.read_or_make("before", lambda: b"1")

    def full(path, content):
        raise StorageError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(disk_cache, "keep", full)
    for name in ("during", "after"):
        disk_cache._keep(name, b"2", lambda: None)
    assert disk_cache.read("before") == b"1" and [path.name for path in own.iterdir()] == ["before"]
    (line,) = said
    assert str(own) in line and line.endswith("not kept")
    first_use.announce()


def test_that_something_is_compiled_is_reported_once(tmp_path, monkeypatch):
    said = []
    first_use.announce(said.append)
    for kind in (np.int8, np.int16):
        loop_in(tmp_path, monkeypatch)(np.ones(3, kind))
    assert said == [f"{first_use.COMPILING} (later starts load them)"]
    said.clear()
    first_use.announce(said.append)
    loop_in(tmp_path, monkeypatch)(np.ones(3, np.int8))
    assert said == []  # an earlier start has left it
    loop_in(None, monkeypatch)(np.ones(3, np.int8))
    assert said == [first_use.COMPILING]  # and this one leaves nothing
    with (tmp_path / "closed").open("w") as closed:
        pass
    first_use.announce(lambda text: print(text, file=closed))
    loop_in(None, monkeypatch)(np.ones(3, np.int8))  # nobody hears it
    first_use.announce()


def test_what_is_inlined_has_no_machine_code_of_its_own(own):
    @inline
    def tripled(x):
        return 3 * x

    @jit
    def all_tripled(x):
        for i in range(x.shape[0]):
            x[i] = tripled(x[i])

    x = np.ones(3)
    all_tripled(x)
    assert x.tolist() == [3, 3, 3]
    inlined, loop = (next(iter(each.overloads.values())) for each in (tripled, all_tripled))
    symbols = loop.library.codegen._engine.is_symbol_defined
    assert symbols(loop.fndesc.llvm_func_name) and symbols(loop.fndesc.llvm_cpython_wrapper_name)
    assert not symbols(loop.fndesc.llvm_cfunc_wrapper_name)
    assert not symbols(inlined.fndesc.llvm_func_name)
