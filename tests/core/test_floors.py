"""The plan of the house: a file imports only from floors below its own, and heavy packages only when due."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

PACKAGE = ROOT / "distgpt"
# The folders of the core from the ground up.
TREE = ("base", "ops", "config", "comm", "cpu", "data", "model", "saved", "generate", "train")

# Rooms and loose files from the ground up, those of the core first: each imports only from those before it.
ORDER = (
    "core.components",
    *(f"core.{name}" for name in TREE),
    *("corpora", "cluster", "gpu", "parallel", "inference", "models", "show", "callbacks", "recipes"),
    *("api", "measure", "components", "assembly", "commands", "__main__", ""),
)
# Folders and files inside a folder from the ground up; "" are those that are not named.
INSIDE = {
    "core.cpu": (
        *("first_use", "pool", "compiling", "matmul", "teams", "fused"),
        *("kernels", "graphs", "stages", "compile_workers"),
    ),
    "corpora": ("unreadable", "tokenizers", "shards", "prepare", "packing", "chats"),
}
LONGEST = 50  # lines of a function
LONGER = {
    "commands.bench:add",
    "commands.jobs:submit",
    "commands.train:_report",
    "commands.train:train",
    "core.train.setup:_assemble",
    "core.train.setup:_open_directory",
    "corpora.tokenizers.bpe_fast:fill_ids",
    "measure.estimate:estimate",
    "show.plot:draw",
}
# What must not know each other, though the order would allow it.
NEVER = {
    "core.comm": ("distgpt.core.ops", "distgpt.core.cpu"),
    "gpu": ("distgpt.core.cpu.kernels", "distgpt.core.cpu.fused"),
}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def room(module):
    """Return the folder or loose file that a module belongs to; the core's folders are rooms of their own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "core" else parts[0]


def inner(module):
    """Return the file or folder of a module inside its room."""
    return module.removeprefix(room(module)).removeprefix(".").split(".")[0]


@functools.cache
def imports(path):
    """Find the modules that a file imports, wherever in it."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / Path(*full.split("."))).with_suffix(".py").exists()
                found.append(full if is_module else node.module)
    return found


MODULES = dict(modules())


def within(path):
    """Find what a file imports of the package."""
    yield from (name.removeprefix("distgpt.") for name in imports(path) if name.startswith("distgpt."))


@pytest.mark.ci
def test_imports_run_down_only():
    """`core.components` names every seam: it imports types, and plain versions when called."""
    for module, path in MODULES.items():
        for target in within(path) if module not in ("core", "core.components") else ():
            is_lower = ORDER.index(room(target)) <= ORDER.index(room(module))
            assert is_lower or target == "core.components", f"{module} must not import {target}"


def test_imports_run_down_inside_a_folder():
    for module, path in MODULES.items():
        order = INSIDE.get(room(module), ())
        for target in within(path) if order and module != room(module) else ():
            if room(target) == room(module):
                mine, its = (order.index(inner(m) if inner(m) in order else "") for m in (module, target))
                assert its <= mine, f"{module} must not import {target}"


def test_only_the_entry_point_imports_the_package_root():
    """Its lazy imports lead to api.py, so that whoever imports it would depend on everything."""
    for module, path in MODULES.items():
        assert module in ("commands.cli", "__main__") or "distgpt" not in imports(path), module


def test_no_two_files_import_each_other():
    """Neither directly nor through others, and not for types alone."""
    files = {f"distgpt.{name}": set(imports(path)) for name, path in MODULES.items() if name}
    files = {name: names & files.keys() - {"distgpt.core.components"} for name, names in files.items()}
    while leaves := [name for name, names in files.items() if not names]:
        for name in leaves:
            del files[name]
        files = {name: names - set(leaves) for name, names in files.items()}
    assert not files, f"among these is a circle: {sorted(files)}"


def names_of(path):
    """What a file defines or imports at its top level, also within `if` and `try`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


IMPORT = re.compile(r"^ *from (distgpt[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def taken(path):
    """Find what a file takes from the package, also in programs that it holds as strings."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in IMPORT.findall(node.value):
                yield from ((module, name.split()[0]) for name in names.split(","))


@pytest.mark.ci
def test_what_tests_benchmarks_and_pages_import_is_there():
    """mypy sees the package alone, and some of these files run only with what is not installed here."""
    known = {name: {*names_of(path)} for name, path in MODULES.items()}
    for folder in ("benchmarks", "docs", "examples", "tests"):
        for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
            for source, name in taken(path):
                module = source.removeprefix("distgpt").removeprefix(".")
                there = f"{module}.{name}".removeprefix(".") in MODULES or name in known.get(module, ())
                assert there, f"{path}: {source} has no {name}"


def test_what_must_not_know_each_other():
    for module, path in MODULES.items():
        forbidden = NEVER.get(room(module), ())
        assert not any(name.startswith(forbidden) for name in imports(path)), module


def test_only_gpu_loads_cupy():
    for module, path in MODULES.items():
        assert room(module) == "gpu" or "cupy" not in {name.split(".")[0] for name in imports(path)}, module


def test_only_what_is_for_gpus_imports_gpu_at_its_top():
    """A command on CPUs runs where that component is not installed."""
    for module, path in MODULES.items():
        tops = (node.module or "" for node in parsed(path).body if isinstance(node, ast.ImportFrom))
        assert room(module) in ("gpu", "experimental") or not any(
            f"{top}.".startswith("distgpt.gpu.") for top in tops
        ), module


def test_only_serving_loads_a_web_server():
    for module, path in MODULES.items():
        found = {name.split(".")[0] for name in imports(path)}
        assert module.startswith("inference.serving") or not found & {"starlette", "uvicorn"}, module


def test_every_file_says_what_it_is_for():
    for module, path in MODULES.items():
        assert ast.get_docstring(parsed(path)), f"{module} does not say what it is for"


def test_a_function_fits_on_a_screen():
    """These are exceptions: options of a command, code compiled as one, the opening of a run."""
    found = {
        f"{module}:{node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST
    }
    assert found <= LONGER, found - LONGER


def loaded_after(code):
    script = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.ci
def test_the_command_line_loads_nothing_heavy():
    assert not loaded_after("import distgpt.commands.cli") & {
        "numpy",
        "numba",
        "mpi4py",
        "rich",
        "cupy",
        "starlette",
        "uvicorn",
    }


@pytest.mark.ci
def test_what_train_refuses_at_once_it_refuses_before_anything_heavy_is_loaded():
    for words in ("--preset nope", "--lr -1", "--n-embd 7", "--config no"):
        script = f"""import sys; sys.argv = {["distgpt", "train", *words.split()]}
from distgpt.commands.cli import main
try:
    main()
except SystemExit as done:
    assert done.code in (2, 65)"""
        assert not loaded_after(script) & {"numpy", "numba", "rich"}, words


@pytest.mark.ci
def test_files_in_int8_are_read_without_compiled_loops():
    assert "numba" not in loaded_after("import distgpt.core.saved.modelfile")


@pytest.mark.ci
def test_the_serial_stage_needs_neither_mpi_nor_a_gpu():
    loaded = loaded_after("import distgpt; distgpt.init('microgpt').loss([[1, 2]], [[2, 3]])")
    assert "numba" in loaded and not loaded & {"mpi4py", "cupy"}
