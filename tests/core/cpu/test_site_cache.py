"""The compiled loops of a site: read by all users, written by the owner of the package, and hashed."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from distgpt.core.base.errors import StorageError
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.first_use import COMPILING
from distgpt.measure import site_cache
from numba import njit

from conftest import copy_compiled, distgpt, inside, needs_mpi, refused

SOMEBODY = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def doubled(x):
    for i in range(x.shape[0]):
        x[i] *= 2


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An installation without a cache, and a user without one."""
    monkeypatch.setattr(disk_cache, "SITE", tmp_path / "compiled")
    monkeypatch.setattr(disk_cache, "folder", lambda: own_of(tmp_path))
    monkeypatch.setattr(disk_cache, "used", set())
    disk_cache.site.cache_clear()
    yield tmp_path / "compiled"
    disk_cache.site.cache_clear()


def own_of(tmp_path):
    (tmp_path / "own").mkdir(exist_ok=True)
    return tmp_path / "own"


def is_loaded():
    """Run a loop as a new start does: whether it was loaded."""
    disk_cache.site.cache_clear()
    loop, x = njit(doubled), np.ones(3)
    disk_cache.keep_on_disk(loop)
    loop(x)
    assert x.tolist() == [2, 2, 2]
    return sum(loop.stats.cache_hits.values()) == 1


@pytest.fixture
def shared(place):
    """The file that holds the loop for all users."""
    site_cache.require_writable()
    assert not is_loaded()
    return site_cache.share()


def forget_own(place):
    for path in (place.parent / "own").iterdir():
        path.unlink()


def test_a_shared_loop_is_loaded_from_one_file_that_all_may_read(shared, place):
    assert list(place.iterdir()) == [shared] and not list((place.parent / "own").iterdir())
    assert stat.S_IMODE(shared.stat().st_mode) == 0o644 and stat.S_IMODE(place.stat().st_mode) == 0o755
    assert is_loaded()
    assert not list((place.parent / "own").iterdir())


def damages(content):
    middle = len(content) // 2
    yield from (b"", content[:20], content[:-1], content + b"x", bytes(len(content)))
    yield content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_a_damaged_file_is_not_loaded_and_its_loops_are_compiled_for_the_user(shared, place):
    whole = shared.read_bytes()
    for content in damages(whole):
        shared.write_bytes(content)
        assert not is_loaded(), content[:9]
        assert is_loaded() and list((place.parent / "own").iterdir())  # his own
        forget_own(place)
    shared.write_bytes(whole)
    assert is_loaded()


def test_what_others_may_write_is_not_trusted(shared, place):
    for path, mode in ((shared, 0o664), (shared, 0o646), (place, 0o775), (place, 0o777)):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        assert not is_loaded(), (path, oct(mode))
        forget_own(place)
        path.chmod(before)
    assert is_loaded()


@as_root
def test_files_of_another_user_are_not_trusted_unless_he_owns_the_package(shared, place, monkeypatch):
    for path in (shared, place):
        os.chown(path, SOMEBODY, -1)
        assert not is_loaded(), path
        forget_own(place)
        if path == shared:
            os.chown(path, 0, -1)
    os.chown(shared, SOMEBODY, -1)
    package = place.parent / "package"
    package.mkdir()
    os.chown(package, SOMEBODY, -1)
    files = disk_cache.sources()
    monkeypatch.setattr(disk_cache, "sources", lambda: files)
    monkeypatch.setattr(disk_cache, "PACKAGE", package)
    assert is_loaded()


def test_kinds_of_processors_lie_side_by_side(shared, place, monkeypatch):
    xeon = disk_cache.processor()[0] + "-other", "+avx512f"
    monkeypatch.setattr(disk_cache, "processor", lambda: xeon)
    assert not is_loaded()
    other = site_cache.share()
    assert {*place.iterdir()} == {shared, other} and xeon[0] in other.name and is_loaded()
    other.write_bytes(shared.read_bytes())  # the loops of the first under the name of the second
    assert not is_loaded()


def test_after_an_update_only_that_kind_is_written_anew(shared, place, monkeypatch):
    others = [place / "znver3-cpython-311-00000000-0123456789abcdef.loops", place / "notes.txt"]
    for path in others:
        path.touch()
    monkeypatch.setattr(disk_cache, "MADE_BY", ("another Numba",))
    disk_cache._digest_of_file.cache_clear()
    disk_cache.used.clear()
    assert not is_loaded()
    updated = site_cache.share()
    assert {*place.iterdir()} == {updated, *others} and updated != shared
    disk_cache._digest_of_file.cache_clear()


