"""Compare the results of short runs in this checkout bitwise with an earlier version.

    python benchmarks/bits.py --base abf7dba3             # exits with 1 if a run differs
    python benchmarks/bits.py --base abf7dba3 --only mpi  # runs whose name contains this

The base gets a worktree and an environment in build/bits/, with its results per processor type. Compares
losses, gradient norms, weights, best weights, and all files of the last checkpoint. On two ranks the order of
a sum does not matter, so some runs have three and four. MPICH simulates "2 nodes". Settings that depend on
the processor (--matmul auto, --dtype auto) are not used.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from distgpt.core.cpu.compiling.processor import processor

ROOT = Path(__file__).parents[1]
HOW = "--save-every 5 --val-fraction 0.1 --eval-every 4 --matmul own --seed 3"
TEXT = f"--data story --warmup 2 --sample-every 6 {HOW}"
SMALL = f"--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --tokenizer word --batch-size 16 {TEXT}"
ADAMW, GPT2 = (
    f"--preset tiny-adamw {SMALL}",
    f"{SMALL} --norm layernorm --mlp gelu --positions learned --bias",
)
THREE = f"{SMALL} --batch-size 12"
BYTES = f"{SMALL} --tokenizer byte --seq-len 96"
# ADAPTERS and CHATS use initial weights from the run "bytes".
ADAPTERS = f"--init WEIGHTS --lora-rank 4 --seq-len 96 --batch-size 16 {TEXT}"
CHATS = f"tune --weights WEIGHTS --data CHATS --seq-len 96 --batch-size 12 {HOW}"
# A gradient 1 standard deviation off is bad. If weights hardly move, some are bad soon.
SPIKES = f"{ADAMW} --batch-size 4 --lr 1e-5 --spike-zscore 1 --bad-steps-allowed 1000"
ROLLBACK = "--on-bad-step rollback"
LONG = 40  # steps; outlier detection starts after 20

# name: ranks, options of the first start, options repeated on resume
RUNS: dict[str, tuple[int, str, str]] = {
    "serial, 1 thread": (0, SMALL, "--threads 1"),
    "serial, 2 threads": (0, SMALL, "--threads 2"),
    "AdamW": (0, ADAMW, "--threads 2"),
    "sprint": (0, f"--preset sprint {SMALL}", "--threads 2"),
    "as GPT-2": (0, GPT2, "--threads 2"),
    "bytes": (0, BYTES, "--threads 2"),
    "windows": (0, f"{SMALL} --window 8", "--threads 2"),
    "float64": (0, SMALL, "--threads 2 --dtype float64"),
    "bfloat16": (0, SMALL, "--threads 2 --dtype bfloat16"),
    "AdamW, bfloat16": (0, ADAMW, "--threads 2 --dtype bfloat16"),
    "micro-batches": (0, SMALL, "--threads 2 --grad-accum 4"),
    "recomputed": (0, SMALL, "--threads 2 --recompute block"),
    "saved meanwhile": (0, SMALL, "--threads 2 --save async"),
    "outliers": (0, SMALL, "--threads 1 --on-bad-step skip --spike-zscore 6"),
    "rolled back": (0, SPIKES, f"--threads 1 {ROLLBACK}"),
    "deterministic": (0, SMALL, "--threads 2 --deterministic"),
    "adapters": (0, ADAPTERS, "--threads 2"),
    "chats": (0, CHATS, "--threads 2"),
    "chats, adapters": (0, f"{CHATS} --lora-rank 4", "--threads 2"),
    "mpi": (2, SMALL, ""),
    "mpi, micro-batches": (2, SMALL, "--grad-accum 2"),
    "mpi, overlapped": (2, SMALL, "--grad-sync overlapped"),
    "mpi, sharded": (2, SMALL, "--grad-sync sharded"),
    "mpi, sharded, bfloat16": (2, SMALL, "--grad-sync sharded --dtype bfloat16"),
    "mpi, wire": (2, SMALL, "--gradient-dtype bfloat16"),
    "mpi, local steps": (2, SMALL, "--outer-every 3"),
    "mpi, deterministic": (2, SMALL, "--deterministic"),
    "mpi, rolled back": (2, SPIKES, ROLLBACK),
    "mpi, adapters": (2, ADAPTERS, ""),
    "mpi, chats": (2, CHATS, ""),
    "3 ranks": (3, THREE, ""),
    "3 ranks, overlapped": (3, THREE, "--grad-sync overlapped"),
    "3 ranks, sharded, AdamW": (3, f"--preset tiny-adamw {THREE}", "--grad-sync sharded"),
    "4 ranks": (4, SMALL, ""),
    "4 ranks, AdamW": (4, ADAMW, ""),
    "4 ranks, overlapped": (4, SMALL, "--grad-sync overlapped"),
    "4 ranks, sharded": (4, SMALL, "--grad-sync sharded"),
    "4 ranks, wire": (4, SMALL, "--gradient-dtype bfloat16"),
    "4 ranks, deterministic": (4, SMALL, "--deterministic"),
    "4 ranks, local steps": (4, SMALL, "--outer-every 3"),
    "2 nodes": (4, SMALL, ""),
    "2 nodes, overlapped": (4, SMALL, "--grad-sync overlapped"),
    "2 nodes, sharded": (4, SMALL, "--grad-sync sharded"),
    "2 nodes, local steps": (4, SMALL, "--outer-every 3"),
}
TWO_NODES = {"MPIR_CVAR_NUM_CLIQUES": "2"}
# Run the command and write the class names of the run's parts on rank 0: a missing callback changes
# no result. RENAMED maps class names of the base to current names.
ASSEMBLED = """
import json
import runpy
from pathlib import Path
from distgpt.core.train import loop

