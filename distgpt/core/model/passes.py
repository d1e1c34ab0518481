"""Forward and backward passes over a batch of one shape, with all memory allocated in advance.

A batch is split into slices of whole sequences, about equally many per worker. Each worker runs its slices
through all layers without waiting for others. In the backward pass, all workers synchronize after each layer
for its weight gradients, which are sums over the whole batch. If workers cannot share the sequences evenly,
or if reading the weights is the bottleneck, the batch is one slice, and each kernel splits its rows or
columns (`_slice_count`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import (
    STATISTICS,
    SUMS,
    Scratch,
    more_activations,
    new_activations,
    norm_of,
)
from distgpt.core.model.memory import PREVIOUS, Rows
from distgpt.core.model.model import Model
from distgpt.core.ops.api import (
    ALL_ROWS,
    Affine,
    Array,
    Floats2d,
    Head,
    Ints1d,
    SortedTokens,
    Stats,
    Wide1d,
    Wide2d,
)
from distgpt.core.ops.kernels import Kernels

ROWS_OF_TILE = 128  # matmuls are fastest with multiples of this

# The activations that every layer keeps for its backward pass, by `recompute`. All layers share the other
# arrays and recompute them. This is nearly free for "mlp", whose norm outputs and activations are computed
# with their gradients, and costs a second forward pass for "block".
KEPT_BY_RECOMPUTE = {
    "none": ("s1", "h1", "qkv", "xhat", "att", "s2", "h2", "pre", "act", *STATISTICS),
    "mlp": ("s1", "qkv", "xhat", "att", "s2", "pre", *STATISTICS),
    "block": ("s1",),
    "all": (),  # no backward pass follows
}

Ready = Callable[[int], None]


@dataclass(slots=True)
class ModelActivations:
    """Arrays before the first and after the last layer, over N rows."""

    embedded: Floats2d  # (N, C), the embedding before its norm, if it has one
    previous: Ints1d | None  # (N,), the token before each token, if its embedding is added
    embed_stats: Stats
    s: Floats2d  # (N, C), output of the last layer
    stats: Stats  # statistics of the final norm
    hidden: Floats2d  # (N, C), input of the output layer
    losses: Wide1d  # (N,)

    @classmethod
    def zeros(cls, config: ModelConfig, kernels: Kernels, n: int) -> ModelActivations:
        stats = norm_of(config).stats
        return cls(
            embedded=kernels.zeros(n, config.n_embd),
            previous=kernels.integers(np.zeros(n)) if config.previous_embedding else None,
            embed_stats=stats(config, kernels, n),
            s=kernels.zeros(n, config.n_embd),
            stats=stats(config, kernels, n),
            hidden=kernels.zeros(n, config.n_embd),
            losses=kernels.accum_zeros(n),
        )


class Pass:
    """Memory and execution of batches of (n_seq, seq_len) tokens, on all workers or the given number.

    All arrays are allocated here, so a step allocates nothing. `recompute` is a key of KEPT_BY_RECOMPUTE. The
    caller fills `positions` (N,) if documents are packed.
    """

    def __init__(
        self,
        model: Model,
        n_seq: int,
        seq_len: int,
        training: bool,
        recompute: str = "mlp",
        workers: int | None = None,
        positions: Ints1d | None = None,
    ) -> None:
        config = model.config
        k = model.kernels
        self.model = model
        self.k = k
        self.positions = positions
        self._workers = k.threads if workers is None else workers
        elements = sum(spec.size for part in model.blocks[0].parts for spec in part.specs)
        self._layer_bytes = 0 if training else elements * k.dtype.itemsize  # 0: ignored
        self._slice_rows = k.slice_rows if training else ALL_ROWS
        self._cut(n_seq, seq_len)
        if training and k.capabilities.sums_bias_gradients:
            assert len(self.slices) == 1, "each slice would overwrite the sums of the one before"
        n = self.n_rows

        self._recompute = recompute if training else "all"
        kept = KEPT_BY_RECOMPUTE[self._recompute]
        first = new_activations(config, k, n)
        others = [more_activations(first, k, kept) for _ in range(1, config.n_layer)]
        self.layers = [Rows(self.slices, each) for each in (first, *others)]
        self.around = Rows(self.slices, ModelActivations.zeros(config, k, n))
        self._again = self._recompute == "mlp"  # kernels compute norms and activations with their gradients

        # Two sets of names for the same memory, which layers use alternately; see the diagram in `Scratch`.
        self._scratch: tuple[Rows[Scratch], Rows[Scratch]] | None = None
        self._finished: list[int] = []  # per layer, the number of final gradients once its own are final
        if training:
            model.make_gradients()
            scratch = model.blocks[0].scratch(k, n, first.added, self._again)
            own = Rows(self.slices, scratch, SUMS)
            below = Rows(self.slices, scratch.of_layer_below(), SUMS)
            self._scratch = (own, below)
            self._finished = [model.finished_with(block) for block in model.blocks]

        # Logits (N, V) would be the largest array, so the head processes chunks of rows, of about equal size.
        chunks = -(-n * config.padded_vocab * k.dtype.itemsize // k.logits_bytes)
        even = -(-n // chunks)
        self.logits_shape = (min(n, -(-even // ROWS_OF_TILE) * ROWS_OF_TILE), config.padded_vocab)
        self._head: Head | None = None
        if training:
            self.expect_losses()

    def reshaped(self, n_seq: int, seq_len: int) -> Pass:
        """Return a pass over a batch of another shape, with at most as many rows, in the same memory.

        Only for passes without gradients, in which all layers share the same activations.
        """
        other = copy(self)
        other._cut(n_seq, seq_len)
        layer = self.layers[0].cut(other.slices)
        other.layers = [layer for _ in self.layers]
        other.around = self.around.cut(other.slices)
        return other

    def forward(
        self,
        tokens: Ints1d,
        caches: Array | None = None,
        start: Ints1d | None = None,
        slots: Ints1d | None = None,
        before: Ints1d | None = None,
    ) -> Floats2d:
        """Compute the last hidden states (N, C) of tokens (N,), the input of the output layer.

        With `caches` (layers, 2, L, K, T_max, head), the tokens follow `start` others whose k and v are
        cached in `slots`; see `attention_cached`. `before` (sequences,) are the last of these tokens, which a
        previous embedding needs. Multiple sequences must then be one slice.
        """
        for layers in self.model.groups:  # a single group, unless layers make their weights one at a time
            self.model.prepare(layers)
            forward = partial(self._forward_slice, layers, tokens, caches, start, slots, before)
            self.k.each(forward, len(self.slices))
        return self.around.all.hidden

    def logits(self, out: Floats2d, hidden: Floats2d) -> None:
        """out (n, padded V) ← the logits of the next token after each hidden state (n, C)."""
        self.k.linear(out, hidden, Affine(self.model.head, None))

    def loss(self, total: Wide1d, tokens: Ints1d, targets: Ints1d) -> None:
        """total[0] ← the mean loss over all rows, without gradients."""
        self.k.sum(total, self.losses(tokens, targets), 1 / self.n_rows, accumulate=False)

    def expect_losses(self) -> None:
        """Make the memory for logits, which passes without gradients need only for losses."""
        if self._head is None:
            logits = self.model.logits(self.logits_shape)
            self._head = Head(self.model.head, logits, self.model.config.vocab_size)

    def losses(self, tokens: Ints1d, targets: Ints1d) -> Wide1d:
        """Compute the loss of every row (N,), in memory that the next pass overwrites."""
        self._head_loss(tokens, targets, None, None, 0.0, False)
        return self.around.all.losses

    def loss_and_gradients(
        self, tokens: Ints1d, targets: Ints1d, scale: float, accumulate: bool, on_ready: Ready | None = None
    ) -> None:
        """Compute (or accumulate) the gradients of scale · mean loss, and that loss in grads.flags[0].

        on_ready(n) is called when the first n elements of the flat gradient buffer are final.
        """
        # Sorted once for the embedding and all value embeddings, which add their gradients in this order.
        in_order = self.k.sort_tokens(tokens, self.model.config.padded_vocab)
        self._head_backward(tokens, targets, scale, accumulate)
        last = self._layers_backward(tokens, in_order, accumulate, on_ready)
        self._embedding_gradients(last, in_order, accumulate)
        if on_ready is not None:
            on_ready(self.model.layout.size)

    def _cut(self, n_seq: int, seq_len: int) -> None:
        """Split the rows into slices of whole sequences: 1, or some for each worker."""
        count = _slice_count(n_seq, seq_len, self._workers, self._slice_rows, self._layer_bytes)
        cuts = [n_seq * i // count * seq_len for i in range(count + 1)]
        self.slices = [slice(start, stop) for start, stop in pairwise(cuts)]
        self.shape = (n_seq, seq_len)
        self.seq_len = seq_len
        self.n_rows = n_seq * seq_len

    def _forward_slice(
        self,
        layers: range,
        tokens: Ints1d,
        caches: Array | None,
        start: Ints1d | None,
        slots: Ints1d | None,
        before: Ints1d | None,
        number: int,
    ) -> None:
        """Run one slice through these layers, including the embedding and the final norm at the ends."""
        model = self.model
        around = self.around.slices[number]
        own = tokens[self.slices[number]]
        positions = self._positions_of(number)
        acts = [layer.slices[number] for layer in self.layers]
        last = around.hidden if model.final_norm is None else around.s
        into = [*(each.s1 for each in acts[1:]), last]  # destination of each layer's output
        first = layers.start
        if first == 0:
            self._embed(acts[0].s1, own, start, before, number)
            x, r = acts[0].s1, None
        else:
            x, r = model.blocks[first - 1].output(acts[first - 1], into[first - 1])
        for i in layers:  # each layer's input is x + r, added by its norm
            block = model.blocks[i]
            block.before_attention(acts[i], x, r, own)
            if caches is None:
                block.attend(acts[i], self.seq_len, positions)
            else:
                assert start is not None
                block.attend_cached(acts[i], caches[i], self.seq_len, start, slots)
            block.after_attention(acts[i])
            block.project(acts[i], into[i])
            x, r = block.output(acts[i], into[i])
        if layers.stop < model.config.n_layer:
            return
        if model.final_norm is not None:
            model.final_norm.forward(around.hidden, around.s, around.stats, x, r)
        elif r is not None:
            self.k.add(around.hidden, x, r)

    def _embed(
        self, x: Floats2d, tokens: Ints1d, start: Ints1d | None, before: Ints1d | None, number: int
    ) -> None:
        """x (n, C) ← the embedding of the n tokens of a slice, normalized if there is an embedding norm."""
        model = self.model
        around = self.around.slices[number]
        embedded = x if model.embed_norm is None else around.embedded
        wte = model.tensors["wte"]
        positions = self._positions_of(number)
        self.k.embed(embedded, tokens, wte, model.positions.wpe, self.seq_len, start, positions)
        if around.previous is not None:
            self.k.previous_tokens(around.previous, tokens, self.seq_len, before, positions)
            self.k.add_embedding(embedded, around.previous, model.tensors[PREVIOUS])
        if model.embed_norm is not None:
            model.embed_norm.forward(x, embedded, around.embed_stats, embedded, None)

    def _head_loss(
        self,
        tokens: Ints1d,
        targets: Ints1d,
        dx: Floats2d | None,
        dw: Wide2d | None,
        scale: float,
        accumulate: bool,
    ) -> None:
        """Compute the loss of every row and, with dx and dw, the gradients of scale · Σ losses."""
        self.expect_losses()
        assert self._head is not None
        x = self.forward(tokens)
        losses = self.around.all.losses
        self.k.linear_cross_entropy(losses, dx, dw, x, self._head, targets, scale, accumulate)

    def _head_backward(self, tokens: Ints1d, targets: Ints1d, scale: float, accumulate: bool) -> None:
        """Compute the loss and its gradient for the last layer's output, in dout of the scratch memory."""
        assert self._scratch is not None, "this pass supports only forward passes"
        model = self.model
        around = self.around.all
        tmp = self._scratch[0].all
        # The head writes the gradient of its input (N, C): the final norm's output, if it has one.
        dhidden = tmp.dout if model.final_norm is None else tmp.dh1
        dlogits_scale = scale * model.gradient_scale / self.n_rows
        dhead = model.grads.get(model.head_name)  # None if it is not trained
        self._head_loss(tokens, targets, dhidden, dhead, dlogits_scale, accumulate)
        self.k.sum(model.grads.flags[:1], around.losses, scale / self.n_rows, accumulate)
        if model.final_norm is not None:
            model.final_norm.backward(tmp.dout, None, tmp.out_sums, dhidden, None, around.s, around.stats)
            model.final_norm.weight_gradients(tmp.out_sums, dhidden, around.s, around.stats, accumulate)

    def _layers_backward(
        self, tokens: Ints1d, in_order: SortedTokens, accumulate: bool, on_ready: Ready | None
    ) -> Scratch:
        """Run the backward pass of all layers. The gradient is in dout of the returned scratch."""
        assert self._scratch is not None
        model = self.model
        for block in model.blocks:  # workers then add to the gradient together: see `ValueEmbedding`
            if block.values is not None and not accumulate:
                block.values.zero_gradient()
        scratch, below = self._scratch
        # Without a final norm, the last layer's dout has no sums.
        out_sums = None if model.final_norm is None else scratch.all.out_sums
        for layers in reversed(model.groups):
            model.prepare(layers)
            for i in reversed(layers):
                backward = partial(self._backward_slice, i, scratch, tokens, accumulate)
                self.k.each(backward, len(self.slices))
                # All workers synchronize here: weight gradients are sums over the rows of all slices.
                gradients = model.blocks[i].weight_gradients
                acts = self.layers[i].all
                self.k.run_together(partial(gradients, acts, scratch.all, out_sums, in_order, accumulate))
                if on_ready is not None:
                    on_ready(self._finished[i])
                # The gradient of this layer's input is the gradient of the output of the layer below.
                scratch, below = below, scratch
                out_sums = scratch.all.out_sums
        return scratch.all

    def _backward_slice(
        self, i: int, scratch: Rows[Scratch], tokens: Ints1d, accumulate: bool, number: int
    ) -> None:
        """Run one slice backward through layer i, after recomputing the activations that it did not keep."""
        block = self.model.blocks[i]
        acts = self.layers[i].slices[number]
        tmp = scratch.slices[number]
        positions = self._positions_of(number)
        if self._recompute == "block":
            block.before_attention(acts, acts.s1, None, tokens[self.slices[number]])
            block.attend(acts, self.seq_len, positions)
            block.after_attention(acts)
        block.backward(acts, tmp, self.seq_len, self._again, accumulate, positions)

    def _positions_of(self, number: int) -> Ints1d | None:
        return None if self.positions is None else self.positions[self.slices[number]]

    def _embedding_gradients(self, tmp: Scratch, tokens: SortedTokens, accumulate: bool) -> None:
        """Compute the embedding gradients from the gradient of the first layer's input in tmp.dout."""
        model = self.model
        embedded = self.around.all.embedded
        stats = self.around.all.embed_stats
        dwte = model.grads.get("wte")
        dwpe = model.positions.dwpe
        dx = tmp.dout
        if model.embed_norm is not None and (dwte is not None or model.embed_norm.dwb is not None):
            model.embed_norm.backward(tmp.din, None, tmp.in_sums, dx, None, embedded, stats)
            model.embed_norm.weight_gradients(tmp.in_sums, dx, embedded, stats, accumulate)
            dx = tmp.din
        if dwte is None:  # no embedding is trained
            return
        if not accumulate:
            if not model.config.tied:  # if tied, the head has already written to dwte
                self.k.zero(dwte)
            if dwpe is not None:
                self.k.zero(dwpe)
        self.k.embed_backward(dwte, dwpe, dx, tokens, self.seq_len, self.positions)
        previous = self.around.all.previous
        if previous is not None:
            dprevious = model.grads[PREVIOUS]
            if not accumulate:
                self.k.zero(dprevious)
            in_order = self.k.sort_tokens(previous, model.config.padded_vocab)
            self.k.embed_backward(dprevious, None, dx, in_order, self.seq_len)


