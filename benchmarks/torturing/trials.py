"""A trial: attempts at one run with faults and corruption, then one without, until the run is finished."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distgpt.callbacks.full_disk import MORE
from torturing import invariants, preload
from torturing.attempts import Attempt, Place, attempt, remove
from torturing.faults import EVERY, MODES, STEPS, Damage, Fault, Mode, Trial
from torturing.preload import Survey

NOTHING = Fault("nothing")
ATTEMPTS = 3  # limit without a fault
IN_USE = ("is in use",)


@dataclass(slots=True)
class Ground:
    """Shared by all trials: the library, and reference runs by ranks and by mode."""

    folder: Path
    preload: Path | None
    say: Callable[[str], None]
    surveys: dict[str, Survey] = field(default_factory=dict)

    def reference(self, mode: Mode, ranks: int) -> Path:
        self.survey(mode, ranks)
        return self._place(_name(mode, ranks)).run

    def survey(self, mode: Mode, ranks: int) -> Survey:
        name = _name(mode, ranks)
        if name not in self.surveys:
            place = self._place(name)
            place.make()
            for round in ("to warm up", "to look at"):
                shutil.rmtree(place.run, ignore_errors=True)
                shutil.rmtree(place.state(0), ignore_errors=True)
                done = attempt(place, 0, mode, ranks, NOTHING, self.preload, None)
                if done.code:
                    raise SystemExit(
                        f"a run without faults, {round}, ended with {done.code}: {done.errors[-1000:]}"
                    )
            sizes = {path: path.stat().st_size for path in place.run.rglob("*") if path.is_file()}
            saved = sum(size for path, size in sizes.items() if f"step-{STEPS:08}" in str(path))
            calls = preload.calls(place.state(0) / "log")
            most = sum(sizes.values()) + saved + sizes[place.run / "weights.safetensors"] + MORE
            found = (
                preload.survey(calls, done.seconds, 3 * EVERY, most)
                if calls
                else Survey(done.seconds, 0, [], [], most)
            )
            self.surveys[name] = found
            self.say(
                f"without faults, {mode.name} on {ranks}: {done.seconds:.1f} s, {found.calls} calls, "
                f"{len(found.save)} of a save, {len(found.elsewhere)} sorts elsewhere"
            )
        return self.surveys[name]

    def _place(self, name: str) -> Place:
        return Place(self.folder / f"reference-{name.replace(' ', '')}")


def _name(mode: Mode, ranks: int) -> str:
    """Return a name with the mode's options, which are stored in the files of a run."""
    return " ".join([str(ranks), *mode.words])


