"""Forward and backward passes over a batch of one shape, with all their memory made beforehand.

A batch is cut into slices of whole sequences, as many for each worker, or nearly. Each worker then takes its
slices through all layers, without waiting for the other workers. On the way back all meet after each layer
for the gradients of its weights, which are sums over the whole batch. A few sequences that workers cannot
share evenly are one slice, and each kernel splits its rows or columns; so it is where reading the weights
takes longest (`_slice_count`).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import (
    NORMS,
    STATISTICS,
    SUMS,
    Scratch,
    more_activations,
    new_activations,
)
from distgpt.core.model.memory import Rows
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

ROWS_OF_TILE = 128  # a matmul is fastest with rows in multiples of this

# By `recompute`: the activations that every layer keeps for its backward pass. All layers share the others,
# and compute them again, which is nearly free for "mlp" (norm outputs and activations come along with their
# gradients) and costs a second forward pass for "block".
KEPT_BY_RECOMPUTE = {
    "none": ("s1", "h1", "qkv", "xhat", "att", "s2", "h2", "pre", "act", *STATISTICS),
    "mlp": ("s1", "qkv", "xhat", "att", "s2", "pre", *STATISTICS),
    "block": ("s1",),
    "all": (),  # for a pass that is never followed by a backward pass
}

Ready = Callable[[int], None]


@dataclass(slots=True)
class ModelActivations:
    """Arrays before the first and after the last layer, over N rows."""

    embedded: Floats2d  # (N, C), the embedding where a norm follows
    embed_stats: Stats
    s: Floats2d  # (N, C), the last layer's output
    stats: Stats  # of the final norm
    hidden: Floats2d  # (N, C), the output layer's input
    losses: Wide1d  # (N,)

    @classmethod
    def zeros(cls, config: ModelConfig, kernels: Kernels, n: int) -> ModelActivations:
        """Make the memory for n rows."""
        stats = NORMS[config.norm].stats
        return cls(
            embedded=kernels.zeros(n, config.n_embd),
            embed_stats=stats(kernels, n),
            s=kernels.zeros(n, config.n_embd),
            stats=stats(kernels, n),
            hidden=kernels.zeros(n, config.n_embd),
            losses=kernels.wide_zeros(n),
        )


class Pass:
    """Memory and order of work for batches of (n_seq, seq_len) tokens, for all workers or `workers` of them.

    All arrays are made here, once: a step allocates nothing. `recompute` is a key of KEPT_BY_RECOMPUTE.
    `positions` (N,), which callers fill, are of documents side by side.
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
        self._layer_bytes = 0 if training else elements * k.dtype.itemsize  # 0: it does not count
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

        # Two sets of names for the same memory, which layers take in turns: `Scratch` has them drawn.
        self._scratch: tuple[Rows[Scratch], Rows[Scratch]] | None = None
        self._finished: list[int] = []  # of each layer: how many gradients are final once its own are
        if training:
            model.make_gradients()
            scratch = model.blocks[0].scratch(k, n, first.added, self._again)
            own = Rows(self.slices, scratch, SUMS)
            below = Rows(self.slices, scratch.of_layer_below(), SUMS)
            self._scratch = (own, below)
            self._finished = [model.finished_with(block) for block in model.blocks]

        # Logits (N, V) would be the largest array of all: the head takes chunks of rows, all about alike.
        chunks = -(-n * config.padded_vocab * k.dtype.itemsize // k.logits_bytes)
        even = -(-n // chunks)
        self.logits_shape = (min(n, -(-even // ROWS_OF_TILE) * ROWS_OF_TILE), config.padded_vocab)
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
        other.around = self.around.cut(other.slices)
        return other

    def forward(
        self,
        tokens: Ints1d,
        caches: Array | None = None,
        start: Ints1d | None = None,
        slots: Ints1d | None = None,
    ) -> Floats2d:
        """Compute the last hidden states (N, C) of tokens (N,): everything before the output layer.

        With `caches` (layers, 2, L, K, T_max, head) the tokens follow `start` others whose k and v are there,
        in `slots`, as `attention_cached` says. Several sequences then take one slice.
        """
        for layers in self.model.groups:  # all at once, unless their weights are made in turn
            self.model.prepare(layers)
            self.k.each(partial(self._forward_slice, layers, tokens, caches, start, slots), len(self.slices))
        return self.around.all.hidden

    def logits(self, out: Floats2d, hidden: Floats2d) -> None:
        """out (n, padded V) ← the logit of every token after each of some hidden states (n, C)."""
        self.k.linear(out, hidden, Affine(self.model.head, None))

    def loss(self, total: Wide1d, tokens: Ints1d, targets: Ints1d) -> None:
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
        return self.around.all.losses

    def loss_and_gradients(
        self, tokens: Ints1d, targets: Ints1d, scale: float, accumulate: bool, on_ready: Ready | None = None
    ) -> None:
        """The model's gradients ← (or += ) those of scale · mean loss, and grads.flags[0] that loss itself.

        on_ready(n) is called as the gradients come in: the first n elements of the flat buffer are final.
        """
        # Once for the embedding and all value embeddings, which add up their gradients in this order.
        in_order = self.k.sort_tokens(tokens, self.model.config.padded_vocab)
        self._head_backward(tokens, targets, scale, accumulate)
        last = self._layers_backward(tokens, in_order, accumulate, on_ready)
        self._embedding_gradients(last, in_order, accumulate)
        if on_ready is not None:
            on_ready(self.model.layout.size)

    def _cut(self, n_seq: int, seq_len: int) -> None:
        """Cut the rows into slices of whole sequences: 1, or some for each worker."""
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
        number: int,
    ) -> None:
        """Take one slice through these layers, with what comes before the first and after the last one."""
        model = self.model
        around = self.around.slices[number]
        own = tokens[self.slices[number]]
        positions = self._positions_of(number)
        acts = [layer.slices[number] for layer in self.layers]
        last = around.hidden if model.final_norm is None else around.s
        into = [*(each.s1 for each in acts[1:]), last]  # what reads a layer's output
        first = layers.start
        if first == 0:
            self._embed(acts[0].s1, own, start, number)
            x, r = acts[0].s1, None
        else:
            x, r = model.blocks[first - 1].output(acts[first - 1], into[first - 1])
        for i in layers:  # x + r is the input of each: its norm adds them up
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

    def _embed(self, x: Floats2d, tokens: Ints1d, start: Ints1d | None, number: int) -> None:
        """x (n, C) ← the embedding of the n tokens of a slice, normalised where a norm follows."""
        model = self.model
        around = self.around.slices[number]
        embedded = x if model.embed_norm is None else around.embedded
        wte = model.tensors["wte"]
        positions = self._positions_of(number)
        self.k.embed(embedded, tokens, wte, model.positions.wpe, self.seq_len, start, positions)
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
        """Compute the loss of every row; with dx and dw the gradients of scale · their sum."""
        self.expect_losses()
        assert self._head is not None
        x = self.forward(tokens)
        losses = self.around.all.losses
        self.k.linear_cross_entropy(losses, dx, dw, x, self._head, targets, scale, accumulate)

    def _head_backward(self, tokens: Ints1d, targets: Ints1d, scale: float, accumulate: bool) -> None:
        """Compute the loss and its gradient up to the last layer's output, in dout of the scratch memory."""
        assert self._scratch is not None, "this pass was made for forward passes alone"
        model = self.model
        around = self.around.all
        tmp = self._scratch[0].all
        # The head writes the gradient of its input (N, C): that of the final norm's output, if there is one.
        dhidden = tmp.dout if model.final_norm is None else tmp.dh1
        dlogits_scale = scale * model.gradient_scale / self.n_rows
        dhead = model.grads.get(model.head_name)  # None where it is not trained
        self._head_loss(tokens, targets, dhidden, dhead, dlogits_scale, accumulate)
        self.k.sum(model.grads.flags[:1], around.losses, scale / self.n_rows, accumulate)
        if model.final_norm is not None:
            model.final_norm.backward(tmp.dout, None, tmp.out_sums, dhidden, None, around.s, around.stats)
            model.final_norm.weight_gradients(tmp.out_sums, dhidden, around.s, around.stats, accumulate)

    def _layers_backward(
        self, tokens: Ints1d, in_order: SortedTokens, accumulate: bool, on_ready: Ready | None
    ) -> Scratch:
        """Take the gradient back through all layers. Its end is in dout of what is returned."""
        assert self._scratch is not None
        model = self.model
        for block in model.blocks:  # before workers add to it together: see `ValueEmbedding`
            if block.values is not None and not accumulate:
                block.values.zero_gradient()
        scratch, below = self._scratch
        # The last layer's dout has no sums where no norm computed it.
        out_sums = None if model.final_norm is None else scratch.all.out_sums
        for layers in reversed(model.groups):
            model.prepare(layers)
            for i in reversed(layers):
                backward = partial(self._backward_slice, i, scratch, tokens, accumulate)
                self.k.each(backward, len(self.slices))
                # All workers meet here: gradients of weights are sums over the rows of all slices.
                gradients = model.blocks[i].weight_gradients
                acts = self.layers[i].all
                self.k.run_together(partial(gradients, acts, scratch.all, out_sums, in_order, accumulate))
                if on_ready is not None:
                    on_ready(self._finished[i])
                # The gradient of this layer's input is that of the output of the layer below.
                scratch, below = below, scratch
                out_sums = scratch.all.out_sums
        return scratch.all

    def _backward_slice(
        self, i: int, scratch: Rows[Scratch], tokens: Ints1d, accumulate: bool, number: int
    ) -> None:
        """Take one slice back through layer i; first forward again, where its activations were not kept."""
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
        """Compute gradients from that of the first layer's input, which is in tmp.dout."""
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
        if dwte is None:  # neither it nor wpe is trained
            return
        if not accumulate:
            if not model.config.tied:  # tied, the head has written there already
                self.k.zero(dwte)
            if dwpe is not None:
                self.k.zero(dwpe)
        self.k.embed_backward(dwte, dwpe, dx, tokens, self.seq_len, self.positions)


EVEN_ENOUGH = 8  # sequences of each worker
FEW_ROWS = range(3, 65)  # of a worker
LARGE_LAYER = 4 << 20  # bytes of a layer's parameters


def _slice_count(n_seq: int, seq_len: int, workers: int, rows: int, layer_bytes: int) -> int:
    """Return the number of slices: as many for each worker, or 1, whose rows or columns each kernel splits.

    Where sequences do not divide evenly, some workers have one more, and the others wait for them. Beside
    EVEN_ENOUGH or more that one hardly matters. A worker has several slices where they divide evenly and have
    at least `rows` rows each: what an operation writes is in the cache still when the next one reads it.
    """
    if n_seq % workers and n_seq < EVEN_ENOUGH * workers:
        return 1
    # A forward pass of few rows takes its time to read weights. A matmul first packs its matrix, in the order
    # in which it reads it: each worker with a slice of its own would pack all of every matrix; of one slice
    # kernels split the columns, and each worker packs a part. Of a layer that fits into a cache, or for more
    # rows than FEW_ROWS, packing hardly counts. For one or two rows nothing is packed, and slices, which do
    # not wait for each other, are best.
    if layer_bytes >= LARGE_LAYER and -(-n_seq * seq_len // workers) in FEW_ROWS:
        return 1
    most = max(1, min(n_seq, n_seq * seq_len // rows) // workers)
    even = (each for each in range(most, 1, -1) if n_seq % (workers * each) == 0)
    return workers * next(even, 1)


def cache_shape(config: ModelConfig, sequences: int = 1) -> tuple[int, ...]:
    """Return the shape of the keys and values that `Pass.forward` keeps of sequences."""
    return config.n_layer, 2, sequences, config.kv_heads, config.seq_len, config.head_size
