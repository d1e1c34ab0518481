"""The layers of the package: imports only from lower layers, heavy packages when needed, the core by itself."""

import ast
import functools
import graphlib
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import distgpt as package
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.components import Components

from conftest import ROOT, SMALL, ci_ranks, distgpt, losses, succeeded
from core import alone as core_alone

PACKAGE = ROOT / "distgpt"
# Packages and modules from the lowest layer up.
ORDER = (
    *("core.components", *(f"core.{name}" for name in ("base", "ops", "config", "comm"))),
    *("core.cpu.first_use", "core.cpu.pool", "core.cpu.compiling", "core.cpu.matmul", "core.cpu.teams"),
    *("core.cpu.fused", "core.cpu.kernels", "core.cpu.graphs", "core.cpu.stages", "core.cpu.compile_workers"),
    *(f"core.{name}" for name in ("cpu", "data", "model", "saved", "generate", "train")),
    *(f"corpora.{name}" for name in ("unreadable", "tokenizers", "shards", "prepare", "packing", "chats")),
    *("corpora", "cluster", "gpu", "parallel", "inference", "models", "show", "callbacks", "recipes"),
    *("api", "measure", "components", "assembly", "commands", "__main__", "core", ""),
)
# Importers of some packages. The root package leads to api.py and so to everything.
ONLY = {
    "cupy": ("gpu.",),
    "starlette": ("inference.serving.",),
    "uvicorn": ("inference.serving.",),
    "distgpt": ("commands.cli.", "__main__."),
}
# Forbidden imports that the order would allow.
NEVER = {
    "core.comm": ("distgpt.core.ops", "distgpt.core.cpu"),
    "gpu": ("distgpt.core.cpu.kernels", "distgpt.core.cpu.fused"),
}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*full.split("."))).with_suffix(".py").exists()
                yield full if is_module else node.module or ""


PATHS = {path.relative_to(ROOT).with_suffix("").parts: path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {".".join(part for part in parts[1:] if part != "__init__"): path for parts, path in PATHS.items()}
IMPORTS = {module: {*imported(ast.walk(parsed(path)))} for module, path in MODULES.items()}


def floor(module):
    parts = module.split(".")
    return next(ORDER.index(name) for n in range(len(parts), -1, -1) if (name := ".".join(parts[:n])) in ORDER)


@pytest.mark.parametrize("module", IMPORTS)
def test_imports_use_only_lower_layers(module):
    """`core.components` imports types, and plain versions when called."""
    for name in IMPORTS[module] if module != "core.components" else ():
        target = name.removeprefix("distgpt.")
        if target != name:
            assert floor(target) <= floor(module) or target == "core.components", target
        users = ONLY.get(name.split(".")[0] if name != "distgpt" else name)
        assert target != name or users is None or f"{module}.".startswith(users), name
        assert not any(module.startswith(room) and name.startswith(other) for room, other in NEVER.items()), name


def test_imports_have_no_cycles():
    files = {f"distgpt.{module}": names - {"distgpt.core.components"} for module, names in IMPORTS.items() if module}
    graphlib.TopologicalSorter(files).prepare()


def test_only_gpu_code_imports_gpu_at_top_level():
    for module, path in MODULES.items():
        tops = {f"{name}." for name in imported(parsed(path).body)}
        assert module.startswith("gpu") or not any(top.startswith("distgpt.gpu.") for top in tops), module


IMPORT = re.compile(r"^ *from (distgpt[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def taken(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in IMPORT.findall(node.value):
                yield from ((module, name.split()[0]) for name in names.split(","))


@pytest.mark.ci
@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "tests"])
def test_names_imported_outside_package_exist(folder):
    """mypy checks only the package, and some files need packages that are not installed."""
    for source, name in {each for path in (ROOT / folder).rglob("*.py") for each in taken(path)}:
        is_module = f"{source}.{name}".removeprefix("distgpt.") in MODULES
        assert is_module or hasattr(importlib.import_module(source), name), (source, name)


REFUSED = """sys.argv = ["distgpt", "train", *{!r}.split()]
from distgpt.commands.cli import main
try:
    main()
except SystemExit as done:
    assert done.code in (2, 65)"""


