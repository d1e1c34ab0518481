"""The plan of the house: a file imports only from floors below its own, and heavy packages only when due."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "distgpt"

# From the ground up. Files on one floor do not import each other, except inside one folder.
FLOORS = [
    ["errors"],
    ["config", "memory", "storage", "reporting", "children"],
    ["presets", "weightsfile", "rows", "gpu", "kernels.api", "comm.api", "comm.cores"],
    ["checkpoint", "settings", "kernels", "comm", "layers"],
    ["corpus", "gradsync", "rundir", "model", "leaving", "accelerator", "tensorboard"],
    ["passes", "optim", "stages"],
    ["step", "generate", "modelfile", "facts", "counts", "curves", "start", "peaks"],
    ["infer", "api", "timing", "diagnosis", "huggingface", "evaluation", "environment", "launcher"],
    ["sizing", "weightsinfo", "profiling"],
    ["train", "display", "estimate"],
    ["run", "doctor", "plot", "datapages", "estimate_page", "summary"],
    ["bench", "comparing"],
    ["commands"],
    ["cli"],
    ["__main__"],
    [""],  # distgpt/__init__.py, which only names what api.py offers
]
SIDES = (
    "gpu",
    "kernels",
    "comm",
    "corpus",
    "huggingface",
    "evaluation",
    "reporting",
    "profiling",
    "bench",
    "comparing",
    "commands",
)  # of these, kernels and comm know nothing of each other


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(p for p in parts if p != "__init__"), path


def floor_of(module):
    for name in (module, module.split(".")[0]):
        for height, names in enumerate(FLOORS):
            if name in names:
                return height
    raise AssertionError(f"{module} has no floor yet: give it one")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / Path(*full.split("."))).with_suffix(".py").exists()
                yield full if is_module else node.module


MODULES = dict(modules())


@pytest.mark.parametrize("module", MODULES)
def test_stairs_run_down_only(module):
    folder = module.split(".")[0]
    for name in imports(MODULES[module]):
        if not name.startswith("distgpt.") or not module:
            continue
        target = name.removeprefix("distgpt.")
        same_folder = target.split(".")[0] == folder and folder in SIDES
        assert same_folder or floor_of(target) < floor_of(module), f"{module} must not import {target}"


@pytest.mark.parametrize("module", MODULES)
def test_kernels_and_communicators_do_not_know_each_other(module):
    pairs = {"kernels": "distgpt.comm", "comm": "distgpt.kernels"}
    forbidden = pairs.get(module.split(".")[0])
    assert not forbidden or not any(name.startswith(forbidden) for name in imports(MODULES[module]))


def test_every_file_says_what_it_is_for_and_stays_small():
    for module, path in MODULES.items():
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{module} does not say what it is for"
        assert len(text.splitlines()) <= 350, f"{module} is too long for one reason to exist"


def loaded_after(code):
    script = f"import sys; {code}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_command_line_loads_nothing_heavy():
    assert not loaded_after("import distgpt.cli") & {"numpy", "numba", "mpi4py", "rich", "cupy"}


def test_the_serial_stage_needs_neither_mpi_nor_a_gpu():
    loaded = loaded_after("import distgpt; distgpt.init('microgpt').loss([[1, 2]], [[2, 3]])")
    assert "numba" in loaded and not loaded & {"mpi4py", "cupy"}
