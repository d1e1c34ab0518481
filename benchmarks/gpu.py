"""Compare distgpt with PyTorch on one GPU; print a table and write JSON.

    python benchmarks/gpu.py [--only GROUP …] [--seconds 460] [--peer PYTHON] [--out FILE]

`make bench-gpu` runs this. Each measurement is a separate process with a time limit. If it fails, hangs or
breaks the device, its earlier rows are kept and the other measurements run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from forward_work import sequences
from peer_process import for_torch

from distgpt.cluster.jobs.processes import TIMED_OUT, run
from distgpt.core.config import ModelConfig
from distgpt.core.config.presets import preset

HERE = Path(__file__).resolve().parent
BAR = {"GPT-2": 1.05, "autotune": 1.05, "gpt-mini": 2.0, "forward XL": 2.0}  # ratio to PyTorch's fastest mode
MEMORY_BOUND = 0.8  # share of a copy's bandwidth
LEAST = 10  # minimum remaining seconds to start a measurement
TEXT = ("--data", "corpus", "--tokenizer", "byte", "--val-fraction", "0", "--grad-accum", "1")
TOY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 8, "vocab_size": 300}
PEERS = {
    "PyTorch, compiled": {"compile": "default"},
    "PyTorch, compiled, cuDNN attention": {"compile": "default", "attention": "cudnn"},
    "PyTorch, compiled, CUDA graphs": {"compile": "reduce-overhead"},
    "PyTorch, max-autotune": {
        "compile": "max-autotune-no-cudagraphs"
    },  # compiles for minutes, so only with --only
}

Found = dict[str, Any]


class Measurements:
    """The command and time limit of each measurement, by "group/program", most important first."""

    def __init__(self, args: argparse.Namespace, scratch: Path) -> None:
        self.commands: dict[str, tuple[float, list[str]]] = {}
        self._args, self._scratch = args, scratch
        self._add("machine/doctor", 40, [*args.distgpt, "doctor", "--json"])
        self._train("GPT-2 bfloat16", "gpt2", "bfloat16", 64, *list(PEERS)[:2])
        self._profile("gpt2", 64)
        self._kernels("kernels", "step")
        for dtype in ("float32", "bfloat16"):
            self._train(f"gpt-mini {dtype}", "gpt-mini", dtype, 16, *list(PEERS)[:3:2])
        for name in ("XL", "S"):
            self._forward(name)
        self._decode()
        self._train("GPT-2 TF32", "gpt2", "tf32", 16, "PyTorch, compiled")
        if "autotune" in (args.only or ()):
            self._train("autotune", "gpt2", "bfloat16", 64, "PyTorch, max-autotune")
        self._kernels("ablation", "ablation")

    def _add(self, name: str, most: float, command: list[Any]) -> None:
        if not self._args.only or name.split("/")[0] in self._args.only:
            self.commands[name] = (most, [str(word) for word in command])

    def _ask(self, name: str, most: float, **request: Any) -> None:
        if self._args.peer:
            words = [HERE / "peers" / "peer_torch_gpu.py", json.dumps(request)]
            self._add(name, most, [*shlex.split(self._args.peer), *words])

    def _shape(self, name: str) -> ModelConfig:
        shape = replace(preset(name).model, vocab_size=50257 if name == "gpt2" else 256)
        return replace(shape, **TOY) if self._args.quick else shape

    def _ours(self, name: str, dtype: str, batch: int, command: str, steps: int) -> list[Any]:
        words = [*self._args.distgpt, *command.split(), "--stage", "cuda", "--preset", name, *TEXT]
        words += ["--dtype", *(["float32", "--tf32"] if dtype == "tf32" else [dtype])]
        if not self._args.quick:
            return [*words, "--batch-size", batch, "--steps", steps, "--recompute", "none"]
        toy = [word for key, value in TOY.items() for word in (f"--{key.replace('_', '-')}", value)]
        return [*words, *toy, "--batch-size", 2, "--steps", 4]

    def _train(self, group: str, name: str, dtype: str, batch: int, *peers: str) -> None:
        """Measure distgpt first and last, to show whether the GPU slows down as it warms up."""
        steps, out = 20 if name == "gpt2" else 100, self._scratch / "bench"
        ours = self._ours(name, dtype, batch, "bench train", steps)
        ours += ["--sample-every", 0, "--json", "--out", out]
        self._add(f"{group}/ours", 90, ours)
        shape, batch = for_torch(self._shape(name)), 2 if self._args.quick else batch
        for who in peers:
            how = {"shape": shape, "batch": batch, "precision": dtype, "steps": steps, **PEERS[who]}
            self._ask(f"{group}/{who}", 400 if group == "autotune" else 150, do="train", **how)
        self._add(f"{group}/ours again", 90, ours)

    def _decoding(self, group: str, new: int) -> list[Any]:
        """Return a command that decodes with weights created by the first measurement of the group."""
        weights = self._scratch / group.replace(" ", "-") / "weights.safetensors"
        words = [*self._ours("gpt2", "bfloat16", 1, "train", 1), "--out", weights.parent]
        self._add(f"{group}/weights", 60, [*words, "--sample-every", 0])
        words = ["infer", "--weights", weights, "--stage", "cuda", "--dtype", "bfloat16", "--json"]
        words += ["--prompt", "Once upon a time", "--max-new-tokens", new, "--temperature", 0]
        return [*self._args.distgpt, *words]

    def _profile(self, name: str, batch: int) -> None:
        words, out = self._ours(name, "bfloat16", batch, "profile", 5), self._args.out.parent / "profile"
        self._add("profile/GPT-2 bfloat16", 60, [*words, "--out", out])

    def _kernels(self, group: str, what: str) -> None:
        switches = ["--quick"] * self._args.quick + ["--host"] * self._args.host
        self._add(f"{group}/own", 90, [sys.executable, HERE / "gpu_kernels.py", what, *switches])

    def _forward(self, name: str) -> None:
        """Compare losses on the GPU with losses on the CPU."""
        count, out = 20 if self._args.quick else 5000, self._scratch / "bench"
        for dtype in ("float32", "bfloat16"):
            study = [*self._args.python, HERE / "forward_study.py"]
            words = [*study, "--preset", name, "--names", count, "--dtype", dtype, "--json"]
            check = ["--method", "batched"] if name == "S" and dtype == "float32" else []
            words += [*check, "--method", "cuda", "--out", out]
            self._add(f"forward {name}/ours, {dtype}", 60, words)
        names = sequences(count)
        np.savez(self._scratch / "names.npz", tokens=names.tokens, lengths=names.lengths)
        request = {"shape": for_torch(preset(name).model), "names": str(self._scratch / "names.npz")}
        for precision in ("float32", "tf32"):
            how = request | {"precision": precision}
            self._ask(f"forward {name}/PyTorch, {precision}", 60, do="forward", **how)

    def _decode(self) -> None:
        new = 4 if self._args.quick else 256
        words = self._decoding("decoding", new)
        for graphs in ("--cuda-graph", "--no-cuda-graph"):
            self._add(f"decoding/ours, {graphs[2:]}", 40, [*words, graphs])
        many = self._decoding("decoding many", new)
        for count in (1, 32, 128):
            at_once = min(count, 3) if self._args.quick else count
            self._add(f"decoding many/ours, {count} in parallel", 60, [*many, "--n", at_once])
        self._ask("decoding/Hugging Face", 60, do="decode", shape=for_torch(self._shape("gpt2")), new=new)


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    date, command = datetime.datetime.now().isoformat(timespec="seconds"), shlex.join(["python", *sys.argv])
    results: Found = {"date": date, "command": command, "quick": args.quick, "seconds": 0.0, "found": {}}
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for name, (most, words) in Measurements(args, Path(scratch)).commands.items():
                left = args.seconds - (time.monotonic() - began)
                results["found"][name] = found = {}
                measure(name, min(left, left if args.quick else most), words, found)
                results["seconds"] = time.monotonic() - began
                args.out.write_text(json.dumps(results, indent=1) + "\n")
    except (KeyboardInterrupt, SystemExit):
        results["interrupted"] = True
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(line[:150] for line in table(results)))
    print(f"written to {args.out}", flush=True)
    return 130 if "interrupted" in results else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="distgpt against PyTorch on one GPU.")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="as in the table: kernels, ablation, …")
    parser.add_argument("--seconds", type=float, default=460, help="for everything together")
    parser.add_argument("--peer", help="Python with PyTorch; default sys.executable")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/gpu-DATE.json)")
    parser.add_argument("--quick", action="store_true", help="toy sizes: whether it runs, not how fast")
    parser.add_argument("--host", action="store_true", help="run on the CUDA emulator; requires --quick")
    args = parser.parse_args()
    if args.host and not args.quick:
        parser.error("--host requires --quick: the emulator is 1,000 times slower than a GPU")
    if args.peer is None and importlib.util.find_spec("torch") is not None:
        args.peer = sys.executable
    stand_in = HERE.parent / "tests" / "gpu" / "hostgpu.py"
    args.python = [sys.executable, *([str(stand_in)] * args.host)]
    args.distgpt = [*args.python, *([] if args.host else ["-m", "distgpt"])]
    args.out = args.out or HERE / "results" / f"gpu-{datetime.date.today()}.json"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


def measure(name: str, most: float, command: list[str], found: Found) -> None:
    """Run one command, kill its process group at the end, and fill in the output."""
    if most < LEAST:
        found["error"] = "not started: no time left"
        return
    print(f"{name}: at most {most:.0f} s", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            ended = run(command, timeout=most, output=output)
        finally:  # includes output before an interrupt
            output.seek(0)
            read(output.read(), found)
    found |= {"wall_s": ended.seconds, "stderr": ended.errors[-5000:].strip()}
    if ended.code:
        how = f"stopped after {most:.0f} s" if ended.code == TIMED_OUT else f"exit code {ended.code}"
        found["error"] = ": ".join([how, *found["stderr"].splitlines()[-1:]])


def read(output: str, found: Found) -> None:
    for text in (output, *output.splitlines()):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if isinstance(value, dict) and "row" not in value:
            found.update(value)
            return
        if isinstance(value, dict):
            found.setdefault("measured", {})[value.pop("row")] = value
    if "measured" not in found:
        found["stdout"] = output[-20_000:]


def table(results: Found) -> Iterator[str]:
    """Return the page: speeds, ratios to PyTorch's fastest mode, kernels, and failures."""
    yield f"GPU benchmark, {results['date']}, {results['seconds']:.0f} s{', toy sizes' * results['quick']}"
    groups: dict[str, Found] = {}
    for name, found in results["found"].items():
        group, who = name.split("/", 1)
        groups.setdefault(group, {})[who] = found
    for group, contestants in groups.items():
        yield from comparison(group, contestants)
        for found in contestants.values():
            yield from kernels(found.get("measured", {}))
    for name, found in results["found"].items():
        for error in [found, *found.get("measured", {}).values()]:
            if "error" in error:
                yield f"! {name}: {error['error']}"


