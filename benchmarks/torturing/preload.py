"""Compile faulty.c and return the environment in which it causes a fault."""

from __future__ import annotations

import errno
import re
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torturing.faults import Fault

SOURCE = Path(__file__).with_name("faulty.c")
_OTHERS = tuple(
    f"/{dot}{name}" for dot in ("", ".") for name in ("metrics", "best", "weights", "summary", "running")
)
FEW = 2
STARTING = 30  # calls of a resumed run before its first step
READS = 150  # more reads below the run's directory than a resumed run makes


def compiled(folder: Path) -> Path | None:
    """Return the compiled library, or None without a compiler or Linux."""
    compiler, made = shutil.which("cc"), folder / "faulty.so"
    if compiler is None:
        return None
    words = [compiler, "-shared", "-fPIC", "-O2", "-o", str(made), str(SOURCE)]
    return made if subprocess.run(words, capture_output=True).returncode == 0 else None


@dataclass(frozen=True, slots=True)
class Call:
    number: int
    seconds: float
    name: str
    path: str


def calls(log: Path) -> list[Call]:
    found = []
    for line in log.read_text().splitlines() if log.exists() else ():
        number, seconds, name, _, path = line.split(maxsplit=4)
        found.append(Call(int(number), float(seconds), name, path))
    return found


@dataclass(frozen=True, slots=True)
class Survey:
    """The duration, calls, calls of the third save, and disk space of a run without faults."""

    seconds: float
    calls: int
    save: list[int]
    elsewhere: list[int]  # other calls on its directory: a few of each kind
    most: int  # bytes of its directory at the end, and of a checkpoint during a save


def survey(found: list[Call], seconds: float, step: int, most: int) -> Survey:
    """Find the calls of a save, from the creation of its directory to the removal of the oldest one."""
    own = [place for place, call in enumerate(found) if f"/.tmp-step-{step:08}" in call.path]
    begin, end = own[0], own[-1]
    while begin and not found[begin - 1].path.startswith(_OTHERS):
        begin -= 1
    while end + 1 < len(found) and not found[end + 1].path.startswith(_OTHERS):
        end += 1
    save = [call.number for call in found[begin : end + 1] if not call.path.startswith(_OTHERS)]
    elsewhere, sorts = [], Counter[tuple[str, str]]()
    for call in found:
        sort = call.name, re.sub(r"\.[0-9a-f]{12}\.", ".", call.path)
        sorts[sort] += 1
        if sorts[sort] <= FEW and not call.path.startswith("/checkpoints") and call.path[0] in "./":
            elsewhere.append(call.number)
    return Survey(seconds, len(found), save, elsewhere, most)


def environment(
    library: Path | None, root: Path, state: Path, fault: Fault, seen: Survey | None
) -> dict[str, str]:
    if library is None:
        return {}
    told = {"LD_PRELOAD": library, "FAULTY_ROOT": root, "FAULTY_STATE": state, "FAULTY_CLOCK": fault.clock}
    if fault.where == "reading":
        told["FAULTY_READS"] = 1
    else:
        told["FAULTY_LOG"] = state / "log"
    if fault.what in ("signal", "error") and fault.where not in ("moment", "step"):
        assert seen is not None
        told["FAULTY_AT"] = _call(fault, seen)
        told["FAULTY_TIMES"] = fault.times
        if fault.what == "signal":
            told |= {"FAULTY_SIGNAL": int(signal.Signals[fault.name]), "FAULTY_TO": fault.to}
        else:  # only a write can be partial
            told["FAULTY_ERROR"] = getattr(errno, fault.name, errno.EIO)
            told["FAULTY_SHORT"] = {"short": 1, "torn": 2}.get(fault.name, 0)
    return {name: str(value) for name, value in told.items()}


def _call(fault: Fault, seen: Survey) -> int:
    if fault.where in ("save", "elsewhere"):
        listed = seen.save if fault.where == "save" else seen.elsewhere
        return listed[fault.turn % len(listed)]
    if fault.where == "start":
        return 1 + fault.turn % STARTING
    return 1 + int(fault.part * (READS if fault.where == "reading" else seen.calls))
