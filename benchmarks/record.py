"""Shared code of the benchmarks: options, result files with their environment, and metrics of runs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DistgptError, print_lines
from distgpt.core.comm.resources import usable_cores
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import VARIABLE
from distgpt.core.saved.rundir import RunDirectory
from distgpt.measure import jobs
from distgpt.measure.doctor.facts import anonymised, environment
from distgpt.measure.profile.session import peak_gflops

os.environ.setdefault(VARIABLE, "float32")  # the dtype of results without one, on every processor


def arguments(about: str | None, rounds: int = 3, **options: dict[str, Any]) -> argparse.Namespace:
    """Return the command line, given options with their settings in argparse, and two common options."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    options["rounds"] = {"type": int, "default": rounds, "help": "times that everything is measured"}
    options["out"] = {"type": Path, "help": "JSON file; benchmarks/results/WHAT-DATE.json if left out"}
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args()


def save(kind: str, found: dict[str, Any], out: Path | None) -> None:
    """Write results with their environment. Default of `out`: results/KIND-DATE.json."""
    gflops = peak_gflops(CpuKernels("float32", len(usable_cores())), 0.7)
    own = {"command": anonymised(shlex.join(["python", *sys.argv])), "sgemm_gflops": gflops}
    path = out or Path(__file__).parent / "results" / f"{kind}-{datetime.date.today()}.json"
    path.write_text(json.dumps({"environment": environment() | own, **found}, indent=1) + "\n")
    print(f"{gflops:.0f} GFLOP/s in float32 matrix products; written to {path}")


def distgpt(*words: object) -> float:
    """Run a command and return its seconds. Exit if it fails."""
    ended = jobs.start(words)
    if ended.code:
        raise SystemExit(f"exit code {ended.code} from distgpt {shlex.join(map(str, words))}")
    return ended.seconds


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in RunDirectory(run).metrics.read_text().splitlines()]


def end_with_errors(main: Callable[[], object]) -> None:
    """Call `main`. Print an expected failure as one line and exit with its code."""
    try:
        main()
    except DistgptError as error:
        print_lines(str(error), err=True)
        raise SystemExit(error.exit_code) from None
