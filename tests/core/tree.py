"""What still leads out of the core: `leads_out.txt`, which only becomes shorter.

    python tests/core/tree.py            what leads out now, and how far the core is from its aims
    python tests/core/tree.py --write    keep that, once it has become less

The core is what a plain `distgpt train` and a plain `distgpt infer` need: `distgpt/core/`, which is to import
nothing of distgpt outside itself.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "distgpt"
KEPT = Path(__file__).with_name("leads_out.txt")

# The folders of the core from the ground up.
TREE = ("base", "ops", "config", "comm", "cpu", "data", "model", "saved", "generate", "train")
# What components are called. The settings name them, so `config` is left out.
WORDS = (
    *("lora", "adapter", "outer", "reproducible", "int8", "int4"),
    *("chat", "hellaswag", "nccl", "slurm"),
)
AIMS = {"Any": 80, "cast": 17}


def modules() -> Iterator[tuple[str, Path]]:
    """Find every module of the package by its name below `distgpt`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), path


MODULES = dict(modules())
CORE = frozenset(name for name in MODULES if name.startswith("core."))


def folder(module: str) -> str:
    """Return in which folder of the core a module lies; "" for core/__init__.py."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[str]:
    """Find the modules of the package that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("distgpt.") in MODULES else node.module for name in members]
        else:
            continue
        yield from (name.removeprefix("distgpt.") for name in names if name.startswith("distgpt."))


def leading_out() -> Iterator[str]:
    """Find imports from core of what is not core."""
    for module in sorted(CORE):
        for target in sorted(set(imports(MODULES[module])) - CORE):
            yield f"{module} imports {target}"


def going_up() -> Iterator[str]:
    """Find imports within the core from a higher folder of it than the importing file's own."""
    for module in sorted(CORE):
        for target in sorted(set(imports(MODULES[module])) & CORE):
            if TREE.index(folder(target)) > TREE.index(folder(module)):
                yield f"{module} climbs to {target}"


def words() -> Iterator[str]:
    """Count the names of components in the core, in each folder of it but `config`."""
    for each in TREE:
        texts = [MODULES[name].read_text() for name in CORE if folder(name) == each != "config"]
        for word in WORDS:
            if count := sum(len(re.findall(f"(?<!u){word}", text, re.IGNORECASE)) for text in texts):
                yield f"{each} says {word} {count}"


def loose_types() -> Iterator[str]:
    """Count in the core what a type checker cannot follow."""
    found = Counter(
        word for name in CORE for word in re.findall(r"\bAny\b|\bcast\(", MODULES[name].read_text())
    )
    for word, aim in AIMS.items():
        yield f"{word} {max(found[word] + found[word + '('], aim)}"


def found() -> list[str]:
    return [*leading_out(), *going_up(), *words(), *loose_types()]


def as_counts(lines: list[str]) -> dict[str, int]:
    """Read lines that end with a number as that number; others count once."""
    split = (line.rsplit(" ", 1) for line in lines)
    return {
        name if last.isdigit() else f"{name} {last}": int(last) if last.isdigit() else 1
        for name, last in split
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        KEPT.write_text("\n".join(found()) + "\n")
    now = found()
    kinds = Counter(word for line in now for word in ("imports", "climbs") if f" {word} " in line)
    print(*now, sep="\n")
    print(f"{kinds['imports']} imports lead out of the core, {kinds['climbs']} up within it")
