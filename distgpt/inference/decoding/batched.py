"""Slots on GPUs, with one cache and one recorded pass for all sequences that decode a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from distgpt.core.generate.plain_slots import PLAIN
from distgpt.core.generate.request import Likelihood, Sampling
from distgpt.core.generate.sampling import candidates, choose, drawn_at
from distgpt.core.generate.slots import (
    Choice,
    Feed,
    Rows,
    SlotKind,
    Slots,
    TokensInSlots,
    check_drop,
    check_feeds,
)
from distgpt.core.model.model import Model
from distgpt.core.model.passes import Pass, cache_shape
from distgpt.core.ops.api import Array, Work

MOST = 64  # maximum number of top tokens to find


Draw = tuple[float, float]  # temperature, and a number in [0, 1), to sample from all tokens


class SampledToken(NamedTuple):
    """A sampled token, with the terms of its probability."""

    token: int
    logit: float
    total: float  # Σ exp((logit - highest) / temperature) over all tokens


class TopKLogits(NamedTuple):
    """A `LogitsElsewhere` with the top tokens in descending order, ties by token, and probability terms."""

    tokens: Array  # (k,)
    logits: Array  # (k,)
    log_sum: float  # log Σ exp(logits) over all tokens; NaN if any logit is not finite
    drawn: SampledToken | None = None  # if the choice needs it
    whole: Callable[[], Array] | None = None  # copies all logits (V,), valid until the next `feed`

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.log_sum)

    def choose(self, sampling: Sampling, uniform: float) -> int:
        """Choose as from all logits, except for rounding if the device sampled or summed.

        Fetches all logits if the top tokens do not cover top-p or min-p.
        """
        if draw_for(sampling, uniform) is None:
            return int(self.tokens[choose(self.logits, sampling, uniform)])
        assert self.drawn is not None, "slots must draw if the choice requires it"
        if _is_plain(sampling):
            return self.drawn.token
        if self.whole is not None and not self._reaches(sampling, self.drawn.total):
            return choose(self.whole(), sampling, uniform)
        by_token = np.argsort(self.tokens)  # sort as in all logits, so that sums have the same order
        kept, p = candidates(self.logits[by_token], sampling, self.drawn.total)
        index = drawn_at(uniform, p)
        return int(self.tokens[by_token[index if kept is None else kept[index]]])

    def _reaches(self, sampling: Sampling, total: float) -> bool:
        """Return whether the top tokens include every token that top-p and min-p keep."""
        highest, lowest = self.logits[0], self.logits[-1]
        if sampling.min_p > 0 and lowest < highest + sampling.temperature * math.log(sampling.min_p):
            return True
        p = np.exp((self.logits - highest) / sampling.temperature)
        return sampling.top_p < 1 and bool(p.sum(dtype=np.float64) >= sampling.top_p * total)

    def likelihood(self, token: int, alternatives: int) -> Likelihood:
        pairs = zip(self.tokens[:alternatives], self.logits[:alternatives], strict=True)
        topk_logits = [(int(i), float(x) - self.log_sum) for i, x in pairs]
        return Likelihood(self._logit_of(token) - self.log_sum, topk_logits)

    def _logit_of(self, token: int) -> float:
        if self.drawn is not None and self.drawn.token == token:
            return self.drawn.logit
        (result,) = np.nonzero(self.tokens == token)
        if len(result) or self.whole is None:
            return float(self.logits[result[0]])
        return float(self.whole()[token])  # chosen from all logits


def enough(choice: Choice | None) -> int:
    """Return how many top tokens a choice needs, apart from `draw_for`.

    0: all logits, because a penalty may lower any logit.
    """
    if choice is None or choice.sampling.repetition_penalty != 1:
        return 0
    sampling = choice.sampling
    some = 1
    if not (sampling.is_greedy or _is_plain(sampling)):
        some = sampling.top_k or MOST  # usually enough for top-p and min-p
    most = max(some, choice.alternatives)
    return most if most <= MOST else 0


def draw_for(sampling: Sampling, uniform: float) -> Draw | None:
    """Return the parameters for sampling on the device, or None if the top tokens are enough."""
    return None if sampling.is_greedy or sampling.top_k else (sampling.temperature, uniform)


def _is_plain(sampling: Sampling) -> bool:
    """Return whether the choice is plain sampling from all tokens."""
    return not sampling.top_k and sampling.top_p == 1 and sampling.min_p == 0


FEW = 4  # largest number of rows that a GPU's linear layers take without a plan
ALIKE = 64  # prompts are padded to multiples of this, so that few lengths need plans
CHUNK = 2048  # tokens of prompts at a time; fewer would not fill a GPU
CHOICES = (1, 8, 64)  # numbers of top tokens to find; few values, so that few graphs are recorded


class _Token(NamedTuple):
    """A token to decode, and the data that its choice needs."""

    feed: Feed
    topk_logits: int  # number of top tokens; 0: all logits
    draw: Draw | None  # if the choice may need any token


def _token(feed: Feed) -> _Token:
    count, choice = enough(feed.choice), feed.choice
    draw = draw_for(choice.sampling, choice.uniform) if count and choice else None
    return _Token(feed, count, draw)


class BatchedSlots:
    """`count` sequences. One pass decodes a token of each; its launches do not depend on their number.

    Passes have 1, 2, 4, … rows, up to `count`; padding rows have no slot. Prompts and drafts run one at a
    time. Rounding depends on the number of rows, so on the other sequences.
    """

    is_exact, chunk = False, CHUNK

    def __init__(self, model: Model, count: int) -> None:
        self.model, self.count, self.length = model, count, model.config.seq_len
        self.can_drop = not model.config.has_position_vectors
        k, padded = model.kernels, model.config.padded_vocab
        self.cache = k.zeros(*cache_shape(model.config, count))
        # Recorded passes keep their memory. Prompts need separate memory, which is replaced for a longer
        # prompt.
        self._decoding = Pass(model, count, 1, training=False, workers=1)
        self._decoded = k.zeros(count, padded)
        self._batches: dict[int, _Batch] = {}
        self._longest = Pass(model, 1, min(ALIKE, self.length), training=False, workers=1)
        self._logits = k.zeros(1, padded)
        self._start, self._slot, self._before = k.integers([0]), k.integers([0]), k.integers([0])
        self._tokens = TokensInSlots(count, self.length)

    def feed(self, work: Sequence[Feed]) -> Rows:
        """Compute logits (see `Slots`). Feeds whose choice needs only a few get a `TopKLogits`."""
        check_feeds(self, work)
        tokens = [_token(each) for each in work if _decodes(each)]
        decoding = sorted(tokens, key=lambda each: each.topk_logits > 0)  # all logits first
        others = [each for each in work if not _decodes(each)]
        batch = self._decode(decoding) if decoding else None
        rows = self._prefill(others)
        chosen = self._chosen(decoding, batch) if batch else []
        of_slot = dict(zip([each.feed.slot for each in decoding], chosen, strict=True))
        k, vocab, end = self.model.kernels, self.model.config.vocab_size, 0
        prompts = np.asarray(k.to_host(self._logits[:rows]))[:, :vocab] if rows else None
        result: list[Any] = []  # elements: Array | TopKLogits
        for each in work:
            if each.slot in of_slot:
                result.append(of_slot[each.slot])
            elif prompts is not None:
                result.extend(prompts[end : end + each.wanted])
                end += each.wanted
        if any(isinstance(row, TopKLogits) for row in result):
            return result
        return np.stack(result) if result else np.zeros((0, vocab), np.float32)

    def copy(self, source: int, target: int, length: int) -> None:
        self._tokens.copy(source, target, length)
        self.model.kernels.move_cached(self.cache, target, source, 0, length, None)

    def drop(self, slot: int, count: int, kept: int) -> None:
        check_drop(self, slot, count, kept)
        self._tokens.drop(slot, count, kept)
        self.model.kernels.move_cached(self.cache, slot, slot, count, kept, self.model.positions.angles)

    # -- decoding

    def _decode(self, some: Sequence[_Token]) -> _Batch:
        """Compute the logits of all tokens, and find the top tokens if a choice needs only these."""
        rows = min(1 << (len(some) - 1).bit_length(), self.count)
        if rows not in self._batches:
            work = self._decoding.reshaped(rows, 1)
            self._batches[rows] = _Batch(self.model, work, self.cache, self._decoded[:rows])
        batch = self._batches[rows]
        inputs = np.zeros((4, rows), np.int32)
        inputs[2] = -1  # padding rows have no slot
        before = self._tokens.before
        columns = [(feed.tokens[0], feed.start, feed.slot, before(feed)) for feed, _, _ in some]
        inputs[:, : len(some)] = np.transpose(columns)
        self.model.kernels.put(batch.inputs, inputs)
        batch.run()
        if most := max(each.topk_logits for each in some):
            batch.choose(next(count for count in CHOICES if count >= most))
        if any(each.draw for each in some):
            batch.draw([each.draw for each in some])
        return batch

    def _chosen(self, some: Sequence[_Token], batch: _Batch) -> list[Array | TopKLogits]:
        """Copy results to the host. The first tokens get all logits, the others their top tokens."""
        k, vocab = self.model.kernels, self.model.config.vocab_size
        whole = sum(not each.topk_logits for each in some)
        result: list[Array | TopKLogits] = []
        if whole:
            result.extend(np.asarray(k.to_host(self._decoded[:whole]))[:, :vocab])
        if whole < len(some):
            tokens, logits = map(k.to_host, batch.topk_logits)
            rows = slice(whole, len(some))
            # Copy: if these are host arrays, the next step overwrites them.
            pairs = zip(tokens[rows].copy(), logits[rows].copy(), strict=True)
            result.extend(TopKLogits(ids, row[:-1], float(row[-1])) for ids, row in pairs)
        if any(each.draw for each in some):
            tokens, results = map(k.to_host, batch.drawn)
            for i, row in enumerate(result):
                if isinstance(row, TopKLogits) and some[i].draw:
                    drawn = SampledToken(int(tokens[i]), *results[i].tolist())
                    result[i] = row._replace(drawn=drawn, whole=partial(self._whole, i))
        return result

    def _whole(self, i: int) -> Array:
        return np.asarray(self.model.kernels.to_host(self._decoded[i]))[: self.model.config.vocab_size]

    # -- prompts

    def _prefill(self, some: Sequence[Feed]) -> int:
        """Compute feeds one at a time; return the total rows of logits."""
        k, padded = self.model.kernels, self.model.config.padded_vocab
        scored = [self._scored_rows(each) for each in some]
        most = sum(each.wanted for each in some) + max(scored, default=0)
        if most > len(self._logits):
            self._logits = k.zeros(rounded_rows(most), padded)
        end = 0
        for each, rows in zip(some, scored, strict=True):
            hidden, length = self._hidden(each), len(each.tokens)
            if rows:
                # Padding rows hold later positions; the next feed overwrites their logits.
                first = length - each.wanted
                self._longest.logits(self._logits[end : end + rows], hidden[first : first + rows])
            end += each.wanted
        return end

    def _hidden(self, some: Feed) -> Array:
        """Compute a padded feed. No pass reads the padding, because the slot's next feed overwrites it."""
        k, rows = self.model.kernels, self._rows_of(some)
        tokens = np.zeros(rows, np.int32)
        tokens[: len(some.tokens)] = some.tokens
        k.put(self._start, np.array([some.start]))
        k.put(self._slot, np.array([some.slot]))
        k.put(self._before, np.array([self._tokens.before(some)]))
        if rows > self._longest.n_rows:
            self._longest = Pass(self.model, 1, rows, training=False, workers=1)
        work = self._longest if rows == self._longest.n_rows else self._longest.reshaped(1, rows)
        return work.forward(k.integers(tokens), self.cache, self._start, self._slot, self._before)

    def _rows_of(self, some: Feed) -> int:
        """Return the padded number of tokens, limited by the context."""
        return min(rounded_rows(len(some.tokens)), self.length - some.start)

    def _scored_rows(self, some: Feed) -> int:
        room = self._rows_of(some) - len(some.tokens) + some.wanted
        return min(rounded_rows(some.wanted), room) if some.wanted else 0


