"""The training loop: every step that is left, and what is due between two steps. The same on every rank."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn
from zlib import crc32

from distgpt.core.base.errors import DistgptError, NonFiniteError
from distgpt.core.base.interrupts import Interrupted, deferred_signals
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.saved.checkpoint import Best
from distgpt.core.train.progress import SAMPLING, SAVING, Due, Schedule
from distgpt.core.train.report import sample
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.seams import Guard, Votes
from distgpt.core.train.step import InFlight
from distgpt.core.train.summary import summarised


def train(run: Run) -> None:
    """Train to the last step, then write the weights and the summary. Collective."""
    with (
        run.directory.lock.claimed(run.comm),  # first: a second process in this directory must write nothing
        summarised(run),  # around all that may end the run
        deferred_signals(run.signals),  # from here on one is noted, and `take_steps` ends the run
        entered(run.guards),  # they watch what follows, which may take long
        run.checkpoints.disk.reserved(run.comm, run.progress.step),
        run.checkpoints.settled(),  # left first: waits for what is being written
    ):
        while True:
            try:
                take_steps(run)
                break
            except BadStep as bad:  # raised on all ranks at the same step
                bad.recover(run)  # progress.step is an earlier one now
        run.exchange.end_round(run.progress.step)  # nothing, unless ranks still have weights of their own
        run.checkpoints.on_root(lambda: _write_weights(run))


@contextmanager
def entered(guards: Sequence[Guard]) -> Iterator[None]:
    """Enter all guards, and leave them in the reverse order."""
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard)
        yield


def take_steps(run: Run) -> None:
    """Take all steps that are left. Raises what ends the run, or BadStep."""
    t, progress = run.settings, run.progress
    if run.assessment and (progress.evaluation_pending or (t.eval_every and not progress.step)):
        save(run, best=evaluate(run), checkpoint=False)
    progress.evaluation_pending = False
    schedule = Schedule(t, run.comm, run.placement.rounds, bool(run.assessment), progress.step)
    votes = Votes(run.comm, run.signals, run.checkpoints.disk, run.clock)
    depth = 1 if run.model.kernels.capabilities.is_async else 0  # results that may be read a step later
    in_flight = InFlight(depth)
    number = progress.step
    while number != run.clock.last:  # not <: nobody knows the last step of a run by the clock, which is None
        is_last = number + 1 == run.clock.last
        in_flight.add_launched(run.launch(number, run.batches, votes.own_votes, run.clock.elapsed))
        number += 1
        due = schedule.after(number, is_last)
        # What is due looks at the weights, so the queue must be empty.
        stop = settle(run, in_flight, leave=0 if due else in_flight.depth)
        if stop:
            stop = settle(run, in_flight, leave=0) or stop  # another signal may have come in a later step
            if not is_last:
                save_and_stop(run, Interrupted(stop, shared=True), evaluation_pending=due.evaluate)
        if due:
            do(run, due)
            if due.save:
                schedule.saved()
            in_flight.restart_clock()  # none of that was a step's time


def settle(run: Run, in_flight: InFlight, leave: int) -> signal.Signals | None:
    """Wait until `leave` steps are under way. Return the signal that came to any rank, the same on all."""
    stop = None
    while len(in_flight) > leave:
        done = in_flight.wait_for_oldest()
        # First of all: a bad step must not count, and one that ends the run is not recorded.
        rejected = run.judge.judge_step(done)
        if rejected:  # its line says after which step, so before that is counted
            run.report.report_skipped(run.progress.step, rejected, run.batches.skipped)
        run.progress.count_step(done.loss, done.seconds, is_good=not rejected)
        run.activity.step = run.progress.step
        metrics: dict[str, float] = {}
        for guard in run.guards:  # after the count: they look at the duration of the last step
            metrics |= guard.settled(done)
        if rejected:
            metrics["skipped"] = 1
        is_last = run.progress.step == run.clock.last  # before the clock hears of the next step
        run.report.report_step(run.progress.step, done, metrics, is_last)
        heard = Votes.read_votes(done.flags)
        run.clock.hear_elapsed(heard.elapsed, launched=run.progress.step + len(in_flight))
        run.checkpoints.check(heard.has_lost_disk)  # after the report: if it raises, the step was recorded
        stop = heard.stop or stop
    return stop


def do(run: Run, due: Due) -> None:
    """Compare, evaluate, save and sample, as far as it is due."""
    if due.compare:
        refuse_different_weights(run)
    if due.evaluate or due.save:
        refuse_non_finite_weights(run)
    best = None
    if due.evaluate:
        try:
            best = evaluate(run)
        except Interrupted as stop:
            if not stop.shared:  # a second signal, which this rank alone has seen
                raise
            save_and_stop(run, stop, evaluation_pending=True)
    save(run, best, due.save)
    if due.sample and run.comm.rank == 0:
        run.activity.enter(SAMPLING)
        text = sample(run.model, run.tokenizer, run.progress.step, signals=run.signals)
        run.report.report_sample(run.progress.step, text)


def evaluate(run: Run) -> Best | None:
    """Return the validation loss if it is the lowest after a step so far. Collective."""
    step, validation = run.progress.step, run.assessment.validation
    metrics = {"step": step, **run.assessment.measure()}
    run.report.report_evaluation(metrics)
    run.progress.count_evaluation(loss := metrics.get("val_loss"))
    if not step or loss is None or validation is None:
        return None
    is_best = on_root(run.comm, lambda: run.checkpoints.is_best(loss))
    return Best(loss, validation.count, step) if is_best else None


def save(run: Run, best: Best | None, checkpoint: bool) -> None:
    """Write the best weights, a checkpoint, or both. After the last step all ranks wait for it."""
    run.activity.enter(SAVING)
    if checkpoint and run.progress.step == run.clock.last:
        run.checkpoints.on_root(lambda: run.checkpoints.write_last(run.state(), best))
    elif best or checkpoint:
        run.checkpoints.begin(run.state(), best, checkpoint)


def save_and_stop(run: Run, stop: Interrupted, evaluation_pending: bool) -> NoReturn:
    """End the run for a signal that all ranks know of. A resumed run makes up for a pending evaluation."""
    refuse_non_finite_weights(run)
    run.progress.evaluation_pending = evaluation_pending
    run.activity.enter(SAVING)
    run.checkpoints.on_root(lambda: run.checkpoints.write_now(run.state()))
    raise stop


def _write_weights(run: Run) -> None:
    run.checkpoints.write_weights(run.progress.step)
    run.checkpoints.disk.write(run.progress.step, 0, run.directory.write_metrics)


def refuse_non_finite_weights(run: Run) -> None:
    """Before saving: weights that no loss was computed with yet must not replace good ones. Collective."""
    if run.comm.allreduce_max(not run.model.is_finite()):
        raise shared(
            NonFiniteError(
                f"the weights are not finite after step {run.progress.step}; "
                "a lower --lr may help; earlier checkpoints are kept"
            )
        )


def refuse_different_weights(run: Run) -> None:
    """All ranks must hold the same weights, to the bit, as far as all of them hold any. Collective."""
    common = run.model.params if run.optimizer.is_part else run.model.weights
    own = crc32(run.model.kernels.to_host(common.flat).data.cast("B"))
    if run.comm.allreduce_max(own) != -run.comm.allreduce_max(-own):
        raise shared(
            DistgptError(f"the ranks' weights differ after step {run.progress.step}; are all nodes alike?")
        )
