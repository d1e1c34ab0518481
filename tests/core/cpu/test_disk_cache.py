"""The cache of compiled loops: the user's, and that of a site, which its owner writes and all others read."""

import ast
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from disks import file_size_limit
from distgpt.core.base.errors import StorageError
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.cpu import first_use
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.compiling.jit import inline, jit
from distgpt.core.cpu.first_use import COMPILING
from distgpt.measure import site_cache
from numba import njit

from conftest import copy_compiled, distgpt, inside, needs_mpi, refused

PACKAGE = Path(disk_cache.__file__).parents[4]
COMPILED = {"jit", "inline", "by_types", "also_for", "intrinsic"}  # what decorates a loop or a part of one
SOMEBODY = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def doubled(x):
    for i in range(x.shape[0]):
        x[i] *= 2


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """An empty cache of the user, in an installation without one."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(disk_cache, "SITE", tmp_path / "compiled")
    monkeypatch.setattr(disk_cache, "folder", lambda: tmp_path / "own")
    monkeypatch.setattr(disk_cache, "used", set())
    disk_cache.site.cache_clear()
    yield tmp_path / "own"
    disk_cache.site.cache_clear()


def is_loaded(dtype=np.float64):
    """Run a loop as a new start does: whether it was loaded."""
    disk_cache.site.cache_clear()
    loop, x = njit(doubled), np.ones(3, dtype)
    disk_cache.keep_on_disk(loop)
    loop(x)
    assert x.tolist() == [2, 2, 2]
    return sum(loop.stats.cache_hits.values()) == 1


def shared_file():
    site_cache.require_writable()
    is_loaded()
    return site_cache.share()


@pytest.fixture
def shared(own):
    return shared_file()


def forget(own):
    for path in own.iterdir():
        path.unlink()


@pytest.mark.parametrize("is_shared", [False, True])
def test_damaged_loops_are_compiled_again(own, is_shared):
    assert not is_loaded()
    if is_shared:
        path = shared_file()
        assert not [*own.iterdir()]
    else:
        (path,) = own.iterdir()
    whole = path.read_bytes()
    assert is_loaded()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (b"", b"\x80no", whole[:20], whole[:-1], whole + b"x", bytes(len(whole)), flipped):
        path.write_bytes(content)
        assert not is_loaded(), content[:9]
        assert is_loaded() and [*own.iterdir()]  # the user's own
        if is_shared:
            forget(own)
    path.write_bytes(whole)
    assert is_loaded()


def test_without_a_place_or_room_loops_still_run(own, monkeypatch):
    with file_size_limit(0):
        assert not is_loaded()
    assert not [path for path in own.iterdir() if path.stat().st_size]
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    assert not is_loaded()


@pytest.mark.ci
def test_of_processes_that_start_at_once_one_compiles_a_loop(own):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert sorted(pool.starmap(is_loaded, [()] * 3, chunksize=1)) == [False, True, True]
    assert len([*own.iterdir()]) == 1


@pytest.fixture
def said():
    said = []
    first_use.announce(said.append)
    yield said
    first_use.announce()


def test_a_full_disk_is_reported_once_and_read_on(own, said, monkeypatch):
    def full(path, content):
        raise StorageError(f"cannot write {path}: No space left on device")

    assert not is_loaded(np.int8)
    kept, _ = [*own.iterdir()], said.clear()
    monkeypatch.setattr(disk_cache, "keep", full)
    for kind in (np.int16, np.int32):
        assert not is_loaded(kind)
    assert is_loaded(np.int8) and [*own.iterdir()] == kept
    (line,) = said
    assert str(own) in line and line.endswith("not kept")


def test_that_something_is_compiled_is_reported_once(tmp_path, said, monkeypatch):
    for kind in (np.int8, np.int16):
        is_loaded(kind)
    assert said == [f"{COMPILING} (later starts load them)"]
    said.clear()
    first_use.announce(said.append)
    assert is_loaded(np.int8) and said == []  # an earlier start has left it
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    is_loaded(np.int8)
    assert said == [COMPILING]  # and this one leaves nothing
    with (tmp_path / "closed").open("w") as closed:
        pass
    first_use.announce(lambda text: print(text, file=closed))
    is_loaded(np.int8)  # nobody hears it


def test_what_is_inlined_has_no_machine_code_of_its_own():
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
    address, of_loop = loop.library.get_pointer_to_function, loop.fndesc
    assert address(of_loop.llvm_func_name) and address(of_loop.llvm_cpython_wrapper_name)
    assert not address(of_loop.llvm_cfunc_wrapper_name) and not address(inlined.fndesc.llvm_func_name)


def compiled_in(tree):
    """Each top function of a file that Numba compiles."""
    for node in tree.body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        names = {name.id for each in decorators for name in ast.walk(each) if isinstance(name, ast.Name)}
        if names & COMPILED:
            yield node


@pytest.mark.ci
def test_whatever_a_loop_uses_is_hashed_for_it():
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


# -- of a site


def test_a_shared_file_is_for_all_to_read_and_only_trusted_if_others_cannot_write_it(shared, own):
    place = shared.parent
    assert [*place.iterdir()] == [shared] and is_loaded() and not [*own.iterdir()]
    assert stat.S_IMODE(shared.stat().st_mode) == 0o644 and stat.S_IMODE(place.stat().st_mode) == 0o755
    for path, mode in ((shared, 0o664), (shared, 0o646), (place, 0o775), (place, 0o777)):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        assert not is_loaded(), (path, oct(mode))
        forget(own)
        path.chmod(before)
    assert is_loaded()


@as_root
def test_files_of_another_user_are_not_trusted_unless_he_owns_the_package(shared, own, monkeypatch):
    for path in (shared, shared.parent):
        os.chown(path, SOMEBODY, -1)
        assert not is_loaded(), path
        forget(own)
        if path == shared:
            os.chown(path, 0, -1)
    os.chown(shared, SOMEBODY, -1)
    package = own.parent / "package"
    package.mkdir()
    os.chown(package, SOMEBODY, -1)
    files = disk_cache.sources()
    monkeypatch.setattr(disk_cache, "sources", lambda: files)
    monkeypatch.setattr(disk_cache, "PACKAGE", package)
    assert is_loaded()


def test_other_processors_and_versions_have_files_of_their_own(shared, monkeypatch):
    place, known = shared.parent, disk_cache.processor()[0]
    with monkeypatch.context() as other:
        other.setattr(disk_cache, "processor", lambda: (f"{known}-other", "+avx512f"))
        assert not is_loaded()
        xeon = site_cache.share()
        assert {*place.iterdir()} == {shared, xeon} and f"{known}-other" in xeon.name and is_loaded()
        xeon.write_bytes(shared.read_bytes())  # the loops of the first under the name of the second
        assert not is_loaded()
    others = [xeon, place / "znver3-cpython-311-00000000-0123456789abcdef.loops", place / "notes.txt"]
    for path in others:
        path.touch()
    monkeypatch.setattr(disk_cache, "MADE_BY", ("another Numba",))
    monkeypatch.setattr(disk_cache, "used", set())
    assert not is_loaded(np.int32)
    updated = site_cache.share()  # in place of what the former version wrote for this processor
    assert {*place.iterdir()} == {updated, *others} and updated != shared


def test_what_is_shared_later_is_added(shared, monkeypatch):
    monkeypatch.setattr(disk_cache, "used", set())
    is_loaded(np.int16)
    assert site_cache.share() == shared and len(disk_cache.site()) == 2 and is_loaded()


def test_a_loop_that_cannot_be_kept_is_not_shared(monkeypatch):
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    site_cache.require_writable()
    assert not is_loaded()
    with pytest.raises(StorageError, match="cannot cache"):
        site_cache.share()


def test_the_command_names_what_it_compiles_and_where_it_lies(monkeypatch):
    monkeypatch.setattr(site_cache, "parts", lambda folder: [("doubling", lambda: is_loaded(np.int16))])
    former = os.umask(0o077)
    try:
        result = inside("compile")
    finally:
        os.umask(former)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    (path,) = disk_cache.SITE.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    first, part, last = result.stdout.splitlines()
    assert disk_cache.processor()[0] in first and part.split()[1:] == ["1", "kernel", "doubling"]
    assert str(path) in last and "1 kernel " in last and "KiB" in last
    again = inside("compile")
    assert again.returncode == 0 and " 0 kernels  doubling" in again.stdout
    assert [*disk_cache.SITE.iterdir()] == [path]


def test_the_command_is_refused_at_once_if_the_package_cannot_be_written():
    disk_cache.SITE.touch()
    refused(inside("compile"), 74, disk_cache.SITE, disk_cache.PACKAGE)


def test_every_part_of_the_presets_is_compiled():
    fields = ("norm", "norm_gain", "embed_norm", "final_norm", "mlp", "positions", "qk_norm", "qk_norm_gain")
    fields += ("value_embeddings", "bias", "tied", "init_weights", "optimizer")

    def values(name):
        run = preset(name)
        return {(field, getattr(run.model, field, None) or getattr(run.train, field, None)) for field in fields}

    compiled = set().union(*map(values, site_cache.PRESETS))
    for name in PRESETS:
        assert values(name) <= compiled, (name, values(name) - compiled)


# Writes the names of all loops that parts of `distgpt compile`, or a command, have used.
USED = """
import json, sys, tempfile
from pathlib import Path
from distgpt.core.comm.job import this_job
from distgpt.core.cpu.compiling import disk_cache
out, *words = sys.argv[1:]
try:
    if words[0] == "parts":
        from distgpt.measure import site_cache
        with tempfile.TemporaryDirectory() as folder:
            for name, act in site_cache.parts(Path(folder)):
                if name in words:
                    act()
    else:
        from distgpt.commands.cli import main
        sys.argv[1:] = words
        main()
