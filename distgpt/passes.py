"""Forward and backward passes over a batch of one shape, with all their memory made beforehand.

A batch is cut into slabs of whole sequences where the workers divide it evenly. Each worker then carries its
slab through all layers without waiting for anyone, and all meet for the weight gradients, which sum over the
whole batch. Where the sequences do not divide evenly there is one slab, and every kernel splits its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from distgpt.kernels.api import Array, Kernels
from distgpt.layers import Block
from distgpt.memory import FlatBuffer, Layout, Spec
from distgpt.model import Model

LOGITS_BYTES = 128 << 20  # the loss sees the logits of this much at a time
EVEN_ENOUGH = 8  # sequences per worker from which an uneven split no longer matters

Ready = Callable[[int], None]


class Rows:
    """Named arrays over the rows of a batch, and the same for every slab of it. Absent names read as None."""

    def __init__(self, kernels: Kernels, widths: dict[str, int], slabs: list[slice]) -> None:
        n = slabs[-1].stop
        specs = [Spec(name, (n, width) if width else (n,)) for name, width in widths.items()]
        self.all = _Named(FlatBuffer(Layout(specs), kernels.zeros))
        self.slabs = [_Named({name: x[rows] for name, x in vars(self.all).items()}) for rows in slabs]

    def swap(self, one: str, other: str) -> None:
        """Let two names change places, everywhere."""
        for names in (self.all, *self.slabs):
            a, b = getattr(names, one), getattr(names, other)
            setattr(names, one, b)
            setattr(names, other, a)


class _Named(SimpleNamespace):
    def __init__(self, arrays: Any) -> None:
        super().__init__(**dict(arrays))

    def __getattr__(self, name: str) -> Any:
        return None


class Pass:
    """Memory and order of work for batches of (n_seq, seq_len) tokens; `training` keeps every layer."""

    def __init__(self, model: Model, n_seq: int, seq_len: int, training: bool) -> None:
        self.model, self.k, self.seq_len = model, model.kernels, seq_len
        config = model.config
        count = _slab_count(n_seq, self.k.threads)
        cuts = [n_seq * i // count * seq_len for i in range(count + 1)]
        self.slabs = [slice(a, b) for a, b in pairwise(cuts)]
        self.n_rows = cuts[-1]
        layers = config.n_layer if training else 1
        kept = [Rows(self.k, Block.saved(config), self.slabs) for _ in range(layers)]
        self.kept = kept if training else kept * config.n_layer
        self.scratch = Rows(self.k, Block.scratch(config), self.slabs)
        ends = {"embedded": config.n_embd, "s": config.n_embd, "hidden": config.n_embd, "losses": 0}
        ends |= {"embed_mean": 0, "embed_rstd": 0, "mean": 0, "rstd": 0}
        self.ends = Rows(self.k, ends, self.slabs)
        row_bytes = config.vocab_size * self.k.dtype.itemsize
        chunks = -(-self.n_rows * row_bytes // LOGITS_BYTES)
        self._logits_shape = (-(-self.n_rows // chunks), config.vocab_size)
        self._logits: Array | None = None

    def hidden(self, tokens: Array, caches: Array | None = None, start: int = 0) -> Array:
        """The last hidden states (N, C) of tokens (N,): everything before the output layer.

        With `caches` (layers, 2, B, H, T_max, head) the tokens follow `start` others whose k and v are there.
        """
        self.k.each(lambda i: self._forward_slab(i, tokens, caches, start), len(self.slabs))
        return self.ends.all.hidden

    def logits(self, hidden: Array) -> Array:
        """The scores (n, V) of every word after each of some hidden states (n, C)."""
        logits = self.k.zeros(len(hidden), self.model.config.vocab_size)
        self.k.linear(logits, hidden, self.model.head, None)
        return logits

    def loss(self, tokens: Array, targets: Array) -> float:
        """The mean loss over all rows, without gradients."""
        return self._head_loss(tokens, targets, None, None, 0.0, False)

    def loss_and_gradients(
        self, tokens: Array, targets: Array, scale: float, accumulate: bool, on_ready: Ready | None = None
    ) -> float:
        """The mean loss; the model's gradients ← (or += ) those of scale · mean loss.

        on_ready(n) is called as the gradients come in: the first n numbers of the flat buffer are final.
        """
        model, t, ready = self.model, self.scratch.all, on_ready or _nobody
        dhead = model.head_grad
        dhidden = t.dout if model.final_norm is None else t.dh1
        loss = self._head_loss(tokens, targets, dhidden, dhead, scale / self.n_rows, accumulate)
        if model.final_norm is not None:
            e = self.ends.all
            model.final_norm.backward(t.dout, t.h1, t.dh1, None, e.s, (e.mean, e.rstd))
            model.final_norm.weights(t.dh1, e.s, (e.mean, e.rstd), accumulate)
        for block, kept in zip(reversed(model.blocks), reversed(self.kept), strict=True):
            self.k.each(partial(self._backward_slab, block, kept), len(self.slabs))
            self.k.share(partial(block.weights, kept.all, t, t.dout, accumulate))
            ready(model.layout.end_of(spec.name for part in block.parts for spec in part.specs()))
            self.scratch.swap("din", "dout")
        self._embedding_weights(tokens, accumulate)
        ready(model.layout.size)
        return loss

    def _forward_slab(self, slab: int, tokens: Array, caches: Array | None, start: int) -> None:
        model, e, t = self.model, self.ends.slabs[slab], self.scratch.slabs[slab]
        x, r = self.kept[0].slabs[slab].s1, None
        first = x if model.embed_norm is None else e.embedded
        added = model.positions.added(start, self.seq_len)
        self.k.embed(first, tokens[self.slabs[slab]], model.params["wte"], added)
        if model.embed_norm is not None:
            model.embed_norm.forward(x, first, (e.embed_mean, e.embed_rstd), first, None)
        for i, (block, kept) in enumerate(zip(model.blocks, self.kept, strict=True)):
            a = kept.slabs[slab]
            block.before_attention(a, t, x, r)
            if caches is None:
                block.attend(a, self.seq_len)
            else:
                block.attend_cached(a, caches[i], start)
            x, r = a.s2, block.after_attention(a, t)
        if model.final_norm is None:
            self.k.add(e.hidden, x, r)
        else:
            model.final_norm.forward(e.hidden, e.s, (e.mean, e.rstd), x, r)

    def _head_loss(
        self,
        tokens: Array,
        targets: Array,
        dx: Array | None,
        dw: Array | None,
        scale: float,
        accumulate: bool,
    ) -> float:
        if self._logits is None:
            self._logits = self.k.zeros(*self._logits_shape)
        x, losses = self.hidden(tokens), self.ends.all.losses
        self.k.linear_cross_entropy(
            losses, dx, dw, x, self.model.head, targets, self._logits, scale, accumulate
        )
        return float(self.k.to_host(losses).mean(dtype="float64"))

    def _backward_slab(self, block: Block, kept: Rows, slab: int) -> None:
        t = self.scratch.slabs[slab]
        block.backward(kept.slabs[slab], t, t.din, t.dout, self.seq_len)

    def _embedding_weights(self, tokens: Array, accumulate: bool) -> None:
        """t.dout holds the gradient of the first block's input."""
        model, e, t = self.model, self.ends.all, self.scratch.all
        dx, dwpe = t.dout, model.positions.dwpe
        if model.embed_norm is not None:
            stats = (e.embed_mean, e.embed_rstd)
            model.embed_norm.backward(t.din, t.h1, dx, None, e.embedded, stats)
            model.embed_norm.weights(dx, e.embedded, stats, accumulate)
            dx = t.din
        if not accumulate:
            if not model.config.tied:  # tied, the head has written there already
                self.k.zero(model.grads["wte"])
            if dwpe is not None:
                self.k.zero(dwpe)
        self.k.embed_backward(model.grads["wte"], dwpe, dx, tokens, self.seq_len)


def _slab_count(n_seq: int, threads: int) -> int:
    even = n_seq % threads == 0 or n_seq >= EVEN_ENOUGH * threads
    return threads if even else 1


def _nobody(ready: int) -> None:
    return None
