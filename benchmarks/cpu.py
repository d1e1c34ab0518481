"""distgpt against PyTorch on this machine's cores, in turn: training, forward passes, decoding.

`make bench` runs it, after making the peer's own environment. A workload's ratio is the median over pairs of
runs; all runs, with the machine and the versions, go into a JSON file. Whole processes, and what a profile
costs a step, are measured without a peer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from peer_process import BEST, ask_peer
from record import arguments, distgpt, end_with_errors, save
from train_beside_torch import PeerOptions, beside_torch

from distgpt.core.comm.resources import usable_cores
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.jobs.processes import distgpt_command, run
from distgpt.measure import jobs
from distgpt.measure.profile.session import Profiler
from distgpt.measure.step_timing import Trial

CORES = len(usable_cores())
GPT2 = {"tokenizer": "byte", "seq_len": 256, "batch_size": 4, "grad_accum": 1, "warmup": 0, "steps": 8}
SMALL = {"n_layer": 4, "n_head": 4, "n_embd": 128, "seq_len": 64, "batch_size": 12, "steps": 200}
SMALL |= {"data": "names", "tokenizer": "char", "norm": "layernorm", "mlp": "gelu", "positions": "learned"}
SMALL |= {"bias": True, "vocab_size": 65}
MINI = {"steps": 50}
BFLOAT16 = {"dtype": "bfloat16"}


@dataclass(frozen=True)
class Workload:
    """Training; by PyTorch's mode the bar of the ratio to it, and that of memory to the leanest of these.

    A mode without a bar is for information.
    """

    preset: str
    stage: str
    settings: dict[str, Any]
    bars: dict[str, float | None] = field(default_factory=lambda: {"eager": None})
    memory: float | None = None


IN_16_BITS: dict[str, float | None] = {"eager": 1.4, "autocast": 1.4, BEST: 1.1}
TRAINING = {
    "gpt2-bfloat16": Workload("gpt2", "serial", GPT2 | BFLOAT16, IN_16_BITS, 0.75),
    "gpt2-bfloat16-mpi": Workload("gpt2", "mpi", GPT2 | BFLOAT16, IN_16_BITS),
    "gpt2-serial": Workload("gpt2", "serial", GPT2, {"eager": 1.3, BEST: 1.03}),
    "gpt2-mpi": Workload("gpt2", "mpi", GPT2, {"eager": 1.3, BEST: 1.03}),
    "gpt-mini-bfloat16": Workload("gpt-mini", "serial", MINI | BFLOAT16, {"eager": 1.4, BEST: 1.1}),
    "gpt-mini": Workload("gpt-mini", "serial", MINI, {"eager": 1.3}),
    # PyTorch with a smaller head, and with an operator that it does not offer
    "gpt2-peers": Workload(
        "gpt2", "serial", GPT2, {"keep-freed": None, "chunked-head": None, "onednn": None}
    ),
}
SMALL_BAR = 2.0  # of the small model in the faster dtype of either side
DTYPES = ("float32", "bfloat16")
FORWARD = ("S", "MS5")
FORWARD_BAR = 1.6  # in float32
HELP = 0.35  # seconds of a whole process
FIRST_STEP, LATER = 3.0, 0.2  # seconds of a process to its first step, and how much more bfloat16 may take


def main() -> None:
    peer = {"required": True, "help": "Python of the environment with PyTorch"}
    best = {"default": BEST, "help": "PyTorch's fastest mode where it is known, instead of looking for it"}
    only = {"nargs": "*", "help": "workloads to run; all if left out"}
    args = arguments(__doc__, peer=peer, best=best, only=only)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        table: dict[str, Callable[[], dict[str, Any]]] = {
            name: partial(train, workload, args, scratch) for name, workload in TRAINING.items()
        }
        table["small"] = partial(small, args, scratch)
        table |= {f"forward-{name}": partial(forward, name, args, scratch) for name in FORWARD}
        table["decode"] = partial(decode, args.peer, args.rounds, scratch)
        table["help"] = partial(helped, args.rounds)
        table["first-step"] = partial(first_steps, args.rounds, scratch)
        table["profile"] = profile
        for name in args.only or table:
            rows[name] = row = table[name]()
            print(f"{name:18} {in_words(row)}", flush=True)
    save("cpu", {"workloads": rows}, args.out)


# -- training


def options(workload: Workload, args: Any, out: Path, **changes: Any) -> PeerOptions:
    values: dict[str, Any] = {
        "stage": workload.stage,
        "threads": max(1, CORES // 2) if workload.stage == "mpi" else CORES,
        "preset": workload.preset,
        "peer_python": args.peer,
        "peer_modes": [args.best if mode == BEST else mode for mode in workload.bars],
        "rounds": args.rounds,
        "out": out,
        "settings": workload.settings,
    }
    return PeerOptions(**values | changes)


def train(workload: Workload, args: Any, out: Path) -> dict[str, Any]:
    found = beside_torch(options(workload, args, out))
    against = [peer | {"bar": bar} for bar, peer in zip(workload.bars.values(), found["peers"], strict=True)]
    return {
        "tokens_per_s": median(run["ours"]["tokens_per_s"] for run in found["runs"]),
        "against": against,
        "memory_bar": workload.memory,
        "memory_ratio": max(peer["memory_ratio"] for peer in against),
        "mfu": found["rows"][0]["mfu"],
        "runs": found["runs"],
    }


def small(args: Any, out: Path) -> dict[str, Any]:
    """The small model, each side in the dtype and mode in which it is fastest."""
    modes, runs = dict.fromkeys(DTYPES, args.best), []
    for _ in range(args.rounds):
        each: Mapping[str, Any] = {}
        for dtype in DTYPES:
            workload = Workload("tiny-adamw", "serial", SMALL | {"dtype": dtype}, {modes[dtype]: SMALL_BAR})
            found = beside_torch(options(workload, args, out, rounds=1))
            modes[dtype] = found["peers"][0]["mode"]
            each = {**each, dtype: found["runs"][0]}
        runs.append(each)
    ours = [max(run["ours"]["tokens_per_s"] for run in each.values()) for each in runs]
    theirs = [max(run["peers"][0]["tokens_per_s"] for run in each.values()) for each in runs]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    peer = {"mode": " or ".join(f"{dtype} {mode}" for dtype, mode in modes.items()), "bar": SMALL_BAR}
    peer |= {"tokens_per_s": median(theirs), "ratios": ratios, "ratio": median(ratios)}
    return {"tokens_per_s": median(ours), "against": [peer], "runs": runs}


# -- without gradients


def forward(name: str, args: Any, out: Path) -> dict[str, Any]:
    """The mean loss over the names of the forward-pass study, batched on both sides."""
    words = ["--preset", name, "--method", "batched", "--method", "torch-batched", "--peer", args.peer]
    words += ["--dtype", "float32", "--dtype", "bfloat16", "--repeats", 15, "--json", "--out", out]
    command = [sys.executable, Path(__file__).parent / "forward_study.py", *words]
    runs = [
        jobs.answer(run(command, env=jobs.unsteered()), "forward_study.py")["rows"]
        for _ in range(args.rounds)
    ]
    against, speeds = [], {}
    for dtype, bar in (("float32", FORWARD_BAR), ("bfloat16", None)):
        of = [{row["method"]: row for row in rows if row["dtype"] == dtype} for rows in runs]
        ratios = [each["torch-batched"]["seconds"] / each["batched"]["seconds"] for each in of]
        ours, theirs = (
            [each[how]["tokens"] / each[how]["seconds"] for each in of]
            for how in ("batched", "torch-batched")
        )
        speeds[dtype] = median(ours)
        peer = {"mode": f"{dtype}, both", "bar": bar, "tokens_per_s": median(theirs)}
        against.append(peer | {"ratios": ratios, "ratio": median(ratios)})
    return {
        "tokens_per_s": speeds["float32"],
        "bfloat16_tokens_per_s": speeds["bfloat16"],
        "against": against,
    }


def decode(python: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Greedy: 256 bytes of prompt and 64 new tokens, in a model whose context holds both."""
    shape = "--preset gpt2 --tokenizer byte --seq-len 320 --batch-size 1 --grad-accum 1 --warmup 0 --steps 1"
    distgpt("train", *shape.split(), "--out", scratch / "decode")
    prompt = scratch / "prompt.txt"
    prompt.write_text(("The harbour lay still. " * 20)[:256])
    words = ["infer", "--threads", CORES, "--weights", scratch / "decode" / "weights.safetensors"]
    words += ["--prompt-file", prompt, "--max-new-tokens", 64, "--temperature", 0, "--json"]
    request = {"threads": CORES, "prompt_len": 256, "new_tokens": 64, "repeats": 3}
    runs = []
    for _ in range(rounds):
        ours = jobs.ask("distgpt infer", words)
        ours = {key: ours[key] for key in ("seconds", "tokens_per_s", "peak_memory")}
        runs.append({"ours": ours, "peer": ask_peer(python, "decode", request)})
    ratios = [run["ours"]["tokens_per_s"] / run["peer"]["tokens_per_s"] for run in runs]
    peer = {"mode": "eager", "bar": 1.8, "ratios": ratios, "ratio": median(ratios)}
    peer["tokens_per_s"] = median(run["peer"]["tokens_per_s"] for run in runs)
    ours = median(run["ours"]["tokens_per_s"] for run in runs)
    return {"tokens_per_s": ours, "against": [peer], "runs": runs}