finally:
    Path(f"{out}-{this_job().rank}.json").write_text(json.dumps(sorted(disk_cache.used)))
"""


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
@pytest.mark.parametrize("way", ["allreduce", "sharded"])
def test_ranks_need_no_loop_that_was_not_compiled(tmp_path, way):
    """Not even those that sum in shared memory: each rank would compile them in its first step."""
    program = [sys.executable, "-c", USED]
    parts = ["training tiny in bfloat16", "exchange in bfloat16"]
    done = distgpt(tmp_path / "compiled", "parts", *parts, program=program)
    assert done.returncode == 0, done.stderr
    words = ["--preset", "tiny", "--n-layer", "2", "--n-head", "2", "--n-embd", "128", "--seq-len", "32"]
    words += ["--dtype", "bfloat16", "--grad-sync", way, "--stage", "mpi", "--steps", "2", "--data", "story"]
    done = distgpt(tmp_path / "run", "train", *words, "--out", tmp_path / "r", ranks=2, program=program)
    assert done.returncode == 0, done.stderr
    compiled, *runs = ({*json.loads(path.read_text())} for path in sorted(tmp_path.glob("*.json")))
    assert len(runs) == 2 and [run - compiled for run in runs] == [set(), set()]


# Runs a command as somebody else, or compiles as root, with the site's cache in the folder named first.
AS_SOMEBODY = """
import os, sys
from pathlib import Path
from distgpt.core.cpu.compiling import disk_cache
disk_cache.SITE = Path(sys.argv.pop(1))  # before anything is loaded from it
from distgpt.measure import site_cache
if sys.argv[1] == "compile":
    site_cache.QUANTIZED_DTYPES = ("int8",)
    del site_cache.WAYS["bfloat16"]