class _Batch:
    """A pass that decodes one token of each sequence, with its inputs and outputs."""

    def __init__(self, model: Model, work: Pass, cache: Array, logits: Array) -> None:
        self.rows, self._model, self._logits = work.n_rows, model, logits
        self.inputs = model.kernels.integers(np.zeros((4, self.rows)))  # tokens, starts, slots, before
        self.topk_logits: list[Array] = []  # tokens and logits that `choose` found
        self._choose: dict[int, tuple[Work, Array, Array]] = {}
        self._how = model.kernels.scalars(2 * self.rows).reshape(self.rows, 2)  # temperatures, random numbers
        result = model.kernels.scalars(2 * self.rows).reshape(self.rows, 2)
        self.drawn = model.kernels.integers(np.zeros(self.rows)), result
        self._draw: Work | None = None
        self.run: Work = model.kernels.record(partial(self._run, work, cache))

    def _run(self, work: Pass, cache: Array) -> None:
        work.logits(self._logits, work.forward(self.inputs[0], cache, *self.inputs[1:]))

    def choose(self, count: int) -> None:
        """Find the top `count` tokens of each row."""
        k, vocab = self._model.kernels, self._model.config.vocab_size
        if count not in self._choose:
            most = min(count, vocab)
            tokens = k.integers(np.zeros((self.rows, most)))
            result = k.accum_zeros(self.rows, most + 1)
            work = k.record(partial(k.topk_logits, tokens, result, self._logits, vocab))
            self._choose[count] = work, tokens, result
        run, *self.topk_logits = self._choose[count]
        run()

    def draw(self, draws: Sequence[Draw | None]) -> None:
        """Sample a token of each row; results of rows without a `Draw` are not used."""
        k, vocab = self._model.kernels, self._model.config.vocab_size
        how = np.full((self.rows, 2), (1.0, 0.0))
        for i, each in enumerate(draws):
            how[i] = each or how[i]
        k.put(self._how, how)
        if self._draw is None:
            self._draw = k.record(partial(k.drawn, *self.drawn, self._logits, vocab, self._how))
        self._draw()


def rounded_rows(rows: int) -> int:
    """Round more than FEW rows up to a power of two or, from ALIKE on, to a multiple of ALIKE."""
    if rows <= FEW:
        return rows
    return 1 << (rows - 1).bit_length() if rows < ALIKE else -(-rows // ALIKE) * ALIKE


def _decodes(each: Feed) -> bool:
    return len(each.tokens) == 1 and each.wanted == 1


BATCHED = SlotKind(BatchedSlots, PLAIN.slot_bytes)


def rehearse_together(slots: Slots) -> None:
    """Plan and record passes of 1, 2, 4, … sequences on a GPU before the first request."""
    if not isinstance(slots, BatchedSlots):
        return
    drawn, rows = Choice(Sampling(temperature=1.0), 0.5, 0), 1
    while rows < 2 * slots.count:  # the last pass has all slots
        some = [Feed(slot, 0, [0], 1, choice=drawn) for slot in range(min(rows, slots.count))]
        for _ in range(2):  # the first call is eager, the second records
            slots.feed(some)
        rows *= 2