EVEN_ENOUGH = 8  # sequences per worker
FEW_ROWS = range(3, 65)  # rows per worker
LARGE_LAYER = 4 << 20  # bytes of a layer's parameters


def _slice_count(n_seq: int, seq_len: int, workers: int, rows: int, layer_bytes: int) -> int:
    """Return the number of slices: equally many per worker, or 1, split by each kernel's rows or columns.

    If sequences do not divide evenly, some workers have one more and the others wait, which hardly matters
    with at least EVEN_ENOUGH per worker. A worker has multiple slices if they divide evenly and have at least
    `rows` rows each, so that the output of an operation is still in the cache for the next one.
    """
    if n_seq % workers and n_seq < EVEN_ENOUGH * workers:
        return 1
    # A forward pass of few rows is limited by reading weights. A matmul first packs its matrix. With a slice
    # per worker, each worker would pack every matrix entirely. With one slice, kernels split the columns, and
    # each worker packs a part. If a layer fits a cache, or for more rows than FEW_ROWS, packing hardly
    # matters. For one or two rows nothing is packed, and slices are best because they do not wait for each
    # other.
    if layer_bytes >= LARGE_LAYER and -(-n_seq * seq_len // workers) in FEW_ROWS:
        return 1
    most = max(1, min(n_seq, n_seq * seq_len // rows) // workers)
    even = (each for each in range(most, 1, -1) if n_seq % (workers * each) == 0)
    return workers * next(even, 1)


def cache_shape(config: ModelConfig, sequences: int = 1) -> tuple[int, ...]:
    """Return the shape of the key/value cache in `Pass.forward`."""
    return config.n_layer, 2, sequences, config.kv_heads, config.seq_len, config.head_size
