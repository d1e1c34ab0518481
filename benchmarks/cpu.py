"""distgpt against PyTorch on this machine's cores, in turn: `distgpt bench train --peer torch`, and decoding.

`make bench` runs it, after making the peer's own environment. A workload's ratio is the median over pairs of
runs; all runs, with the machine and the versions, go into a JSON file. Whole processes, and what a profile
costs a step, are measured without a peer.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from record import arguments, distgpt, end_with_errors, save

from distgpt.comm.cores import usable_cores
from distgpt.config.presets import preset
from distgpt.kernels.cpu import CpuKernels
from distgpt.measure import jobs
from distgpt.measure.bench.train import TrainOptions, measure
from distgpt.measure.profile.session import Profiler
from distgpt.measure.step_timing import Trial

CORES = len(usable_cores())
GPT2 = {"tokenizer": "byte", "seq_len": 256, "batch_size": 4, "grad_accum": 1, "warmup": 0, "steps": 8}
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "seq_len": 64, "batch_size": 12, "steps": 200}
SMALL |= {"data": "names", "tokenizer": "char", "norm": "layernorm", "mlp": "gelu", "positions": "learned"}
SMALL |= {"bias": True, "vocab_size": 65}
# name: (the bar, preset, stage, settings, the peer's switch). Without a bar: for information.
TRAINING: dict[str, tuple[float | None, str, str, dict[str, Any], str]] = {
    "gpt2-serial": (1.35, "gpt2", "serial", GPT2, ""),
    "gpt2-mpi": (1.35, "gpt2", "mpi", GPT2, ""),
    "gpt2-mpi-chunked": (1.35, "gpt2", "mpi", GPT2 | {"grad_sync": "chunked"}, ""),
    "gpt-mini": (1.3, "gpt-mini", "serial", {"steps": 50}, ""),
    "small": (1.5, "tiny", "serial", SMALL, ""),
    # PyTorch with glibc told to keep freed memory; with a smaller head; with an operator it does not offer
    "gpt2-peer-keeps-memory": (None, "gpt2", "serial", GPT2, "keep_freed"),
    "gpt2-peer-chunked-head": (None, "gpt2", "serial", GPT2, "chunked_head"),
    "gpt2-peer-onednn": (None, "gpt2", "serial", GPT2, "onednn"),
}
SECONDS = {"help": 0.35, "first-step": 3.0}  # the bars of whole processes


def main() -> None:
    peer = {"required": True, "help": "Python of the environment with PyTorch"}
    args = arguments(__doc__, peer=peer, only={"nargs": "*", "help": "workloads to run; all if left out"})
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        table: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(train, name, args.peer, args.rounds, Path(scratch)) for name in TRAINING
        }
        table["decode"] = partial(decode, args.peer, args.rounds, Path(scratch))
        table |= {name: partial(seconds, name, args.rounds, Path(scratch)) for name in SECONDS}
        table["profile"] = profile
        for name in args.only or table:
            rows[name] = row = table[name]()
            print(f"{name:22} {in_words(row)}   (bar: {row['bar'] or 'none'})", flush=True)
    save("cpu", {"workloads": rows}, args.out)


def train(name: str, python: str, rounds: int, out: Path) -> dict[str, Any]:
    bar, preset, stage, settings, peer = TRAINING[name]
    options = TrainOptions(
        stage=stage,
        threads=max(1, CORES // 2) if stage == "mpi" else CORES,
        preset=preset,
        peer="torch",
        peer_python=python,
        peer_switches={peer: True} if peer else {},
        rounds=rounds,
        out=out,
        settings=settings,
    )
    runs = measure(options)["runs"]
    for run in runs:
        run["ours"]["peak_rss_bytes"] = sum(run["ours"]["peak_memory"])
    return paired(bar, runs)


def decode(python: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Greedy: 256 bytes of prompt and 64 new tokens, in a model whose context holds both."""
    shape = "--preset gpt2 --tokenizer byte --seq-len 320 --batch-size 1 --grad-accum 1 --warmup 0 --steps 1"
    distgpt("train", *shape.split(), "--out", scratch / "decode")
    prompt = scratch / "prompt.txt"
    prompt.write_text(("The harbour lay still. " * 20)[:256])
    words = ["infer", "--threads", CORES, "--weights", scratch / "decode" / "weights.safetensors"]
    words += ["--prompt-file", prompt, "--max-new-tokens", 64, "--json"]
    request = {"threads": CORES, "prompt_len": 256, "new_tokens": 64, "repeats": 3}
    pairs = []
    for _ in range(rounds):
        ours = jobs.ask("distgpt infer", words)
        ours = {key: ours[key] for key in ("seconds", "tokens_per_s", "peak_memory")}
        ours["peak_rss_bytes"] = sum(ours["peak_memory"])
        theirs = jobs.ask_peer(python, "decode", request)
        pairs.append({"ours": ours, "peer": theirs})
    return paired(1.8, pairs)


def paired(bar: float | None, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over pairs of runs."""
    ratios = [run["ours"]["tokens_per_s"] / run["peer"]["tokens_per_s"] for run in runs]
    memory = [run["ours"]["peak_rss_bytes"] / run["peer"]["peak_rss_bytes"] for run in runs]
    return {
        "bar": bar,
        "ratio": median(ratios),
        "ratios": ratios,
        "tokens_per_s": median(run["ours"]["tokens_per_s"] for run in runs),
        "peer_tokens_per_s": median(run["peer"]["tokens_per_s"] for run in runs),
        "memory_ratio": median(memory),
        "runs": runs,
    }


def seconds(name: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Wall time of a whole process, the median of some runs, after one that warms the caches."""
    out = scratch / "start"
    words = ["--help"] if name == "help" else ["train", "--preset", "tiny", "--steps", 1, "--out", out]
    times = []
    for _ in range(2 * rounds + 1):
        times.append(distgpt(*words))
        shutil.rmtree(out, ignore_errors=True)
    return {"bar": SECONDS[name], "seconds": median(times[1:]), "all_seconds": times}


def profile(pairs: int = 200) -> dict[str, Any]:
    """Steps of `tiny` in turn with and without a profile, after some that warm up."""
    run = preset("tiny", {"vocab_size": 256, "grad_accum": 1, "recompute": "mlp"})
    trial = Trial(run, CpuKernels("float32", CORES))
    plain = trial.trained.launch
    Profiler(warm_up=0).watch(trial.trained)
    times: list[list[float]] = [[], []]
    for _ in range(3 + pairs):
        for own, launch in zip(times, (plain, trial.trained.launch), strict=True):
            begun = time.perf_counter()
            launch(0, trial.batches).read()
            own.append(time.perf_counter() - begun)
    without, seconds = (own[3:] for own in times)
    ratio = median(b / a for a, b in zip(without, seconds, strict=True))
    return {"bar": None, "seconds": median(seconds), "without_s": median(without), "ratio": ratio}


def in_words(row: dict[str, Any]) -> str:
    if "seconds" in row:
        with_profile = f", {row['ratio']:.3f} × that without a profile" if "ratio" in row else ""
        return f"{row['seconds']:.2f} s{with_profile}"
    return (
        f"{row['ratio']:5.2f} × PyTorch   {row['tokens_per_s']:9,.0f} against "
        f"{row['peer_tokens_per_s']:9,.0f} tokens/s   memory {row['memory_ratio']:.2f} ×"
    )


if __name__ == "__main__":
    end_with_errors(main)
