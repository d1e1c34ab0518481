"""Evaluation of a trained model: loss on text, benchmarks, the report, and a trace of one forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distgpt.core.base.errors import DataError, DistgptError, NonFiniteError, escape, one_line
from distgpt.core.comm.agree import collective_error, on_every_rank, on_root
from distgpt.core.config import TrainConfig
from distgpt.core.cpu.stages import Stage, report_compiling
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import Array
from distgpt.core.saved.modelfile import open_model
from distgpt.core.train.assessment import Progress, Scorer, Validation
from distgpt.corpora.mixture import paths_of
from distgpt.corpora.shards import is_shards, read_manifest
from distgpt.inference.evaluation.benchmark import KEYS, OTHER_KEYS, SHOWN, load_benchmark


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
    core: Path | None = None,
) -> dict[str, Any]:
    """Measure the model in a file; return metrics by name, the same on any number of ranks. Collective.

    `val` is anything that --data accepts, or the validation split of shards; `val_tokens` limits it (0: all).
    With `chats`, only answers count. If the model was trained on `val`, only the held-out part is scored.
    `core` is a directory with the tasks of the CORE score.
    """
    comm = stage.comm
    report_compiling(comm, progress.noted if progress else None)
    model, description, _, chosen = open_model(stage, weights, dtype, context, matmul, part=adapter)
    tokenizer = description.tokenizer
    if tokenizer is None:
        raise collective_error(DataError(f"{weights} has no tokenizer to read text with"))
    if progress is not None and comm.rank == 0:
        stage.notes.report_to(progress.noted)
    scorer = Scorer(model, comm)
    found: dict[str, Any] = {"weights": str(weights), "dtype": chosen, "context": model.config.seq_len}
    if val is not None:
        found |= _on_text(stage, scorer, description.run.train, tokenizer, val, val_tokens, chats, progress)
    for name, path in (benchmarks or {}).items():
        benchmark = load_benchmark(comm, name, path, tokenizer, model.config.seq_len)
        result = benchmark.measure(scorer, progress)
        _refuse_nonfinite(result["loss"])
        keys = (*KEYS, *filter(None, [OTHER_KEYS.get(name)]))
        found |= {f"{name}_{key}": result[key] for key in keys}
    if core is not None:
        from distgpt.inference.evaluation.core_score import Core

        result = Core(comm, core, tokenizer, model.config.seq_len).measure(scorer, progress)
        _refuse_nonfinite(result.pop("loss"))
        found |= result
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
        what = f"scoring only the held-out {held_out:.2%}" if held_out else "the loss is on training data"
        stage.notes.add(f"the model was trained on {escape(val)}: {what}")
    wanted = DataRequest(val, existing=tokenizer, val_fraction=held_out or 0.0, splits=("val",))
    wanted = replace(wanted, kind="chats", seq_len=length) if chats else wanted
    corpus = load_corpus(comm, wanted, stage.notes.add)
    validation = on_every_rank(
        comm, lambda: Validation(corpus.held_out_windows(length, most), corpus.is_text)
    )
    loss = validation.measure(scorer, progress)
    _refuse_nonfinite(loss)
    bits = on_root(comm, lambda: validation.bits_per_byte(loss, tokenizer))
    perplexity = math.exp(loss) if loss < 700 else None  # exp overflows for larger losses
    result = {"val": val, "val_tokens": validation.count, "val_loss": loss}
    return result | {"perplexity": perplexity, "bits_per_byte": bits}


def _held_out(val: str, t: TrainConfig) -> float | None:
    """Return the fraction of this text that training held out, or None if training used another text."""
    path, trained_on = resolve_data(val), [Path(t.data)]
    with suppress(DistgptError, OSError):  # The training text may have been deleted.
        trained_on = [*paths_of(t.data)]
    if not any(each.exists() and each.samefile(path) for each in trained_on):
        return None
    if is_shards(path):
        return None if read_manifest(path).of("val") else 0.0
    return t.val_fraction


def _refuse_nonfinite(loss: float) -> None:
    """Raise a NonFiniteError on all ranks, which have the same loss."""
    if not math.isfinite(loss):
        raise collective_error(
            NonFiniteError("the model's logits are not finite; its weights are corrupt or diverged")
        )


def page(found: dict[str, Any]) -> str:
    """Format the metrics as lines of text."""
    lines = [f"weights        {found['weights']}", f"dtype          {found['dtype']}"]
    if "val_loss" in found:
        lines += [
            f"text           {found['val']}: {found['val_tokens']:,} tokens, {found['context']:,} at a time",
            f"loss           {found['val_loss']:.4f} nats per token",
            f"perplexity     {_known(found['perplexity'], '.2f', 'beyond 1e304')}",
            f"bits per byte  {_known(found['bits_per_byte'], '.4f', 'unknown: the text has no bytes')}",
        ]
    for name in [key.removesuffix("_acc") for key in found if key.endswith("_acc")]:
        values = {key: found[f"{name}_{key}"] for key in SHOWN if f"{name}_{key}" in found}
        examples = found[f"{name}_examples"]
        errors = {key: math.sqrt(x * (1 - x) / max(1, examples - 1)) for key, x in values.items()}
        words = [f"{key} {value:.2%} ± {errors[key]:.2%}" for key, value in values.items()]
        if f"{name}_perplexity" in found:
            words.append(f"perplexity {_known(found[f'{name}_perplexity'], '.2f', 'beyond 1e304')}")
        lines.append(f"{name:<14} {', '.join(words)} ({examples:,} questions)")
    if "core" in found:
        lines.append(f"{'CORE':<14} {found['core']:.4f}, the mean of {len(found['core_tasks'])} tasks")
        lines += [f"  {label:<40} {accuracy:.2%}" for label, accuracy in found["core_tasks"].items()]
    return "\n".join(map(one_line, lines))


def _known(value: float | None, form: str, unknown: str) -> str:
    return unknown if value is None else f"{value:{form}}"


# Activations of every layer


@dataclass(frozen=True, slots=True)
class Trace:
    """Hidden states and attention weights of one forward pass over tokens (…, T), as arrays on the host.

    `hidden[i]` (…, T, C) is the input of layer i; the last one is the input of the output layer.
    `attention[i]` (…, H, T, T) has the weights of each position over all positions; rows sum to 1.
    `logits` (…, T, V) are the next-token logits.
    """

    hidden: tuple[NDArray[Any], ...]
    attention: tuple[NDArray[Any], ...]
    logits: NDArray[Any]

    def of_one(self) -> Trace:
        """Return the trace of the first sequence, without the batch axis."""
        hidden, attention = (tuple(x[0] for x in parts) for parts in (self.hidden, self.attention))
        return Trace(hidden, attention, self.logits[0])

    def __repr__(self) -> str:
        layers = len(self.attention)
        return (
            f"<Trace of {layers} layers: hidden {self.hidden[0].shape}, attention {self.attention[0].shape}>"
        )


def trace(model: Model, tokens: Array, n_seq: int, seq_len: int) -> Trace:
    """Run the model over tokens (n_seq · seq_len,) and keep every layer's activations."""
    config, k = model.config, model.kernels
    work = Pass(model, n_seq, seq_len, training=True, recompute="none")
    last = work.forward(tokens)
    scores = k.zeros(n_seq * seq_len, config.padded_vocab)
    work.logits(scores, last)

    def host(array: Array, *inner: int) -> NDArray[Any]:
        return np.array(k.to_host(array)).reshape(n_seq, seq_len, *inner)

    read = [layer.all.s1 for layer in work.layers]
    return Trace(
        tuple(host(x, config.n_embd) for x in (*read, last)),
        tuple(
            _attention(host(layer.all.qkv, -1, config.head_size), config.n_head, block.window)
            for layer, block in zip(work.layers, model.blocks, strict=True)
        ),
        host(scores, config.padded_vocab)[..., : config.vocab_size],
    )


def _attention(qkv: NDArray[Any], n_head: int, window: int) -> NDArray[Any]:
    """Return softmax(q kᵀ / √head, causal) (B, H, T, T) of qkv (B, T, H + 2K, head), already rotated."""
    wide = np.moveaxis(qkv.astype(np.promote_types(qkv.dtype, np.float32)), 1, 2)
    q, k, _ = np.split(wide, [n_head, (n_head + wide.shape[1]) // 2], axis=1)
    k = np.repeat(k, n_head // k.shape[1], axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=wide.dtype)
    seen = np.tri(scores.shape[-1], dtype=bool)
    scores[..., ~(np.triu(seen, 1 - window) if window else seen)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    weights: NDArray[Any] = p / p.sum(-1, keepdims=True)
    return weights
