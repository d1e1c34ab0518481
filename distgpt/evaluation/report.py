"""How good the model in a file is: its loss over a text or shards, and its accuracy in HellaSwag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from distgpt.comm.agree import on_root, shared
from distgpt.comm.api import Comm
from distgpt.data.batches import Tokens
from distgpt.data.loading import DataRequest, load_corpus
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError
from distgpt.evaluation.assessment import Validation
from distgpt.evaluation.hellaswag import load_hellaswag
from distgpt.evaluation.scoring import Scorer
from distgpt.machine.stages import Stage
from distgpt.saved.modelfile import load_model


def evaluate(
    stage: Stage,
    weights: Path,
    val: str | None = None,
    hellaswag: Path | None = None,
    val_tokens: int = 0,
    dtype: str = "float32",
    context: int | None = None,
) -> dict[str, Any]:
    """Return the measures by name, the same on any number of ranks. Collective.

    `val` is a text, or a folder of shards whose validation part is read: its first `val_tokens`, or all if 0.
    """
    comm = stage.comm
    model, description = load_model(weights, stage.kernels(dtype), comm, context)
    tokenizer = description.tokenizer
    if tokenizer is None:
        raise shared(DataError(f"{weights} has no tokenizer, so it cannot read text"))
    scorer, found = Scorer(model, comm), {"weights": str(weights), "context": model.config.seq_len}
    if val is not None:
        validation = Validation(_held_out(comm, val, tokenizer), model.config.seq_len, val_tokens)
        held = validation.measure(scorer)
        length = on_root(comm, lambda: validation.bytes_predicted(tokenizer))
        bits = held.loss / math.log(2) * held.tokens / length if length else math.nan
        found |= {"val": val, "val_tokens": held.tokens, "val_loss": held.loss}
        found |= {"perplexity": held.perplexity, "bits_per_byte": bits}
    if hellaswag is not None:
        examples = load_hellaswag(comm, hellaswag, tokenizer, model.config.seq_len)
        accuracy = examples.measure(scorer)
        found |= {"hellaswag": accuracy.per_token, "hellaswag_unnormalised": accuracy.plain}
        found |= {"hellaswag_examples": accuracy.examples}
    return found


def _held_out(comm: Comm, data: str, tokenizer: Tokenizer) -> Tokens:
    corpus = load_corpus(comm, DataRequest(data, existing=tokenizer, splits=("val",)))
    return corpus.splits["train" if corpus.is_text else "val"]


def page(found: dict[str, Any]) -> str:
    """For people, a line each."""
    lines = [f"weights        {found['weights']}"]
    if "val_loss" in found:
        lines += [
            f"text           {found['val']}: {found['val_tokens']:,} tokens, {found['context']:,} at once",
            f"loss           {found['val_loss']:.4f} nats per token",
            f"perplexity     {found['perplexity']:.2f}",
            f"bits per byte  {found['bits_per_byte']:.4f}",
        ]
    if "hellaswag" in found:
        lines += [
            f"HellaSwag      {found['hellaswag']:.2%} of {found['hellaswag_examples']:,} right, "
            f"by loss per token ({found['hellaswag_unnormalised']:.2%} by summed loss; chance is 25 %)"
        ]
    return "\n".join(lines)
