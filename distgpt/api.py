"""The Python API for notebooks and tests: load, create or train a model, inspect it, generate text."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.comm.agree import on_root
from distgpt.core.comm.api import Comm
from distgpt.core.comm.job import this_job
from distgpt.core.components import Components, components, install
from distgpt.core.config import AUTO_DTYPE, DEFAULT_TEMPERATURE, ModelConfig, RunConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.config.run_request import asked_for
from distgpt.core.cpu.stages import Stage, connected, open_stage
from distgpt.core.data.batches import rank_sequences
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.data.tokenizers import Tokenizer, load_tokenizer
from distgpt.core.generate.python_api import generate, tokens_in
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.saved.modelfile import Description, on_host, open_model, random_model, save_model
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.interfaces import Listener
from distgpt.core.train.loop import train as train_run
from distgpt.core.train.parallel_strategy import OptimizerState
from distgpt.core.train.plan import Plan, make_plan
from distgpt.core.train.resume import leave_finished
from distgpt.core.train.run import Run
from distgpt.core.train.setup import open_run
from distgpt.recipes import followed

if TYPE_CHECKING:
    from distgpt.inference.evaluation.evaluate import Trace


@contextmanager
def _ending_together() -> Iterator[None]:
    """End the whole job on an error of only this rank, as commands do. Otherwise the other ranks would wait.

    If all ranks raise the error, the caller handles it.
    """
    try:
        yield
    except BaseException as error:
        _end_job(error)
        raise


def _end_job(error: BaseException) -> None:
    """Report the error and end the job, unless all ranks raise it. Does not return if it ends the job."""
    comm = connected[-1] if connected else None
    if comm is not None and comm.size > 1 and not getattr(error, "shared", False):
        this_job().leave(error, comm)


def _open(stage: str, threads: int | None = None) -> Stage:
    """Open a stage. Afterwards an uncaught error, or sys.exit, also ends the whole job."""
    opened, former = open_stage(stage, threads), sys.excepthook

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _end_job(error)
        former(kind, error, trace)

    if opened.comm.size > 1:
        sys.excepthook = uncaught
        this_job().watch_exit(opened.comm)
    return opened


@_ending_together()
def load(
    path: str | PathLike[str],
    stage: str = "serial",
    dtype: str = "auto",
    context: int | None = None,
    adapter: str | PathLike[str] | None = None,
) -> GPT:
    """Load a model from a weights file. `context` changes its context length (not with learned positions).

    `dtype` "auto" is float32, which gives exact parameters, logits and gradients, or int8 or int4 for a file
    in these formats. int8 and int4 models cannot be trained. An `adapter` is merged into the weights.
    """
    opened = _open(stage)
    merged = Path(adapter) if adapter else None
    model, description, _, _ = open_model(opened, Path(path), dtype, context, part=merged)
    return GPT(model, description, opened.comm)


@_ending_together()
def init(
    config: ModelConfig | str,
    seed: int = 0,
    stage: str = "serial",
    dtype: str = "float32",
    tokenizer: str | None = None,
) -> GPT:
    """Create a model with random weights. `config` is a ModelConfig or a preset's name.

    `dtype` "auto" is float32. `tokenizer` is byte, gpt2 or the path of a tokenizer file. Its vocabulary size
    applies unless `config` sets one.
    """
    dtype = "float32" if dtype == AUTO_DTYPE else dtype
    if isinstance(config, str):
        config = preset(config).model
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed ({seed}) must be at least 0 and less than 2^63")
    opened = _open(stage)
    reader = on_root(opened.comm, lambda: load_tokenizer(tokenizer)) if tokenizer else None
    if reader:
        config = replace(config, vocab_size=config.vocab_size or reader.size)
    return GPT(
        random_model(config, dtype, opened.kernels, seed),
        Description(RunConfig(model=config), reader),
        opened.comm,
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished run: the model, the lines of its metrics.jsonl since this call, and its directory.

    With an ensemble, the lines are those of all models.
    """

    model: GPT
    metrics: list[dict[str, Any]] = field(repr=False)
    directory: Path


