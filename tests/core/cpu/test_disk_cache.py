"""Caches of compiled loops: the user's, a site's shared one, and processes that compile for them."""

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

from conftest import ci_ranks, copy_compiled, distgpt, inside, refused, succeeded

PACKAGE = Path(disk_cache.__file__).parents[4]
COMPILED = {"jit", "inline", "by_types", "also_for", "intrinsic"}  # decorators of loops
SOMEBODY = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def doubled(x):
    for i in range(x.shape[0]):
        x[i] *= 2


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(disk_cache, "SITE", tmp_path / "compiled")
    monkeypatch.setattr(disk_cache, "folder", lambda: tmp_path / "own")
    monkeypatch.setattr(disk_cache, "used", set())
    disk_cache.site.cache_clear()
    yield tmp_path / "own"
    disk_cache.site.cache_clear()


def is_loaded(dtype=np.float64):
    """Run a loop like a new process; return whether it was loaded."""
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
def test_corrupt_loops_are_recompiled(own, is_shared):
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
        assert is_loaded() and [*own.iterdir()]  # the user's cache
        if is_shared:
            forget(own)
    path.write_bytes(whole)
    assert is_loaded()


def test_loops_run_without_a_cache(own, monkeypatch):
    with file_size_limit(0):
        assert not is_loaded()
    assert not [path for path in own.iterdir() if path.stat().st_size]
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    assert not is_loaded()


@pytest.mark.ci
def test_concurrent_processes_compile_once(own):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert sorted(pool.starmap(is_loaded, [()] * 3, chunksize=1)) == [False, True, True]
    assert len([*own.iterdir()]) == 1


@pytest.fixture
def said():
    first_use.announce((said := []).append)
    yield said
    first_use.announce()


def test_full_disk_is_reported_once(own, said, monkeypatch):
    def full(path, content):
        raise StorageError(f"cannot write {path}: No space left on device")

    assert not is_loaded(np.int8)
    kept, _ = [*own.iterdir()], said.clear()
    monkeypatch.setattr(disk_cache, "keep", full)
    assert not is_loaded(np.int16) and not is_loaded(np.int32)
    assert is_loaded(np.int8) and [*own.iterdir()] == kept
    (line,) = said
    assert str(own) in line and line.endswith("not kept")


def test_compiling_is_reported_once(tmp_path, said, monkeypatch):
    for kind in (np.int8, np.int16):
        is_loaded(kind)
    assert said == [f"{COMPILING} (later starts load them)"]
    said.clear()
    first_use.announce(said.append)
    assert is_loaded(np.int8) and said == []  # cached by an earlier start
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    is_loaded(np.int8)
    assert said == [COMPILING]  # nothing is cached
    with (tmp_path / "closed").open("w") as closed:
        pass
    first_use.announce(lambda text: print(text, file=closed))
    is_loaded(np.int8)  # the error is ignored


def test_inlined_functions_have_no_machine_code():
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
    for node in tree.body:
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        names = {name.id for each in decorators for name in ast.walk(each) if isinstance(name, ast.Name)}
        if names & COMPILED:
            yield node


@pytest.mark.ci
def test_digests_cover_all_names_in_loops():
    """Numba also freezes constants, including imported ones."""
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


def test_shared_file_is_trusted_only_if_private(shared, own):
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
def test_foreign_files_are_trusted_only_of_package_owner(shared, own, monkeypatch):
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


def test_processors_and_versions_have_separate_files(shared, monkeypatch):
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
    updated = site_cache.share()  # replaces the file of the previous version
    assert {*place.iterdir()} == {updated, *others} and updated != shared


def test_share_adds_later_loops(shared, monkeypatch):
    monkeypatch.setattr(disk_cache, "used", set())
    is_loaded(np.int16)
    assert site_cache.share() == shared and len(disk_cache.site()) == 2 and is_loaded()


def test_uncacheable_loop_is_not_shared(monkeypatch):
    monkeypatch.setattr(disk_cache, "folder", lambda: None)
    site_cache.require_writable()
    assert not is_loaded()
    with pytest.raises(StorageError, match="cannot cache"):
        site_cache.share()


def test_compile_command_prints_parts_and_path(monkeypatch):
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


