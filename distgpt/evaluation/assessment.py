"""The quality of a model, in training and afterwards: its loss on held-out text, and HellaSwag.

HellaSwag asks which of four endings of a text the model finds likeliest, per token. Its file has a JSON
object on each line: "ctx", the beginning; "endings", its continuations; "label", the number of the right one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distgpt.checked import parse_json
from distgpt.comm.agree import on_every_rank, on_root, shared
from distgpt.comm.api import Comm
from distgpt.config import TrainConfig
from distgpt.data.batches import Tokens
from distgpt.data.loading import DataRequest, load_corpus, read_text, resolve_data
from distgpt.data.shards import is_shards, read_manifest
from distgpt.data.tokenizers.naming import Ids, Tokenizer
from distgpt.data.tokenizers.plain import BytesDecoder
from distgpt.errors import DataError, DistgptError, NonFiniteError, escape, one_line
from distgpt.evaluation.scoring import Scorer, Span
from distgpt.interrupts import PendingSignals
from distgpt.kernels.api import Array
from distgpt.model.model import Model
from distgpt.saved.modelfile import dtype_of, load_model
from distgpt.stages import Stage

ENDINGS = 4  # of an example of HellaSwag
LABELS = tuple(map(str, range(ENDINGS)))  # also written as texts


class Progress(Protocol):
    """Shows how far a measurement has come. Called on rank 0 alone."""

    def noted(self, text: str) -> None: ...
    def began(self, total: int, done: int) -> None: ...
    def advanced(self, done: int, tokens: int) -> None: ...
    def close(self) -> None: ...


def sums_with_progress(scorer: Scorer, spans: list[Span], progress: Progress | None) -> Array:
    """Return the summed loss of each span, and show how far that has come. Collective."""
    if progress is None or scorer.comm.rank:
        return scorer.sums(spans)
    progress.began(len(spans), 0)
    try:
        return scorer.sums(spans, progress.advanced)
    finally:
        progress.close()


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
        total = float(sums_with_progress(scorer, self.spans, progress).sum())
        return HeldOutLoss(total / self.count, self.count)

    def bits_per_byte(self, loss: float, tokenizer: Tokenizer) -> float | None:
        """Return a loss in a unit that other tokenizers share; None where the text has no bytes."""
        if self._bytes is None:
            self._bytes = self._bytes_predicted(tokenizer)
        return loss / math.log(2) * self.count / self._bytes if self._bytes else None

    def _bytes_predicted(self, tokenizer: Tokenizer) -> int:
        """Return the length of the predicted text in UTF-8, without separators between documents."""
        ids = np.concatenate([self.spans[0].ids[:1], *(span.ids[1:] for span in self.spans)])
        if isinstance(tokenizer, BytesDecoder):  # whose ids may hold parts of characters
            predicted = ids[1:]
            return sum(len(tokenizer.pieces[i]) for i in predicted[predicted != tokenizer.separator].tolist())
        first, all_of_it = (
            len(tokenizer.decode(some[some != tokenizer.separator]).encode()) for some in (ids[:1], ids)
        )
        return all_of_it - first


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Fractions of right answers by loss per token, and by summed loss, which favours short endings."""

    per_token: float
    plain: float
    examples: int
    mean_loss: float  # of all tokens of all endings


class HellaSwag:
    """The examples as tokens; `spans` holds four for each."""

    def __init__(self, spans: list[Span], labels: list[int]) -> None:
        self.spans, self.labels = spans, np.array(labels)

    def measure(self, scorer: Scorer, progress: Progress | None = None) -> Accuracy:
        """Return the accuracy. Collective."""
        sums = sums_with_progress(scorer, self.spans, progress).reshape(-1, ENDINGS)
        counts = np.array([span.count for span in self.spans]).reshape(-1, ENDINGS)
        right = [(scores.argmin(1) == self.labels).mean() for scores in (sums / counts, sums)]
        mean_loss = float(sums.sum() / counts.sum())
        return Accuracy(float(right[0]), float(right[1]), len(self.labels), mean_loss)


def load_hellaswag(comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int) -> HellaSwag:
    """Rank 0 reads the file, and every rank parses its text alike. Collective."""
    text = on_root(comm, lambda: read_text(path))
    try:
        return parse_hellaswag(text, path, tokenizer, seq_len)
    except DataError as error:
        raise shared(error) from None


