"""How good a model in a file is: its loss over a text or shards, and its answers in HellaSwag."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.data.batches import Tokens
from distgpt.data.loading import Wanted, load_corpus
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, UsageError
from distgpt.evaluation.hellaswag import load_hellaswag
from distgpt.evaluation.scoring import Scorer
from distgpt.evaluation.validation import Validation
from distgpt.machine.stages import Stage
from distgpt.saved.modelfile import load_model


@dataclass(frozen=True, slots=True)
class Question:
    """What to measure, and on which model."""

    weights: Path
    val: str | None  # a folder of shards, of which the validation part is read, or a text
    hellaswag: Path | None
    most_tokens: int  # of val; 0: all
    dtype: str
    context: int | None

    def __post_init__(self) -> None:
        if self.val is None and self.hellaswag is None:
            raise UsageError("nothing to evaluate: give --val, --hellaswag or both")


def evaluate(question: Question, stage: Stage) -> dict[str, Any]:
    """The numbers by name, the same on any number of ranks. Collective."""
    comm = stage.comm
    model, description = load_model(question.weights, stage.kernels(question.dtype), comm, question.context)
    tokenizer = description.tokenizer
    if tokenizer is None:
        raise shared(DataError(f"{question.weights} has no tokenizer, so no text can be put to it"))
    scorer, found = Scorer(model, comm), {"weights": str(question.weights), "context": model.config.seq_len}
    if question.val is not None:
        held_out = _held_out(comm, question.val, tokenizer)
        validation = Validation(held_out, model.config.seq_len, question.most_tokens)
        held = validation.measure(scorer)
        length = on_root(comm, lambda: validation.bytes_predicted(tokenizer))
        bits = held.loss / math.log(2) * held.tokens / length if length else math.nan
        found |= {"val": question.val, "val_tokens": held.tokens, "val_loss": held.loss}
        found |= {"perplexity": held.perplexity, "bits_per_byte": bits}
    if question.hellaswag is not None:
        examples = load_hellaswag(comm, question.hellaswag, tokenizer, model.config.seq_len)
        accuracy = examples.measure(scorer)
        found |= {"hellaswag": accuracy.per_token, "hellaswag_unnormalised": accuracy.plain}
        found |= {"hellaswag_examples": accuracy.examples}
    return found


def _held_out(comm: Comm, data: str, tokenizer: Tokenizer) -> Tokens:
    corpus = load_corpus(comm, Wanted(data, existing=tokenizer, splits=("val",)))
    return corpus.splits["train" if corpus.is_text else "val"]


def page(found: dict[str, Any]) -> str:
    """For people, a line each."""
    lines = [f"weights        {found['weights']}"]
    if "val_loss" in found:
        lines += [
            f"text           {found['val']}: {found['val_tokens']:,} tokens, {found['context']:,} at once",
            f"loss           {found['val_loss']:.4f} nats a token",
            f"perplexity     {found['perplexity']:.2f}",
            f"bits per byte  {found['bits_per_byte']:.4f}",
        ]
    if "hellaswag" in found:
        lines += [
            f"HellaSwag      {found['hellaswag']:.2%} of {found['hellaswag_examples']:,} right, "
            f"by loss per token ({found['hellaswag_unnormalised']:.2%} by summed loss; chance is 25 %)"
        ]
    return "\n".join(lines)


def tell(found: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(found) if as_json else page(found))
