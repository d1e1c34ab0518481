"""The training loop, the same on every rank of every stage."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, Protocol
from zlib import crc32

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DistgptError, NonFiniteError
from distgpt.evaluation.assessment import Assessment
from distgpt.interrupts import Interrupted, Noted, noted
from distgpt.model.generate import Sampling, generate, opening
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved.checkpoint import save_checkpoint
from distgpt.saved.modelfile import Description, on_host, save_model
from distgpt.saved.rundir import RunDirectory
from distgpt.training.savetimer import SaveTimer
from distgpt.training.step import Step, StepResult
from distgpt.training.timelimit import TimeLimit


class Listener(Protocol):
    """Shows or records the progress of a run. Called on rank 0 alone."""

    def started(self, facts: dict[str, Any]) -> None: ...
    def stepped(self, metrics: dict[str, Any]) -> None: ...
    def evaluated(self, metrics: dict[str, Any]) -> None: ...
    def noted(self, text: str) -> None: ...
    def sampled(self, step: int, text: str) -> None: ...


def _nobody(step: Step) -> None:
    return None


@dataclass(slots=True)
class Trainer:
    """Everything one rank holds during a run. `step` counts finished steps."""

    run: RunConfig
    fitted: TrainConfig  # the run's, with automatic values resolved by this machine's memory
    comm: Comm
    model: Model
    optimizer: AdamW
    tokenizer: Tokenizer
    batches: Batches
    assessment: Assessment
    directory: RunDirectory
    listener: Listener
    step: int = 0
    loss: float | None = None  # of the last step
    val_loss: float | None = None  # of the last evaluation
    best_loss: float = math.inf  # the lowest validation loss after a step
    best_step: int | None = None
    step_seconds: list[float] = field(default_factory=list)
    watch: Callable[[Step], None] = _nobody  # called with the step object before the first step
    limit: TimeLimit | None = None  # of rank 0
    owes_evaluation: bool = False  # one was due after the last step, and a signal came first
    _finished_at: float = 0.0
    _noted: Noted = field(default_factory=Noted)

    def train(self) -> None:
        """Run to the last step, then write the weights.

        A step's result is read once the next one is under way, except where something is due in between.
        """
        work = Step(self.model, self.optimizer, self.comm, self.fitted)
        self.watch(work)
        with noted() as found:
            self._noted = work.noted = self.assessment.scorer.noted = found
            self._look_ahead()
            try:
                self._steps(work)
            except Interrupted as ended:
                if ended.number == signal.SIGUSR1 and found.late:
                    ended.why = "the time is up"
                raise
            on_root(self.comm, partial(self._save_weights, self.directory.weights))

    def _steps(self, work: Step) -> None:
        t = self.fitted
        running: list[StepResult] = []
        if self.assessment and (self.owes_evaluation or (t.eval_every and not self.step)):
            self._evaluate()
        self.owes_evaluation = False
        timer = SaveTimer(self.comm, 0 if t.save_every else t.save_minutes, self.step)
        self._finished_at = time.perf_counter()
        for step in range(self.step, t.steps):
            running.append(work.launch(step, self.batches))
            due = self._due(step + 1)
            if timer.is_due(step + 1):
                due.add("save")
            asked = None
            while len(running) > (self.model.kernels.queued and not due and not asked):
                asked = self._finish(running.pop(0)) or asked
            if asked and self.step < t.steps:
                self._save_and_leave(Interrupted(asked, shared=True), owes_evaluation="evaluate" in due)
            if due:
                self._do(due)
                if "save" in due:
                    timer.saved()
                self._finished_at = time.perf_counter()  # none of that is a step's time

    def _finish(self, result: StepResult) -> signal.Signals | None:
        """Wait for a step and count it as done. Returns a signal that came on any rank, the same on all."""
        loss, norm = result.read()
        self._refuse_divergence(loss, norm)
        self.step += 1
        self.loss = loss
        now = time.perf_counter()
        self.step_seconds.append(now - self._finished_at)
        self._report(loss, norm, result.lr, self.step_seconds[-1])
        self._finished_at = now
        self._look_ahead()
        return result.asked()

    def _look_ahead(self) -> None:
        """Until when another step may begin."""
        if self.limit:
            self._noted.deadline = self.limit.latest(self.step_seconds)

    def _save_and_leave(self, ended: Interrupted, owes_evaluation: bool) -> NoReturn:
        """For a signal that all ranks know of. The checkpoint says whether an evaluation is still due."""
        self._refuse_non_finite_weights()
        self.owes_evaluation = owes_evaluation
        on_root(self.comm, self._save_checkpoint)
        raise ended

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        """Both are sums over all ranks, so all ranks decide alike."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "gradient" if math.isfinite(loss) else "loss"
        raise shared(
            NonFiniteError(
                f"the {what} is not finite at step {self.step + 1} (loss {loss}, gradient norm {norm}); "
                "a lower --lr, a longer --warmup or a smaller --clip may help; earlier checkpoints are kept"
            )
        )

    def _refuse_non_finite_weights(self) -> None:
        """Weights that no loss was computed with yet must not replace good ones. Alike on all ranks."""
        if not self.model.is_finite():
            raise shared(
                NonFiniteError(
                    f"the weights are not finite after step {self.step}; "
                    "a lower --lr may help; earlier checkpoints are kept"
                )
            )

    def _report(self, loss: float, norm: float, lr: float, seconds: float) -> None:
        t = self.run.train
        if self.comm.rank or (self.step % t.log_every and self.step != t.steps):
            return
        per_step = t.batch_size * self.run.model.seq_len
        metrics = {
            "step": self.step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": per_step * self.step,
            "tokens_per_s": per_step / seconds,
            "step_s": seconds,
        }
        self.directory.record(metrics)
        self.listener.stepped(metrics)

    def _due(self, step: int) -> set[str]:
        """What follows this step, but for the next one."""
        t = self.run.train
        every = {"verify": t.verify_every, "save": t.save_every, "sample": t.sample_every}
        if self.assessment:
            every["evaluate"] = t.eval_every
        due = {what for what, interval in every.items() if interval and step % interval == 0}
        if step == t.steps:
            due |= {"save", "evaluate"} if self.assessment else {"save"}
        return due

    def _do(self, due: set[str]) -> None:
        if "verify" in due:
            self._compare_ranks()
        if due & {"evaluate", "save"}:
            self._refuse_non_finite_weights()
        if "evaluate" in due:
            try:
                self._evaluate()
            except Interrupted as ended:
                if not ended.shared:
                    raise
                self._save_and_leave(ended, owes_evaluation=True)
        if "save" in due:
            on_root(self.comm, self._save_checkpoint)
        if "sample" in due and self.comm.rank == 0:
            text = sample(self.model, self.tokenizer, self.step, noted=self._noted)
            self.listener.sampled(self.step, text)

    def _evaluate(self) -> None:
        """All ranks find the same loss, so all agree on whether it is the lowest so far."""
        metrics = {"step": self.step, **self.assessment.measure()}
        if self.comm.rank == 0:
            self.directory.record(metrics)
            self.listener.evaluated(metrics)
        self.val_loss, self.owes_evaluation = metrics.get("val_loss"), False
        if self.step and self.val_loss is not None and self.val_loss < self.best_loss:
            self.best_loss, self.best_step = self.val_loss, self.step
            on_root(self.comm, partial(self._save_weights, self.directory.best))

    def _compare_ranks(self) -> None:
        """All ranks must hold the same weights, to the bit."""
        own = crc32(memoryview(self.model.kernels.to_host(self.model.weights.flat)).cast("B"))
        if self.comm.largest(own) != -self.comm.largest(-own):
            raise shared(
                DistgptError(f"the ranks' weights differ after step {self.step}; are all nodes alike?")
            )

    def _save_checkpoint(self) -> None:
        """Write one and drop the oldest."""
        begun = time.perf_counter()
        state = {
            "seed": self.run.train.seed,
            "world_size": self.comm.size,
            "corpus": self.batches.fingerprint,
            "rounds": self.fitted.grad_accum,
            "best": self._best(),
            "owes_evaluation": self.owes_evaluation,
        }
        model, m, v = self.model, self.optimizer.m, self.optimizer.v
        groups = {
            "weights": (on_host(model, model.weights), self._description().to_metadata()),
            "optimizer": (on_host(model, m, "m/") | on_host(model, v, "v/"), {}),
        }
        save_checkpoint(self.directory.checkpoints, self.step, groups, state, self.run.train.keep)
        if self.limit:
            self.limit.saved(time.perf_counter() - begun)
            self._look_ahead()

    def _best(self) -> dict[str, Any] | None:
        """The lowest validation loss; comparable with losses over as many tokens only."""
        validation = self.assessment.validation
        if validation is None or math.isinf(self.best_loss):
            return None
        step = {} if self.best_step is None else {"step": self.best_step}
        return {"loss": self.best_loss, "tokens": validation.count, **step}

    def _save_weights(self, path: Path) -> None:
        save_model(path, self.model, self._description())

    def _description(self) -> Description:
        return Description(self.run, self.tokenizer)


def sample(
    model: Model, tokenizer: Tokenizer, seed: int, length: int = 120, noted: Noted | None = None
) -> str:
    """A short text from the model, starting from a line break or the first token there is.

    It is shorter when a signal comes meanwhile.
    """
    alone, prompt = SerialComm(), opening(tokenizer)
    chosen = generate(model, prompt, length, Sampling(temperature=0.8, top_k=50, seed=seed), alone)
    return tokenizer.decode(list(takewhile(lambda token: not (noted and noted.came), chosen)))
