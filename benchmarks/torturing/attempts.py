"""One attempt at a run: real processes under a real mpirun, a fault, and their end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from distgpt.cluster.jobs.launchers import own_mpirun
from distgpt.cluster.jobs.processes import unlaunched
from torturing import preload
from torturing.faults import EVALUATED, EVERY, KEEP, STEPS, Fault, Mode
from torturing.preload import Survey

MARK = "DISTGPT_TORTURE"  # environment variable that marks all processes of an attempt
LIMIT = 90.0  # seconds until an attempt counts as a hang
GONE = 15.0  # seconds from the end of the command until all its processes must have ended
LOOK = 0.002  # seconds between checks of a run
AFTER_STEP = 0.006  # maximum seconds from the chosen step to the fault, about the duration of a save
DISK = 64 << 20  # bytes of a disk that is large enough
MODEL = "--n-layer 1 --n-head 2 --n-embd 32 --seq-len 32 --batch-size 12 --data story --tokenizer byte"
HOW = f"--lr 1e-3 --warmup 2 --steps {STEPS} --save-every {EVERY} --val-fraction 0.1 --val-tokens 512"
HOW += f" --eval-every {EVALUATED} --threads 1 --set matmul=own --progress plain"


@dataclass(frozen=True, slots=True)
class Place:
    folder: Path

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def run(self) -> Path:
        return self.disk / "run"

    @property
    def metrics(self) -> Path:
        return self.run / "metrics.jsonl"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    def state(self, attempt: int) -> Path:
        return self.folder / f"state-{attempt}"

    def make(self) -> None:
        for path in (self.disk, self.temporary):
            path.mkdir(parents=True)
        (self.folder / "keep.toml").write_text(f"keep = {KEEP}\n")


@dataclass(slots=True)
class Attempt:
    """The outcome of an attempt. `came`: time.monotonic() of the fault, or None if there was none."""

    fault: Fault
    ranks: int
    code: int = 0
    seconds: float = 0.0
    came: float | None = None
    early: bool = False  # the metrics were still empty at the fault
    hung: bool = False
    left: list[str] = field(default_factory=list)  # processes that had to be killed
    leaving: float | None = None  # seconds from the fault until all processes had ended
    again: float | None = None  # seconds from the start until the run passed its previous step
    output: str = ""
    errors: str = ""
    second: int | None = None  # the exit code of a second process in the same directory
    stalls: list[float] = field(default_factory=list)  # seconds for which steps waited for saves


def command(place: Place, mode: Mode, ranks: int, preload: dict[str, str]) -> list[str]:
    stage = ["--stage", "mpi"] if ranks > 1 else []
    launcher = [own_mpirun() or "mpirun", "-n", str(ranks)] if ranks > 1 else []
    told = ["env", *(f"{name}={value}" for name, value in preload.items())] if preload else []
    words = [
        *MODEL.split(),
        *HOW.split(),
        "--config",
        str(place.folder / "keep.toml"),
        "--out",
        str(place.run),
    ]
    program = [sys.executable, "-m", "distgpt", "train", *stage, *words, *mode.words, "--resume", "auto"]
    return [*launcher, *told, *program]


def attempt(
    place: Place, number: int, mode: Mode, ranks: int, fault: Fault, made: Path | None, seen: Survey | None
) -> Attempt:
    """Start the run, trigger the fault, wait for all processes, and kill them after the limit."""
    state, mark = place.state(number), f"{os.getpid()}-{place.folder.name}-{number}"
    state.mkdir()
    variables = preload.environment(made, place.run, state, fault, seen)
    found = Attempt(fault, ranks)
    before, begun = _last_step(place.metrics), time.monotonic()
    with _disk(place, fault, seen), _ended(mark):
        running = _start(command(place, mode, ranks, variables), place, state, mark, "")
        (state / "launcher").write_text(str(running.pid))
        watch, other = _Watch(found, place, state, mark, running, seen, begun), None
        while running.poll() is None or (other and other.poll() is None):
            watch.look()
            since = time.monotonic() - begun
            if found.again is None and _last_step(place.metrics) > before:
                found.again = since
            if fault.what == "twice" and other is None and seen and since >= fault.part * seen.seconds:
                other = _start(command(place, mode, ranks, {}), place, state, mark, "-2")
            if since > LIMIT:
                found.hung = True
                break
            time.sleep(LOOK)
        found.seconds = time.monotonic() - begun
        while (
            (alive := processes(mark)) and not found.hung and time.monotonic() < begun + found.seconds + GONE
        ):
            watch.look()
            time.sleep(0.02)
        watch.look()
        if found.came is not None:
            found.leaving = time.monotonic() - found.came
        if alive:
            found.left = [words for _, words in alive]
            end(mark)
        found.code, found.second = running.wait(), other.wait() if other else None
    found.output, found.errors = (
        "".join(path.read_text(errors="replace") for path in sorted(state.glob(f"{name}*")))
        for name in ("out", "err")
    )
    found.stalls = stalls(preload.calls(state / "log"))
    return found


def _start(words: list[str], place: Place, state: Path, mark: str, suffix: str) -> subprocess.Popen[bytes]:
    env = {**unlaunched(os.environ), MARK: mark, "TMPDIR": str(place.temporary)}
    with (state / f"out{suffix}").open("w") as out, (state / f"err{suffix}").open("w") as err:
        return subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


@contextmanager
def _ended(mark: str) -> Iterator[None]:
    """Kill all processes if a campaign is interrupted."""
    try:
        yield
    finally:
        end(mark)


class _Watch:
    """Triggers faults that the library does not, and continues stopped processes."""

    def __init__(
        self,
        found: Attempt,
        place: Place,
        state: Path,
        mark: str,
        running: subprocess.Popen[bytes],
        seen: Survey | None,
        begun: float,
    ) -> None:
        self.found, self.mark, self.running, self.begun = found, mark, running, begun
        self.metrics, self.hit = place.metrics, state / "hit"
        self.as_found, self.before = _signature(place.metrics), _last_step(place.metrics)
        fault = found.fault
        self.resume_at: float | None = None
        self.own = fault.what == "signal" and fault.where in ("moment", "step")
        self.due = begun + 1.2 * fault.part * seen.seconds if seen and fault.where == "moment" else 0.0
        self.step = 1 + int(fault.part * (STEPS - 1))
        self.reached: float | None = None

    def look(self) -> None:
        fault, now = self.found.fault, time.monotonic()
        if self.found.came is None and self.hit.exists() and (words := self.hit.read_text().split()):
            self._came(float(words[0]))
        if self.own and self.running.poll() is None and self._is_due(now):
            self.own = False
            targets = self._targets()
            early = _signature(self.metrics) == self.as_found
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.Signals[fault.name])
            if targets:
                self._came(now)
                self.found.early = early
        if self.resume_at is not None and now >= self.resume_at:
            for pid, _ in processes(self.mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.resume_at = None

    def _came(self, when: float) -> None:
        self.found.came, self.found.early = when, _signature(self.metrics) == self.as_found
        if self.found.fault.name == "SIGSTOP":
            self.resume_at = when + self.found.fault.pause

    def _is_due(self, now: float) -> bool:
        if self.found.fault.where == "moment":
            return now >= self.due
        if self.reached is None and _last_step(self.metrics) >= max(self.step, self.before + 1):
            self.reached = now
        return self.reached is not None and now >= self.reached + AFTER_STEP * (
            self.found.fault.part * 97 % 1
        )

    def _targets(self) -> list[int]:
        to = self.found.fault.to
        if to == "launcher":
            return [self.running.pid]
        ranks = {rank: pid for pid, rank in _ranks(self.mark).items()}
        return list(ranks.values()) if to == "all" else [ranks[int(to)]] if int(to) in ranks else []


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _last_step(metrics: Path) -> int:
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    steps = [line.partition(b'"step": ')[2].partition(b",")[0] for line in lines[:-1]]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def processes(mark: str) -> list[tuple[int, str]]:
    """Return the living processes with this mark in their environment, with their command lines."""
    needle, found = f"{MARK}={mark}".encode() + b"\0", []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if needle in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words:
                        found.append((int(folder.name), words.strip()[:200]))
    return found


def _ranks(mark: str) -> dict[int, int]:
    found = {}
    for pid, words in processes(mark):
        if " -m distgpt " in words and "mpirun" not in words and "hydra" not in words:
            with suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(line[9:]) for line in environ if line.startswith(b"PMI_RANK=")]
                found[pid] = ranks[0] if ranks else 0
    return found


def end(mark: str) -> None:
    """Kill all processes, including processes that they start during this call."""
    while alive := processes(mark):
        for pid, _ in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextmanager
def _disk(place: Place, fault: Fault, seen: Survey | None) -> Iterator[None]:
    """Mount a separate file system for a run that fills its disk; it has space again afterwards."""
    if fault.what != "full":
        yield
        return
    size = int((16 << 10) + fault.part * 1.1 * (seen.most if seen else DISK))
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place.disk))
    yield
    mount("-o", f"remount,size={DISK}", str(place.disk))


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def remove(place: Place) -> None:
    if place.disk.is_mount():
        subprocess.run(["umount", "-l", str(place.disk)], check=True)
    shutil.rmtree(place.folder)


def can_mount(folder: Path) -> bool:
    place = Place(folder / "mounting")
    place.make()
    try:
        mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place.disk))
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        remove(place)
    return True


def stalls(calls: list[preload.Call]) -> list[float]:
    """Return the additional time between two lines of metrics if a save starts between them."""
    with_save: list[float] = []
    without: list[float] = []
    last, has_save, has_other = None, False, False
    for call in calls:
        if call.name == "write" and call.path == "/metrics.jsonl":
            if last is not None and not has_other:
                (with_save if has_save else without).append(call.seconds - last)
            last, has_save, has_other = call.seconds, False, False
        has_save = has_save or (call.name == "mkdir" and "/.tmp-step-" in call.path)
        has_other = has_other or "best.safetensors" in call.path
    usual = sorted(without)[len(without) // 2] if without else 0.0
    return [seconds - usual for seconds in with_save]
