"""The bits of a list of short runs, to compare two versions: nothing may differ where only the code moved.

    python benchmarks/bits.py --out before.json          # in the one checkout, with its own environment
    python benchmarks/bits.py --against before.json      # in the other; exits with 1 where a run differs

Of each run: losses and gradient norms, weights, best weights, and every file of the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
SMALL = (
    "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --data story --tokenizer word --batch-size 16 --seed 3"
)
SMALL += (
    " --steps 12 --save-every 5 --val-fraction 0.1 --eval-every 4 --sample-every 6 --warmup 2 --matmul own"
)
GPT2 = "--norm layernorm --mlp gelu --positions learned --bias"
RUNS = {
    "serial, 1 thread": (0, "--threads 1"),
    "serial, 2 threads": (0, "--threads 2"),
    "as GPT-2": (0, f"--threads 2 {GPT2}"),
    "float64": (0, "--threads 2 --dtype float64"),
    "bfloat16": (0, "--threads 2 --dtype bfloat16"),
    "micro-batches": (0, "--threads 2 --grad-accum 4"),
    "saved meanwhile": (0, "--threads 2 --save async"),
    "rechecked": (0, "--threads 1 --recheck-every 3"),
    "outliers": (0, "--threads 1 --on-bad-step skip --spike-zscore 6"),
    "deterministic": (0, "--threads 2 --deterministic"),
    "mpi": (2, ""),
    "mpi, micro-batches": (2, "--grad-accum 2"),
    "mpi, chunked": (2, "--grad-sync chunked"),
    "mpi, overlapped": (2, "--grad-sync overlapped"),
    "mpi, sharded": (2, "--grad-sync sharded"),
    "mpi, sharded, bfloat16": (2, "--grad-sync sharded --dtype bfloat16"),
    "mpi, wire": (2, "--gradient-dtype bfloat16"),
    "mpi, local steps": (2, "--outer-every 3"),
    "mpi, deterministic": (2, "--deterministic"),
    "mpi, rechecked": (2, "--recheck-every 3"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the bits are written")
    parser.add_argument("--against", type=Path, help="bits of another version")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    args = parser.parse_args()
    found = {name: bits(*how) for name, how in RUNS.items() if args.only in name}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    if not args.against:
        return 0
    before = json.loads(args.against.read_text())
    differing = {name: _differing(before.get(name, {}), now) for name, now in found.items()}
    for name, keys in differing.items():
        print(f"{name}: {', '.join(keys) if keys else 'the same'}")
    return int(any(differing.values()))


def bits(ranks: int, words: str) -> dict[str, str]:
    """Train to the end, and again by way of a stop after six steps, and return what is in the files."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, halves = Path(scratch, "whole"), Path(scratch, "halves")
        _train(ranks, f"{SMALL} {words} --out {whole}")
        _train(ranks, f"{SMALL} {words} --schedule constant --steps 6 --out {halves}")
        _train(ranks, f"{words} --schedule constant --steps 12 --out {halves} --resume auto")
        return {**_of(whole, "whole"), **_of(halves, "halves")}


def _train(ranks: int, words: str) -> None:
    launcher = [str(BIN / "mpirun"), "-n", str(ranks)] if ranks else []
    stage = ["--stage", "mpi", "--threads", "1"] if ranks else []
    command = [*launcher, str(BIN / "distgpt"), "train", *words.split(), *stage, "--progress", "plain"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ended.stderr}")


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
    return {f"{name}/{key}": value for key, value in found.items()}


def _differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