def test_compile_command_requires_writable_package():
    disk_cache.SITE.touch()
    refused(inside("compile"), 74, disk_cache.SITE, disk_cache.PACKAGE)


def test_compiled_parts_cover_all_presets():
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


@ci_ranks
@pytest.mark.parametrize("way", ["allreduce", "sharded"])
def test_ranks_need_only_compiled_loops(tmp_path, way):
    program = [sys.executable, "-c", USED]
    parts = ["training tiny in bfloat16", "exchange in bfloat16"]
    succeeded(tmp_path / "compiled", "parts", *parts, program=program, by=distgpt)
    words = ["--preset", "tiny", "--n-layer", "2", "--n-head", "2", "--n-embd", "128", "--seq-len", "32"]
    words += ["--dtype", "bfloat16", "--grad-sync", way, "--stage", "mpi", "--steps", "2", "--data", "story"]
    succeeded(tmp_path / "run", "train", *words, "--out", tmp_path / "r", ranks=2, program=program, by=distgpt)
    compiled, *runs = ({*json.loads(path.read_text())} for path in sorted(tmp_path.glob("*.json")))
    assert len(runs) == 2 and [run - compiled for run in runs] == [set(), set()]


# Runs a command as another user, or compiles as root, with the site's cache in the first argument.
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
def test_users_of_compiled_installation_compile_nothing(monkeypatch):
    monkeypatch.undo()
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name)).chmod(0o755)
        (home := folder / "home").mkdir()
        os.chown(home, SOMEBODY, SOMEBODY)
        env = {**os.environ, "HOME": str(home), "NUMBA_CACHE_DIR": str(folder / "own"), "TMPDIR": str(home)}
        copy_compiled(folder / "own")  # the command shares existing loops
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


# Needs a new process, because compiled loops are not noted again.
FINDING = """
import sys
from dataclasses import replace
from functools import partial
from distgpt.core.config.presets import preset
from distgpt.core.cpu import compile_workers, first_use
from distgpt.core.cpu.compiling import disk_cache
from distgpt.core.cpu.stages import open_stage
from distgpt.core.model.model import miniature
from distgpt.core.train.setup import warmup_pass
from distgpt.core.components import components

run = preset(sys.argv[1], {"vocab_size": 256, "dtype": sys.argv[2], "matmul": sys.argv[3]})
small = replace(run, model=miniature(run.model))
work = partial(warmup_pass, config=small, strategy=components().strategy(run.train, 1))
stage = open_stage("serial", 2)
kernels = stage.kernels(run.train.dtype, run.train.matmul_backend)
missing = compile_workers.missing_loops(stage, run.train.dtype, run.train.matmul_backend, work)
print(len(missing), len(list(disk_cache.folder().glob("*.loop"))))
helper = compile_workers.started([compile_workers.loop_name(each) for each in missing])
assert helper.wait(300) == 0
before = len(list(disk_cache.folder().iterdir()))
work(kernels)
print(before, len(list(disk_cache.folder().iterdir())), first_use.has_compiled())
print(len(compile_workers.missing_loops(stage, run.train.dtype, run.train.matmul_backend, work)))
"""


@pytest.mark.ci
def test_compile_workers_find_and_compile_loops(tmp_path):
    env = {"DISTGPT_CACHE": str(tmp_path / "cache")}
    program = [sys.executable, "-c", FINDING]
    result = succeeded("tiny-adamw", "float32", "blas", program=program, env=env, timeout=300, by=distgpt)
    noted, again, missing = map(str.split, result.stdout.splitlines())
    assert int(noted[0]) > 15 and noted[1] == "0" and missing == ["0"]
    assert again[0] == again[1] and again[2] == "False"  # no file more, nothing reported
    small = "--n-layer 2 --seq-len 32 --batch-size 2 --data story --tokenizer byte --threads 2 --steps 3"
    weights = []
    for name, where in (("by a helper", env), ("by others", {})):
        out = tmp_path / name
        words = ("--preset", "tiny-adamw", "--set", "matmul=blas", *small.split(), "--out", out)
        succeeded("train", *words, env=where, timeout=300, by=distgpt)
        weights.append((out / "weights.safetensors").read_bytes())
    assert weights[0] == weights[1]
