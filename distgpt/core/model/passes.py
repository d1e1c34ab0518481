"""Forward and backward passes over a batch of one shape, with all their memory made beforehand.

A batch is cut into slices of whole sequences where the workers divide it evenly. Each worker then takes its
slices through all layers, without waiting for the other workers. On the way back all meet after each layer
for the gradients of its weights, which are sums over the whole batch. Where a few sequences do not divide
evenly there is one slice, and each kernel splits its rows or columns; so it is where reading the weights
takes longest.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import NORMS, SUMS, Block, Scratch
from distgpt.core.model.memory import Rows
from distgpt.core.model.model import Model
from distgpt.core.ops.api import (
    ALL_ROWS,
    Affine,
    Array,
    Floats1d,
    Floats2d,
    Head,
    Ints1d,
    Kernels,
    SortedTokens,
    Stats,
    Wide1d,
    Wide2d,
)

TILE = 128  # a matmul is fastest with rows in multiples of this
EVEN_ENOUGH = 8  # sequences per worker from which an uneven split hardly matters
# Without gradients, workers with few rows each spend their time on the weights of wide layers: each packs all
# of them, or a part where kernels split columns. One or two rows are never packed, and slices are best.
FEW, WIDE = range(3, 65), 4 << 20  # rows of a worker, and bytes of a layer's parameters

# The activations that every layer keeps for its backward pass; the rest is shared by all layers and
# computed again, which is nearly free for "mlp" (norm outputs and activations come along with their
# gradients) and costs a second forward pass for "block".
KEPT = {
    "none": ("s1", "h1", "qkv", "xhat", "att", "s2", "h2", "pre", "act", "statistics"),
    "mlp": ("s1", "qkv", "xhat", "att", "s2", "pre", "statistics"),
    "block": ("s1",),
    "all": (),  # for a pass that is never followed by a backward pass
}

Ready = Callable[[int], None]


@dataclass(slots=True)
class Ends:
    """Arrays before the first and after the last layer, over N rows."""

    embedded: Floats2d  # (N, C), the embedding where a norm follows
    embed_stats: Stats
    s: Floats2d  # the last layer's output
    stats: Stats  # of the final norm
    hidden: Floats2d  # the output layer's input
    losses: Wide1d  # (N,)

    @classmethod
    def zeros(cls, config: ModelConfig, kernels: Kernels, n: int) -> Ends:
        """Make the memory for n rows."""
        stats = NORMS[config.norm].stats
        embedded, s, hidden = (kernels.zeros(n, config.n_embd) for _ in range(3))
        return cls(embedded, stats(kernels, n), s, stats(kernels, n), hidden, kernels.wide_zeros(n))


class Pass:
    """Memory and order of work for batches of (n_seq, seq_len) tokens, for all workers or `workers` of them.

    `recompute` is a key of KEPT. `positions` (N,), which callers fill, are of documents side by side.
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
        config, k = model.config, model.kernels
        self.model, self.k, self.positions = model, k, positions
        self._workers = k.threads if workers is None else workers
        layer_elements = sum(spec.size for part in model.blocks[0].parts for spec in part.specs())
        self._is_wide = not training and layer_elements * k.dtype.itemsize >= WIDE
        self._slice_rows = k.slice_rows if training else ALL_ROWS
        self._cut(n_seq, seq_len)
        n = self.n_rows
        self._recompute = recompute if training else "all"
        self._again = self._recompute == "mlp"
        first = Block.new_activations(config, k, n)
        kept = KEPT[self._recompute]
        others = [Block.new_activations(config, k, n, first, kept) for _ in range(1, config.n_layer)]
        self.layers = [Rows(self.slices, each) for each in (first, *others)]
        # Gradients of all layers share two sets of names for the same memory: what a layer calls the gradient
        # of its input is that of the output to the layer below, so layers take the sets in turns.
        self._scratch: tuple[Rows[Scratch], Rows[Scratch]] | None = None
        self._finished: list[int] = []
        if training:
            scratch = model.blocks[0].scratch(config, k, n, first.added, self._again)
            self._scratch = (
                Rows(self.slices, scratch, SUMS),
                Rows(self.slices, scratch.of_layer_below(), SUMS),
            )
            self._finished = [model.finished_with(block) for block in model.blocks]
        self.ends = Rows(self.slices, Ends.zeros(config, k, n))
        # Logits (N, V) would be the largest array of all: the head takes chunks of rows, all about alike.
        chunks = -(-n * config.padded_vocab * k.dtype.itemsize // k.logits_bytes)
        even = -(-n // chunks)
        self.logits_shape = (min(n, -(-even // TILE) * TILE), config.padded_vocab)
        self._head: Head | None = None
        if training:
            self.expect_losses()

    def reshaped(self, n_seq: int, seq_len: int) -> Pass:
        """Return a pass over a batch of another shape, with as many rows or fewer, in the same memory.

        Only without gradients: then one layer's activations are all layers'.
        """
        other = copy(self)
        other._cut(n_seq, seq_len)
        layer = self.layers[0].cut(other.slices)
        other.layers = [layer for _ in self.layers]
        other.ends = self.ends.cut(other.slices)
        return other

    def hidden(
        self,
        tokens: Ints1d,
        caches: Array | None = None,
        start: Ints1d | None = None,
        lanes: Ints1d | None = None,
    ) -> Floats2d:
        """Compute the last hidden states (N, C) of tokens (N,): everything before the output layer.

        With `caches` (layers, 2, L, K, T_max, head) the tokens follow `start` others whose k and v are there,
        in `lanes`, as `attention_cached` says. Several sequences then take one slice.
        """
        for layers in self.model.groups:  # all at once, unless their weights are made in turn
            self.model.prepare(layers)
            self.k.each(partial(self._forward_slice, layers, tokens, caches, start, lanes), len(self.slices))
        return self.ends.all.hidden

    def scores(self, out: Floats2d, hidden: Floats2d) -> None:
        """out (n, padded V) ← the score of every token after each of some hidden states (n, C)."""
        self.k.linear(out, hidden, Affine(self.model.head, None))

    def loss(self, total: Floats1d, tokens: Ints1d, targets: Ints1d) -> None:
        """total[0] ← the mean loss over all rows, without gradients."""
        self.k.sum(total, self.losses(tokens, targets), 1 / self.n_rows, accumulate=False)

    def expect_losses(self) -> None:
        """Make the memory for logits, which a pass without gradients may never need."""
        if self._head is None:
            logits = self.k.zeros(*self.logits_shape)
            self._head = Head(self.model.head, logits, self.model.config.vocab_size)

    def losses(self, tokens: Ints1d, targets: Ints1d) -> Wide1d:
        """Compute the loss of every row (N,), in memory that the next pass overwrites."""
        self._head_loss(tokens, targets, None, None, 0.0, False)
        return self.ends.all.losses

    def loss_and_gradients(
        self, tokens: Ints1d, targets: Ints1d, scale: float, accumulate: bool, on_ready: Ready | None = None
    ) -> None:
        """The model's gradients ← (or += ) those of scale · mean loss, and grads.flags[0] that loss itself.

        on_ready(n) is called as the gradients come in: the first n elements of the flat buffer are final.
        """
        assert self._scratch is not None, "this pass was made for forward passes alone"
        model, (scratch, below), ready = self.model, self._scratch, on_ready or (lambda final: None)
        tmp = scratch.all
        # Without a final norm, the gradient of the hidden states (N, C) is that of the last layer's output.
        dhidden, out_sums = (tmp.dout, None) if model.final_norm is None else (tmp.dh1, tmp.out_sums)
        along = scale * model.gradient_scale / self.n_rows
        # Once for the embedding and all value embeddings, which add up their gradients in this order.
        in_order = self.k.sort_tokens(tokens, model.config.padded_vocab)
        self._head_loss(tokens, targets, dhidden, model.head_grad, along, accumulate)
        self.k.sum(model.grads.flags[:1], self.ends.all.losses, scale / self.n_rows, accumulate)
        if model.final_norm is not None:
            ends = self.ends.all
            model.final_norm.backward(tmp.dout, None, out_sums, tmp.dh1, None, ends.s, ends.stats)
            model.final_norm.weights(out_sums, tmp.dh1, ends.s, ends.stats, accumulate)
        for block in model.blocks:  # before workers add to it together: see `ValueEmbedding.weights`
            if block.values is not None and not accumulate:
                block.values.zero_gradient()
        for layers in reversed(model.groups):
            model.prepare(layers)
            for i in reversed(layers):
                backward = partial(self._backward_slice, i, scratch, tokens, accumulate)
                self.k.each(backward, len(self.slices))
                # All workers meet here: gradients of weights are sums over the rows of all slices.
                block, acts = model.blocks[i], self.layers[i].all
                self.k.run_together(partial(block.weights, acts, scratch.all, out_sums, in_order, accumulate))
                ready(self._finished[i])
                # The gradient of this layer's input is that of the output of the layer below.
                scratch, below = below, scratch
                out_sums = scratch.all.out_sums
        self._embedding_weights(scratch.all, in_order, accumulate)
        ready(model.layout.size)

    def _cut(self, n_seq: int, seq_len: int) -> None:
        few = self._is_wide and -(-n_seq * seq_len // self._workers) in FEW
        count = 1 if few else _slice_count(n_seq, seq_len, self._workers, self._slice_rows)
        cuts = [n_seq * i // count * seq_len for i in range(count + 1)]
        self.slices = [slice(a, b) for a, b in pairwise(cuts)]
        self.shape, self.seq_len, self.n_rows = (n_seq, seq_len), seq_len, cuts[-1]

    def _forward_slice(
        self,
        layers: range,
        tokens: Ints1d,
        caches: Array | None,
        start: Ints1d | None,
        lanes: Ints1d | None,
        number: int,
    ) -> None:
        """Take one slice through these layers, with what comes before the first and after the last one."""
        model, ends = self.model, self.ends.slices[number]
        own, positions = tokens[self.slices[number]], self._positions_of(number)
        acts = [layer.slices[number] for layer in self.layers]
        last = ends.hidden if model.final_norm is None else ends.s
        into = [*(each.s1 for each in acts[1:]), last]  # what reads a layer's output
        first = layers.start
        if first == 0:
            self._embed(acts[0].s1, own, start, number)
            x, r = acts[0].s1, None
        else:
            x, r = model.blocks[first - 1].output(acts[first - 1], into[first - 1])
        for i in layers:
            block = model.blocks[i]
            block.before_attention(acts[i], x, r, own)
            if caches is None:
                block.attend(acts[i], self.seq_len, positions)
            else:
                assert start is not None
                block.attend_cached(acts[i], caches[i], self.seq_len, start, lanes)
            block.after_attention(acts[i])
            block.project(acts[i], into[i])
            x, r = block.output(acts[i], into[i])
        if layers.stop < model.config.n_layer:
            return
        if model.final_norm is not None:
            model.final_norm.forward(ends.hidden, ends.s, ends.stats, x, r)
        elif r is not None:
            self.k.add(ends.hidden, x, r)

    def _embed(self, x: Floats2d, tokens: Ints1d, start: Ints1d | None, number: int) -> None:
        model, ends, positions = self.model, self.ends.slices[number], self._positions_of(number)
        embedded = x if model.embed_norm is None else ends.embedded
        wte, wpe = model.tensors["wte"], model.positions.wpe
        self.k.embed(embedded, tokens, wte, wpe, self.seq_len, start, positions)
        if model.embed_norm is not None:
            model.embed_norm.forward(x, embedded, ends.embed_stats, embedded, None)

    def _head_loss(
        self,
        tokens: Ints1d,
        targets: Ints1d,
        dx: Floats2d | None,
        dw: Wide2d | None,
        scale: float,
        accumulate: bool,
    ) -> None:
        self.expect_losses()
        assert self._head is not None
        x, losses = self.hidden(tokens), self.ends.all.losses
        self.k.linear_cross_entropy(losses, dx, dw, x, self._head, targets, scale, accumulate)

    def _backward_slice(
        self, i: int, scratch: Rows[Scratch], tokens: Ints1d, accumulate: bool, number: int
    ) -> None:
        block, acts, tmp = self.model.blocks[i], self.layers[i].slices[number], scratch.slices[number]
        if self._recompute == "block":
            block.before_attention(acts, acts.s1, None, tokens[self.slices[number]])
            block.attend(acts, self.seq_len, self._positions_of(number))
            block.after_attention(acts)
        block.backward(acts, tmp, self.seq_len, self._again, accumulate, self._positions_of(number))

    def _positions_of(self, number: int) -> Ints1d | None:
        return None if self.positions is None else self.positions[self.slices[number]]

    def _embedding_weights(self, tmp: Scratch, tokens: SortedTokens, accumulate: bool) -> None:
        """Compute gradients from that of the first layer's input, which is in tmp.dout."""
        model, ends = self.model, self.ends.all
        dx, dwte, dwpe = tmp.dout, model.grads.get("wte"), model.positions.dwpe
        if dwte is None:  # it is not trained
            return
        if model.embed_norm is not None:
            model.embed_norm.backward(tmp.din, None, tmp.in_sums, dx, None, ends.embedded, ends.embed_stats)
            model.embed_norm.weights(tmp.in_sums, dx, ends.embedded, ends.embed_stats, accumulate)
            dx = tmp.din
        if not accumulate:
            if not model.config.tied:  # tied, the head has written there already
                self.k.zero(dwte)
            if dwpe is not None:
                self.k.zero(dwpe)
        self.k.embed_backward(dwte, dwpe, dx, tokens, self.seq_len, self.positions)


def _slice_count(n_seq: int, seq_len: int, threads: int, rows: int) -> int:
    """Return the number of slices: as many for each thread, of at least `rows` rows each if it is not one."""
    if n_seq % threads and n_seq < EVEN_ENOUGH * threads:
        return 1
    most = max(1, min(n_seq, n_seq * seq_len // rows) // threads)
    return threads * next(each for each in range(most, 0, -1) if each == 1 or n_seq % (threads * each) == 0)
