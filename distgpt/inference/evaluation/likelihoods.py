"""The loss of each span of text, and whether it is the likeliest: answers are judged by these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distgpt.core.ops.api import Array
from distgpt.core.train.assessment import Scorer, Span

AT_ONCE = 128  # predictions whose logits of all tokens are computed at once


def likelihoods(
    scorer: Scorer, spans: Sequence[Span], advanced: Callable[[int, int], None] = lambda done, tokens: None
) -> Array:
    """Return the summed loss of each span, and 1 where all of its tokens are the likeliest: (n, 2).

    Collective. Only predicted tokens are scored. Spans that differ only in their last token share a sequence.
    """
    found = np.zeros((len(spans), 2))
    together: dict[bytes, list[int]] = {}
    for i, span in enumerate(spans):
        together.setdefault(np.asarray(span.ids[:-1], np.int32).tobytes(), []).append(i)

    k, config = scorer.model.kernels, scorer.model.config
    inputs, outputs = k.zeros(AT_ONCE, config.n_embd), k.zeros(AT_ONCE, config.padded_vocab)

    def score(rows: list[list[int]]) -> None:
        scored = _of_sequences(scorer, [[spans[i] for i in row] for row in rows], inputs, outputs)
        found[[i for row in rows for i in row]] = scored

    scorer.in_batches(spans, list(together.values()), score, advanced)
    scorer.comm.sum(found)  # each place is zero on all ranks but one
    return found


def _of_sequences(scorer: Scorer, rows: list[list[Span]], inputs: Array, outputs: Array) -> Array:
    """Return the loss of each span and whether it is the likeliest (n, 2); a row's spans share its tokens."""
    scorer.put([row[0] for row in rows])
    around = scorer.run("hidden", lambda work: work.forward(scorer.tokens))
    k, work = scorer.model.kernels, scorer.work
    assert work is not None
    hidden = k.to_host(around.hidden).reshape(*work.shape, -1)
    spans = [(i, span) for i, row in enumerate(rows) for span in row]
    states = np.concatenate([hidden[i, span.first - 1 : len(span.ids) - 1] for i, span in spans])
    targets = np.concatenate([span.ids[span.first :] for _, span in spans])
    each = np.empty((len(states), 2))  # the loss of each target, and whether none is likelier
    for start in range(0, len(states), AT_ONCE):
        some = slice(start, min(start + AT_ONCE, len(states)))
        count = some.stop - start
        k.put(inputs[:count], states[some])
        work.logits(outputs[:count], inputs[:count])
        logits = k.to_host(outputs[:count])[:, : scorer.model.config.vocab_size]
        top = logits.max(1)
        hit = logits[np.arange(count), targets[some]]
        total = np.exp(logits - top[:, None]).sum(1, dtype=np.float64)
        each[some, 0] = np.log(total) + top - hit
        each[some, 1] = hit == top
    starts = np.cumsum([0, *(span.count for _, span in spans[:-1])])
    sums = np.add.reduceat(each[:, 0], starts)
    return np.stack([sums, np.minimum.reduceat(each[:, 1], starts)], axis=1)