def comparison(group: str, contestants: Found) -> Iterator[str]:
    speeds, best = {}, {"ours": 0.0, "theirs": 0.0}
    for who, found in contestants.items():
        row = (found.get("rows") or [found])[-1]  # the last row of `distgpt bench`
        if "tokens_per_s" in row or "loss" in row:
            speeds[who] = speed = row.get("tokens_per_s") or 1 / row["seconds"], row.get("mfu")
            side = "ours" if who.startswith("ours") else "theirs"
            best[side] = max(best[side], speed[0])
    if not speeds:
        return
    ours, theirs = best.values()
    bar = next((value for key, value in BAR.items() if group.startswith(key)), None)
    verdict = f"{ours / theirs:.2f} x" if ours and theirs else "nothing to compare with"
    if ours and theirs and bar:
        verdict += f" (bar {bar}: {'met' if ours / theirs >= bar else 'NOT met'})"
    yield f"{group}: {verdict}"
    for who, (speed, mfu) in speeds.items():
        peak = f"{mfu:7.1%} of the peak" if mfu else ""
        yield f"    {who:36} {speed:14,.1f}/s {peak}"


def kernels(rows: Found) -> Iterator[str]:
    for name, row in rows.items():
        time_us = row["seconds"] * 1e6 if "seconds" in row else row.get("us_per_name", 0)
        if "of_copy" in row:
            mark = "" if row["of_copy"] >= MEMORY_BOUND else " !"
            yield f"    {name:44} {time_us:10,.1f} us {row['of_copy']:5.0%} of a copy's bandwidth{mark}"
        elif "tflops" in row:
            yield f"    {name:44} {time_us:10,.1f} us {row['tflops']:7.1f} TFLOP/s {row.get('chosen', '')}"


if __name__ == "__main__":
    sys.exit(main())