else:
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
from distgpt.commands.cli import main
main()
"""
LITTLE = "--steps 2 --sample-every 1 --eval-every 1 --val-fraction 0.1"
USUAL = f"""train --preset tiny {LITTLE} --out tiny
train --preset microgpt {LITTLE} --out microgpt
train --preset gpt-mini --n-layer 1 --batch-size 2 --steps 1
infer --prompt a --max-new-tokens 3 --dtype float32
infer --prompt a --max-new-tokens 3 --dtype int8
eval --weights tiny --val corpus
weights quantize tiny --dtype int8 --out int8.safetensors
tune --weights tiny --data chats.jsonl --steps 2 --out tuned"""
FOR_ALL = all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(os.__file__).parents)


@as_root
@pytest.mark.skipif(not FOR_ALL, reason="this Python is for root alone")
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_is_compiled_for_a_user_of_an_installation_that_was(monkeypatch):
    """What users usually do, as a user with an empty home, beside a cache that only root may write."""
    monkeypatch.undo()
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name)).chmod(0o755)
        (home := folder / "home").mkdir()
        os.chown(home, SOMEBODY, SOMEBODY)
        env = {**os.environ, "HOME": str(home), "NUMBA_CACHE_DIR": str(folder / "own"), "TMPDIR": str(home)}
        copy_compiled(folder / "own")  # what the command finds there it shares as what it compiles
        (home / "chats.jsonl").write_text('{"prompt": "Is it?", "completion": "It is."}\n' * 4)
        for words in ("compile", *USUAL.splitlines()):
            program = [sys.executable, "-c", AS_SOMEBODY, folder / "compiled", *words.split()]
            result = subprocess.run(program, env=env, cwd=home, capture_output=True, text=True)
            assert result.returncode == 0, (words, result.stderr)
            if words == "compile":
                (path,) = (folder / "compiled").iterdir()
                assert str(path) in result.stdout and path.stat().st_uid == 0
            else:
                assert COMPILING not in result.stdout + result.stderr, (words, result.stdout, result.stderr)
        assert not (home / ".cache").exists() and not [*home.glob("distgpt-*")]
