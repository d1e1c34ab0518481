"""distgpt against PyTorch on this machine's cores: both sides in turn, ratios pair by pair, JSON at the end.

Run it with `make bench`, which makes the peer's own environment first. Every figure comes from whole runs of
the real programs: `distgpt train` and `distgpt infer` on one side, `peer_torch.py` in `distgpt/measure/peer`
on the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distgpt.measure.peer.running import FOLDER, unsteered

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
WARM_UP = 2  # steps of a run that are not counted

ENVIRONMENT = unsteered()

GPT2 = "--preset gpt2 --tokenizer byte --seq-len 256 --batch-size 4 --grad-accum 1 --warmup 0 --steps 8"
SHAPE = "--n-layer 4 --n-head 4 --n-embd 128 --seq-len 64 --batch-size 12 --vocab-size 65 --steps 200"
SMALL = f"{SHAPE} --norm layernorm --mlp gelu --positions learned --bias --data names --tokenizer char"
MINI = "--n-layer 6 --n-head 6 --n-embd 384 --batch-size 16 --vocab-size 164 --untied"
PEER_MINI = f"{MINI} --steps 48 --schedule linear --weight-decay 0"

# name: (the bar, ranks, distgpt's settings, the peer's). Without a bar: for information.
TRAINING: dict[str, tuple[float | None, int, str, str]] = {
    "gpt2-serial": (1.35, 1, GPT2, "--steps 6"),
    "gpt2-mpi": (1.35, 2, GPT2, "--steps 6"),
    "gpt2-mpi-chunked": (1.35, 2, f"{GPT2} --grad-sync chunked", "--steps 6"),
    "gpt-mini": (1.3, 1, "--preset gpt-mini", PEER_MINI),
    "small": (1.5, 1, SMALL, SHAPE),
    # PyTorch with glibc told to keep freed memory; with a smaller head; with an operator it does not offer
    "gpt2-peer-keeps-memory": (None, 1, GPT2, "--steps 6 --keep-freed"),
    "gpt2-peer-chunked-head": (None, 1, GPT2, "--steps 6 --chunked-head"),
    "gpt2-peer-onednn": (None, 1, GPT2, "--steps 6 --onednn"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True, help="Python of the environment with PyTorch")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs per workload")
    parser.add_argument("--only", nargs="*", help="workloads to run; all if left out")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/cpu-DATE.json if left out")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    results: dict[str, Any] = {"environment": environment(args.peer), "workloads": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name, measure in workloads(Path(scratch), args.peer, cores).items():
            if not args.only or name in args.only:
                results["workloads"][name] = row = measure(args.rounds)
                show(name, row)
    print(f"BLAS and cores: {results['environment']['sgemm_gflops']:.0f} GFLOP/s in float32 matrix products")
    path = args.out or HERE / "results" / f"cpu-{datetime.date.today()}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {path}")


def workloads(scratch: Path, peer: Path, cores: int) -> dict[str, Callable[[int], dict[str, Any]]]:
    table: dict[str, Callable[[int], dict[str, Any]]] = {}
    for name, (bar, ranks, ours, theirs) in TRAINING.items():
        table[name] = lambda rounds, bar=bar, ranks=ranks, ours=ours, theirs=theirs: paired(
            rounds,
            bar,
            lambda: train(scratch, ranks, cores // ranks, ours.split()),
            lambda: peer_run(peer, ["train", "--threads", str(cores), *theirs.split()]),
        )
    table["decode"] = lambda rounds: paired(
        rounds,
        1.8,
        lambda: decode(scratch, cores),
        lambda: peer_run(peer, ["decode", "--threads", str(cores), "--repeats", "3"]),
    )
    table["help"] = lambda rounds: seconds(rounds, 0.35, [BIN / "distgpt", "--help"])
    tiny = [BIN / "distgpt", "train", "--preset", "tiny", "--steps", "1", "--out", scratch / "start"]
    table["first-step"] = lambda rounds: seconds(rounds, 3.0, tiny, scratch / "start")
    return table


def paired(
    rounds: int, bar: float | None, ours: Callable[[], dict[str, Any]], theirs: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs]
    memory = [a["peak_rss_bytes"] / b["peak_rss_bytes"] for a, b in pairs]
    return {
        "bar": bar,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_s": statistics.median(a["tokens_per_s"] for a, _ in pairs),
        "peer_tokens_per_s": statistics.median(b["tokens_per_s"] for _, b in pairs),
        "memory_ratio": statistics.median(memory),
        "runs": [{"ours": a, "peer": b} for a, b in pairs],
    }


def train(scratch: Path, ranks: int, threads: int, settings: list[str]) -> dict[str, Any]:
    """One run; its speed is the median over the steps after the first few, as the run recorded them."""
    out = scratch / "run"
    shutil.rmtree(out, ignore_errors=True)
    stage = ["--stage", "mpi" if ranks > 1 else "serial", "--threads", str(threads)]
    command = [BIN / "distgpt", "train", *stage, *settings, "--out", out, "--progress", "plain"]
    if ranks > 1:
        command = [BIN / "mpirun", "-n", str(ranks), *command]
    peak, _ = run(command)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(line["step_s"] for line in lines[WARM_UP:])
    return {
        "command": " ".join(map(str, command)).replace(str(out), "RUN").replace(f"{BIN}/", ""),
        "tokens_per_s": lines[-1]["tokens"] / lines[-1]["step"] / step,
        "step_s_median": step,
        "first_loss": lines[0]["loss"],
        "final_loss": lines[-1]["loss"],
        "peak_rss_bytes": peak,
    }


def decode(scratch: Path, threads: int) -> dict[str, Any]:
    """Greedy: 256 bytes of prompt and 64 new tokens, in a model whose context holds both."""
    weights = scratch / "decode" / "weights.safetensors"
    if not weights.exists():
        shape = (
            "--preset gpt2 --tokenizer byte --seq-len 320 --batch-size 1 --grad-accum 1 --warmup 0 --steps 1"
        )
        run([BIN / "distgpt", "train", *shape.split(), "--out", weights.parent])
    prompt = scratch / "prompt.txt"
    prompt.write_text(("The harbour lay still. " * 20)[:256])
    command = [BIN / "distgpt", "infer", "--threads", str(threads), "--weights", weights]
    command += ["--prompt-file", prompt, "--max-new-tokens", "64", "--json"]
    peak, output = run(command)
    answer = json.loads(output)
    return {key: answer[key] for key in ("seconds", "tokens_per_s")} | {"peak_rss_bytes": peak}


def peer_run(python: Path, words: list[str]) -> dict[str, Any]:
    _, output = run([python, FOLDER / "peer_torch.py", *words])
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def run(command: list[Any]) -> tuple[int, str]:
    """(peak memory of the largest process, standard output). A command that fails ends the benchmark."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen([str(word) for word in command], stdout=output, env=ENVIRONMENT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"exit code {child.returncode} from {' '.join(map(str, command))}")
        output.seek(0)
        return usage.ru_maxrss * 1024, output.read()


