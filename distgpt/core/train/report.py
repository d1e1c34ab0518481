"""Reports of rank 0, shown and written while a run goes on: steps, evaluations, samples, bad steps."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from distgpt.core.base.errors import StorageError
from distgpt.core.base.interrupts import PendingSignals
from distgpt.core.config import DEFAULT_TEMPERATURE, RunConfig
from distgpt.core.cpu.first_use import compiling_for
from distgpt.core.data.batches import PIECE, Batches
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.generate.engine_setup import engine_for
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import default_prompt
from distgpt.core.model.model import Model
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.assessment import bits_per_byte
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.progress import Finished
from distgpt.core.train.seams import Clock, Listener

LOOKED_AT = 2000  # tokens of a text


@dataclass(frozen=True, slots=True)
class Reading:
    """The fields of a step in metrics.jsonl that follow from the text and the clock."""

    batches: Batches
    batch_size: int
    bytes_per_token: float | None  # of the text; None where not all of it is text
    clock: Clock

    def epochs(self, step: int) -> float:
        """Return how many times the text is read by the end of this step."""
        rows = (step + self.batches.skipped) * self.batch_size
        return rows / self.batches.windows_per_epoch

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a training loss in bits per byte, None where that is unknown."""
        return bits_per_byte(loss, self.bytes_per_token)

    def fields(self, step: int, loss: float) -> dict[str, float]:
        """Return what is known after a step; `elapsed_s` is of runs that end by the clock."""
        found = {"epoch": round(self.epochs(step), 4)}
        if (bits := self.bits_per_byte(loss)) is not None:
            found["train_bits_per_byte"] = bits
        if self.clock.elapsed is not None:
            found["elapsed_s"] = round(self.clock.seconds(), 3)
        return found


class Report:
    """Called on all ranks; rank 0 alone reports. It tolerates a disk that fails as `Checkpoints` does."""

    def __init__(
        self,
        rank: int,
        run: RunConfig,
        directory: RunDirectory,
        listener: Listener,
        checkpoints: Checkpoints,
        reading: Reading,
    ) -> None:
        self._is_silent, self._run, self._directory, self._reading = rank > 0, run, directory, reading
        self._listener, self._checkpoints = listener, checkpoints

    def step(self, step: int, done: Finished, more: dict[str, float], is_last: bool) -> None:
        t = self._run.train
        if self._is_silent or (step % t.log_every and not is_last):
            return
        per_step = t.batch_size * self._run.model.seq_len
        metrics = {
            "step": step,
            "loss": done.loss,
            "lr": done.lr,
            "grad_norm": done.norm,
            "tokens": per_step * step,
            "tokens_per_s": per_step / done.seconds,
            "step_s": done.seconds,
            **self._reading.fields(step, done.loss),
            **more,
        }
        self._record(metrics := _timed(metrics))
        self._listener.stepped(metrics)

    def evaluation(self, metrics: dict[str, Any]) -> None:
        if not self._is_silent:
            self._record(metrics := _timed(metrics))
            self._listener.evaluated(metrics)

    def sample(self, step: int, text: str) -> None:
        if not self._is_silent:
            self._listener.sampled(step, text)

    def note(self, text: str) -> None:
        if not self._is_silent:
            self._listener.noted(text)

    def skipped(self, step: int, reason: str, skipped: int) -> None:
        """Report that the step after `step` was bad and left out. `skipped`: batches passed over so far."""
        if not self._is_silent:
            what = f"{reason} at step {step + 1}"
            self.remember({"step": step, "bad": what, "skipped": skipped})
            self._listener.noted(f"{what}: it is left out")

    def remember(self, event: dict[str, Any]) -> None:
        """Write an event into history.jsonl."""
        if self._is_silent:
            return
        try:
            self._directory.remember(event)
        except StorageError as error:
            self._checkpoints.tolerate(error)

    def _record(self, metrics: dict[str, Any]) -> None:
        try:
            self._directory.record(metrics)
        except StorageError as error:
            self._checkpoints.tolerate(error)


def _timed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a line of metrics with the time of day in seconds since 1970: a number like the others."""
    return {**metrics, "time": round(time.time(), 3)}


def word_of_text(batches: Batches, tokenizer: Tokenizer) -> str:
    """Return a word of the training text, for a prompt; "" if none is found at once."""
    text = tokenizer.decode(batches.sample(PIECE)[:LOOKED_AT].tolist())
    found = re.search(r"(?<=\s)[^\W\d_]{3,20}(?=\s)", text)
    return found[0] if found else ""


@compiling_for("the sample")
def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, signals: PendingSignals | None = None
) -> str:
    """Write a short text from a line break, or the first token there is; shorter when a signal comes."""
    engine = engine_for(model, tokenizer, 1)
    engine.submit(
        Request(default_prompt(tokenizer), length, temperature=DEFAULT_TEMPERATURE, top_k=50, seed=seed)
    )
    pieces: list[str] = []

    def write() -> None:
        while not engine.is_idle and not (signals and signals.came):
            pieces.extend(event.text for event in engine.step())

    model.kernels.precisely(write)
    return "".join(pieces)
