"""distgpt against PyTorch on one GPU; a table at the end, and every number as JSON.

    python benchmarks/gpu.py [--only SECTION …] [--seconds 460] [--peer PYTHON] [--out FILE]

`make bench-gpu` runs it. Each section is a process of its own with a time limit: what fails, hangs or breaks
the device ends that section alone, and what it had found until then is kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

# In the order of their importance: the most seconds, the module, the function.
SECTIONS = {
    "environment": (40, "environment", "environment"),
    "train-gpt2": (220, "training", "train_gpt2"),
    "train-mini": (90, "training", "train_mini"),
    "study": (70, "study", "study"),
    "decode": (60, "decoding", "decode"),
    "kernels": (45, "kernels", "kernels"),
    "products": (40, "products", "products"),
    "ablation": (40, "ablation", "ablation"),
    "train-float32": (90, "training", "train_float32"),
}
LEAST = 12  # seconds that a section is worth starting for
LATE = 3  # seconds after which a section that should have ended is ended


def main() -> int:
    args = arguments()
    if args.section:
        run_section(args)
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    results: dict[str, Any] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "quick": args.quick,
        "host": args.host,
        "peer": args.peer,
        "seconds": 0.0,
        "sections": {},
    }
    began = time.monotonic()
    try:
        for name in args.only or SECTIONS:
            left = args.seconds - (time.monotonic() - began)
            results["sections"][name] = section = {}
            measure(name, min(left, args.seconds if args.quick else SECTIONS[name][0]), args, section)
            results["seconds"] = time.monotonic() - began
            write(args.out, results)
    except KeyboardInterrupt:
        results["interrupted"] = True
    finally:
        results["seconds"] = time.monotonic() - began
        write(args.out, results)
        show(results)
        print(f"written to {args.out}")
    return 130 if "interrupted" in results else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="distgpt against PyTorch on one GPU.")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections to run; all if left out")
    parser.add_argument("--seconds", type=float, default=460, help="for everything together")
    parser.add_argument("--peer", help="Python of an environment with PyTorch; this one's if left out")
    parser.add_argument("--out", type=Path, help="JSON file; benchmarks/results/gpu-DATE.json if left out")
    parser.add_argument("--quick", action="store_true", help="toy sizes: whether it runs, not how fast")
    parser.add_argument("--host", action="store_true", help="on the tests' stand-in for a GPU; takes --quick")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.host and not args.quick:
        parser.error("--host is for --quick: the stand-in computes a thousand times slower than a GPU")
    if args.peer is None and importlib.util.find_spec("torch") is not None:
        args.peer = sys.executable
    args.out = args.out or HERE / "results" / f"gpu-{datetime.date.today()}.json"
    return args


def measure(name: str, seconds: float, args: argparse.Namespace, section: dict[str, Any]) -> None:
    """Fill in what a section finds, in a process group of its own, of which nothing stays behind."""
    if seconds < LEAST:
        section["ended"] = "not started: no time left"
        return
    print(f"{name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch, "found.json")
        command = [sys.executable, str(HERE / "gpu.py"), "--section", name, "--out", str(found)]
        command += ["--seconds", str(seconds - LATE), *(["--peer", args.peer] if args.peer else [])]
        command += ["--quick"] * args.quick + ["--host"] * args.host
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
        try:
            code = child.wait(seconds)
            if code:
                section["ended"] = f"by exit code {code}"
        except subprocess.TimeoutExpired:
            section["ended"] = f"stopped after {seconds:.0f} s"
        except KeyboardInterrupt:
            section["ended"] = "interrupted"
            raise
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            section["seconds"] = time.monotonic() - began
            with suppress(OSError, ValueError):
                section.update(json.loads(found.read_text()))


def run_section(args: argparse.Namespace) -> None:
    """In the section's own process."""
    from gpubench.report import Report

    report = Report(args.out, args.seconds)
    with report.attempt("section"):
        from gpubench.section import Section

        _, module, function = SECTIONS[args.section]
        section = Section(report, args.host, args.quick, args.peer)
        try:
            getattr(importlib.import_module(f"gpubench.{module}"), function)(section)
        finally:
            section.close()


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def show(results: dict[str, Any]) -> None:
    try:
        from gpubench.table import table

        print("\n".join(table(results)), flush=True)
    except Exception as error:
        print(f"no table: {type(error).__name__}: {error}; all numbers are in the file", flush=True)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