train = loop.train
def noted(run):
    ends = train(run)
    def either(now, before):
        return getattr(run, now if hasattr(run, now) else before)
    parts = [run.model, run.model.kernels, run.optimizer, either("gradient_sync", "exchange")]
    parts += [run.checkpoints.disk, either("budget", "clock"), either("step_policy", "judge"), run.assessment]
    parts += [next(iter(run.step._recorded.values())), *either("callbacks", "guards")]
    names = [type(part).__name__ for part in parts]
    if run.comm.rank == 0:
        Path(run.directory.path, "assembled.json").write_text(json.dumps(names))
    return ends
loop.train = noted
runpy.run_module("distgpt", run_name="__main__")
"""
RENAMED = {
    "FiniteJudge": "StepPolicy",
    "Judge": "StepPolicy",
    "Recorded": "CapturedWork",
    "AfterBackward": "SyncAfterBackward",
    "Clock": "Budget",
    "TimedClock": "TimedBudget",
    "Room": "FullDiskHandler",
}
# Options of the base that are now settings of --set.
FORMER = re.compile(r"--(matmul|spike-zscore|bad-steps-allowed) (\S+)")
# Text and scores of a run's model in each dtype.
MODELS = {
    f"{run}, written in {dtype}": (run, dtype)
    for run in ("serial, 2 threads", "as GPT-2")
    for dtype in ("float32", "float64", "bfloat16", "int8", "int4")
}
PASSING = {"seconds", "tokens_per_s", "peak_memory"}
SUBJECTS = "boy girl king fox bear bird"
VERBS = "ran slept sang ate"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", required=True, metavar="REVISION", help="the version to compare with")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    args = parser.parse_args()
    base, differing = Base(args.base), 0
    with tempfile.TemporaryDirectory() as scratch:
        files = Files(Path(scratch), Path(sys.executable).parent)
        for name in filter(lambda name: args.only in name, (*RUNS, *MODELS)):
            before, now = base.bits(name), bits(name, files)
            for key in filter(lambda key: key.endswith("/assembled"), before):
                before[key] = ", ".join(RENAMED.get(part, part) for part in before[key].split(", "))
            keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
            print(f"{name}: {', '.join(keys) if keys else 'the same'}", flush=True)
            differing += bool(keys)
    return int(bool(differing))


def bits(name: str, files: Files) -> dict[str, str]:
    return of_run(name, files) if name in RUNS else of_model(*MODELS[name], files)


class Base:
    """An earlier version with its own worktree and environment, and its results on this processor."""

    def __init__(self, revision: str) -> None:
        folder = ROOT / "build" / "bits" / revision
        if not (folder / ".venv" / "ready").exists():
            if not folder.exists():
                subprocess.run(["git", "worktree", "add", "--detach", folder, revision], cwd=ROOT, check=True)
            subprocess.run([sys.executable, "-m", "venv", folder / ".venv"], check=True)
            pip = (folder / ".venv/bin/python", "-m", "pip", "install", "--quiet")
            subprocess.run([*pip, "--editable", ".[mpich]"], cwd=folder, check=True)
            (folder / ".venv" / "ready").touch()
        self._files = Files(folder / "runs", folder / ".venv" / "bin")
        self._path = folder / f"bits-{_hash(repr(processor()).encode())}.json"
        self._known = json.loads(self._path.read_text()) if self._path.exists() else {}

    def bits(self, name: str) -> dict[str, str]:
        how = f"{name}: {RUNS.get(name) or MODELS.get(name)}"  # runs a changed row again
        if how not in self._known:
            self._known[how] = bits(name, self._files)
            self._path.write_text(json.dumps(self._known, indent=1) + "\n")
        found: dict[str, str] = self._known[how]
        return found


class Files:
    """The initial weights and data of one version's runs, created on first use; `bin` has its commands."""

    def __init__(self, folder: Path, bin: Path) -> None:
        self.folder, self.bin = folder, bin
        folder.mkdir(exist_ok=True)

    def weights(self, run: str) -> Path:
        out = self.folder / run.replace(" ", "-")
        if not out.exists():
            _train(run, *_command(run, self), out, self)
        return out / "weights.safetensors"

    def chats(self) -> Path:
        path, said = self.folder / "chats.jsonl", []
        for who, what in product(SUBJECTS.split(), VERBS.split()):
            said += [{"prompt": f"What did the {who} do?", "completion": f"The {who} {what}."}]
        path.write_text("".join(json.dumps(each) + "\n" for each in said))
        return path