# -- whole processes, and profiles


def helped(rounds: int) -> dict[str, Any]:
    """The help, the median of some processes after one that warms the caches."""
    times = [distgpt("--help") for _ in range(2 * rounds + 1)]
    return {"bar": HELP, "seconds": median(times[1:]), "all_seconds": times}


def first_steps(rounds: int, scratch: Path) -> dict[str, Any]:
    """From the start of a process to its first step, in both dtypes in turn, after one to warm caches."""
    times: dict[str, list[float]] = {dtype: [] for dtype in DTYPES}
    for _ in range(2 * rounds + 1):
        for dtype, own in times.items():
            own.append(first_step(dtype, scratch / "start"))
    plain, narrow = (median(times[dtype][1:]) for dtype in DTYPES)
    return {
        "bar": FIRST_STEP,
        "seconds": plain,
        "later_bar": LATER,
        "later": narrow - plain,
        "all_seconds": times,
    }


def first_step(dtype: str, out: Path) -> float:
    times: list[float] = []

    def on_line(line: str) -> None:
        if line.startswith("step 1/"):
            times.append(time.perf_counter() - begun)

    words = ["train", "--preset", "tiny", "--steps", 1, "--dtype", dtype, "--progress", "plain", "--out", out]
    begun = time.perf_counter()
    run(distgpt_command(*words), env=jobs.unsteered(), on_line=on_line)
    shutil.rmtree(out, ignore_errors=True)
    return times[0]


