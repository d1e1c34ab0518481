"""The training loop, with all remaining steps and the work due between them. The same on every rank."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn
from zlib import crc32

from distgpt.core.base.errors import DistgptError, MismatchError, NonFiniteError, escape_model_text
from distgpt.core.base.interrupts import Interrupted, deferred_signals
from distgpt.core.comm.agree import collective_error, on_root
from distgpt.core.saved.checkpoint import Best
from distgpt.core.train.interfaces import StepFlags, callback_failed
from distgpt.core.train.progress import SAMPLING, SAVING, Due, SaveTimer, due_after
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.step import InFlight
from distgpt.core.train.summary import write_at_end

# Fields of metrics.jsonl that callbacks must not use.
RECORDED = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "time", "skipped"}


def train(run: Run) -> None:
    """Train to the last step, then write the weights and the summary. Collective."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(run.directory.lock.claimed(run.comm))  # Lock first: a second process must not write here.
        stack.push(partial(write_at_end, run))  # outermost, so it covers everything that may end the run
        enter(deferred_signals(run.signals))  # record one signal; `run_steps` then ends the run
        for callback in run.callbacks:  # they watch the code below, which may run long
            enter(callback)
        enter(run.checkpoints.disk.reserved(run.comm, run.progress.step))
        stack.push(run.checkpoints.wait_at_exit)  # exited first: waits for the current write
        while True:
            try:
                run_steps(run)
                break
            except BadStep as bad:  # raised on all ranks at the same step
                bad.recover(run)  # progress.step is now an earlier one
        run.gradient_sync.end_round(run.progress.step)  # no effect unless ranks have different weights
        run.checkpoints.on_root(lambda: _write_weights(run))


def run_steps(run: Run) -> None:
    """Run all remaining steps. Raises the error that ends the run, or BadStep."""
    t = run.settings
    progress = run.progress
    if run.assessment and (progress.evaluation_pending or (t.eval_every and not progress.step)):
        save(run, best=evaluate(run), checkpoint=False)
    progress.evaluation_pending = False
    timer = SaveTimer(run.comm, 0 if t.save_every else t.save_minutes, progress.step)
    rounds = run.placement.rounds
    flags = StepFlags(run.comm, run.signals, run.checkpoints.disk, run.budget)
    depth = 1 if run.model.kernels.capabilities.is_async else 0  # number of steps whose results may be late
    in_flight = InFlight()
    number = progress.step
    while run.budget.last is None or number < run.budget.last:  # None: a time-limited run without a known end
        is_last = number + 1 == run.budget.last
        in_flight.add_launched(run.launch(number, run.batches, flags.local_flags, run.budget.elapsed))
        number += 1
        due = due_after(t, number, rounds, run.assessment is not None, is_last)
        # Collective, so all ranks call the timer even if a checkpoint is already due.
        if rounds.ends(number) and timer.is_due(number):
            due = replace(due, save=True)
        # The due work reads the weights, so the queue must be empty.
        stop = finish_steps(run, in_flight, leave=0 if due else depth)
        if stop:
            # Steps in flight count also, and may have received another signal.
            stop = finish_steps(run, in_flight, leave=0) or stop
            if not is_last:  # after the last step, the run ends normally and writes everything
                ending = Interrupted(stop, shared=True, why=run.signals.reasons.get(stop, ""))
                save_and_stop(run, ending, evaluation_pending=due.evaluate)
        if due:
            perform_due(run, due)
            if due.save:
                timer.saved()
            # This time does not belong to a step, and only rank 0 samples.
            in_flight.restart_clock()
            run.step.restart_clock()


def finish_steps(run: Run, in_flight: InFlight, leave: int) -> signal.Signals | None:
    """Wait until at most `leave` steps are in flight. Return the signal any rank received, or None."""
    stop = None
    while len(in_flight) > leave:
        done = in_flight.wait_for_oldest()
        # Check first: a bad step must not count, and one that ends the run must not be recorded.
        rejected = run.step_policy.check_step(done)
        if rejected:  # before the count, because the message names the previous step
            run.report.report_skipped(run.progress.step, rejected, run.batches.skipped)
        run.progress.count_step(done.loss, done.seconds, is_good=not rejected)
        run.activity.step = run.progress.step
        metrics: dict[str, float] = {}  # additional fields for the step's line and metrics.jsonl
        for callback in run.callbacks:  # after the count, because callbacks read the last step's duration
            try:
                fields = callback.after_step(done)
                if taken := RECORDED & fields.keys():
                    raise ValueError(f"the run already records {', '.join(sorted(taken))}")
                metrics |= fields
            except (DistgptError, OSError):  # they have a message and an exit code
                raise
            except Exception as error:
                raise callback_failed(callback, error) from error
        if rejected:
            metrics["skipped"] = 1
        run.report.report_step(run.progress.step, done, metrics)
        reduced = StepFlags.parse_flags(done.flags, run.settings.grad_sync)
        run.budget.set_elapsed(reduced.elapsed, launched=run.progress.step + len(in_flight))
        run.checkpoints.check(reduced.has_lost_disk)  # last, so that the step is recorded if this raises
        stop = reduced.stop or stop
    return stop