def test_what_is_shared_later_is_added(shared):
    disk_cache.used.clear()
    ((_, act),) = compiles_one(None)
    act()
    assert site_cache.share() == shared and len(disk_cache.site()) == 2 and is_loaded()


def test_a_loop_that_cannot_be_kept_is_not_shared(place, monkeypatch):
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    site_cache.require_writable()
    assert not is_loaded()
    with pytest.raises(StorageError, match="cannot be kept"):
        site_cache.share()


def compiles_one(folder):
    def act():
        loop = njit(doubled)
        disk_cache.keep_on_disk(loop)
        loop(np.ones(3, np.int16))

    yield "doubling", act


def test_the_command_names_what_it_compiles_and_where_it_lies(place, monkeypatch):
    monkeypatch.setattr(site_cache, "parts", compiles_one)
    former = os.umask(0o077)
    try:
        result = inside("compile")
    finally:
        os.umask(former)
    assert result.returncode == 0 and result.stderr == "", result.stderr
    (path,) = place.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    first, part, last = result.stdout.splitlines()
    assert "compiling 1 part for " in first
    assert disk_cache.processor()[0] in first and part.split()[1:] == ["1", "kernel", "doubling"]
    assert str(path) in last and "1 kernel " in last and "KiB" in last
    again = inside("compile")
    assert again.returncode == 0 and " 0 kernels  doubling" in again.stdout and list(place.iterdir()) == [path]


def test_the_command_refuses_at_once_where_the_package_cannot_be_written(place):
    place.touch()
    refused(inside("compile"), 74, place, disk_cache.PACKAGE)


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


@contextlib.contextmanager
def open_to_all():
    """A folder below which another user may read, and one in it that is his home."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        home.mkdir()
        os.chown(home, SOMEBODY, SOMEBODY)
        yield Path(folder), home


# Runs a command as somebody else, or compiles a part as root, with the cache in the folder named first.
AS_SOMEBODY = """
import os, sys
from pathlib import Path
from distgpt.core.cpu.compiling import disk_cache
disk_cache.SITE = Path(sys.argv.pop(1))  # before anything is loaded from it
from distgpt.measure import site_cache
if sys.argv[1] == "compile":
    site_cache.ROUNDED_DTYPES = ("int8",)
    del site_cache.WAYS["bfloat16"]
else:
    os.setgroups([])
    os.setgid(12345)
    os.setuid(12345)
from distgpt.commands.cli import main
main()
"""


def is_for_all(path):
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in Path(path).parents)


@as_root
@pytest.mark.skipif(not is_for_all(os.__file__), reason="this Python is for root alone")
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_nothing_is_compiled_for_a_user_of_an_installation_that_was():
    """What users usually do, as a user with an empty home, beside a cache that only root may write."""
    with open_to_all() as (folder, home):
        env = {**os.environ, "HOME": str(home), "NUMBA_CACHE_DIR": str(folder / "own"), "TMPDIR": str(home)}
        copy_compiled(folder / "own")  # what the command finds there it shares as what it compiles

        def run(*words):
            program = [sys.executable, "-c", AS_SOMEBODY, folder / "compiled", *words]
            return subprocess.run(program, env=env, cwd=home, capture_output=True, text=True)

        made = run("compile")
        assert made.returncode == 0, made.stderr
        (path,) = (folder / "compiled").iterdir()
        assert str(path) in made.stdout and path.stat().st_uid == 0
        chats = home / "chats.jsonl"
        chats.write_text('{"prompt": "Is it?", "completion": "It is."}\n' * 4)
        small = ("--steps", "2", "--sample-every", "1", "--eval-every", "1", "--val-fraction", "0.1")
        for words in (
            *(("train", "--preset", name, *small, "--out", name) for name in ("tiny", "microgpt")),
            ("train", "--preset", "gpt-mini", "--n-layer", "1", "--batch-size", "2", "--steps", "1"),
            *(("infer", "--prompt", "a", "--max-new-tokens", "3", "--dtype", d) for d in ("float32", "int8")),
            ("eval", "--weights", "tiny", "--val", "corpus"),
            ("weights", "quantize", "tiny", "--dtype", "int8", "--out", "int8.safetensors"),
            ("tune", "--weights", "tiny", "--data", chats, "--steps", "2", "--out", "tuned"),
        ):
            result = run(*words)
            assert result.returncode == 0, (words, result.stderr)
            assert COMPILING not in result.stdout + result.stderr, (words, result.stdout, result.stderr)
        assert not (home / ".cache").exists() and not list(home.glob("distgpt-*"))
