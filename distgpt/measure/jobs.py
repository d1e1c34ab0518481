"""Start distgpt runs as processes, read their output files, and write results."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from distgpt.cluster.jobs.launchers import Launcher
from distgpt.cluster.jobs.processes import OUR_LINE, Ended, distgpt_command, ending, run, unlaunched
from distgpt.core.base.checked import parse_json, parse_object
from distgpt.core.base.errors import DataError, DistgptError, StorageError, error_for, print_lines
from distgpt.core.base.files import atomic_file, read_small, storage_errors, write_json
from distgpt.core.config import ON_GPU, RunConfig
from distgpt.core.saved.rundir import RunDirectory, read_metrics
from distgpt.measure.doctor.facts import environment
from distgpt.show.page import Block, terminal

# Both sides of a comparison run without variables that start with these prefixes, since some would affect
# only one side's BLAS.
_STEERING = ("OPENBLAS_", "MKL_", "OMP_", "ATEN_", "ONEDNN_", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER")


def unsteered(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for both sides of a comparison."""
    return {key: value for key, value in unlaunched(environ).items() if not key.startswith(_STEERING)}


def start(words: Sequence[object], launcher: Launcher | None = None, ranks: int = 1) -> Ended:
    """Run a distgpt command to its end, as `ranks` processes under a launcher or as one process."""
    command = distgpt_command(*words)
    if launcher is not None:
        command = launcher.command(ranks, command)
    return run(command, env=unsteered())


def ask(
    what: str, words: Sequence[object], launcher: Launcher | None = None, ranks: int = 1
) -> dict[str, Any]:
    """Run a distgpt command and return the JSON object it prints. Errors start with `what`."""
    return answer(start(words, launcher, ranks), what)


def answer(ended: Ended, what: str) -> dict[str, Any]:
    """Return the last JSON object of a child's output, or raise its error if it failed."""
    if ended.code:
        raise_failure(ended, what)
    for line in reversed(ended.output.splitlines()):
        if line.startswith("{"):
            with suppress(ValueError):
                result = parse_json(line)
                assert isinstance(result, dict)  # the line starts with a brace
                return result
    raise DataError(f"{what} printed no result: {ended.complaint()}")


def raise_failure(ended: Ended, what: str) -> NoReturn:
    """Raise a child's error: its own with its exit code if it is a distgpt error, otherwise how it ended."""
    kind = error_for(ended.code)
    said = ended.complaint()
    if kind is not DistgptError and any(line.startswith(OUR_LINE) for line in ended.errors.splitlines()):
        raise kind(said)
    words = f": {said}" if said else ""
    raise DistgptError(f"{what} failed ({ending(ended.code)}){words}")


def train(
    what: str, config: RunConfig, out: Path, words: Sequence[object], launcher: Launcher | None, ranks: int
) -> dict[str, Any]:
    """Train into `out`, which must not exist yet, in the stage that `words` name. Return the summary."""
    toml = out.with_suffix(".toml")
    with atomic_file(toml) as file:
        file.write(config.to_toml().encode())
    command = ["train", "--config", toml, "--out", out, "--progress", "plain", *words]
    ended = start(command, launcher, ranks)
    if ended.code:
        raise_failure(ended, what)
    return read_summary(out)


def read_summary(out: Path) -> dict[str, Any]:
    path = RunDirectory(out).summary
    try:
        return parse_object(read_small(path), path)
    except StorageError:
        raise DataError(f"cannot read {path}; check that the first host can write there") from None


def read_losses(out: Path) -> list[float | None]:
    """Return the loss of each step, up to the first corrupt line. None: not finite."""
    losses: list[float | None] = []
    with suppress(StorageError, DataError):
        for line in read_metrics(RunDirectory(out).metrics):
            losses += [line.numbers["loss"]] if "loss" in line.numbers else []
    return losses


def check_gpu(stage: str, dtype: str, launcher: str | None, hostfile: Path | None) -> None:
    """Raise an error if the stage would run on this machine and its GPUs do not support it."""
    if stage in ON_GPU and launcher is None and hostfile is None:
        from distgpt.gpu.probe import require_gpu

        require_gpu(stage, dtype)


# Results

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options that all benchmarks share: how to start ranks, and where to write results."""

    ranks: int = 2
    hostfile: Path | None = None
    launcher: str | None = None
    name: str | None = None
    out: Path = Path("bench")
    as_json: bool = False

    def prepare(self) -> None:
        prepare(self.out)

    def finish(self, kind: str, name: str, found: Row, blocks: Sequence[Block]) -> None:
        """Print the results, and save them under the user's name for them or `name`."""
        if self.as_json:
            print(json.dumps(found), flush=True)
        else:
            print_lines(terminal(blocks))
        say(f"written to {save(self.out, kind, self.name or name, found)}")


def prepare(folder: Path) -> None:
    """Create a directory for results and check that it is writable, before anything is measured."""
    with storage_errors("write to", folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def say(line: str) -> None:
    print_lines(line, err=True)


def save(folder: Path, kind: str, name: str, found: Row) -> Path:
    """Write {kind}-{name}.json with a description of this machine, replacing an earlier file."""
    words = re.sub(r"[^\w.]+", "-", name).strip("-")
    path = folder / f"{kind}-{words or 'unnamed'}.json"
    write_json(path, {"kind": kind, "name": name, "environment": environment(), **found})
    return path
