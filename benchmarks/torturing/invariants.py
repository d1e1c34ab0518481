"""Invariants after each attempt and at the end of a trial, checked without distgpt's own code.

A finding is a line "name: details"; the table counts names.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torturing.attempts import Attempt
from torturing.faults import KEEP, KILL, STEPS, Mode

# Documented exit codes of signals, and of a disk that fails.
SIGNALS = {"SIGTERM": 143, "SIGINT": 130, "SIGUSR1": 75}
USAGE, DATA, STORAGE = 2, 65, 74
DOCUMENTED = (0, 1, 2, 65, 70, 71, 74, 75, 76, 130, 143)
# Codes of MPICH's mpirun if a rank was killed: the rank's signal, or 143 if MPI then aborts another rank (the
# codes are combined by bitwise or); 137 of other launchers.
RANK_KILLED = (9, 137, 143)
# Codes for a signal before MPI has started: the signal's number, or a rank's code.
BEFORE_MPI = (2, 9, 10, 11, 15)
FILES = {
    "config.toml",
    "tokenizer.json",
    "metrics.jsonl",
    "summary.json",
    "weights.safetensors",
    "best.safetensors",
}
MAY_BE = {"history.jsonl", "checkpoints"}
SAME = ("*.safetensors", f"checkpoints/step-{STEPS:08}/*.safetensors")  # files that must be bitwise identical


@dataclass(slots=True)
class Seen:
    """The state of a run's directory."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)  # lines of metrics that repeat an earlier one
    half_line: bool = False
    saved: dict[int, str] = field(default_factory=dict)  # step: error, or "" if intact
    torn: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    holder: str = ""  # content of running.json
    resumed: list[int] = field(default_factory=list)  # the steps of resumes in history.jsonl
    best: int | None = None  # the step of the best weights, from their metadata
    best_said: dict[int, int] = field(default_factory=dict)  # the same, from each checkpoint

    @property
    def step(self) -> int:
        return max(self.losses, default=0)

    @property
    def newest(self) -> int:
        """Return the step of the newest intact checkpoint, or 0."""
        return max((step for step, wrong in self.saved.items() if not wrong), default=0)


def look(run: Path) -> Seen:
    seen = Seen()
    if not run.is_dir():
        return seen
    seen.names = {path.name for path in run.iterdir()}
    if (run / "running.json").exists():
        seen.holder = (run / "running.json").read_text(errors="replace") or "nothing"
    seen.hidden = [
        str(path.relative_to(run))
        for path in run.rglob("*")
        if path.name.startswith(".") or path.suffix == ".old"
    ]
    for path in sorted(run.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith(".")
            # The first file is appended to; the second is the lock itself and only names the process.
            and path.name not in ("metrics.jsonl", "running.json")
            and (wrong := torn(path))
        ):
            seen.torn.append(f"{path.name} {wrong}")
    for path in sorted(run.glob("checkpoints/step-*")):
        if path.name.removeprefix("step-").isdigit():
            seen.saved[int(path.name.removeprefix("step-"))] = broken(path)
    seen.best = _best_in(run / "best.safetensors")
    states = {step: _read(run / f"checkpoints/step-{step:08}/state.json") for step in seen.saved}
    seen.best_said = {step: state["best"]["step"] for step, state in states.items() if state.get("best")}
    if (run / "history.jsonl").is_file():
        events = (run / "history.jsonl").read_bytes().split(b"\n")[:-1]
        begun = [line for line in events if b'"from": ' in line]  # without discarded and bad steps
        seen.resumed = [int(step) for step in re.findall(rb'"step": (\d+)', b"\n".join(begun))]
    if (run / "metrics.jsonl").is_file():
        _read_metrics((run / "metrics.jsonl").read_bytes(), seen)
    return seen


def _read_metrics(content: bytes, seen: Seen) -> None:
    *lines, rest = content.split(b"\n")
    seen.half_line = bool(rest)
    for line in lines:
        try:
            found = json.loads(line)
            key = "loss" if "loss" in found else "val_loss"
            step, value = found["step"], found[key]
        except (ValueError, KeyError, TypeError):
            seen.torn.append("metrics.jsonl has a broken line that is not its last")
            continue
        of = seen.losses if key == "loss" else seen.evaluations
        if step in of:
            seen.repeated.append(f"{key} of step {step}")
        if key == "loss" and step < seen.step:
            seen.repeated.append(f"step {step} comes after step {seen.step}")
        of[step] = value


