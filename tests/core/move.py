"""Move every module to where it will live: the core to distgpt/core, each component to a folder of its own.

    python tests/core/move.py            what would move where
    python tests/core/move.py --do       git mv, and paths in all files; then `make format`

It changes nothing but places: names of modules stay, but for those in RENAMED. No file stays behind at an old
place. What depends on the depth of a path is to be mended by hand: `disk_cache.KERNELS`,
`site_cache.PACKAGE`, `files.bundled`, `facts._git`. This file is gone once it has been run.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tree import MODULES, PACKAGE, TREE

ROOT = PACKAGE.parent
# Folders of distgpt for what is not core, with today's modules; `folder.*` are all that are left in there.
COMPONENTS = {
    "parallel": "training.exchange.* training.opening.balance",
    "guards": "training.guards.* training.timed",
    "adapters": """model.lora saved.adapter inference.adapters kernels.fused.low_rank
        kernels.decoding.low_rank training.opening.adapter_kind""",
    "rounded": "kernels.rounded.* model.packed model.rounding saved.rounded saved.calibration",
    "processors": """kernels.compiling.arm kernels.matmul.amx kernels.matmul.mmla kernels.matmul.neon
        kernels.matmul.tiles kernels.matmul.widening""",
    "recipes": "config.dial model.bigrams training.opening.*",
    "formats": "saved.families saved.family saved.fetched saved.huggingface saved.llama saved.peft",
    "formats.gguf": "saved.gguf.*",
    "texts": "data.packing",
    "texts.chats": "data.chats.*",
    "texts.prepare": "data.prepare.*",
    "texts.tokenizers": "data.tokenizers.*",
    "generation": "inference.*",
}
# Loops and matmuls of CPUs keep folders of their own within the core.
INNER = {f"kernels.{name}": f"core.cpu.{name}" for name in ("compiling", "matmul", "fused", "decoding")}
RENAMED = {
    "training.exchange.api": "core.train.exchange",
    "kernels.cpu": "core.cpu.kernels",
    "kernels.rounded.cpu": "rounded.kernels",
    "model.rounding": "rounded.bits",
    "model.trace": "measure.trace",
    "data.tokenizers.naming": "core.data.tokenizers",
    "kernels.fused.low_rank": "adapters.loops",
    "kernels.decoding.low_rank": "adapters.decoding",
    "config.dial": "recipes.scaling",
    "training.opening.dial": "recipes.depth",
}
TEXTS = {".py", ".md", ".toml", ".ipynb", ".yml", ".sh", ".txt", ".cu", ".h"}


def places() -> dict[str, str]:
    """Return the new name of each module that moves, by its present one."""
    found: dict[str, str] = {}
    for folder, names in TREE.items():
        for name in names.split():
            within = INNER.get(name.rpartition(".")[0], f"core.{folder}")
            stem = name.rpartition(".")[2]
            found[name] = "core.config" if name == "config" else f"{within}.{stem}"
    for folder, patterns in COMPONENTS.items():
        for pattern in patterns.split():
            for name in matching(pattern):
                found.setdefault(name, f"{folder}.{name.rpartition('.')[2]}")
    return found | {name: place for name, place in RENAMED.items() if name in MODULES}


def matching(pattern: str) -> Iterator[str]:
    within, _, last = pattern.rpartition(".")
    if last != "*":
        if pattern in MODULES:
            yield pattern
        return
    for name, path in MODULES.items():
        if name.startswith(f"{within}.") and path.name != "__init__.py":
            yield name


def file_of(name: str) -> Path:
    return Path("distgpt", *name.split("."))


class Paths:
    """Rewrites what names a module: imports, dotted names in texts, paths of files."""

    def __init__(self, moved: dict[str, str]) -> None:
        self.moved = moved
        longest = sorted(moved, key=len, reverse=True)
        dotted = "|".join(re.escape(name) for name in longest)
        self._dotted = re.compile(rf"\bdistgpt\.({dotted})\b(?!\.py)")
        slashed = "|".join(re.escape(name.replace(".", "/")) for name in longest)
        self._slashed = re.compile(rf"(?<![\w/])(distgpt/)?({slashed})\.py\b")

    def rewritten(self, path: Path, text: str) -> str:
        if path.suffix == ".py":
            text = self._imports(text)
        text = self._dotted.sub(lambda found: f"distgpt.{self.moved[found[1]]}", text)
        return self._slashed.sub(self._path, text)

    def _path(self, found: re.Match[str]) -> str:
        return (found[1] or "") + self.moved[found[2].replace("/", ".")].replace(".", "/") + ".py"

    def _imports(self, text: str) -> str:
        """Split imports of modules from a folder, where these now lie in several."""
        lines = text.splitlines(keepends=True)
        for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "distgpt":
                continue
            folder = str(node.module).removeprefix("distgpt").removeprefix(".")
            modules = [alias for alias in node.names if f"{folder}.{alias.name}".lstrip(".") in self.moved]
            if not modules:
                continue
            indent, made = " " * node.col_offset, []
            for alias in modules:
                within, _, name = self.moved[f"{folder}.{alias.name}".lstrip(".")].rpartition(".")
                called = alias.asname or alias.name
                alias_of = f" as {called}" * (called != name)
                made.append(f"{indent}from distgpt.{within} import {name}{alias_of}")
            rest = [alias for alias in node.names if alias not in modules]
            if rest:
                names = ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in rest)
                made.append(f"{indent}from {node.module} import {names}")
            lines[node.lineno - 1 : node.end_lineno] = ["\n".join(made) + "\n"]
        return "".join(lines)


def main(do: bool) -> None:
    moved = {name: place for name, place in places().items() if name != place}
    if len(set(moved.values())) < len(moved):
        twice = {place for place in moved.values() if [*moved.values()].count(place) > 1}
        sys.exit(f"two modules would have one place: {sorted(twice)}")
    if not do:
        for name, place in sorted(moved.items(), key=lambda pair: pair[1]):
            print(f"{name} -> {place}")
        return
    paths = Paths(moved)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for file in (ROOT / name for name in tracked.stdout.split("\n") if Path(name).suffix in TEXTS):
        text = file.read_text()
        if (new := paths.rewritten(file, text)) != text:
            file.write_text(new)
    for name, place in moved.items():
        source, target = MODULES[name], ROOT / file_of(place)
        target = target / "__init__.py" if source.name == "__init__.py" else target.with_suffix(".py")
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(source), str(target)], cwd=ROOT, check=True)
    for folder in sorted({ROOT / file_of(place).parent for place in moved.values()}):
        for each in (folder, *(above for above in folder.parents if above.is_relative_to(PACKAGE))):
            if not (each / "__init__.py").exists():
                (each / "__init__.py").write_text(f'"""{each.name}\\n\\nNot here: to be said.\\n"""\n')


if __name__ == "__main__":
    main("--do" in sys.argv[1:])
