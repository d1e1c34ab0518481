"""The training loop, the same on every rank of every stage."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.comm.launched import leave_at_once
from distgpt.config import RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DistgptError, NonFiniteError
from distgpt.evaluation.assessment import Assessment
from distgpt.interrupts import Interrupted, Noted, first_of, noted
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved.checkpoint import load_state, newest_intact
from distgpt.saved.rundir import RunDirectory
from distgpt.saved.state import State
from distgpt.training.badsteps import BadSteps
from distgpt.training.due import due_after
from distgpt.training.gradsync.outer import ends_round
from distgpt.training.laggards import Laggards
from distgpt.training.pace import recent_seconds, usual_seconds
from distgpt.training.place import EVALUATING, EXCHANGING, SAMPLING, SAVING, Place
from distgpt.training.progress import Progress
from distgpt.training.recording import Listener, Recorder
from distgpt.training.restore import begin_anew, restore
from distgpt.training.sampling import sample
from distgpt.training.savetimer import SaveTimer
from distgpt.training.saving import Saver
from distgpt.training.step import Step, StepResult
from distgpt.training.timelimit import TimeLimit
from distgpt.training.watch import Stall, Watch

SECONDS_AT_ONCE = 1.0  # that a second signal may wait for


def _nobody(step: Step) -> None:
    return None


class _WentBack(Exception):
    """A bad step was undone: training goes on from an earlier one."""


@dataclass(slots=True)
class Trainer:
    """Everything one rank holds during a run."""

    run: RunConfig
    fitted: TrainConfig  # the run's, with automatic values resolved by this machine's memory
    comm: Comm
    model: Model
    optimizer: AdamW
    tokenizer: Tokenizer
    batches: Batches
    assessment: Assessment
    directory: RunDirectory
    saver: Saver
    recorder: Recorder
    bad: BadSteps
    listener: Listener
    progress: Progress
    shares: list[int] | None = None  # sequences of each rank in a micro-batch, if they are not as many
    places: int = 0  # a checksum of where the ranks are, if that was asked for
    origin: Path | None = None  # the checkpoint from which this process began
    work: Step | None = None  # once it trains
    watch: Callable[[Step], None] = _nobody  # called with the step object before the first step
    limit: TimeLimit | None = None  # of rank 0
    stall: Stall = field(default_factory=Stall)
    last_words: list[Callable[[BaseException], None]] = field(default_factory=list)  # before it ends itself
    place: Place = field(default_factory=Place)
    laggards: Laggards = field(default_factory=Laggards)
    _finished_at: float = 0.0
    _at_rest: threading.Lock = field(default_factory=threading.Lock)
    _noted: Noted = field(default_factory=Noted)

    def train(self) -> None:
        """Run to the last step, then write the weights.

        A step's result is read once the next one is under way, except where something is due in between.
        """
        work = self.work = Step(self.model, self.optimizer, self.comm, self.fitted, self.shares)
        self.watch(work)
        work.place, self._at_rest = self.place, work.at_rest
        work.noted = self.listener.noted
        self.assessment.scorer.mark = partial(self.place.enter, EVALUATING)
        if self.fitted.spike_zscore or not self.model.kernels.capabilities.is_async:
            work.judge = self.bad.wrong  # before the weights change: waits for a queue
        usual, slow, say = self._usual, self.laggards.sentence, self.listener.noted
        watch = Watch(self.comm, self.place, self.stall, usual, slow, say, self._leave)
        with noted() as found, watch:
            self._noted = self.assessment.scorer.noted = found
            self._look_ahead()
            try:
                while self._went_back(work):
                    pass
            except Interrupted as ended:
                if ended.number == signal.SIGUSR1 and found.late:
                    ended.why = "the time is up"
                self.saver.wait(SECONDS_AT_ONCE)  # for what had begun before
                raise
            except DistgptError:
                self.saver.wait()
                raise
            work.end_round(self.progress.step)
            self.saver.on_root(self._write_the_rest)

    def _usual(self) -> float:
        """Seconds of a step."""
        return usual_seconds(self.fitted, self.comm.size, self._recent())

    def _recent(self) -> list[float]:
        return recent_seconds(self.fitted, self.comm.size, self.progress.step, self.progress.seconds)

    def _leave(self, ended: Interrupted | DistgptError) -> None:
        """From another thread, while the main one is stuck: save the last finished step if it is at rest, and
        end the job. In an exchange the weights are those after that step; from here on they stay so."""
        try:
            at_rest = not self.model.kernels.capabilities.is_async and self._at_rest.acquire(timeout=1)
            if at_rest and self.saver.has_all and self.place.doing in (EXCHANGING, EVALUATING):
                self.progress.evaluation_pending |= self.place.doing == EVALUATING
                self._save_now()
                self.directory.write_metrics()
            for speak in self.last_words:
                speak(ended)
        except Exception as error:
            ended.add_note(f"nothing more was saved: {error}")
        leave_at_once(ended, self.comm)

    def _write_the_rest(self) -> None:
        self.saver.save_weights()
        self.directory.write_metrics()

    def _went_back(self, work: Step) -> bool:
        """Run to the last step, or until a bad one was undone."""
        try:
            self._steps(work)
        except _WentBack:
            return True
        return False

    def _flags(self) -> list[int]:
        """What the ranks sum along with their gradients: signals that came, and whether rank 0 must end."""
        return [*self._noted.counts(), int(self.saver.trouble is not None)]

    def _steps(self, work: Step) -> None:
        t, progress = self.fitted, self.progress
        running: list[StepResult] = []
        if self.assessment and (progress.evaluation_pending or (t.eval_every and not progress.step)):
            self._save(best=self._evaluate(), checkpoint=False)
        progress.evaluation_pending = False
        timer = SaveTimer(self.comm, 0 if t.save_every else t.save_minutes, progress.step)
        self._finished_at = time.perf_counter()
        for step in range(progress.step, t.steps):
            running.append(work.launch(step, self.batches, self._flags))
            due = due_after(t, step + 1, self.comm.size, bool(self.assessment))
            if ends_round(t, step + 1, self.comm.size) and timer.is_due(step + 1):
                due.add("save")
            asked = None
            while len(running) > (self.model.kernels.capabilities.is_async and not due and not asked):
                asked = self._finish(running.pop(0)) or asked
            if asked and progress.step < t.steps:
                self._save_and_leave(Interrupted(asked, shared=True), owes_evaluation="evaluate" in due)
            if due:
                self._do(due)
                if "save" in due:
                    timer.saved()
                self._finished_at = time.perf_counter()  # none of that is a step's time

    def _finish(self, result: StepResult) -> signal.Signals | None:
        """Wait for a step and count it as done. Returns a signal that came on any rank, the same on all."""
        loss, norm = result.read()
        progress = self.progress
        wrong = self.bad.wrong(loss, norm) if result.wrong is None else result.wrong
        if wrong:
            self._take_bad_step(wrong, loss, norm)
        else:
            self.bad.was_good(loss, norm)
            progress.loss = loss
        progress.step += 1
        self.place.step = progress.step
        now = time.perf_counter()
        progress.seconds.append(now - self._finished_at)
        more = self.laggards.add(result.seconds()) | ({"skipped": 1} if wrong else {})
        if self.comm.rank == 0:
            self.recorder.stepped(progress.step, loss, norm, result.lr, progress.seconds[-1], more)
        self._finished_at = now
        *signals, trouble = result.flags()
        if trouble:
            on_root(self.comm, self.saver.raise_trouble)
        if self.comm.rank == 0:
            self.directory.refuse_if_lost()
            self.saver.look()
        self._look_ahead()
        return first_of(signals)

    def _look_ahead(self) -> None:
        """Until when another step may begin."""
        if self.limit:
            saves = 2 if self.fitted.save == "async" else 1  # one may be on its way
            self._noted.deadline = self.limit.latest(self._recent(), self.saver.seconds, saves)

    def _save_and_leave(self, ended: Interrupted, owes_evaluation: bool) -> NoReturn:
        """For a signal that all ranks know of. The checkpoint says whether an evaluation is still due."""
        self._refuse_non_finite_weights()
        self.progress.evaluation_pending = owes_evaluation
        self.place.enter(SAVING)
        self.saver.on_root(self._save_now)
        raise ended

    def _take_bad_step(self, wrong: str, loss: float, norm: float) -> None:
        """End the run, go back, or leave the step out. All ranks have the same sums, and decide alike."""
        number = self.progress.step + 1
        if error := self.bad.refuse(wrong, number, loss, norm):
            raise shared(error)
        if self.fitted.on_bad_step == "rollback":
            used = number + self.batches.skipped
            self._go_back(used)
            if self.comm.rank == 0:
                self.recorder.went_back(self.progress.step, f"{wrong} at step {number}", self.batches.skipped)
            raise _WentBack
        if self.comm.rank == 0:
            self.recorder.left_out(self.progress.step, f"{wrong} at step {number}", self.batches.skipped)

    def _go_back(self, used: int) -> None:
        """To the newest checkpoint, or the first weights; the first `used` batches are not seen again."""
        self.saver.wait()
        path, document = on_root(self.comm, self._to_go_back_to)
        state = State.from_json(document)
        if path:
            restore(self.comm, self.model, self.optimizer, Path(path))
        else:
            begin_anew(self.comm, self.model, self.optimizer, self.run.train)
        self.load(replace(state, skipped=used - state.step))
        self.saver.on_root(partial(self._forget_later_steps, bool(path)))

    def _to_go_back_to(self) -> tuple[str | None, dict[str, Any]]:
        newest = newest_intact(self.directory.checkpoints, self.progress.step)
        path = newest[0] if newest else self.origin
        return (str(path), load_state(path)) if path else (None, {"step": 0})

    def _forget_later_steps(self, was_saved: bool) -> None:
        self.directory.drop_metrics_after(self.progress.step, self.progress.evaluation_pending)
        if was_saved:  # else the run would come to the same step again if it ended now
            self._save_now()

    def load(self, state: State) -> None:
        """Go on from what a checkpoint says beside weights and moments."""
        self.progress.load(state)
        self.batches.skipped = state.skipped

    def _refuse_non_finite_weights(self) -> None:
        """Weights that no loss was computed with yet must not replace good ones. Collective."""
        if self.comm.largest(not self.model.is_finite()):
            raise shared(
                NonFiniteError(
                    f"the weights are not finite after step {self.progress.step}; "
                    "a lower --lr may help; earlier checkpoints are kept"
                )
            )

    def _do(self, due: set[str]) -> None:
        if "verify" in due:
            self._compare_ranks()
        if due & {"evaluate", "save"}:
            self._refuse_non_finite_weights()
        best = False
        if "evaluate" in due:
            try:
                best = self._evaluate()
            except Interrupted as ended:
                if not ended.shared:
                    raise
                self._save_and_leave(ended, owes_evaluation=True)
        self._save(best, "save" in due)
        if "sample" in due and self.comm.rank == 0:
            self.place.enter(SAMPLING)
            text = sample(self.model, self.tokenizer, self.progress.step, noted=self._noted)
            self.listener.sampled(self.progress.step, text)

    def _save(self, best: bool, checkpoint: bool) -> None:
        """After the last step with all ranks waiting; else rank 0 does it for itself."""
        self.place.enter(SAVING)
        if checkpoint and self.progress.step == self.fitted.steps:
            self.saver.on_root(partial(self._save_now, best))
        elif best or checkpoint:
            self.saver.begin(self._state(), best, checkpoint)

    def _save_now(self, best: bool = False) -> None:
        self.saver.finish(self._state(), best)

    def _evaluate(self) -> bool:
        """Return whether the loss is the lowest so far. All ranks find the same."""
        progress = self.progress
        metrics = {"step": progress.step, **self.assessment.measure()}
        if self.comm.rank == 0:
            self.recorder.evaluated(metrics)
        return progress.count_evaluation(metrics.get("val_loss"))

    def _compare_ranks(self) -> None:
        """All ranks must hold the same weights, to the bit: those that they all hold."""
        alike = self.model.params if self.optimizer.is_part else self.model.weights
        own = crc32(memoryview(self.model.kernels.to_host(alike.flat)).cast("B"))
        if self.comm.largest(own) != -self.comm.largest(-own):
            raise shared(
                DistgptError(
                    f"the ranks' weights differ after step {self.progress.step}; are all nodes alike?"
                )
            )

    def _state(self) -> State:
        """What a checkpoint says beside weights and moments."""
        t, validation = self.fitted, self.assessment.validation
        run = State(
            seed=t.seed,
            ranks=self.comm.size,
            corpus=self.batches.fingerprint,
            micro_batches=t.grad_accum,
            shares=self.shares,
            hosts=self.places,
        )
        return self.progress.save(run, validation.count if validation else 0)
