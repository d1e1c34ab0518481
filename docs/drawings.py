"""Drawings of the documentation, made from the code: `python docs/drawings.py` writes docs/images/*.svg.

A test compares the files with new drawings, so that they match the code.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from distgpt.cluster.affinity.machine import Cpu, Machine
from distgpt.cluster.affinity.plan import blocks, recommended
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.compiling.processor import AVX512_BF16
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.measure.profile.operations import OPERATIONS

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
INK, FAINT, LINE = "#1b2a2f", "#5b6b70", "#9aa8ac"
TEAL, SAND, ROSE, BLUE, PLAIN = "#cfe8e4", "#f6e6c8", "#f4d3d0", "#d5e2f5", "#eceff0"


class Drawing:
    """An SVG with a white background, which is also readable on dark pages."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = LINE) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}"'
            f' stroke="{edge}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        fill: str = INK,
        anchor: str = "middle",
        **more: str,
    ) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{extra}>'
            f"{escape(words, quote=False)}</text>"
        )

    def path(self, d: str, color: str = LINE, width: float = 1.2, arrow: bool = False) -> None:
        end = ' marker-end="url(#end)"' if arrow else ""
        self.parts.append(f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{width:g}"{end}/>')

    def svg(self) -> str:
        font = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' role="img" {font}>\n'
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto"><path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker></defs>\n'
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="8" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


# -- imports


def house() -> Drawing:
    """Draw the imports between directories, without lines that follow from others."""
    needs = imports()
    levels: dict[str, int] = {}
    for name in needs:
        _level(name, needs, levels)
    floors = [sorted(n for n in needs if levels[n] == i) for i in range(max(levels.values()) + 1)]
    width, step, wide, high = 900.0, 54.0, 120.0, 30.0
    drawing = Drawing(
        width, len(floors) * step + 30, "The directories of distgpt, which import only from directories below"
    )
    at: dict[str, tuple[float, float]] = {}
    for i, names in enumerate(floors):
        names.sort(key=lambda name: sum(at[n][0] for n in needs[name]) / max(1, len(needs[name])))
        for j, name in enumerate(names):
            at[name] = (width * (j + 1) / (len(names) + 1), (len(floors) - 1 - i) * step + 24)
    for name, others in needs.items():
        for other in sorted(others - {far for near in others for far in _all_below(near, needs)}):
            (x, y), (u, v) = at[name], at[other]
            drawing.path(f"M{x:g} {y + high:g}C{x:g} {y + 50:g} {u:g} {v - 20:g} {u:g} {v:g}")
    for name, (x, y) in at.items():
        drawing.box(x - wide / 2, y, wide, high, SAND if name.startswith(CORE) else PLAIN)
        drawing.text(x, y + 20, name, 14, font_weight="600")
    return drawing


CORE = "core/"


def imports() -> dict[str, set[str]]:
    """Return the imports of each directory of the package."""
    package = ROOT / "distgpt"
    needs: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        name = _room(path.relative_to(package).with_suffix("").parts)
        if name is None:
            continue
        found = {_room(module.split(".")[1:]) for module in _modules(path.read_text())} - {None, name}
        needs.setdefault(name, set()).update(found)  # type: ignore[arg-type]
    return needs


def _modules(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "distgpt" else [str(node.module)]


def _room(parts: Sequence[str]) -> str | None:
    """Return the directory of a module; in the core, its subdirectory.

    None for the entry points, and for core/components.py, which imports all directories when it is called.
    """
    if not parts or parts[0] in ("__init__", "__main__"):
        return None
    if parts[0] == "core" and parts[1] in ("__init__", "components"):
        return None
    return f"{CORE}{parts[1]}" if parts[0] == "core" else parts[0]


def _level(name: str, needs: dict[str, set[str]], levels: dict[str, int]) -> int:
    if name not in levels:
        levels[name] = 1 + max((_level(other, needs, levels) for other in needs[name]), default=-1)
    return levels[name]


def _all_below(name: str, needs: dict[str, set[str]]) -> set[str]:
    return needs[name] | {far for near in needs[name] for far in _all_below(near, needs)}


# -- a step


class Recorded(Kernels):
    """Kernels that record the name and the output shape of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return _noting(name, found, self.calls) if name in OPERATIONS else found


def _noting(
    name: str, work: Callable[..., Any], calls: list[tuple[str, tuple[int, ...]]]
) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        first = args[0] if hasattr(args[0], "shape") else args[0].w  # weights and bias
        before = len(calls)
        calls.append((name, first.shape))
        result = work(*args, **more)
        del calls[before + 1 :]  # operations called by this one
        return result

    return call


STEPS = (
    *("look up the tokens", "norm", "queries, keys, values", "attention", "projection", "norm"),
    *("MLP: up, and activation", "MLP: down", "norm", "scores and loss"),
)


def step() -> Drawing:
    """Draw the operations of a step with one layer: forward, backward, and gradients of weights."""
    forward, backward, weights = passes()
    row, top = 46.0, 74.0
    drawing = Drawing(900, top + row * len(STEPS) + 16, "The operations of a training step")
    for x, words in ((300, "forward ↓"), (560, "↑ backward, into the input"), (775, "into the weights")):
        drawing.text(x, 32, words, 15, font_weight="600")
    drawing.text(300, 50, "activations", 12, FAINT)
    drawing.text(560, 50, "gradients of activations", 12, FAINT)
    drawing.text(775, 50, "summed over all rows", 12, FAINT)
    drawing.box(14, top + row - 6, 872, row * 7, "#fafbfb", PLAIN)
    middle = top + row * 4.5 - 6
    turned = f"rotate(-90 28 {middle:g})"
    drawing.text(28, middle, "each layer", 12, FAINT, transform=turned)
    for i, words in enumerate(STEPS):
        y = top + i * row
        drawing.text(190, y + 22, words, 13, INK, "end")
        _operation(drawing, 300, y, *forward[i], BLUE)
        if i + 1 < len(STEPS):
            drawing.path(f"M300 {y + 34:g}V{y + row - 1:g}", FAINT, arrow=True)
        else:
            drawing.path(f"M400 {y + 17:g}H560V{y - 11:g}", FAINT, arrow=True)
        begin = f"M560 {y + row:g}V{y + 17:g}"  # start of the arrow into the weights
        if back := backward[i]:
            _operation(drawing, 560, y, *back, ROSE)
            drawing.path(f"M560 {y + row:g}V{y + 35:g}", FAINT, arrow=True)
            begin = f"M660 {y + 17:g}"
        if into := weights[i]:
            drawing.path(f"{begin}H684", FAINT, arrow=True)
            _operation(drawing, 775, y, *into, SAND, 180)
    return drawing


def _operation(
    drawing: Drawing, x: float, y: float, name: str, shape: str, fill: str, wide: float = 200
) -> None:
    drawing.box(x - wide / 2, y, wide, 34, fill)
    drawing.text(x, y + 15, name, 12, font_family="ui-monospace, monospace")
    drawing.text(x, y + 28, shape, 10.5, FAINT)


Call = tuple[str, str]  # an operation and its output shape


def passes() -> tuple[list[Call], list[Call | None], list[Call | None]]:
    """Return the operations of a step of a model of one layer, each in the order of STEPS.

    Forward; backward into the input; into the weights, the embedding's first.
    """
    config = ModelConfig(vocab_size=64, seq_len=8, n_layer=1, n_head=3, n_embd=12)
    kernels = Recorded()
    model = Model(Architecture(config), kernels)
    model.allocate_master_weights()
    work = Pass(model, 2, config.seq_len, training=True, recompute="none")
    tokens = kernels.integers([0] * work.n_rows)
    kernels.calls.clear()
    work.loss_and_gradients(tokens, tokens, 1.0, False)
    names = {16: "N", 12: "C", 36: "3 C", 48: "4 C", 64: "V", 8: "T"}
    calls = [
        (name, " × ".join(names[n] for n in shape))
        for name, shape in kernels.calls
        if name not in ("sum", "zero", "sort_tokens")
    ]
    forward = [call for call in calls if "backward" not in call[0]]
    summed = [call for call in calls if call[0].endswith("_weights")]
    *backward, embedding = (call for call in calls if "backward" in call[0] and call not in summed)
    assert len(forward) == len(STEPS) == len(backward) + 2, calls
    last_first = iter(summed)
    inner = [None if name == "attention" else next(last_first) for name, _ in reversed(forward[1:-1])]
    assert not list(last_first), calls
    return forward, [None, *reversed(backward), None], [embedding, *reversed(inner), None]


# -- the buffer of gradients


def buffer() -> Drawing:
    """Draw the gradients of GPT-2 124M in memory order, and one layer's enlarged."""
    layout = Architecture(
        ModelConfig(vocab_size=50257, seq_len=1024, n_layer=12, n_head=12, n_embd=768)
    ).layout
    whole: dict[str, int] = {}
    layer: dict[str, int] = {}
    for spec in layout.specs:
        parts = spec.name.split(".")
        kind = f"layer {parts[1]}" if parts[0] == "blocks" else parts[0]
        whole[kind] = whole.get(kind, 0) + spec.size
        if kind == "layer 0":
            layer[".".join(parts[2:])] = spec.size
    drawing = Drawing(900, 236, "The gradients of GPT-2 124M, in one buffer")
    drawing.text(
        450,
        28,
        f"all gradients of GPT-2 124M: {sum(whole.values()):,} numbers in one array",
        15,
        font_weight="600",
    )
    bounds = _bar(drawing, 20, 44, 860, whole, 9)
    left, right = bounds["layer 0"]
    drawing.path(f"M{left:g} 86L60 118M{right:g} 86L760 118", LINE)
    _bar(drawing, 60, 118, 700, layer, 12)
    drawing.text(772, 143, "one layer", 12, FAINT, "start")
    drawing.path("M20 184H878", FAINT, arrow=True)
    drawing.text(
        20, 202, "the backward pass finishes them in this order, the last layer first", 13, INK, "start"
    )
    drawing.text(
        20,
        222,
        "then: one Allreduce over the whole array, and every number × 1 / world size",
        13,
        INK,
        "start",
    )
    return drawing


def _bar(
    drawing: Drawing, x: float, y: float, wide: float, sizes: dict[str, int], letters: float
) -> dict[str, tuple[float, float]]:
    """Draw parts with a length by size, with their names if they fit; return their positions."""
    bounds, scale = {}, wide / sum(sizes.values())
    for name, size in sizes.items():
        fill = SAND if name.startswith("w") and "." not in name else TEAL
        drawing.box(x, y, size * scale, 42, fill)
        short = name.removeprefix("layer ")
        if size * scale > 0.65 * letters * len(short):
            drawing.text(x + size * scale / 2, y + 26, short, letters)
        bounds[name] = x, x + size * scale
        x += size * scale
    return bounds


# -- a tile of a matmul


def tile() -> Drawing:
    """Draw the registers of a microkernel for AVX-512 and its inputs for one k."""
    shape, cell = AVX512_BF16, 17.0
    depth, left, top = 10, 250.0, 216.0
    across, down = shape.columns * cell, shape.rows * cell
    drawing = Drawing(900, top + down + 70, "A tile of C = A B")
    for k in range(depth):
        now = k == 4
        drawing.box(left, 36 + k * cell, across, cell, SAND if now else PLAIN)
        drawing.box(left - 20 - (depth - k) * cell, top, cell, down, ROSE if now else PLAIN)
    for row in range(shape.rows):
        for vector in range(shape.vectors):
            x = left + vector * shape.lanes * cell
            drawing.box(x, top + row * cell, shape.lanes * cell, cell, BLUE if row == 5 else TEAL)
    drawing.box(left - 20 - (depth - 4) * cell, top + 5 * cell, cell, cell, "#e39b94")
    drawing.text(
        left + across / 2, 24, f"B: a panel of {shape.columns} columns, packed, one k below the other", 13
    )
    drawing.text(left - 20 - depth * cell / 2, top - 10, f"A: {shape.rows} rows, in place", 13)
    sums = shape.rows * shape.vectors
    foot = top + down
    drawing.text(left + across / 2, foot + 22, f"C: {sums} registers of {shape.lanes} sums each", 13)
    words = f"for each k: {shape.vectors} registers of B are loaded; each element of A meets both of them"
    drawing.text(450, foot + 50, words, 13)
    return drawing


# -- a node


def node() -> Drawing:
    """Draw ranks and threads on two sockets of four NUMA regions with 16 cores each."""
    machine = two_sockets(regions=4, cores=16, cache=4)
    advice = recommended(machine)
    title = f"A node of {len(machine.cpus)} cores: {advice.ranks} ranks of {advice.threads} threads"
    rank_of = {
        seat: rank
        for rank, block in enumerate(blocks(machine, advice.ranks))
        for seat in block.seats[: advice.threads]
    }
    drawing = Drawing(900, 340, title)
    for socket, of_socket in groupby(machine.cpus, lambda cpu: cpu.socket):
        top = 10.0 + 162 * socket
        drawing.box(10, top, 880, 154, "#ffffff")
        drawing.text(20, top + 20, f"socket {socket}", 14, anchor="start", font_weight="600")
        for column, (region, cpus) in enumerate(groupby(of_socket, lambda cpu: cpu.region)):
            draw_region(drawing, 20 + column * 217, top + 30, region, list(cpus), rank_of)
    return drawing


def draw_region(
    drawing: Drawing, x: float, y: float, region: int, cpus: Sequence[Cpu], rank_of: dict[int, int]
) -> None:
    """Draw a NUMA region with its ranks and a square for each core, grouped by shared cache."""
    drawing.box(x, y, 210, 114, (TEAL, SAND, BLUE, ROSE)[region % 4])
    drawing.text(x + 8, y + 18, f"NUMA region {region}, its own memory", 12, anchor="start")
    for number, (_, cores) in enumerate(groupby(cpus, lambda cpu: cpu.cache)):
        left, top = x + 8 + number % 2 * 98, y + 28 + number // 2 * 28
        drawing.box(left, top, 92, 24, "#ffffff")
        for i, cpu in enumerate(cores):
            drawing.box(left + 5 + i * 21, top + 4, 16, 16, INK if cpu.number in rank_of else PLAIN)
    for rank, seats in Counter(rank_of[cpu.number] for cpu in cpus if cpu.number in rank_of).items():
        drawing.text(x + 8, y + 104, f"rank {rank}: {seats} threads", 12, anchor="start", font_weight="600")


def two_sockets(regions: int, cores: int, cache: int) -> Machine:
    """Describe a node by regions per socket, cores per region, and cores per shared cache."""
    count = 2 * regions * cores
    cpus = (Cpu(i, i, i // cache * cache, i // cores, i // (regions * cores)) for i in range(count))
    return Machine(tuple(cpus), frozenset(range(count)))


def speed() -> Drawing:
    """Draw the first table of the page about speed: a bar for each ratio."""
    page = (ROOT / "docs" / "explanation" / "speed.md").read_text()
    table = re.search(r"^\| work .*?\n\n", page, re.MULTILINE | re.DOTALL)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].split("\n")[2:] if line
    ]
    left, step, unit = 16.0, 46.0, 150.0
    drawing = Drawing(590, 64 + step * len(rows), "Speed of distgpt divided by the speed of another program")
    drawing.text(
        left, 26, "Speed of distgpt / speed of the other program", 15, anchor="start", font_weight="600"
    )
    for i, (work, machine, other, ratio) in enumerate(rows):
        y, value = 42 + step * i, float(ratio)
        drawing.text(left, y + 12, f"{work}, {machine}; {other}", 12.5, anchor="start")
        drawing.box(left, y + 18, unit * value, 16, TEAL if value >= 1 else ROSE)
        end = left + unit * max(value, 1) + 8
        drawing.text(end, y + 31, f"{ratio}x", 13, anchor="start", font_weight="600")
        drawing.path(f"M{left + unit:g} {y + 15:g}V{y + 37:g}", FAINT)
    drawing.text(left + unit, 54 + step * len(rows), "equal", 12, FAINT)
    return drawing


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    "folders": house,
    "step": step,
    "buffer": buffer,
    "tile": tile,
    "node": node,
    "speed": speed,
}


def main(names: Iterable[str]) -> None:
    for name in [*names] or DRAWINGS:
        (IMAGES / f"{name}.svg").write_text(DRAWINGS[name]().svg())


if __name__ == "__main__":
    main(sys.argv[1:])