def parse_hellaswag(text: str, path: Path, tokenizer: Tokenizer, seq_len: int) -> HellaSwag:
    """Parse the text of a file. A context that is too long for an ending loses its beginning."""
    spans: list[Span] = []
    labels: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        context, endings, label = _example(line, f"{path}, line {number}")
        try:
            begun = tokenizer.encode(context)
            spans += (_span(begun, tokenizer.encode(" " + ending), seq_len) for ending in endings)
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from None
        labels.append(label)
    if not labels:
        raise DataError(f"{path} holds no examples")
    return HellaSwag(spans, labels)


def _span(begun: Ids, ending: Ids, seq_len: int) -> Span:
    if not len(begun) or not len(ending):
        raise DataError("a context or an ending gives no tokens")
    ending = ending[:seq_len]
    begun = begun[max(0, len(begun) + len(ending) - seq_len - 1) :]
    return Span(np.concatenate([begun, ending]), len(begun))


def _example(line: str, where: str) -> tuple[str, list[str], int]:
    try:
        found = parse_json(line)
        context, endings, label = found["ctx"], found["endings"], found["label"]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{where}: no JSON object with ctx, endings and label") from None
    texts = [context, *endings] if isinstance(endings, list) else []
    if len(texts) != ENDINGS + 1 or not all(isinstance(text, str) and text for text in texts):
        raise DataError(f"{where}: ctx and its {ENDINGS} endings must be texts, none of them empty")
    if str(label) not in LABELS or isinstance(label, bool):
        raise DataError(f"{where}: label is {label!r:.40}, there are {ENDINGS} endings")
    return context, endings, int(label)


class Assessment:
    """Validation, HellaSwag or both; false without either."""

    def __init__(
        self,
        model: Model,
        comm: Comm,
        validation: Validation | None,
        hellaswag: HellaSwag | None,
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
            accuracy = self.hellaswag.measure(self.scorer)
            found |= {"hellaswag": accuracy.per_token, "hellaswag_examples": accuracy.examples}
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
    hellaswag: Path | None = None,
    val_tokens: int = 0,
    dtype: str = "auto",
    matmul: str = "auto",
    context: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the model in a file: the results by name, the same on any number of ranks. Collective.

    `val` is what --data can be, of shards the part for validation: its first `val_tokens`, or all if 0. Of
    the text that the model was trained on, only the part that was held out is read.
    """
    comm = stage.comm
    chosen = dtype_of(weights, dtype, comm, stage.device is not None)
    model, description = load_model(weights, stage.kernels(chosen, matmul), comm, context)
    tokenizer = description.tokenizer
    if tokenizer is None:
        raise shared(DataError(f"{weights} has no tokenizer, so it cannot read text"))
    if progress is not None and comm.rank == 0:
        stage.notes.report_to(progress.noted)
    scorer = Scorer(model, comm)
    found: dict[str, Any] = {"weights": str(weights), "dtype": chosen, "context": model.config.seq_len}
    if val is not None:
        held_out = on_root(comm, lambda: _held_out(val, description.run.train))
        if held_out is not None:
            stage.notes.add(_of_training(val, held_out))
        wanted = DataRequest(val, existing=tokenizer, val_fraction=held_out or 0.0, splits=("val",))
        corpus = load_corpus(comm, wanted, stage.notes.add)
        length = model.config.seq_len
        validation = on_every_rank(comm, lambda: Validation(corpus.held_out, length, val_tokens))
        held = validation.measure(scorer, progress)
        _refuse_nonfinite(held.loss)
        bits = on_root(comm, lambda: validation.bits_per_byte(held.loss, tokenizer))
        perplexity = held.perplexity if math.isfinite(held.perplexity) else None  # of a loss beyond 700
        found |= {"val": val, "val_tokens": held.tokens, "val_loss": held.loss}
        found |= {"perplexity": perplexity, "bits_per_byte": bits}
    if hellaswag is not None:
        examples = load_hellaswag(comm, hellaswag, tokenizer, model.config.seq_len)
        accuracy = examples.measure(scorer, progress)
        _refuse_nonfinite(accuracy.mean_loss)
        found |= {"hellaswag": accuracy.per_token, "hellaswag_unnormalised": accuracy.plain}
        found |= {"hellaswag_examples": accuracy.examples}
    return found


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
    if "hellaswag" in found:
        lines += [
            f"HellaSwag      {found['hellaswag']:.2%} of {found['hellaswag_examples']:,} right, "
            f"by loss per token ({found['hellaswag_unnormalised']:.2%} by summed loss; chance is 25 %)"
        ]
    return "\n".join(map(one_line, lines))


def _known(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else f"{value:{form}}"