@pytest.mark.ci
@pytest.mark.parametrize("code, heavy", [
    ("import distgpt.commands.cli", "numpy numba mpi4py rich cupy starlette uvicorn"),
    *((REFUSED.format(words), "numpy numba rich") for words in ("--preset no", "--lr -1", "--n-embd 7", "--config no")),
    ("import distgpt.core.saved.modelfile", "numba"),
    ("import distgpt.commands.train, distgpt.commands.runs, distgpt.show.display, distgpt.inference.generation.batch; "
     "import distgpt.core.generate.single", "matplotlib jinja2 numba"),
    ("import distgpt; distgpt.init('microgpt').loss([[1, 2]], [[2, 3]])", "mpi4py cupy"),
])  # fmt: skip
def test_heavy_packages_are_loaded_lazily(code, heavy):
    script = f"import sys\n{code}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert not loaded & set(heavy.split()) and ("numba" in loaded) == ("init" in code), loaded & set(heavy.split())


# Records the modules and files that a run uses in its first step.
LOADED = """
import inspect, json, sys
from pathlib import Path
from distgpt.commands.cli import main
from distgpt.core.train.step import Step

launch, ran = Step.launch, set()

def note(frame, event, arg):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no module, no class
        ran.add(frame.f_code.co_filename)

def seen(*args):
    result = launch(*args)
    sys.setprofile(None)
    Path(__file__).with_suffix(".json").write_text(json.dumps([[*sys.modules], [*ran]]))
    return result

Step.launch = seen
sys.setprofile(note)
main()
"""
# Modules that a plain run does not load, files that it does not call, and their users.
LATER = {
    "core.generate.engine": "--sample-every, and the report of a run that is over",
    "core.train.assessment": "--val, --val-fraction, metrics",
    "parallel.choose": "several ranks",
}
UNUSED = {
    "core.saved.checkpoint": "a directory that was there, and what is saved",
    "core.train.resume": "--resume",
    "core.train.summary": "the end of a run",
}


@pytest.mark.ci
def test_plain_run_loads_only_needed_modules(tmp_path):
    (script := tmp_path / "run.py").write_text(LOADED)
    words = [*SMALL, "--tokenizer", "byte", "--steps", "1", "--progress", "plain", "--out", tmp_path / "run"]
    succeeded("train", *words, program=[sys.executable, script], by=distgpt)
    loaded, ran = map(set, json.loads(script.with_suffix(".json").read_text()))
    assert MODULES.keys() >= LATER.keys() and "distgpt.core.train.step" in loaded
    assert not loaded & {f"distgpt.{name}" for name in LATER}
    assert str(MODULES["core.train.step"]) in ran and not ran & {str(MODULES[name]) for name in UNUSED}


@pytest.mark.parametrize("make", [
    lambda plain: plain.stage("cuda"), lambda plain: plain.kernels("int8"), lambda plain: plain.text("shards"),
    lambda plain: plain.quantized("int8"), lambda plain: plain.part("adapter"), lambda plain: plain.metric("bleu"),
])  # fmt: skip
def test_plain_components_reject_unknown_names(make):
    with pytest.raises(UsageError, match=r"unknown .*'(cuda|int8|shards|adapter|bleu)'"):
        make(Components())


@ci_ranks
@pytest.mark.timeout(900)  # compiling may take minutes
@pytest.mark.parametrize("ranks", [1, 2])
def test_core_matches_whole_program(ranks, tmp_path):
    program, alone, whole = [sys.executable, core_alone.__file__], tmp_path / "alone", tmp_path / "whole"
    stage = "serial" if ranks == 1 else "mpi"
    for steps in (3, 6):
        result = succeeded(stage, alone, str(steps), program=program, ranks=ranks, timeout=600, by=distgpt)
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in core_alone.SIZE.items() if name != "matmul"]
    (tmp_path / "own.toml").write_text('matmul = "own"')
    words = [*settings, "--config", tmp_path / "own.toml", "--threads=1", f"--stage={stage}"]
    for more in (["--steps=3"], ["--steps=6", "--resume=auto"]):
        succeeded("train", *words, *more, "--out", whole, ranks=ranks, by=distgpt)
    assert losses(alone) == losses(whole) and len(losses(alone)) == 6
    assert len({(run / "weights.safetensors").read_bytes() for run in (alone, whole)}) == 1
    if ranks == 1:
        text = package.load(whole / "weights.safetensors").generate("The", max_new_tokens=8, temperature=0)
        assert result.stdout.rstrip("\n").endswith(text.rstrip("\n"))