def perform_due(run: Run, due: Due) -> None:
    """Compare weights, evaluate, save and sample if due."""
    if due.compare:
        refuse_different_weights(run)
    if due.evaluate or due.save:
        refuse_non_finite_weights(run)
    best = None
    if due.evaluate:
        try:
            best = evaluate(run)
        except Interrupted as stop:
            if not stop.shared:  # a second signal, received only by this rank
                raise
            save_and_stop(run, stop, evaluation_pending=True)
    save(run, best, due.save)
    if due.sample and run.comm.rank == 0:
        from distgpt.core.generate.engine import sample  # loads all of generation

        run.activity.enter(SAMPLING)
        text = sample(run.model, run.tokenizer, run.progress.step, signals=run.signals)
        run.report.listener.sampled(run.progress.step, text)
        event: dict[str, object] = {"step": run.progress.step, "sample": escape_model_text(text.strip())}
        run.report.remember(event, run.directory.samples)


def evaluate(run: Run) -> Best | None:
    """Evaluate and report. Return a record if these are the best weights. Collective.

    Return None before the first step, or if no text is held out.
    """
    step = run.progress.step
    assert run.assessment is not None, "an evaluation requires validation data"
    validation = run.assessment.validation
    metrics = {"step": step, **run.assessment.measure()}
    run.report.report_evaluation(metrics)
    run.progress.count_evaluation(loss := metrics.get("val_loss"))
    if loss is not None and (why := run.budget.after_evaluation(step, loss)):
        run.report.note(why)
    if not step or loss is None or validation is None:
        return None
    is_best = on_root(run.comm, lambda: run.checkpoints.is_best(loss))
    return Best(loss, validation.count, step) if is_best else None


def save(run: Run, best: Best | None, checkpoint: bool) -> None:
    """Write the best weights, a checkpoint, or both. After the last step, all ranks wait."""
    if best or checkpoint:
        run.activity.enter(SAVING)
    if checkpoint and run.progress.step == run.budget.last:
        run.checkpoints.on_root(lambda: run.checkpoints.write_last(run.state(), best))
    elif best or checkpoint:
        run.checkpoints.begin(run.state(), best, checkpoint)


def save_and_stop(run: Run, stop: Interrupted, evaluation_pending: bool) -> NoReturn:
    """Save and end the run after a signal that all ranks received. A resumed run does pending evaluations."""
    refuse_non_finite_weights(run)
    run.progress.evaluation_pending = evaluation_pending
    run.activity.enter(SAVING)
    run.checkpoints.on_root(lambda: run.checkpoints.write_now(run.state()))
    raise stop


def _write_weights(run: Run) -> None:
    run.checkpoints.write_weights(run.progress.step)
    run.checkpoints.disk.write(run.progress.step, 0, run.directory.write_metrics)


def refuse_non_finite_weights(run: Run) -> None:
    """Reject weights that are not finite before saving, because no loss has tested them yet. Collective."""
    if run.comm.allreduce_max(not run.model.is_finite()):
        raise collective_error(
            NonFiniteError(
                f"the weights are not finite after step {run.progress.step}; "
                "try a lower --lr; earlier checkpoints are kept"
            )
        )


def refuse_different_weights(run: Run) -> None:
    """Raise an error if weights that ranks share are not bitwise identical. Collective."""
    if run.comm.size == 1:
        return
    common = run.model.params if run.optimizer.is_part else run.model.weights
    own = crc32(run.model.kernels.to_host(common.flat).data.cast("B"))
    if run.comm.allreduce_max(own) != -run.comm.allreduce_max(-own):  # true if the maximum is not the minimum
        raise collective_error(
            MismatchError(
                f"ranks have different weights after step {run.progress.step}; check that nodes are identical"
                f" and --grad-sync {run.settings.grad_sync} and {type(run.optimizer).__qualname__} return the"
                " same values on every rank"
            )
        )
