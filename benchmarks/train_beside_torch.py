"""Compare `distgpt bench train` with PyTorch on CPUs: the same model, alternately, and the ratio.

    python benchmarks/train_beside_torch.py --preset gpt2 --tokenizer byte --seq-len 256 --batch-size 4 \\
        --peer-python PYTHON --peer-mode eager --peer-mode best

Accepts the options of `distgpt train`; the default of --steps is 20. PyTorch trains on random tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import click
from charts import Bar, BarChart
from peer_process import BEST, ask_peer, candidates, refuse_without_torch, switches, training
from record import end_with_errors

from distgpt.commands import bench
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.resources import usable_cores
from distgpt.core.config import ON_GPU, WITH_MPI, RunConfig
from distgpt.measure.bench import train as own
from distgpt.measure.bench.train import TrainOptions, measured_peak, prepared, scratch_folder, with_peak
from distgpt.measure.jobs import Row, say
from distgpt.show.page import Block, tabulated

OURS, THEIRS = "distgpt", "PyTorch"
TRIED = 6  # maximum steps per mode to find the fastest one
COLUMNS = (("who", "who", str), ("mode", "mode", str), *own.COLUMNS)


@dataclass(frozen=True, slots=True)
class PeerOptions(TrainOptions):
    """The command line. Each mode, named in peer_process.py, is trained in each round."""

    peer_python: str = sys.executable
    peer_modes: Sequence[str] = ("keep-freed",)
    rounds: int = 3

    @property
    def all_threads(self) -> int:
        """Threads of all ranks together, which PyTorch also uses."""
        ranks = self.ranks if self.stage in WITH_MPI else 1
        return self.threads * ranks if self.threads else len(usable_cores())


@click.command("train_beside_torch.py", help=__doc__, context_settings={"show_default": True})
@bench.train_options
@click.option("--peer-python", default=sys.executable, help="Python with PyTorch.")
@click.option(
    *("--peer-mode", "peer_modes"),
    multiple=True,
    default=("keep-freed",),
    show_default=True,
    metavar="MODE",
    help="How PyTorch trains: eager, or some of keep-freed, compile, autotune, autocast joined by +; best "
    "tries them. Repeatable.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Pairs of runs.")
def main(**given: Any) -> None:
    options = bench.to_options(PeerOptions, given)
    found = beside_torch(options)
    options.finish("train", f"{options.preset}-{options.stage}", found, blocks(found))


def beside_torch(options: PeerOptions) -> dict[str, Any]:
    """Train alternately with each mode of PyTorch, and measure the peak."""
    refuse_peer(options)
    launcher, run = prepared(options)
    runs: list[Row] = []
    modes: list[Row] = []
    with scratch_folder(options) as scratch:
        for turn in range(options.rounds):
            say(f"distgpt train, {options.stage}, round {turn + 1}")
            ours, trained = own.train(options, run, launcher, scratch / f"run{turn}")
            modes = modes or [mode_of(asked, options, trained) for asked in options.peer_modes]
            runs.append({"ours": ours, "peers": [train_peer(options, trained, each) for each in modes]})
    return compared(options, trained, modes, runs, measured_peak(options, launcher))


def refuse_peer(options: PeerOptions) -> None:
    if options.stage in ON_GPU or options.dtype not in ("float32", "bfloat16"):
        raise UsageError(
            "PyTorch trains here on cores in float32 or bfloat16: a GPU's figures come from make bench-gpu"
        )
    for mode in options.peer_modes:
        switches(mode if mode != BEST else candidates(options.dtype)[0])
    refuse_without_torch("--peer-python", options.peer_python)


def mode_of(asked: str, options: PeerOptions, run: RunConfig) -> Row:
    """Return the requested mode, or the fastest candidate after a few steps each."""
    if asked != BEST:
        return {"asked": asked, "mode": asked}
    steps = min(TRIED, max(1, run.train.steps - 2))
    shortest = {}
    for mode in candidates(options.dtype):
        shortest[mode] = train_peer(options, run, {"mode": mode}, steps)["step_s_min"]
    return {"asked": asked, "mode": min(shortest, key=shortest.__getitem__), "tried_step_s_min": shortest}


def train_peer(options: PeerOptions, run: RunConfig, mode: Row, steps: int | None = None) -> Row:
    request = training(run, mode["mode"], options.all_threads, steps or max(1, run.train.steps - 2))
    say(f"PyTorch, {mode['mode']}" + (", to find its fastest mode" if steps else ""))
    return ask_peer(options.peer_python, "train", request)


def compared(
    options: PeerOptions, run: RunConfig, modes: Sequence[Row], runs: Sequence[Row], peak: float
) -> dict[str, Any]:
    """Return the result. `runs` has distgpt's and each PyTorch mode's measurement of each round."""
    ours = [run["ours"] for run in runs]
    rows, peers = [{**median_run(ours), "who": OURS}], []
    for i, mode in enumerate(modes):
        theirs = [run["peers"][i] for run in runs]
        peer = median_run(theirs)
        kept = ("tokens_per_s", "step_s_median", "first_loss", "final_loss", "threads")
        same = {"who": THEIRS, "preset": options.preset, "dtype": options.dtype, "ranks": 1}
        memory = {"peak_memory": [peer["peak_rss_bytes"]], "version": peer["torch"]}
        rows.append(same | {"mode": mode["mode"]} | {key: peer[key] for key in kept} | memory)
        ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(ours, theirs, strict=True)]
        memories = [sum(a["peak_memory"]) / b["peak_rss_bytes"] for a, b in zip(ours, theirs, strict=True)]
        more = {"ratio": median(ratios), "ratios": ratios, "memory_ratio": median(memories)}
        peers.append(mode | {"tokens_per_s": median(b["tokens_per_s"] for b in theirs)} | more)
    return {"rows": rows, **with_peak(rows, run, peak), "peers": peers, "runs": runs}


def median_run(rows: Sequence[Row]) -> Row:
    """Return the run with the median speed, or the faster of the two middle ones."""
    return sorted(rows, key=lambda row: float(row["tokens_per_s"]))[len(rows) // 2]


def blocks(found: dict[str, Any]) -> list[Block]:
    """Return the report of a result of this program or of `distgpt bench train`."""
    rows = found["rows"]
    bars = [
        Bar(
            ", ".join(str(row[key]) for key in ("who", "stage") if row.get(key)),
            row["tokens_per_s"],
            f"{row['tokens_per_s']:,.0f}",
        )
        for row in rows
    ]
    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
    description = (
        f"The fastest, {best.get('who', OURS)}, trains on {best['tokens_per_s']:,.0f} tokens a second."
    )
    chart = BarChart("Tokens per second", description, "tokens/s", bars)
    return [chart, tabulated(COLUMNS, rows, "Training", " ".join(notes(found)))]


def notes(found: dict[str, Any]) -> list[str]:
    """Return remarks about a result of this program or of `distgpt bench train`, including older versions."""
    lines = [own.peak_note(found)] if found.get("peak_gflops") else []
    for peer in found.get("peers", []):
        several = ", ".join(f"{ratio:.2f}" for ratio in peer["ratios"])
        tried = len(peer.get("tried_step_s_min", ()))
        mode = peer["mode"] + (f", the fastest of {tried} modes" if tried else "")
        lines.append(
            f"{peer['ratio']:.2f} × PyTorch ({mode}) at {peer['memory_ratio']:.2f} × its memory, "
            f"on random tokens; pairs of runs in turn: {several}."
        )
    if any("keep-freed" in peer["mode"] for peer in found.get("peers", [])):
        lines.append("keep-freed: PyTorch keeps the memory it has freed, which makes it faster and larger.")
    return lines


if __name__ == "__main__":
    end_with_errors(main)