def seconds(rounds: int, bar: float, command: list[Any], leftover: Path | None = None) -> dict[str, Any]:
    """Wall time of a whole process, the best of some runs, after one that warms the caches."""
    times = []
    for _ in range(2 * rounds + 1):
        begun = time.perf_counter()
        run(command)
        times.append(time.perf_counter() - begun)
        if leftover:
            shutil.rmtree(leftover)
    return {"bar": bar, "seconds": statistics.median(times[1:]), "all_seconds": times}


def show(name: str, row: dict[str, Any]) -> None:
    if "seconds" in row:
        print(f"{name:18} {row['seconds']:.2f} s   (bar: {row['bar']} s)", flush=True)
        return
    print(
        f"{name:18} {row['ratio']:5.2f} × PyTorch   {row['tokens_per_s']:9,.0f} against "
        f"{row['peer_tokens_per_s']:9,.0f} tokens/s   memory {row['memory_ratio']:.2f} ×   "
        f"(bar: {row['bar'] or 'none'})",
        flush=True,
    )


def environment(peer: Path) -> dict[str, Any]:
    versions = "import json, torch, transformers as t; print(json.dumps([torch.__version__, t.__version__]))"
    torch, transformers = json.loads(run([peer, "-c", versions])[1])
    found = machine()
    return {
        **found,
        "versions": {**found["versions"], "torch": torch, "transformers": transformers},
    }


def shown(word: str) -> str:
    """An argument as others may read it: of a path into this machine the last name."""
    return Path(word).name if word.startswith("/") else word


def machine() -> dict[str, Any]:
    """What a figure has to be read with."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True)
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=HERE, capture_output=True, text=True)
    blas = (
        "import time, numpy as np; a = np.ones((2048, 2048), 'f'); b = a @ a; best = 9.0\n"
        "for _ in range(20):\n t = time.perf_counter(); np.matmul(a, a, out=b); "
        "best = min(best, time.perf_counter() - t)\nprint(2 * 2048**3 / best / 1e9, np.__version__)"
    )
    gflops, numpy = run([sys.executable, "-c", blas])[1].split()
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "dirty": bool(changes.stdout.strip()),
        "command": " ".join(["python", *(shown(word) for word in sys.argv)]),
        "processor": cpu[0].split(":")[1].strip() if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "sgemm_gflops": float(gflops),
        "versions": {"python": platform.python_version(), "numpy": numpy},
    }


if __name__ == "__main__":
    main()
