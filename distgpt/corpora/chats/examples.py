"""Chats to learn from on every rank: all examples, what of them is learned, and batches of them.

An example is learned whole: it lies in one row, beside others that it does not see. So rows may have room
left at their end, which is not learned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from distgpt.core.base.errors import DataError, Say, UsageError
from distgpt.core.base.formatting import count
from distgpt.core.comm.agree import on_root, shared
from distgpt.core.comm.api import Comm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.data.batches import ArrayTokens, Batches, Tokens, Window
from distgpt.core.data.loading import Corpus, DataRequest
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.ops.api import IGNORED, Array
from distgpt.corpora.chats.format import ChatFormat, Example
from distgpt.corpora.chats.rows import read_examples
from distgpt.corpora.packing import pack

SECONDS_BETWEEN_LINES = 10.0


class Examples(ArrayTokens):
    """The inputs of all examples, one after the other, and as many targets (int32), some IGNORED.

    Example i has those in [starts[i], starts[i + 1]).
    """

    def __init__(self, inputs: Array, targets: Array, starts: Array) -> None:
        super().__init__(inputs)
        self.targets, self.starts = targets, starts
        for part in (targets, starts):
            self.fingerprint = f"crc32:{crc32(part.data.cast('B'), int(self.fingerprint[6:], 16)):08x}"

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def learned(self) -> int:
        """Return how many targets are learned."""
        return int((self.targets != IGNORED).sum())


class ExampleBatches(Batches):
    """The global batches of a run whose rows are examples side by side."""

    def __init__(self, examples: Examples, seq_len: int, batch_size: int, seed: int) -> None:
        super().__init__(examples, seq_len, batch_size, seed, shift=False)
        self.examples = examples
        self.plan = pack(examples.starts[:-1], len(examples), seq_len, whole=True)
        self.windows_per_epoch = len(self.plan)
        until = np.cumsum(np.append(0, examples.targets != IGNORED))
        of_piece = until[self.plan.starts + self.plan.lengths] - until[self.plan.starts]
        self._learned = np.add.reduceat(of_piece, self.plan.ends[:-1])  # targets, by row

    def notes(self, steps: int) -> Iterator[str]:
        examples, rows = self.examples, self.windows_per_epoch
        full, learned = len(examples) / (rows * self.seq_len), examples.learned / len(examples)
        batch_size = len(self._numbers)
        yield (
            f"{count(examples.count, 'example')} of {len(examples):,} tokens, of which {learned:.0%} are"
            f" learned, in {count(rows, 'sequence')}, {full:.0%} full: {batch_size * steps / rows:.3g} epochs"
            f" are {count(steps, 'step')} of {count(batch_size, 'sequence')}"
        )

    def counted_fraction(self, step: int) -> float:
        rows = self._order(step, slice(None))[0]
        return float(self._learned[rows].sum()) / (len(rows) * self.seq_len)

    def fill(
        self, step: int, which: slice, x_out: Array, y_out: Array, positions_out: Array | None = None
    ) -> None:
        assert positions_out is not None
        x_out[:], y_out[:] = 0, IGNORED
        for row, x, y, positions in zip(
            self._order(step, which)[0], x_out, y_out, positions_out, strict=True
        ):
            at = 0
            for start, length in self.plan.row(int(row)):
                here, there = slice(at, at + length), slice(start, start + length)
                x[here], y[here] = self.examples.read(start, start + length), self.examples.targets[there]
                positions[here] = np.arange(length)
                at += length
            positions[at:] = np.arange(len(positions) - at)


@dataclass(frozen=True, slots=True)
class ChatCorpus(Corpus):
    """Chats, of which the answers are learned, and scored where they are held out."""

    is_text = False  # answers end with tokens that are no text

    def batches(self, comm: Comm, run: RunConfig) -> Batches:
        t = run.train
        return ExampleBatches(_examples(self.train), run.model.seq_len, t.batch_size, t.seed)

    def held_out_windows(self, seq_len: int, most: int) -> list[Window]:
        """Return the examples, the first of them with `most` tokens to learn (0: all)."""
        examples, found, answers = _examples(self.held_out), list[Window](), 0
        for start, stop in pairwise(examples.starts.tolist()):
            targets = examples.targets[start:stop]
            ids = np.append(examples.read(start, stop), targets[-1:].clip(0).astype(np.uint32))
            found.append(Window(ids, learned := targets != IGNORED))
            answers += int(learned.sum())
            if 0 < most <= answers:
                break
        return found


def _examples(tokens: Tokens) -> Examples:
    assert isinstance(tokens, Examples)
    return tokens


class _Chats:
    """The kind of text of --chats."""

    def refuse_missing(self, request: DataRequest) -> None:
        """Refuse nothing: what is wrong with chats is found where they are read."""

    def load(self, comm: Comm, request: DataRequest, say: Say) -> Corpus:
        tokenizer, path = request.existing, Path(request.data)
        if tokenizer is None:
            raise shared(DataError("chats are read by the tokenizer of the weights, and these have none"))
        found = load_examples(comm, path, tokenizer, request.seq_len, request.val_fraction, say)
        return ChatCorpus(tokenizer, found["train"], found.get("val"))


CHATS = _Chats()


def load_examples(
    comm: Comm, path: Path, tokenizer: Tokenizer, seq_len: int, val_fraction: float, say: Say
) -> dict[str, Examples]:
    """Return the examples for training and, with `val_fraction`, some for validation. Collective.

    Rank 0 reads them. Those for validation come from all over the file.
    """
    of_root: list[Examples] = []

    def read() -> list[list[Any]]:
        found = _fitting(path, ChatFormat(tokenizer), seq_len, say)
        held_out = np.diff(np.floor(np.arange(len(found) + 1) * val_fraction)) > 0
        if val_fraction and not held_out.any():
            raise DataError(
                f"{path}: --val-fraction {val_fraction} of {count(len(found), 'example')} is none"
            )
        parts = (~held_out, held_out) if val_fraction else (~held_out,)
        of_root.extend(_together([found[i] for i in np.flatnonzero(part)]) for part in parts)
        return [[part.read(0, 0).dtype.name, len(part), part.count] for part in of_root]

    splits = {}
    for split, (dtype, length, number) in zip(("train", "val"), on_root(comm, read), strict=False):
        arrays = np.empty(length, dtype), np.empty(length, np.int32), np.empty(number + 1, np.int64)
        if of_root:
            own = of_root.pop(0)
            arrays = own.read(0, length), own.targets, own.starts
        for array in arrays:
            comm.broadcast(array)
        splits[split] = Examples(*arrays)
    return splits


def _fitting(path: Path, chat: ChatFormat, seq_len: int, say: Say) -> list[Example]:
    """Read the examples. One that is too long loses its end, and is left out where no answer is left."""
    found, cut, lost, last = [], 0, 0, time.monotonic()
    for example in read_examples(path, chat):
        ids, learned = (part[: seq_len + 1] for part in example)
        cut += len(ids) < len(example.ids)
        if learned[1:].any():
            found.append(Example(ids, learned))
        else:
            lost += 1
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            say(f"{count(len(found), 'example')} read")
    limit = f"{seq_len + 1} tokens (--seq-len)"
    if not found:
        raise DataError(f"{path}: no example has an answer within its first {limit}")
    if cut or lost:
        without = f", and {lost:,} without an answer before that are left out" if lost else ""
        say(f"{cut:,} of {count(len(found) + lost, 'example')} are cut after {limit}{without}")
    return found


def _together(examples: list[Example]) -> Examples:
    inputs = np.concatenate([ids[:-1] for ids, _ in examples])
    targets = [np.where(learned[1:], ids[1:].astype(np.int32), IGNORED) for ids, learned in examples]
    lengths = [len(ids) - 1 for ids, _ in examples]
    return Examples(
        inputs, np.concatenate(targets).astype(np.int32), np.cumsum([0, *lengths], dtype=np.int64)
    )


def check(t: TrainConfig, ranks: int, on_gpu: bool) -> None:
    """Refuse chats for a new model."""
    if not t.init:
        raise UsageError("chats are for a model that has learned to read: distgpt tune --weights")
