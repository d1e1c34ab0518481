"""Forward and backward passes over a batch of one shape, with all their memory made beforehand.

A batch is cut into slabs of whole sequences where the workers divide it evenly. Each worker then takes its
slab through all layers without waiting for the others; all meet for the weight gradients, which are sums over
the whole batch. Where the sequences do not divide evenly there is one slab, and each kernel splits its rows
or columns; so it is where reading the weights takes longest.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from itertools import pairwise
from typing import Any

from distgpt.kernels.api import Affine, Array, Head, Work
from distgpt.model.layers import NORMS, Block
from distgpt.model.memory import Rows
from distgpt.model.model import Model

TILE = 128  # a matmul is fastest with rows in multiples of this
EVEN_ENOUGH = 8  # sequences per worker from which an uneven split hardly matters
# Without gradients, workers with few rows each spend their time on the weights of wide layers: each packs all
# of them, or a part where kernels split columns. One or two rows are never packed, and slabs are best.
FEW, WIDE = range(3, 65), 4 << 20  # rows of a worker, and bytes of a layer's parameters

# What every layer keeps of its forward pass for the backward pass; the rest is shared by all layers and
# computed again, which is nearly free for "mlp" (norm outputs and activations come along with their
# gradients) and costs a second forward pass for "block".
KEPT = {
    "none": ("s1", "h1", "qkv", "att", "s2", "h2", "pre", "act"),
    "mlp": ("s1", "qkv", "att", "s2", "pre"),
    "block": ("s1",),
    "all": (),  # for a pass that is never followed by a backward pass
}

# What gradients of a layer's weights are computed from besides activations, and the layer below writes anew.
# Of two names, the layer below reads by the first one what this layer wrote by the second.
TURNS = (("dout", "din"), ("out_sums", "in_sums"), ("dpre",), ("dqkv",), ("dmid",), ("mid_sums",))

Ready = Callable[[int], None]


class Pass:
    """Memory and order of work for batches of (n_seq, seq_len) tokens; `recompute` is a key of KEPT.

    For all workers of the kernels, or for `workers` of them.
    """

    def __init__(
        self,
        model: Model,
        n_seq: int,
        seq_len: int,
        training: bool,
        recompute: str = "mlp",
        workers: int | None = None,
    ) -> None:
        self.model, self.k = model, model.kernels
        self._workers = model.kernels.threads if workers is None else workers
        self._wide = not training and _layer_bytes(model) >= WIDE
        self._cut(n_seq, seq_len)
        self._recompute = recompute if training else "all"
        self._again = self._recompute == "mlp"
        # Whether the layer below may begin meanwhile: it has to leave alone what they read.
        self._beside = self.k.beside and self._recompute == "none"
        self._turns = [(*ring, f"last_{ring[0]}") if self._beside else ring for ring in TURNS]
        self.layers = self._layers()
        self.scratch = self._scratch(training)
        ends = self._arrays(dict.fromkeys(("embedded", "s", "hidden"), model.config.n_embd))
        norm, n = NORMS[model.config.norm], self.n_rows
        wide = {
            "losses": self.k.wide_zeros(n),
            "embed_stats": norm.stats(self.k, n),
            "stats": norm.stats(self.k, n),
        }
        self.ends = Rows(self.slabs, ends | wide)
        row_bytes = model.config.padded_vocab * self.k.dtype.itemsize
        chunks = -(-n * row_bytes // self.k.logits_bytes)
        even = -(-n // chunks)
        self.logits_shape = (min(n, -(-even // TILE) * TILE), model.config.padded_vocab)
        self._head: Head | None = self._new_head() if training else None

    def reshaped(self, n_seq: int, seq_len: int) -> Pass:
        """A pass over a batch of another shape, with as many rows or fewer, in the same memory.

        Only without gradients: then one layer's activations are all layers'.
        """
        other = copy(self)
        other._cut(n_seq, seq_len)
        layer = self.layers[0].cut(other.slabs)
        other.layers = [layer for _ in self.layers]
        other.scratch, other.ends = self.scratch.cut(other.slabs), self.ends.cut(other.slabs)
        return other

    def hidden(self, tokens: Array, caches: Array | None = None, start: Array | None = None) -> Array:
        """The last hidden states (N, C) of tokens (N,): everything before the output layer.

        With `caches` (layers, 2, B, H, T_max, head) the tokens follow `start` others whose k and v are there.
        """
        self.k.each(lambda i: self._forward_slab(i, tokens, caches, start), len(self.slabs))
        return self.ends.all.hidden

    def scores(self, out: Array, hidden: Array) -> None:
        """out (n, padded V) ← the score of every token after each of some hidden states (n, C)."""
        self.k.linear(out, hidden, Affine(self.model.head, None))

    def loss(self, total: Array, tokens: Array, targets: Array) -> None:
        """total[0] ← the mean loss over all rows, without gradients."""
        self.k.sum(total, self.losses(tokens, targets), 1 / self.n_rows, accumulate=False)

    def expect_losses(self) -> None:
        """Make the memory for logits, which a pass without gradients may never need."""
        if self._head is None:
            self._head = self._new_head()

    def losses(self, tokens: Array, targets: Array) -> Array:
        """The loss of every row (N,), in memory that the next pass writes over."""
        self._head_loss(tokens, targets, None, None, 0.0, False)
        return self.ends.all.losses

    def loss_and_gradients(
        self, tokens: Array, targets: Array, scale: float, accumulate: bool, on_ready: Ready | None = None
    ) -> None:
        """The model's gradients ← (or += ) those of scale · mean loss, and grads.extra that loss itself.

        on_ready(n) is called as the gradients come in: the first n elements of the flat buffer are final.
        """
        model, t, ready = self.model, self.scratch.all, on_ready or _nothing
        dhead = model.head_grad
        dhidden, out_sums = (t.dout, None) if model.final_norm is None else (t.dh1, t.out_sums)
        self._head_loss(tokens, targets, dhidden, dhead, scale / self.n_rows, accumulate)
        self.k.sum(model.grads.extra[:1], self.ends.all.losses, scale / self.n_rows, accumulate)
        if model.final_norm is not None:
            e = self.ends.all
            model.final_norm.backward(t.dout, None, out_sums, t.dh1, None, e.s, e.stats)
            model.final_norm.weights(out_sums, t.dh1, e.s, e.stats, accumulate)
        under_way: list[Block] = []  # whose weights' gradients may be
        for block, layer in zip(reversed(model.blocks), reversed(self.layers), strict=True):
            self.k.each(partial(self._backward_slab, block, layer, accumulate), len(self.slabs))
            self._join(under_way, ready)
            self._share(partial(block.weights, layer.all, t, t.dout, out_sums, accumulate))
            under_way.append(block)
            if not self._beside:
                self._join(under_way, ready)
            self._turn(1)
            out_sums = t.out_sums
        self._embedding_weights(tokens, accumulate)
        self._join(under_way, ready)
        self._turn(-model.config.n_layer)  # back to where they were: a recorded pass is repeated as it is
        ready(model.layout.size)

    def _share(self, work: Work) -> None:
        """Gradients of weights: beside the layer below where that may begin, else in order."""
        if self.k.beside and not self._beside:
            work()
        else:
            self.k.share(work)

    def _join(self, under_way: list[Block], ready: Ready) -> None:
        """From here on the gradients of these layers' weights are final."""
        while under_way:
            self.k.join()
            parts = under_way.pop().parts
            ready(self.model.layout.end_of(spec.name for part in parts for spec in part.specs()))

    def _turn(self, layers: int) -> None:
        """What a layer gave is what the layer below gets."""
        for ring in self._turns:
            self.scratch.rotate(ring, layers)

    def _cut(self, n_seq: int, seq_len: int) -> None:
        few = self._wide and -(-n_seq * seq_len // self._workers) in FEW
        count = 1 if few else _slab_count(n_seq, self._workers)
        cuts = [n_seq * i // count * seq_len for i in range(count + 1)]
        self.slabs = [slice(a, b) for a, b in pairwise(cuts)]
        self.shape, self.seq_len, self.n_rows = (n_seq, seq_len), seq_len, cuts[-1]

    def _arrays(self, widths: dict[str, int]) -> dict[str, Array]:
        return {name: self.k.zeros(self.n_rows, width) for name, width in widths.items()}

    def _new_head(self) -> Head:
        return Head(self.model.head, self.k.zeros(*self.logits_shape), self.model.config.vocab_size)

    def _layers(self) -> list[Rows]:
        """Every layer's activations: its own where they are kept, one for all where they are not."""
        config, kept = self.model.config, KEPT[self._recompute]
        widths = Block.activations(config)
        own = {name: width for name, width in widths.items() if name in kept}
        shared: dict[str, Any] = self._arrays({name: widths[name] for name in widths.keys() - own.keys()})
        if self._recompute in ("block", "all"):
            shared |= Block.statistics(config, self.k, self.n_rows)
        layers = []
        for _ in range(config.n_layer):
            statistics = {} if "lse" in shared else Block.statistics(config, self.k, self.n_rows)
            layers.append(Rows(self.slabs, self._arrays(own) | statistics | shared))
        return layers

    def _scratch(self, training: bool) -> Rows:
        config, k = self.model.config, self.k
        widths = Block.scratch(config)
        if self._beside:
            widths |= {ring[-1]: widths[ring[0]] for ring in self._turns if ring[0] in widths}
        unused = {"dpre"} if k.in_place else set()
        unused |= {"dact"} if self._again else set()
        unused |= set() if training else widths.keys() - (set() if k.adds else {"dh1"})
        used = {name: width for name, width in widths.items() if name not in unused}
        scratch = Rows(self.slabs, self._arrays(used))
        if training and k.norm_sums and (config.norm_gain or config.bias):
            for name in (name for ring in self._turns for name in ring if "sums" in ring[0]):
                scratch.add(name, k.wide_zeros(k.norm_sums, 3 * config.n_embd))
        return scratch

    def _forward_slab(self, slab: int, tokens: Array, caches: Array | None, start: Array | None) -> None:
        model, e, t = self.model, self.ends.slabs[slab], self.scratch.slabs[slab]
        x, r = self.layers[0].slabs[slab].s1, None
        first = x if model.embed_norm is None else e.embedded
        wte, wpe = model.params["wte"], model.positions.wpe
        self.k.embed(first, tokens[self.slabs[slab]], wte, wpe, self.seq_len, start)
        if model.embed_norm is not None:
            model.embed_norm.forward(x, first, e.embed_stats, first, None)
        last = e.hidden if model.final_norm is None else e.s
        inputs = [*(each.slabs[slab].s1 for each in self.layers), last]
        for i, (block, layer) in enumerate(zip(model.blocks, self.layers, strict=True)):
            a = layer.slabs[slab]
            block.before_attention(a, x, r)
            if caches is None:
                block.attend(a, self.seq_len)
            else:
                block.attend_cached(a, caches[i], start)
            block.after_attention(a, t)
            x, r = block.project(a, t, inputs[i + 1])
        if model.final_norm is None:
            if r is not None:
                self.k.add(e.hidden, x, r)
        else:
            model.final_norm.forward(e.hidden, e.s, e.stats, x, r)

    def _head_loss(
        self,
        tokens: Array,
        targets: Array,
        dx: Array | None,
        dw: Array | None,
        scale: float,
        accumulate: bool,
    ) -> None:
        self.expect_losses()
        assert self._head is not None
        x, losses = self.hidden(tokens), self.ends.all.losses
        self.k.linear_cross_entropy(losses, dx, dw, x, self._head, targets, scale, accumulate)

    def _backward_slab(self, block: Block, layer: Rows, accumulate: bool, slab: int) -> None:
        a, t = layer.slabs[slab], self.scratch.slabs[slab]
        if self._recompute == "block":
            block.before_attention(a, a.s1, None)
            block.attend(a, self.seq_len)
            block.after_attention(a, t)
        block.backward(a, t, t.din, t.dout, self.seq_len, self._again, accumulate)

    def _embedding_weights(self, tokens: Array, accumulate: bool) -> None:
        """t.dout holds the gradient of the first block's input."""
        model, e, t = self.model, self.ends.all, self.scratch.all
        dx, dwpe = t.dout, model.positions.dwpe
        if model.embed_norm is not None:
            model.embed_norm.backward(t.din, None, t.in_sums, dx, None, e.embedded, e.embed_stats)
            model.embed_norm.weights(t.in_sums, dx, e.embedded, e.embed_stats, accumulate)
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


def _layer_bytes(model: Model) -> int:
    specs = [spec for block in model.blocks[:1] for part in block.parts for spec in part.specs()]
    return sum(spec.size for spec in specs) * int(model.kernels.dtype.itemsize)


def _nothing(ready: int) -> None:
    return None