def run(
    trial: Trial, ground: Ground, keep: Path | None = None, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Run a trial and return the result. Keep its directory in `keep` if it fails."""
    mode = next(mode for mode in MODES if mode.name == trial.mode)
    ground.reference(mode, trial.ranks[0])  # outside the trial's time
    begun, place = time.monotonic(), Place(ground.folder / f"trial-{trial.number}")
    place.make()
    try:
        told = _Telling(trial, ground, place, say or (lambda text: None))
        told.all_attempts()
        found = told.result(time.monotonic() - begun)
        if keep and (found["wrong"] or say):
            shutil.copytree(place.folder, keep / place.folder.name, dirs_exist_ok=True)
    finally:
        remove(place)
    return found


class _Telling:
    """A running trial and its findings."""

    def __init__(self, trial: Trial, ground: Ground, place: Place, say: Callable[[str], None]) -> None:
        self.trial, self.ground, self.place, self.say = trial, ground, place, say
        self.mode = next(mode for mode in MODES if mode.name == trial.mode)
        self.done: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.damaged = ""
        self.refused = ""
        self.seen = invariants.Seen()
        self.awaited = 0.0  # seconds from the last fault until all processes had ended

    def all_attempts(self) -> None:
        faults = [*self.trial.faults, *[NOTHING] * ATTEMPTS]
        for number, fault in enumerate(faults):
            if number == 1 and self.trial.damage:
                self.damaged = damage(self.place.run, self.trial.damage)
                self.say(f"damage: {self.damaged}")
            done = self._attempt(number, fault)
            if self.refused:
                return
            if done.code == 0 and number >= len(self.trial.faults) - 1:
                break
        else:
            self.wrong.append(f"not done: after {ATTEMPTS} attempts without a fault")
            return
        self._judge_the_end()

    def _attempt(self, number: int, fault: Fault) -> Attempt:
        ranks = self.trial.ranks[min(number, len(self.trial.ranks) - 1)]
        survey = self.ground.survey(self.mode, ranks)
        done = attempt(self.place, number, self.mode, ranks, fault, self.ground.preload, survey)
        before, self.seen = self.seen, invariants.look(self.place.run)
        tolerated = bool(self.damaged)
        wrong = invariants.after_attempt(self.mode, done, before, self.seen, tolerated)
        self.say(f"attempt {number} on {ranks}: {fault}\n  {_shown(done)}\n  {self.seen}")
        self.say(f"  wrong: {wrong}\n{done.errors.rstrip()}")
        if tolerated and done.code:
            self._judge_refusal(done)
        elif (
            done.code == invariants.USAGE
            and fault.what == "nothing"
            and any(words in done.errors for words in IN_USE)
        ):
            self.wrong.append(f"rejected: {done.errors.strip().splitlines()[-1][:300]}")
            wrong = []
        self.wrong += wrong
        row = {
            "fault": asdict(fault),
            "ranks": ranks,
            "code": done.code,
            "came": done.came is not None or bool(fault.what == "full" and done.code),
        }
        row |= {"seconds": round(done.seconds, 3), "step": self.seen.step, "saved": self.seen.newest}
        if done.came is not None and done.code:
            row["leaving"] = round(done.leaving or 0.0, 3)
        if number and self.awaited and done.again is not None:
            row["lost"] = round(self.awaited + done.again, 3)
        self.awaited = (done.leaving or 0.0) if done.came is not None and done.code else 0.0
        row["stalls"] = [round(seconds, 5) for seconds in done.stalls]
        self.done.append(row)
        return done

    def _judge_refusal(self, done: Attempt) -> None:
        """Check that a run was rejected only for a corrupt checkpoint, with the file's name."""
        self.refused = (done.errors.strip().splitlines() or [""])[-1][:400]
        name = self.damaged.partition(":")[0]
        intact = any(not wrong for wrong in self.seen.saved.values())
        if name.startswith("checkpoints/") and intact:
            self.wrong.append(f"rejected although a checkpoint is intact: {self.refused}")
        elif (
            name.rpartition("/")[2]
            in ("metrics.jsonl", "best.safetensors", "weights.safetensors", "summary.json")
            and intact
        ):
            self.wrong.append(f"rejected because of an unneeded file: {self.refused}")

    def _judge_the_end(self) -> None:
        ranks = {self.trial.ranks[min(n, len(self.trial.ranks) - 1)] for n in range(len(self.done))}
        wrong = invariants.at_the_end(
            self.place.run,
            self.ground.reference(self.mode, self.trial.ranks[0]),
            self.mode,
            len(ranks) == 1,
        )
        name = self.damaged.partition(":")[0]
        if name == "metrics.jsonl":
            wrong = [
                line
                for line in wrong
                if not line.startswith(("steps", "twice", "losses", "evaluations", "torn: metrics"))
            ]
        if name == "history.jsonl":  # this file is only appended to, so a corrupt line stays
            wrong = [line for line in wrong if not line.startswith("torn: history")]
        if name == "config.toml" and any(
            "changed from" in (self.place.state(n) / "out").read_text(errors="replace")
            for n in range(len(self.done))
        ):
            wrong = [
                line
                for line in wrong
                if not line.startswith(("weights", "losses", "checkpoints", "steps", "evaluations"))
            ]
        self.say(f"at the end wrong: {wrong}")
        self.wrong += wrong
        self.wrong += [
            f"leaked: {path.name} in the temporary directory"
            for path in self.place.temporary.iterdir()
            if not self._was_killed()
        ]

    def _was_killed(self) -> bool:
        return any(row["code"] not in invariants.DOCUMENTED for row in self.done)

    def result(self, seconds: float) -> dict[str, Any]:
        trial = self.trial
        found: dict[str, Any] = {
            "trial": trial.number,
            "kind": trial.kind,
            "mode": trial.mode,
            "ranks": trial.ranks,
        }
        found |= {"seconds": round(seconds, 2), "wrong": sorted(set(self.wrong)), "attempts": self.done}
        if trial.damage:
            found["damage"] = self.damaged
        if self.refused:
            found["refused"] = self.refused
        return found


def _shown(done: Attempt) -> Attempt:
    return replace(done, output="", errors="")


def damage(run: Path, wanted: Damage) -> str:
    """Corrupt a file of the run; return its name and the change, or "" if there is no file."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    if not files:
        return ""
    path, chance = files[int(wanted.which * len(files))], random.Random(wanted.seed)
    content = bytearray(path.read_bytes())
    place = int(wanted.place * len(content))
    if wanted.how == "gone":
        path.unlink()
    elif wanted.how == "a bit" and content:
        content[place] ^= 1 << chance.randrange(8)
    elif wanted.how == "bytes":
        part = content[place : place + 16]
        content[place : place + len(part)] = chance.randbytes(len(part))
    elif wanted.how == "zeros":
        part = content[place : place + 512]
        content[place : place + len(part)] = bytes(len(part))
    elif wanted.how == "more":
        content += chance.randbytes(1 + chance.randrange(600))
    else:
        del content[0 if wanted.how == "emptied" else place :]
    if wanted.how != "gone":
        path.write_bytes(content)
    return f"{path.relative_to(run)}: {wanted.how} at {place}"