def of_run(name: str, files: Files) -> dict[str, str]:
    """Train without interruption, and with a stop halfway; return hashes of the files."""
    ranks, begin = _command(name, files)
    steps, again = LONG if ROLLBACK in begin else 12, f"train {RUNS[name][2]} --resume auto"
    constant = "--schedule constant --steps"
    with tempfile.TemporaryDirectory() as scratch:
        whole, halves = Path(scratch, "whole"), Path(scratch, "halves")
        _train(name, ranks, f"{begin} --steps {steps}", whole, files)
        assert ROLLBACK not in begin or "back_to" in (whole / "history.jsonl").read_text()
        _train(name, ranks, f"{begin} {constant} {steps // 2}", halves, files)
        _train(name, ranks, f"{again} {constant} {steps}", halves, files)
        return {**_of(whole, "whole"), **_of(halves, "halves")}


def of_model(run: str, dtype: str, files: Files) -> dict[str, str]:
    words = f"infer --weights {files.weights(run)} --dtype {dtype} --threads 2 --json --seed 5 --n 3"
    words += " --max-new-tokens 24 --logprobs 3 --prompt-logprobs --prompt"
    found = json.loads(
        _printed([str(files.bin / "distgpt"), *words.split(), "There was a small lighthouse by the sea"])
    )
    return {"completions": _hash(json.dumps(_lasting(found), sort_keys=True).encode())}


def _lasting(found: Any) -> Any:
    """Return the output without values that differ between processes."""
    if isinstance(found, dict):
        return {key: _lasting(value) for key, value in found.items() if key not in PASSING}
    return list(map(_lasting, found)) if isinstance(found, list) else found


def _command(name: str, files: Files) -> tuple[int, str]:
    ranks, begin, words = RUNS[name]
    if "WEIGHTS" in begin:
        begin = begin.replace("WEIGHTS", str(files.weights("bytes")))
    begin = begin.replace("CHATS", str(files.chats()))
    command = "" if begin.startswith("tune") else "train"
    dtype = "" if "--dtype" in words else "--dtype float32"
    return ranks, f"{command} {begin} --steps 12 {words} {dtype}"


def _train(name: str, ranks: int, words: str, out: Path, files: Files) -> None:
    launcher = [str(files.bin / "mpirun"), "-n", str(ranks)] if ranks else []
    stage = ["--stage", "mpi", "--threads", "1"] if ranks else []
    options = [*stage, "--progress", "plain", "--out", str(out)]
    env = TWO_NODES if name.startswith("2 nodes") else {}
    command = [str(files.bin / "python"), "-P", "-c", ASSEMBLED]  # -P: do not import this checkout's package
    if files.bin == Path(sys.executable).parent:
        words = FORMER.sub(lambda found: f"--set {found[1].replace('-', '_')}={found[2]}", words)
    _printed([*launcher, *command, *words.split(), *options], env)


def _printed(command: list[str], env: dict[str, str] | None = None) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(env or {})})
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")
    return ended.stdout


def _of(run: Path, name: str) -> dict[str, str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    numbers = [[line.get(key) for key in ("step", "loss", "grad_norm", "lr", "val_loss")] for line in lines]
    found = {"metrics": _hash(json.dumps(numbers).encode())}
    last = max((run / "checkpoints").iterdir())
    files = (run / "weights.safetensors", run / "best.safetensors", *sorted(last.iterdir()))
    for path in files:
        if path.suffix == ".safetensors":
            data = path.read_bytes()
            found[path.relative_to(run).as_posix()] = _hash(data[8 + int.from_bytes(data[:8], "little") :])
        elif path.name == "state.json":
            found["state"] = path.read_text()
    names = json.loads((run / "assembled.json").read_text())
    found["assembled"] = ", ".join(names)
    return {f"{name}/{key}": value for key, value in found.items()}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
