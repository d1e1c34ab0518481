"""The training loop, the same on every rank of every stage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.comm.serial import SerialComm
from distgpt.config import RunConfig, TrainConfig
from distgpt.data.batches import Batches
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DistgptError, NonFiniteError
from distgpt.evaluation.assessment import Assessment
from distgpt.model.generate import Sampling, generate, opening
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved import checkpoint
from distgpt.saved.modelfile import Description, fill, on_host, save_model
from distgpt.saved.rundir import RunDirectory
from distgpt.training.step import Outcome, Step


class Listener(Protocol):
    """Whoever shows the run's progress. Called on rank 0 alone."""

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
    settled: TrainConfig  # the run's, with what "automatic" came to here
    comm: Comm
    model: Model
    optimizer: AdamW
    tokenizer: Tokenizer
    batches: Batches
    assessment: Assessment
    directory: RunDirectory
    listener: Listener
    step: int = 0
    best_loss: float = math.inf  # of all validations after a step
    step_seconds: list[float] = field(default_factory=list)
    watch: Callable[[Step], None] = _nobody  # told of the steps' object before the first of them
    _settled_at: float = 0.0

    def train(self) -> None:
        """Run to the last step, then write the weights.

        A step's outcome is read once the next one is under way, except where something has to be done first.
        """
        t = self.settled
        work = Step(self.model, self.optimizer, self.comm, t)
        self.watch(work)
        running: list[Outcome] = []
        if self.assessment and t.eval_every and not self.step:
            self._evaluate()
        self._settled_at = time.perf_counter()
        for step in range(self.step, t.steps):
            running.append(work.launch(step, self.batches))
            due = self._is_due(step + 1)
            while len(running) > (self.model.kernels.queued and not due):
                self._settle(running.pop(0))
            if due:
                self._occasionally()
                self._settled_at = time.perf_counter()  # none of that is a step's time
        on_root(self.comm, partial(self._save_weights, self.directory.weights))

    def _settle(self, outcome: Outcome) -> None:
        """Wait for a step and count it as done."""
        loss, norm = outcome.read()
        self._refuse_divergence(loss, norm)
        self.step += 1
        now = time.perf_counter()
        self.step_seconds.append(now - self._settled_at)
        self._report(loss, norm, outcome.lr, self.step_seconds[-1])
        self._settled_at = now

    def _refuse_divergence(self, loss: float, norm: float) -> None:
        """Both numbers are sums over all ranks, so all ranks come to the same verdict."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "gradient" if math.isfinite(loss) else "loss"
        raise shared(
            NonFiniteError(
                f"the {what} is not finite at step {self.step + 1} (loss {loss}, gradient norm {norm}); "
                "a lower --lr, a longer --warmup or a smaller --clip may help; earlier checkpoints are kept"
            )
        )

    def _refuse_useless_weights(self) -> None:
        """No loss has seen the latest weights yet, the same on all ranks; they must not replace good ones."""
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

    def _is_due(self, step: int) -> bool:
        """Whether something is to be done after this step."""
        t = self.run.train
        every = (t.verify_every, t.eval_every, t.save_every, t.sample_every)
        return step == t.steps or any(interval and step % interval == 0 for interval in every)

    def _occasionally(self) -> None:
        t = self.run.train
        if t.verify_every and self.step % t.verify_every == 0:
            self._compare_ranks()
        is_last = self.step == t.steps
        to_evaluate = self.assessment and ((t.eval_every and self.step % t.eval_every == 0) or is_last)
        to_save = (t.save_every and self.step % t.save_every == 0) or is_last
        if to_evaluate or to_save:
            self._refuse_useless_weights()
        if to_evaluate:
            self._evaluate()
        if to_save:
            on_root(self.comm, self._save_checkpoint)
        if t.sample_every and self.step % t.sample_every == 0 and self.comm.rank == 0:
            self.listener.sampled(self.step, sample(self.model, self.tokenizer, self.step))

    def _evaluate(self) -> None:
        """All ranks find the same, so all agree on whether this is the best so far."""
        metrics = {"step": self.step, **self.assessment.measure()}
        if self.comm.rank == 0:
            self.directory.record(metrics)
            self.listener.evaluated(metrics)
        if self.step and metrics.get("val_loss", math.inf) < self.best_loss:
            self.best_loss = metrics["val_loss"]
            on_root(self.comm, partial(self._save_weights, self.directory.best))

    def _compare_ranks(self) -> None:
        """All ranks must hold the same weights, to the bit."""
        own = crc32(memoryview(self.model.kernels.to_host(self.model.weights.flat)).cast("B"))
        if self.comm.largest(own) != -self.comm.largest(-own):
            raise shared(
                DistgptError(f"the ranks' weights differ after step {self.step}; are all nodes alike?")
            )

    def _save_checkpoint(self) -> None:
        description = Description(self.run, self.tokenizer)
        m, v = (on_host(self.model, b, p) for b, p in ((self.optimizer.m, "m/"), (self.optimizer.v, "v/")))
        groups = {
            "weights": (on_host(self.model, self.model.weights), description.to_metadata()),
            "optimizer": (m | v, {}),
        }
        state = {
            "seed": self.run.train.seed,
            "world_size": self.comm.size,
            "corpus": self.batches.fingerprint,
            "rounds": self.settled.grad_accum,
            "best": self._best(),
        }
        checkpoint.save_checkpoint(self.directory.checkpoints, self.step, groups, state, self.run.train.keep)

    def _best(self) -> dict[str, float] | None:
        """The lowest validation loss, which compares with those over as many tokens only."""
        validation = self.assessment.validation
        if validation is None or math.isinf(self.best_loss):
            return None
        return {"loss": self.best_loss, "tokens": validation.count}

    def _save_weights(self, path: Path) -> None:
        save_model(path, self.model, Description(self.run, self.tokenizer))

    def restore(self, path: Path, step: int, best_loss: float) -> None:
        """Weights, moments and position of a verified checkpoint. Collective."""
        moments = {"m/": self.optimizer.m, "v/": self.optimizer.v}
        for stem, buffers in (("weights", {"": self.model.weights}), ("optimizer", moments)):
            fill(self.comm, self.model, buffers, partial(checkpoint.load_group, path, stem))
        self.step, self.best_loss = step, best_loss


def sample(model: Model, tokenizer: Tokenizer, seed: int, length: int = 120) -> str:
    """A short text from the model, for the eye, starting from a line break or the first token there is."""
    alone, prompt = SerialComm(), opening(tokenizer)
    chosen = generate(model, prompt, length, Sampling(temperature=0.8, top_k=50, seed=seed), alone)
    return tokenizer.decode(list(chosen))
