"""The training loop: every step that is left, and what is due between two steps. The same on every rank."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NoReturn
from zlib import crc32

from distgpt.core.base.errors import DistgptError, MismatchError, NonFiniteError
from distgpt.core.base.interrupts import Interrupted, deferred_signals
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.saved.checkpoint import Best
from distgpt.core.train.progress import SAMPLING, SAVING, Due, SaveTimer, due_after
from distgpt.core.train.run import BadStep, Run
from distgpt.core.train.seams import Votes, guard_failed
from distgpt.core.train.step import InFlight
from distgpt.core.train.summary import write_at_end

# Names in a line of metrics.jsonl that no guard may use.
RECORDED = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "time", "skipped"}


def train(run: Run) -> None:
    """Train to the last step, then write the weights and the summary. Collective."""
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(run.directory.lock.claimed(run.comm))  # first: a second process here must write nothing
        stack.push(partial(write_at_end, run))  # around all that may end the run
        enter(deferred_signals(run.signals))  # from here on one is noted, and `take_steps` ends the run
        for guard in run.guards:  # they watch what follows, which may take long
            enter(guard)
        enter(run.checkpoints.disk.reserved(run.comm, run.progress.step))
        stack.push(run.checkpoints.wait_at_exit)  # left first: waits for what is being written
        while True:
            try:
                take_steps(run)
                break
            except BadStep as bad:  # raised on all ranks at the same step
                bad.recover(run)  # progress.step is an earlier one now
        run.exchange.end_round(run.progress.step)  # nothing, unless ranks still have weights of their own
        run.checkpoints.on_root(lambda: _write_weights(run))


def take_steps(run: Run) -> None:
    """Take all steps that are left. Raises what ends the run, or BadStep."""
    t = run.settings
    progress = run.progress
    if run.assessment and (progress.evaluation_pending or (t.eval_every and not progress.step)):
        save(run, best=evaluate(run), checkpoint=False)
    progress.evaluation_pending = False
    timer = SaveTimer(run.comm, 0 if t.save_every else t.save_minutes, progress.step)
    rounds = run.placement.rounds
    votes = Votes(run.comm, run.signals, run.checkpoints.disk, run.clock)
    depth = 1 if run.model.kernels.capabilities.is_async else 0  # results that may be read a step later
    in_flight = InFlight()
    number = progress.step
    while run.clock.last is None or number < run.clock.last:  # None: a run by the clock that goes on
        is_last = number + 1 == run.clock.last
        in_flight.add_launched(run.launch(number, run.batches, votes.own_votes, run.clock.elapsed))
        number += 1
        due = due_after(t, number, rounds, run.assessment is not None, is_last)
        # Collective: all ranks ask the timer, also where a checkpoint is due in any case.
        if rounds.ends(number) and timer.is_due(number):
            due = replace(due, save=True)
        # What is due looks at the weights, so the queue must be empty.
        stop = settle(run, in_flight, leave=0 if due else depth)
        if stop:
            # The steps under way count too. Another signal may have come in one of them; mostly none has.
            stop = settle(run, in_flight, leave=0) or stop
            if not is_last:  # after the last step the run ends by itself, with all that it writes at its end
                ending = Interrupted(stop, shared=True, why=run.signals.reasons.get(stop, ""))
                save_and_stop(run, ending, evaluation_pending=due.evaluate)
        if due:
            perform_due(run, due)
            if due.save:
                timer.saved()
            # None of that was a step's time, and rank 0 alone samples.
            in_flight.restart_clock()
            run.step.restart_clock()


def settle(run: Run, in_flight: InFlight, leave: int) -> signal.Signals | None:
    """Wait until no more than `leave` steps are under way.

    Return the signal that came to any rank, the same on all; None if none did.
    """
    stop = None
    while len(in_flight) > leave:
        done = in_flight.wait_for_oldest()
        # Judge first: if it raises, the step is neither counted nor recorded.
        rejected = run.judge.judge_step(done)
        if rejected:  # reported before the step is counted, as its line names the step before it
            run.report.report_skipped(run.progress.step, rejected, run.batches.skipped)
        run.progress.count_step(done.loss, done.seconds, is_good=not rejected)
        run.activity.step = run.progress.step
        metrics: dict[str, float] = {}  # beside loss and norm, for the step's line and for metrics.jsonl
        for guard in run.guards:  # after the count: they look at the duration of the last step
            try:
                fields = guard.after_step(done)
                if taken := RECORDED & fields.keys():
                    raise ValueError(f"the run itself records {', '.join(sorted(taken))}")
                metrics |= fields
            except (DistgptError, OSError):  # with a line and an exit code of their own
                raise
            except Exception as error:
                raise guard_failed(guard, error) from error
        if rejected:
            metrics["skipped"] = 1
        run.report.report_step(run.progress.step, done, metrics)
        heard = Votes.read_votes(done.votes, run.settings.grad_sync)
        run.clock.hear_elapsed(heard.elapsed, launched=run.progress.step + len(in_flight))
        run.checkpoints.check(heard.has_lost_disk)  # after the report: if it raises, the step was recorded
        stop = heard.stop or stop
    return stop


def perform_due(run: Run, due: Due) -> None:
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
        from distgpt.core.generate.engine import sample  # with all that generates

        run.activity.enter(SAMPLING)
        text = sample(run.model, run.tokenizer, run.progress.step, signals=run.signals)
        run.report.listener.sampled(run.progress.step, text)


def evaluate(run: Run) -> Best | None:
    """Measure and report. Return what says that these weights are the best so far. Collective.

    Only weights that a step has changed can be: None before the first one, and where no text is held out.
    """
    step = run.progress.step
    assert run.assessment is not None, "nothing is due where nothing is measured"
    validation = run.assessment.validation
    metrics = {"step": step, **run.assessment.measure()}
    run.report.report_evaluation(metrics)
    run.progress.count_evaluation(loss := metrics.get("val_loss"))
    if not step or loss is None or validation is None:
        return None
    is_best = on_root(run.comm, lambda: run.checkpoints.is_best(loss))
    return Best(loss, validation.count, step) if is_best else None


def save(run: Run, best: Best | None, checkpoint: bool) -> None:
    """Write the best weights, a checkpoint, or both. After the last step all ranks wait for it."""
    if best or checkpoint:
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
    """Refuse to save weights that are not finite: no loss was computed with them yet. Collective."""
    if run.comm.allreduce_max(not run.model.is_finite()):
        raise shared(
            NonFiniteError(
                f"the weights are not finite after step {run.progress.step}; "
                "a lower --lr may help; earlier checkpoints are kept"
            )
        )


def refuse_different_weights(run: Run) -> None:
    """Refuse to go on where ranks that should hold the same weights do not, to the bit. Collective."""
    if run.comm.size == 1:
        return
    common = run.model.params if run.optimizer.is_part else run.model.weights
    own = crc32(run.model.kernels.to_host(common.flat).data.cast("B"))
    if run.comm.allreduce_max(own) != -run.comm.allreduce_max(-own):  # the largest is not the smallest
        raise shared(
            MismatchError(
                f"the ranks' weights differ after step {run.progress.step}; are all nodes alike, and do"
                f" --grad-sync {run.settings.grad_sync} and {type(run.optimizer).__qualname__} give all ranks"
                " the same bits?"
            )
        )