def _best_in(path: Path) -> int | None:
    """Return the step in the metadata of a weights file, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = path.read_bytes()
        known = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        return int(json.loads(known["best"])["step"])
    return None


def torn(path: Path) -> str:
    """Return the error of a file, or ""."""
    content = path.read_bytes()
    try:
        if path.suffix == ".toml":
            tomllib.loads(content.decode())
        elif path.suffix == ".json":
            json.loads(content)
        elif path.suffix == ".jsonl":
            [json.loads(line) for line in content.splitlines()]
        elif path.suffix == ".safetensors":
            length = int.from_bytes(content[:8], "little")
            known = json.loads(content[8 : 8 + length])["__metadata__"]
            if hashlib.sha256(content[8 + length :]).hexdigest() != known["data_sha256"]:
                return "does not match its checksum"
    except (ValueError, KeyError, TypeError) as error:
        return f"cannot be read: {error}"
    return ""


def broken(checkpoint: Path) -> str:
    """Return the error of a checkpoint, or ""."""
    try:
        listed = json.loads((checkpoint / "manifest.json").read_text())
        if not {"weights.safetensors", "optimizer.safetensors", "state.json"} <= listed.keys():
            return "its manifest lacks a file"
        for name, entry in listed.items():
            content = (checkpoint / name).read_bytes()
            if "header_sha256" in entry:
                length = int.from_bytes(content[:8], "little")
                known = json.loads(content[8 : 8 + length])["__metadata__"]["header_sha256"]
                same = known == entry["header_sha256"] and not torn(checkpoint / name)
            else:
                same = hashlib.sha256(content).hexdigest() == entry["sha256"]
            if len(content) != entry["bytes"] or not same:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fits(mode: Mode, done: Attempt) -> list[str]:
    """Return whether this exit code is documented for this attempt."""
    fault, several = done.fault, done.ranks > 1
    allowed = {0}
    if fault.what == "signal" and done.came is not None:
        to_launcher = fault.to == "launcher" and several
        if fault.name == KILL:
            allowed |= {-signal.SIGKILL} if to_launcher or not several else {*RANK_KILLED}
        elif fault.name != "SIGSTOP":
            allowed.add(SIGNALS[fault.name])
            if done.early:
                allowed |= {*BEFORE_MPI} if several else {-signal.Signals[fault.name]}
    if fault.what in ("error", "full"):
        allowed.add(STORAGE)
        if fault.name == "torn" and done.came is not None:
            allowed |= {*RANK_KILLED} if several else {-signal.SIGKILL}
        if fault.where == "reading":
            allowed |= {DATA, USAGE}
    if fault.what == "twice":
        allowed.add(USAGE)
        if done.second not in (None, 0, USAGE):
            return [f"exit code: the second process left with {done.second}"]
        if done.code and done.second:
            return ["both rejected: two processes each considered the other the first"]
    if done.code in allowed:
        return []
    return [
        f"exit code: {done.code} where {', '.join(map(str, sorted(allowed)))} would be right{_last(done)}"
    ]


def _last(done: Attempt) -> str:
    said = [line for line in done.errors.splitlines() if line.startswith("distgpt: ")]
    return f" ({said[-1][:300]})" if said else ""


def after_attempt(mode: Mode, done: Attempt, before: Seen, seen: Seen, tolerated: bool = False) -> list[str]:
    """`tolerated`: files were corrupted on purpose, so corrupt files and a rejected run are expected."""
    found: list[str] = []
    if done.early and done.fault.name == "SIGINT" and "Traceback" in done.errors:
        return found  # the fault came while Python was starting, so the other ranks continue
    if done.hung:
        found.append(f"hang: no end after {done.seconds:.0f} s")
    found += [f"left behind: {words}" for words in done.left]
    if "Traceback" in done.errors or "internal error" in done.errors:
        found.append(f"traceback: {' | '.join(done.errors.splitlines()[-4:])[-500:]}")
    if not done.hung and not tolerated:
        found += fits(mode, done)
    if tolerated and done.code not in (0, USAGE, DATA):
        found.append(f"exit code: {done.code} for corrupt files{_last(done)}")
    ours = [line for line in done.errors.splitlines() if line.startswith("distgpt: ")]
    # MPICH returns 143 as for a signal if one rank is killed and another aborts.
    killed = done.code not in DOCUMENTED or (done.came and done.fault.name == KILL)
    if done.code in DOCUMENTED[1:] and not killed and not ours and not done.early:
        found.append(f"no word: exit code {done.code} without a line of ours")
    if tolerated:
        return found
    found += _torn_checkpoints(seen) + [f"torn: {what}" for what in seen.torn]
    found += [f"twice: {what}" for what in seen.repeated]
    wrote_half = killed or done.fault.what in ("error", "full")
    if seen.half_line and not wrote_half:
        found.append("torn: metrics.jsonl ends in half a line")
    left_by_this = seen.holder and seen.holder != before.holder
    if not killed and left_by_this and done.fault.what not in ("error", "full"):
        found.append("leaked: running.json after an end that was not a kill")
    resumed = seen.resumed[len(before.resumed) :]
    if resumed and done.fault.where != "reading" and resumed[-1] < before.newest:
        found.append(f"older: resumed at {resumed[-1]}, although {before.newest} was intact")
    found += [
        f"best: step {said} according to the checkpoint of step {step}, but {seen.best}"
        for step, said in seen.best_said.items()
        if seen.best is None or seen.best < said
    ]
    return found + lost(mode, done, before, seen)


def _torn_checkpoints(seen: Seen) -> list[str]:
    """Report separately a checkpoint that was being removed, since newer ones usually suffice."""
    intact, found = sum(not wrong for wrong in seen.saved.values()), []
    for step, wrong in seen.saved.items():
        if wrong:
            name = "half removed" if intact >= KEEP and step < seen.newest else "torn"
            found.append(f"{name}: the checkpoint of step {step}: {wrong}")
    return found


def lost(mode: Mode, done: Attempt, before: Seen, seen: Seen) -> list[str]:
    """A saving signal loses no step; other faults lose at most one interval between saves.

    If a disk fails, a run that continues has only the earlier saves.
    """
    steps = max(seen.step, before.step if not seen.losses else 0) - seen.newest
    asked = done.fault.name in SIGNALS and done.code == SIGNALS.get(done.fault.name)
    found = []
    if asked and steps > 0 and not done.early:
        found.append(
            f"lost: {steps} steps by {done.fault.name}: step {seen.step} was done, {seen.newest} saved"
        )
    elif steps > mode.loses and not (mode.goes_on and done.fault.what in ("error", "full")):
        found.append(f"lost: {steps} steps: step {seen.step} was done, {seen.newest} saved")
    if seen.newest < before.newest:
        found.append(f"lost: the checkpoint of step {before.newest}, and only {seen.newest} is left")
    if done.fault.what == "full" and done.code == STORAGE and mode.goes_on:
        intact = sorted(step for step, wrong in seen.saved.items() if not wrong)
        if len(intact) > 1:
            found.append(f"hoarded: full disk, but kept the checkpoints of steps {intact}")
        if seen.step == STEPS and "weights.safetensors" not in seen.names:
            found.append("no result: finished all steps without weights")
    said = re.findall(r"step ([\d,]+) is saved", done.errors)
    if said and int(said[-1].replace(",", "")) not in seen.saved:
        found.append(f"untrue: reports that step {said[-1]} is saved, but has {sorted(seen.saved)}")
    return found


def at_the_end(run: Path, reference: Path, mode: Mode, same_ranks: bool) -> list[str]:
    """Compare with an uninterrupted run of the same mode."""
    seen, expected = look(run), look(reference)
    found = _torn_checkpoints(seen) + [f"torn: {what}" for what in seen.torn]
    found += [f"twice: {what}" for what in seen.repeated]
    found += [f"leaked: {name}" for name in seen.hidden]
    found += [f"leaked: {name}" for name in sorted(seen.names - FILES - MAY_BE)]
    found += [f"missing: {name}" for name in sorted((FILES | {"checkpoints"}) - seen.names)]
    if sorted(seen.losses) != [*range(1, STEPS + 1)]:
        found.append(f"steps: metrics.jsonl has {sorted(seen.losses)}")
    if sorted(seen.evaluations) != sorted(expected.evaluations):
        found.append(f"evaluations: has steps {sorted(seen.evaluations)}, not {sorted(expected.evaluations)}")
    if STEPS not in seen.saved or len(seen.saved) > KEEP:
        found.append(f"checkpoints: has steps {sorted(seen.saved)}, not the last {KEEP}")
    pairs = [(seen.losses, expected.losses), (seen.evaluations, expected.evaluations)]
    if same_ranks:
        found += [
            f"weights: {path.relative_to(reference)} has other bytes"
            for files in SAME
            for path in sorted(reference.glob(files))
            if not _same(run / path.relative_to(reference), path)
            # A disk that fails for long loses the best weights; then the next best ones count.
            and not (mode.rises and path.name == "best.safetensors")
        ]
        if any(mine != theirs for mine, theirs in pairs):
            found.append("losses: differ from an uninterrupted run")
    elif any(
        abs(mine[step] - theirs[step]) > mode.close * abs(theirs[step])
        for mine, theirs in pairs
        for step in mine
        if step in theirs
    ):
        found.append("losses: differ by too much from an uninterrupted run")
    summary = _read(run / "summary.json")
    if summary.get("stop") != "finished":
        found.append(f"summary: reports that the run {summary.get('stop')}")
    elif summary.get("best_step") != seen.best:
        found.append(f"best: the summary has step {summary['best_step']}, not {seen.best}")
    return found


def _same(path: Path, other: Path) -> bool:
    return path.is_file() and path.read_bytes() == other.read_bytes()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
