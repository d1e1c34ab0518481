"""Text from a model, token by token: a cache of keys and values, and the choice of the next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from distgpt.comm.agree import shared
from distgpt.comm.api import Array, Comm
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DistgptError, NonFiniteError, UsageError
from distgpt.model.model import Model, miniature
from distgpt.model.passes import Pass

COLDEST = 1e-6  # temperatures below are greedy: scores divided by them overflow


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in play."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature}: it must be at least 0")
        if self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k}: it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p}: it must lie in (0, 1]")


class Decoder:
    """Scores of the next token of one growing sequence. Past the context length the window slides."""

    def __init__(self, model: Model) -> None:
        self.model = model
        c, k = model.config, model.kernels
        self._cache = k.zeros(c.n_layer, 2, 1, c.n_head, c.seq_len, c.head_size)
        self._one = Pass(model, 1, 1, training=False)
        self._window: Pass | None = None
        self._token, self._start = k.integers([0]), k.integers([0])
        self._scores = k.zeros(1, c.padded_vocab)
        self._next = k.record(lambda: self._run(self._one, self._token))
        self._seen: list[int] = []

    def feed(self, tokens: Sequence[int]) -> Array:
        """Append tokens; return the scores (V,) of the next one, on the host."""
        start = len(self._seen)
        self._seen.extend(tokens)
        limit = self.model.config.seq_len
        if len(self._seen) > limit:
            # Every position moves by one, so the whole cache is invalid.
            del self._seen[: len(self._seen) - limit]
            start, tokens = 0, self._seen
            self._window = self._window or Pass(self.model, 1, limit, training=False)
        k = self.model.kernels
        k.put(self._start, np.array([start]))
        if len(tokens) == 1:
            k.put(self._token, np.array(tokens))
            self._next()
        else:
            self._run(self._pass_for(len(tokens)), k.integers(tokens))
        return k.to_host(self._scores)[0, : self.model.config.vocab_size].copy()

    def _run(self, work: Pass, tokens: Array) -> None:
        hidden = work.hidden(tokens, self._cache, self._start)
        work.scores(self._scores, hidden[-1:])

    def _pass_for(self, count: int) -> Pass:
        if self._window is not None and self._window.seq_len == count:
            return self._window
        return Pass(self.model, 1, count, training=False)


def generate(
    model: Model, prompt: Sequence[int], count: int, sampling: Sampling, comm: Comm
) -> Iterator[int]:
    """Yield `count` new tokens. Scores are averaged over the ranks, and rank 0 chooses."""
    if not prompt:
        raise UsageError("the prompt is empty: give at least one token to start from")
    decoder, random = Decoder(model), np.random.default_rng(sampling.seed)
    new: Sequence[int] = prompt
    chosen = np.zeros(1, np.int64)
    for _ in range(count):
        logits = decoder.feed(new)
        comm.sum(logits)
        logits /= comm.size
        if not np.isfinite(logits).all():  # a sum over all ranks, so alike on all
            raise shared(
                NonFiniteError("the model's scores are not finite: its weights are damaged or diverged")
            )
        if comm.rank == 0:
            chosen[0] = choose(logits, sampling, random)
        comm.broadcast(chosen)
        new = [int(chosen[0])]
        yield new[0]


def rehearse(model: Model) -> None:
    """Compile, choose and record all that decoding needs, so that its time does not count.

    On a CPU a small model compiles the same loops; a GPU's kernels are compiled for the sizes of the model.
    """
    small = model if model.kernels.queued else miniature(model.config, model.kernels)
    decoder = Decoder(small)
    for tokens in ([0] * min(7, small.config.seq_len), [0], [0], [0]):
        decoder.feed(tokens)


def choose(logits: Array, sampling: Sampling, random: np.random.Generator) -> int:
    """Choose one token: the likeliest, or one drawn from what temperature, top_k and top_p leave."""
    if sampling.temperature < COLDEST:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scores = logits[order].astype(np.float64) / sampling.temperature
    p = np.exp(scores - scores[0])
    p /= p.sum()
    kept = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
    p = p[:kept] / p[:kept].sum()
    return int(order[random.choice(len(p), p=p)])


def opening(tokenizer: Tokenizer) -> list[int]:
    """A prompt for text from nothing: a full stop and a line break, a line break, or the first token.

    A line break alone comes second, since a model with rotary positions cannot count equal tokens, and may
    repeat the one it was given for ever.
    """
    for text in (".\n", "\n"):
        try:
            if tokens := tokenizer.encode(text).tolist():
                return list(tokens)
        except DistgptError:
            continue
    return [0]