def profile(pairs: int = 200) -> dict[str, Any]:
    """Steps of `tiny` in turn with and without a profile, after some that warm up."""
    run = preset("tiny-adamw", {"vocab_size": 256, "grad_accum": 1, "recompute": "mlp"})
    trial = Trial(run, CpuKernels("float32", CORES))
    plain, profiled = trial.trained.launch, Profiler(trial.trained, warm_up=0).launch
    times: list[list[float]] = [[], []]
    for _ in range(3 + pairs):
        for own, launch in zip(times, (plain, profiled), strict=True):
            begun = time.perf_counter()
            launch(0, trial.batches).wait()
            own.append(time.perf_counter() - begun)
    without, seconds = (own[3:] for own in times)
    ratio = median(b / a for a, b in zip(without, seconds, strict=True))
    return {"seconds": median(seconds), "without_s": median(without), "ratio": ratio}


def in_words(row: dict[str, Any]) -> str:
    if "seconds" in row:
        text = f"{row['seconds']:.2f} s" + (f" (bar: {row['bar']})" if "bar" in row else "")
        text += f", {row['ratio']:.3f} × that without a profile" if "ratio" in row else ""
        return text + (
            f", {row['later']:+.2f} s in bfloat16 (bar: {row['later_bar']})" if "later" in row else ""
        )
    lines = [f"{row['tokens_per_s']:9,.0f} tokens/s"]
    for peer in row["against"]:
        bar = "" if peer["bar"] is None else f" (bar: {peer['bar']})"
        lines.append(f"    {peer['ratio']:5.2f} × PyTorch's {peer['tokens_per_s']:,.0f}, {peer['mode']}{bar}")
    if "memory_ratio" in row:
        bar = "" if row["memory_bar"] is None else f" (bar: {row['memory_bar']})"
        lines.append(f"    {row['memory_ratio']:5.2f} × the memory of its leanest mode of these{bar}")
    return "\n".join(lines)


if __name__ == "__main__":
    end_with_errors(main)
