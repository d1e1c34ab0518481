"""The quality of a model, in training and afterwards: its loss on held-out text, and benchmarks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_every_rank, on_root, shared
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.data.batches import Tokens
from distgpt.data.chats.examples import Examples
from distgpt.data.loading import DataRequest, load_corpus
from distgpt.data.named import resolve_data
from distgpt.data.shards import is_shards, read_manifest
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, DistgptError, NonFiniteError, escape, one_line
from distgpt.evaluation.benchmark import SHOWN, Benchmark, Progress, load_benchmark, with_progress
from distgpt.evaluation.bits import bits_per_byte, text_bytes
from distgpt.evaluation.scoring import Scorer, Span
from distgpt.interrupts import PendingSignals
from distgpt.kernels.api import IGNORED
from distgpt.model.model import Model
from distgpt.saved.adapter import open_model
from distgpt.stages import Stage, report_compiling


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """The mean loss in nats over this many predicted tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class Validation:
    """The first `most` held-out tokens (0: all), in the same windows every time, each predicted once.

    Windows are as long as the context.
    """

    def __init__(self, tokens: Tokens, seq_len: int, most: int = 0) -> None:
        end = min(most + 1, len(tokens)) if most else len(tokens)
        starts = range(0, end - 1, seq_len)
        self.spans = [Span(tokens.read(start, min(start + seq_len + 1, end))) for start in starts]
        self.count = end - 1
        self._bytes: int | None = None

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> HeldOutLoss:
        """Return the loss. Collective."""
        total = float(with_progress(scorer.sums, self.spans, scorer.comm, progress).sum())
        return HeldOutLoss(total / self.count, self.count)

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Return a loss in a unit that other tokenizers share; None where the text has no bytes."""
        if self._bytes is None:
            self._bytes = self._bytes_predicted(tokenizer)
        return bits_per_byte(loss, self._bytes / self.count)

    def _bytes_predicted(self, tokenizer: Tokenizer) -> int:
        """Return the length of the predicted text in UTF-8, without separators between documents."""
        ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
        return text_bytes(ids, tokenizer) - text_bytes(ids[:1], tokenizer)


class AnswersHeldOut(Validation):
    """The answers of held-out examples, the first of them with `most` tokens to learn (0: all)."""

    def __init__(self, examples: Examples, most: int = 0) -> None:
        self.spans, self.count = [], 0
        for start, stop in pairwise(examples.starts.tolist()):
            targets = examples.targets[start:stop]
            ids = np.append(examples.read(start, stop), targets[-1:].clip(0).astype(np.uint32))
            self.spans.append(Span(ids, learned=targets != IGNORED))
            self.count += self.spans[-1].count
            if 0 < most <= self.count:
                break

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> None:
        """Return None: answers end with tokens that are no text."""


def validation_on(tokens: Tokens, seq_len: int, most: int) -> Validation:
    """Return the loss to measure on what is held out."""
    return AnswersHeldOut(tokens, most) if isinstance(tokens, Examples) else Validation(tokens, seq_len, most)


class Assessment:
    """Validation, HellaSwag or both; false without either."""

    def __init__(
        self,
        model: Model,
        comm: Comm,
        validation: Validation | None,
        hellaswag: Benchmark | None,
        tokenizer: Tokenizer,
        signals: PendingSignals,
        on_batch: Callable[[], None],
    ) -> None:
        self.validation, self.hellaswag, self._tokenizer = validation, hellaswag, tokenizer
        self.scorer = Scorer(model, comm, signals, on_batch)

    def __bool__(self) -> bool:
        return self.validation is not None or self.hellaswag is not None

    def measure(self) -> dict[str, Any]:
        """Return the fields of a line of metrics.jsonl, which rank 0 has all of. Collective."""
        found: dict[str, Any] = {}
        if self.validation is not None:
            begun = time.perf_counter()
            held = self.validation.measure(self.scorer)
            seconds = time.perf_counter() - begun
            found |= {"val_loss": held.loss, "val_tokens": held.tokens, "val_s": seconds}
            if (bits := self.bits_per_byte(held.loss)) is not None:
                found["bits_per_byte"] = bits
        if self.hellaswag is not None:
            result = self.hellaswag.measure(self.scorer)
            found |= {"hellaswag": result.acc_norm, "hellaswag_examples": result.examples}
        return found

    def bits_per_byte(self, loss: float | None) -> float | None:
        """Return a validation loss in bits per byte on rank 0, None on others."""
        if self.validation is None or loss is None or self.scorer.comm.rank:
            return None
        return self.validation.bits_per_byte(loss, self._tokenizer)


def evaluate(
    stage: Stage,
    weights: Path,
    val: str | None = None,
    benchmarks: Mapping[str, Path] | None = None,
    val_tokens: int = 0,
    dtype: str = "auto",
    matmul: str = "auto",
    context: int | None = None,
    chats: bool = False,
    progress: Progress | None = None,
    adapter: Path | None = None,
) -> dict[str, Any]:
    """Measure the model in a file: the results by name, the same on any number of ranks. Collective.

    `val` is what --data can be, of shards the part for validation: its first `val_tokens`, or all if 0. With
    `chats` their answers alone count. Of what the model was trained on, only the part that was held out is
    read.
    """
    comm = stage.comm
    report_compiling(comm, progress.noted if progress else None)
    model, description, _, chosen = open_model(stage, weights, adapter, dtype, context, matmul, "evaluation")
    tokenizer = description.tokenizer
    if tokenizer is None:
        raise shared(DataError(f"{weights} has no tokenizer, so it cannot read text"))
    if progress is not None and comm.rank == 0:
        stage.notes.report_to(progress.noted)
    scorer = Scorer(model, comm)
    found: dict[str, Any] = {"weights": str(weights), "dtype": chosen, "context": model.config.seq_len}
    if val is not None:
        found |= _on_text(stage, scorer, description.run.train, tokenizer, val, val_tokens, chats, progress)
    for name, path in (benchmarks or {}).items():
        benchmark = load_benchmark(comm, name, path, tokenizer, model.config.seq_len)
        result = benchmark.measure(scorer, progress)
        _refuse_nonfinite(result.loss)
        found |= {f"{name}_{key}": value for key, value in result.published(name).items()}
    return found


def _on_text(
    stage: Stage,
    scorer: Scorer,
    trained: TrainConfig,
    tokenizer: Tokenizer,
    val: str,
    most: int,
    chats: bool,
    progress: Progress | None,
) -> dict[str, Any]:
    comm, length = stage.comm, scorer.model.config.seq_len
    held_out = on_root(comm, lambda: _held_out(val, trained))
    if held_out is not None:
        stage.notes.add(_of_training(val, held_out))
    wanted = DataRequest(val, existing=tokenizer, val_fraction=held_out or 0.0, splits=("val",))
    wanted = replace(wanted, chats=True, seq_len=length) if chats else wanted
    corpus = load_corpus(comm, wanted, stage.notes.add)
    validation = on_every_rank(comm, lambda: validation_on(corpus.held_out, length, most))
    held = validation.measure(scorer, progress)
    _refuse_nonfinite(held.loss)
    bits = on_root(comm, lambda: validation.bits_per_byte(held.loss, tokenizer))
    perplexity = held.perplexity if math.isfinite(held.perplexity) else None  # of a loss beyond 700
    found = {"val": val, "val_tokens": held.tokens, "val_loss": held.loss}
    return found | {"perplexity": perplexity, "bits_per_byte": bits}


def _held_out(val: str, t: TrainConfig) -> float | None:
    """Return the fraction of this text that training held out; None if the model is not known to know it."""
    path, trained_on = resolve_data(val), Path(t.data)
    with suppress(DistgptError, OSError):  # the text of training may be gone
        trained_on = resolve_data(t.data)
    if not trained_on.exists() or not trained_on.samefile(path):
        return None
    if is_shards(path):
        return None if read_manifest(path).of("val") else 0.0
    return t.val_fraction


def _of_training(val: str, held_out: float) -> str:
    if held_out:
        return f"the model was trained on {escape(val)}: only the {held_out:.2%} held out of it is scored"
    return f"the model was trained on {escape(val)}: this is its loss on what it has seen"


def _refuse_nonfinite(loss: float) -> None:
    """Raise a NonFiniteError; all ranks have the same loss."""
    if not math.isfinite(loss):
        raise shared(NonFiniteError("the model's scores are not finite: its weights are damaged or diverged"))


def page(found: dict[str, Any]) -> str:
    """For people, a line each."""
    lines = [f"weights        {found['weights']}", f"dtype          {found['dtype']}"]
    if "val_loss" in found:
        lines += [
            f"text           {found['val']}: {found['val_tokens']:,} tokens, {found['context']:,} at once",
            f"loss           {found['val_loss']:.4f} nats per token",
            f"perplexity     {_known(found['perplexity'], '.2f', 'beyond 1e304')}",
            f"bits per byte  {_known(found['bits_per_byte'], '.4f', 'unknown: the text has no bytes')}",
        ]
    for name in [key.removesuffix("_acc") for key in found if key.endswith("_acc")]:
        values = {key: found[f"{name}_{key}"] for key in SHOWN if f"{name}_{key}" in found}
        examples = found[f"{name}_examples"]
        words = [f"{key} {value:.2%} ± {_error(value, examples):.2%}" for key, value in values.items()]
        if f"{name}_perplexity" in found:
            words.append(f"perplexity {_known(found[f'{name}_perplexity'], '.2f', 'beyond 1e304')}")
        lines.append(f"{name:<14} {', '.join(words)} ({examples:,} questions)")
    return "\n".join(map(one_line, lines))


def _error(fraction: float, examples: int) -> float:
    """The standard error of a fraction."""
    return math.sqrt(fraction * (1 - fraction) / max(1, examples - 1))


def _known(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else f"{value:{form}}"
