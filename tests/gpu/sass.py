"""Disassemble CUDA kernels with NVIDIA's tool: their instructions, and whether each is in a loop."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
_LINE = re.compile(
    r"^(?P<label>[.$\w]+):|^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)(?P<rest>[^;]*)", re.MULTILINE
)
_TARGET = re.compile(r"`\(([.$\w]+)\)")
_DOUBLE = re.compile(r"D(ADD|FMA|MUL|SETP|MNMX)\b|(F2F|I2F|F2I|FRND)\b.*\bF64\b|MUFU\.\w*64H")


class Instruction(NamedTuple):
    op: str  # includes modifiers: "LDG.E.128"
    in_loop: bool

    @property
    def is_double(self) -> bool:
        """Whether it works on float64, which most GPUs do 32 or 64 times slower."""
        return bool(_DOUBLE.match(self.op))

    def matches(self, words: str) -> bool:
        """Whether it has all these modifiers: "LDG 128"."""
        return set(words.split()) <= set(self.op.split("."))


Kernel = list[Instruction]


@cache
def disassembler() -> Path | None:
    """Find nvdisasm in PyPI's wheel, a toolkit in CUDA_HOME, or the PATH."""
    wheels = find_spec("nvidia")
    for folder in (wheels.submodule_search_locations if wheels else None) or ():
        for tool in Path(folder).glob("*/bin/nvdisasm"):
            return tool
    homes = [Path(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    found = shutil.which("nvdisasm", path=os.pathsep.join(map(str, homes))) if homes else None
    found = found or shutil.which("nvdisasm")
    return Path(found) if found else None


def disassembled(cubin: bytes) -> dict[str, Kernel]:
    tool = disassembler()
    assert tool is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, *parts = _SECTION.split(done.stdout)
    return {name: _kernel(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _kernel(text: str) -> Kernel:
    """Parse instructions. A loop extends from a label to a branch back to the label."""
    ops: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in _LINE.finditer(text):
        if line["label"]:
            labels[line["label"]] = len(ops)
            continue
        if line["op"].startswith("BRA") and (target := _TARGET.search(line["rest"])):
            branches.append((len(ops), target[1]))
        ops.append(line["op"])
    looped = set[int]()
    for at, label in branches:
        if label in labels:
            looped.update(range(labels[label], at) if labels[label] < at else ())
    return [Instruction(op, i in looped) for i, op in enumerate(ops)]


def count(kernel: Kernel, words: str) -> int:
    """Count the instructions that have all these modifiers."""
    return sum(instruction.matches(words) for instruction in kernel)