@_ending_together()
def train(
    preset: str | None = None,
    *,
    stage: str = "serial",
    threads: int | None = None,
    config: str | PathLike[str] | None = None,
    out: str | PathLike[str] | None = None,
    resume: str | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    on_evaluation: Callable[[dict[str, Any]], object] | None = None,
    on_note: Callable[[str], object] | None = None,
    components: Components | None = None,
    **settings: Any,
) -> Trained:
    """Train a model like `distgpt train`. `settings` are its options, such as `n_layer=6, data="my.txt"`,
    `depth=6` or `within="30m"`.

    The functions are called on rank 0 during training, with the metrics of each step and each evaluation,
    and with notes. An exception in one of them ends the run and, under MPI, the whole job.
    """
    if components is not None:
        install(components)  # permanently: later calls may need them to read the run
    ready, told = _open(stage, threads), _Told(on_step, on_evaluation, on_note)
    toml, directory = (None if path is None else Path(path) for path in (config, out))
    request = followed(asked_for(settings, preset, toml, directory, resume), ready, told.noted)
    plan = make_plan(ready, request, told.noted)
    # A notebook, or one of the functions, may change the working directory.
    plan = replace(
        plan,
        directory=RunDirectory(plan.directory.path.absolute()),
        checkpoint=plan.checkpoint and plan.checkpoint.absolute(),
    )
    t, weights = plan.config.train, plan.directory.weights
    if t.ensemble > 1:
        from distgpt.recipes.ensemble import train_ensemble

        weights = plan.directory.ensemble
        if result := train_ensemble(plan, ready, partial(_train_planned, told), told.noted):
            model = GPT(result.model, result.description, ready.comm)
            return Trained(model, told.metrics, plan.directory.path)
    elif not plan.is_finished:
        run = _train_planned(told, plan, ready)
        model = GPT(run.model, run.checkpoints.description, ready.comm)
        return Trained(model, told.metrics, plan.directory.path)
    leave_finished(ready.comm, plan.directory, t, plan.state.seconds, told.noted)
    finished, description, _, _ = open_model(ready, weights, t.dtype)
    return Trained(GPT(finished, description, ready.comm), [], plan.directory.path)


def _train_planned(told: _Told, plan: Plan, ready: Stage) -> Run:
    try:
        run = open_run(plan, ready, told)
        train_run(run)
    finally:  # also if it failed before training
        if ready.comm.rank == 0:
            plan.directory.lock.release()
    return run


def _ignore(about: object) -> None: ...


