"""The directory of a run and the files in it, which only rank 0 touches."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from distgpt.core.base.checked import checked, parse_object
from distgpt.core.base.errors import DataError, StorageError, UsageError, escape
from distgpt.core.base.files import (
    append,
    atomic_file,
    lock,
    open_regular,
    read_small,
    storage_errors,
    unfinished_versions,
)
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.config import CHANGEABLE, RunConfig, differences, parse_toml
from distgpt.core.saved.checkpoint import remove_unfinished, set_damaged_aside

ATTEMPTS, SECONDS_BETWEEN = 10, 0.05  # to lock a file that another process may be looking at

_held: dict[Path, int] = {}  # open files that this process has locked


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of running.json: the process that trains here."""

    host: str
    pid: int

    def __str__(self) -> str:
        return escape(f"process {self.pid} on {self.host}")[:200]


class RunDirectory:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.tokenizer = path / "tokenizer.json"
        self.metrics = path / "metrics.jsonl"
        self.history = path / "history.jsonl"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"
        self.best = path / "best.safetensors"
        self.summary = path / "summary.json"
        self.running = path / "running.json"
        self._lock_path = self.running.absolute()
        self._unwritten: list[bytes] = []  # lines of metrics

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDirectory) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    # One process trains here. It holds the kernel's lock on running.json, which ends with the process.

    @contextmanager
    def claimed(self, comm: Comm) -> Iterator[None]:
        """Hold the directory meanwhile, in rank 0's process. Collective."""
        on_root(comm, self.claim)
        try:
            yield
        finally:
            if comm.rank == 0:
                self.release()

    def claim(self) -> None:
        """Hold the directory until `release`, or the end of the process; a UsageError if another one does."""
        path = self._lock_path
        with storage_errors("write", path):
            for _ in range(ATTEMPTS):
                if path in _held or self._lock(path):
                    return
                time.sleep(SECONDS_BETWEEN)
        raise self._in_use()

    def _lock(self, path: Path) -> bool:
        """Lock the file, and return whether this process holds it now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        got = lock(descriptor, fcntl.LOCK_EX)
        is_free = got if got is not None else not self._is_named()
        if not is_free or not _is_at(descriptor, path):  # its holder has removed it meanwhile
            os.close(descriptor)
            return False
        _held[path] = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, _line(asdict(Holder(platform.node(), os.getpid()))))
        except OSError:
            self.release()
            raise
        if got is None:
            time.sleep(SECONDS_BETWEEN)
            if self._is_named():  # another process began at the same moment, and wrote its name later
                os.close(_held.pop(path))
                return False
        return True

    def release(self) -> None:
        """Release the directory, if this process holds it."""
        path = self._lock_path
        if (descriptor := _held.pop(path, None)) is not None:
            with suppress(OSError):
                if _is_at(descriptor, path):
                    path.unlink()
            with suppress(OSError):  # the lock is gone even where closing reports an error
                os.close(descriptor)

    def refuse_second(self) -> str:
        """Raise a UsageError if another process holds the directory; return which one was killed here."""
        if self._lock_path in _held:
            return ""
        if self.is_held():
            raise self._in_use()
        return str(self._holder() or "another process") if self._lock_path.exists() else ""

    def is_held(self) -> bool:
        """Return whether a process trains here."""
        if self._lock_path in _held:
            return True
        with storage_errors("read", self.running):
            try:
                with open_regular(self._lock_path) as file:
                    got = lock(file.fileno(), fcntl.LOCK_SH)
                    return self._is_named() if got is None else not got
            except (FileNotFoundError, NotADirectoryError):
                return False

    def lacks_locks(self) -> bool:
        """Return whether this process holds the directory by its name alone."""
        return self._lock_path in _held and lock(_held[self._lock_path], fcntl.LOCK_EX) is None

    def _is_named(self) -> bool:
        """Return whether running.json names another process of this host that lives.

        On a disk without locks that is all that can be known.
        """
        holder = self._holder()
        return holder is not None and holder.host == platform.node() and _is_another(holder.pid)

    def _in_use(self) -> UsageError:
        return UsageError(
            f"{self.path} is in use: {self._holder() or 'another process'} trains there; "
            "wait for its end, stop it, or choose another --out"
        )

    def _holder(self) -> Holder | None:
        """Return the process that wrote its name into running.json; None where the file is half written."""
        with suppress(DataError, StorageError, ValueError):
            found = parse_object(read_small(self._lock_path), self.running)
            return checked(Holder, {name: found.get(name) for name in Holder.__slots__})
        return None

    def saved(self) -> RunConfig | None:
        """Return the configuration of the run in this directory; None without one."""
        with storage_errors("use the run directory", self.path):
            if not self.config.exists():
                return None
        text = read_small(self.config).decode(errors="replace")
        return RunConfig().with_values(parse_toml(text, str(self.config)))

    def refuse_conflict(self, run: RunConfig, resuming: bool) -> None:
        """Raise a UsageError if the directory holds anything but this very run. Writes nothing."""
        with storage_errors("use the run directory", self.path):
            if saved := self.saved():
                if different := differing(saved, run):
                    goes_on = "" if resuming else "add --resume auto, or "
                    if goes_on and differing(saved, run, CHANGEABLE):
                        goes_on = "to resume it as it is give --out and --resume auto alone, or else "
                    raise UsageError(
                        f"{self.path} holds a run with another configuration ({different}); "
                        f"{goes_on}choose another --out"
                    )
                if not resuming:
                    raise UsageError(
                        f"{self.path} holds this run already; add --resume auto, or choose another --out"
                    )
            elif self.path.is_dir() and set(self.path.iterdir()) - {self.running, *self._left_behind()}:
                raise UsageError(f"{self.path} is not empty and holds no run; choose another --out")
            elif self.path.exists() and not self.path.is_dir():
                raise UsageError(f"{self.path} is not a directory; choose another --out")

    def _left_behind(self) -> list[Path]:
        """List the unfinished files of a run that was killed before it had begun, or while it wrote."""
        files = (self.config, self.tokenizer, self.metrics, self.weights, self.best, self.summary)
        return [path for file in files for path in unfinished_versions(file)]

    def refuse_undecodable(self) -> None:
        """Raise a UsageError if the directory's name could not be written into its files."""
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError:
            raise UsageError(f"{self.path.absolute()} is not valid UTF-8: choose another --out") from None

    def create(self, run: RunConfig, tokenizer_json: str, step: int, owes_evaluation: bool = False) -> None:
        """Create the directory with configuration and tokenizer; a failure leaves no new directory behind.

        Drops metrics of steps after `step`, which will be repeated, and of the evaluation after it if that is
        still due. Sets damaged checkpoints of such steps aside.
        """
        fresh = not self.path.exists()
        with storage_errors("use the run directory", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                self.claim()
                remove_unfinished(self.checkpoints)
                set_damaged_aside(self.checkpoints, step)
                for path in self._left_behind():
                    path.unlink(missing_ok=True)
                for path, text in ((self.config, run.to_toml()), (self.tokenizer, tokenizer_json)):
                    with atomic_file(path) as file:
                        file.write(text.encode())
                self.drop_metrics_after(step, owes_evaluation)
            except UsageError:  # another process holds the directory
                raise
            except BaseException:
                if fresh:
                    shutil.rmtree(self.path, ignore_errors=True)
                raise

    def record(self, metrics: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl, with null for values that are not finite.

        A line that cannot be written is kept for the next time.
        """
        known = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._unwritten.append(_line(known))
        self.write_metrics()

    def write_metrics(self) -> None:
        """Append the lines that could not be written before."""
        if self._unwritten:
            with storage_errors("write", self.metrics):
                append(self.metrics, b"".join(self._unwritten))
            self._unwritten.clear()

    def remember(self, event: Mapping[str, object]) -> None:
        """Append one line to history.jsonl, with the time."""
        moment = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        with storage_errors("write", self.history):
            append(self.history, _line({**moment, **event}))

    def branched_from(self) -> Path | None:
        """Return the checkpoint of another run that this one began with, if it did."""
        if not self.history.exists():
            return None
        first = parse_object(read_small(self.history).split(b"\n")[0], self.history)
        origin = first.get("from") if first.get("branch") is True else None
        return Path(origin) if isinstance(origin, str) and "\0" not in origin else None

    def finished_at(self) -> int | None:
        """Return the last step of a finished run, by its summary; None if that is not of a finished run.

        The summary is written after the weights: that of a run that was killed in between is an older one.
        """
        with suppress(DataError, StorageError):  # there is none, or it is damaged
            summary = parse_object(read_small(self.summary), self.summary)
            step = summary.get("step")
            if summary.get("stop") == "finished" and type(step) is int and self.weights.exists():
                return step
        return None

    def owns(self, checkpoint: Path) -> bool:
        return checkpoint.resolve().parent == self.checkpoints.resolve()

    def drop_metrics_after(self, step: int, owes_evaluation: bool) -> None:
        """Keep the metrics up to a step, without the half line that a killed run may have left."""
        self.write_metrics()
        if not self.metrics.exists():
            return
        with storage_errors("read", self.metrics), open_regular(self.metrics) as file:
            lines = file.readlines()
        kept = [line for line in lines if step and 0 <= _step_of(line) <= step]
        if owes_evaluation:
            kept = [line for line in kept if _step_of(line) < step or b'"loss": ' in line]
        if kept != lines:
            with atomic_file(self.metrics) as file:
                file.writelines(kept)


def _is_another(pid: int) -> bool:
    """Return whether a process of this number runs, and is not this one."""
    if pid <= 0 or pid == os.getpid():  # 0 and below are groups
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at this path."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())


def _line(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _step_of(line: bytes) -> int:
    """Return the step of a line of metrics; -1 if the line is not whole."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else -1
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return step if type(step) is int else -1


def differing(before: RunConfig, now: RunConfig, changeable: Container[str] = ()) -> str:
    """List the settings that differ and must not, for a message; "" if none does."""
    different = [
        f"{name} was {old!r:.80} and is now {new!r:.80}"
        for name, (old, new) in differences(before, now).items()
        if name not in changeable
    ]
    return "; ".join(different[:3]) + "; …" * (len(different) > 3)


def place_for(parent: Path, name: str, resuming: bool) -> Path:
    """Return parent/name, or parent/name-2, -3, … if that exists; when resuming, the last that exists."""
    count, path = 1, parent / name
    last = path
    while path.exists():
        last = path
        count += 1
        path = parent / f"{name}-{count}"
    return last if resuming else path