class _Told(Listener):
    """A listener that stores the metrics, and passes everything to the user's functions."""

    def __init__(self, *functions: Callable[[Any], object] | None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self._on_step, self._on_evaluation, self._on_note = (each or _ignore for each in functions)

    def stepped(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)
        self._on_step(metrics)

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self.metrics.append(metrics)
        self._on_evaluation(metrics)

    def noted(self, text: str) -> None:
        self._on_note(text)


class GPT:
    """A model with its tokenizer. Tokens are integers of shape (B, T), or (T,) for a single sequence."""

    def __init__(self, model: Model, description: Description, comm: Comm) -> None:
        self._model, self._description, self._comm = model, description, comm
        self._passes: dict[tuple[int, int, bool], Pass] = {}
        self._lock = threading.RLock()  # calls share the buffers of passes and kernels

    def __repr__(self) -> str:
        c, k = self.config, self._model.kernels
        dtype = k.capabilities.rounded or (k.dtype.name if k.dtype == k.accum_dtype else "bfloat16")
        shape = f"{c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, context {c.seq_len}"
        return f"<GPT of {self._model.architecture.layout.elements:,} parameters: {shape}; {dtype}>"

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._description.tokenizer

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Return all parameters by name. On CPUs (except in bfloat16) they are views of the model."""
        self._refuse_a_part()
        return on_host(self._model, self._model.weights)

    def logits(self, tokens: ArrayLike) -> NDArray[Any]:
        """Return the logits (B, T, V) of the next token after each token."""
        ids, shape = self._checked(tokens)
        with self._lock:
            work, k = self._pass(ids, training=False), self._model.kernels
            out = k.zeros(ids.size, self.config.padded_vocab)
            work.logits(out, work.forward(self._flat(ids)))
            return np.array(k.to_host(out)[:, : self.config.vocab_size]).reshape(*shape, -1)

    def trace(self, tokens: ArrayLike) -> Trace:
        """Return hidden states, attention weights of every layer, and logits."""
        from distgpt.inference.evaluation.evaluate import trace

        ids, shape = self._checked(tokens)
        with self._lock:
            result = trace(self._model, self._flat(ids), *ids.shape)
        return result if len(shape) == 2 else result.of_one()

    def loss(self, tokens: ArrayLike, targets: ArrayLike) -> float:
        """Return the mean cross-entropy over all tokens."""
        ids, wanted = self._pair(tokens, targets)
        k = self._model.kernels
        with self._lock:
            total = k.accum_zeros(1)
            work = self._pass(ids, training=False)
            work.loss(total, self._flat(ids), self._flat(wanted))
            return float(k.to_host(total)[0])

    def gradients(self, tokens: ArrayLike, targets: ArrayLike) -> dict[str, NDArray[Any]]:
        """Return the gradients of the mean loss by parameter name."""
        ids, wanted = self._pair(tokens, targets)
        with self._lock:
            work = self._pass(ids, training=True)
            work.loss_and_gradients(self._flat(ids), self._flat(wanted), 1.0, accumulate=False)
            k = self._model.kernels
            return {name: np.array(k.to_host(array)) for name, array in self._model.grads.items()}

    def batches(
        self, data: str | PathLike[str], batch_size: int, seed: int = 0
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield this rank's tokens and targets of each step, without end.

        `train` has the same order with this seed, for any number of ranks.
        """
        run = RunConfig(self.config, TrainConfig(data=str(data), batch_size=batch_size, seed=seed))
        request = DataRequest(str(data), seq_len=self.config.seq_len, existing=self.tokenizer)
        result = load_corpus(self._comm, request).batches(self._comm, run)
        own = rank_sequences(batch_size, self._comm.rank, self._comm.size, 0, 1)
        for step in itertools.count():
            pair = np.zeros((2, own.stop - own.start, self.config.seq_len), np.int32)
            result.fill(step, own, *pair)
            yield pair[0], pair[1]

    def average(self, gradients: Mapping[str, NDArray[Any]]) -> None:
        """Replace the gradients by their means over all ranks. Collective."""
        for gradient in gradients.values():
            self._comm.sum(gradient)
            gradient /= self._comm.size

    def optimizer(self, name: str = "adamw", **settings: Any) -> Optimizer:
        """Return AdamW or Muon for this model. `settings` are settings of `train`, such as lr or clip."""
        return Optimizer(self, TrainConfig(optimizer=name, **settings))

    @_ending_together()
    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 100,
        temperature: float = DEFAULT_TEMPERATURE,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        *,
        stream: bool = False,
        **settings: Any,
    ) -> Any:
        """Continue a prompt: return text for text, and tokens for a list of tokens.

        For a list of prompts, return a list of results, which are computed concurrently. `settings` are the
        other settings of a request: min_p, repetition_penalty, stop (one or multiple strings), overflow,
        lookup. With n=3 the result is a list of samples per prompt. With logprobs=5 each sample is a
        Completion with log-probabilities, including the prompt's own with prompt_logprobs=True. With
        `stream`, return an iterator over pieces of text, or tokens, for a single prompt.
        """
        settings |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
        settings |= {"top_p": top_p, "seed": seed}
        return generate(self._model, self.tokenizer, self._comm, prompt, stream, settings)

    @_ending_together()
    def save(self, path: str | PathLike[str]) -> None:
        """Write the model as a weights file, on rank 0."""
        if dtype := self._model.kernels.capabilities.rounded:
            raise UsageError(
                f"cannot save a model in {dtype}; save it in float, then run distgpt weights quantize"
            )
        self._refuse_a_part()
        on_root(self._comm, lambda: save_model(Path(path), self._model, self._description))

    def _refuse_a_part(self) -> None:
        if self._model.master_part is not None:
            raise UsageError(
                "a rank has only a part of the full-precision weights (grad_sync sharded, dtype bfloat16);"
                " load the weights file of the run"
            )

    def _pass(self, ids: NDArray[Any], training: bool) -> Pass:
        """Return the buffers for batches of this shape, cached for the next call."""
        n_seq, seq_len = ids.shape
        key = (n_seq, seq_len, training)
        if key not in self._passes:
            self._passes = {key: Pass(self._model, n_seq, seq_len, training)}
        return self._passes[key]

    def _flat(self, ids: NDArray[Any]) -> Any:
        return self._model.kernels.integers(ids.reshape(-1))

    def _pair(self, tokens: ArrayLike, targets: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        (ids, shape), (wanted, other) = self._checked(tokens), self._checked(targets)
        if shape != other:
            raise DataError(f"tokens {shape} and targets {other} must have the same shape")
        return ids, wanted

    def _checked(self, tokens: ArrayLike) -> tuple[NDArray[Any], tuple[int, ...]]:
        """Return the tokens as (B, T), and their original shape."""
        ids = tokens_in(tokens, self.config.vocab_size)
        if ids.shape[-1] > self.config.seq_len:
            raise DataError(f"{ids.shape[-1]} tokens exceed the context of {self.config.seq_len}")
        return ids.reshape(-1, ids.shape[-1]), ids.shape


class Optimizer:
    """Updates a model from gradients in a custom training loop. Created by `GPT.optimizer`."""

    def __init__(self, model: GPT, config: TrainConfig) -> None:
        self._gpt, self._config, self._steps = model, config, 0
        model._refuse_a_part()
        kernels = model._model.kernels
        if kernels.dtype != kernels.accum_dtype or kernels.capabilities.rounded:
            raise UsageError("only a model in float32 or float64 can be updated; load it with another dtype")
        self._state = OptimizerState(components().optimizer(config)(model._model, config))
        self._state.begin()

    def step(self, gradients: Mapping[str, ArrayLike], lr: float | None = None) -> float:
        """Update the model, unless a gradient is not finite. Return the norm of all gradients.

        Gradients must be the same on all ranks. `lr`: learning rate of this step (default: the schedule's).
        """
        optimizer, model = self._state.optimizer, self._gpt._model
        if gradients.keys() != model.grads.keys():
            raise DataError("the gradients must have the names of GPT.parameters()")
        with self._gpt._lock:
            for name, array in model.grads.items():
                model.kernels.put(array, np.asarray(gradients[name]))
            rate = components().learning_rate(self._config, self._steps) if lr is None else lr
            optimizer.step(self._steps, 1.0, rate)
        self._steps += 1
        return float(np.sqrt(model.kernels.to_host(optimizer.norm)[0]))
