"""A hashed table of token pairs, added to the residual stream before the first layer.

Each token and the one before it give the number of a row; pairs with the same number share it. Lacking
today: `sort_tokens` is valid until its next call, so that value embeddings need their tokens sorted first,
as here; the compiled decoder knows no such part, and a cached pass does not know the token before its first
one.
"""

from __future__ import annotations

from distgpt.core.config import ModelConfig
from distgpt.core.model.layers import Block, LayerActivations, Part, Positions, Scratch, Tensors
from distgpt.core.model.memory import VALUES, Spec
from distgpt.core.model.model import Architecture
from distgpt.core.ops.api import Array, Floats2d, Ints1d, SortedTokens, Wide2d
from distgpt.core.ops.kernels import Kernels

ROWS = 1 << 16
FACTORS = 2654435761, 40503  # odd, so that neither token is lost


class TokenPairs(Part):
    """y[n] += w[hash(token n - 1, token n)], w (ROWS, C)"""

    def __init__(self, name: str, config: ModelConfig) -> None:
        super().__init__(name, [Spec(f"{name}.w", (ROWS, config.n_embd), VALUES)])

    def bind(self, kernels: Kernels, params: Tensors, grads: Tensors) -> None:
        name = f"{self.name}.w"
        self.k, self.w, self.dw = kernels, params[name], grads.get(name)

    def rows(self, tokens: Ints1d, seq_len: int) -> Ints1d:
        """Return the row of each token's pair; the first token of a sequence counts as its own neighbour."""
        each: Array = tokens.reshape(-1, seq_len).astype("int64")
        before = each.copy()
        before[:, 1:] = each[:, :-1]
        numbers: Ints1d = ((FACTORS[0] * before + FACTORS[1] * each) % ROWS).astype("int32")
        return numbers.reshape(-1)

    def forward(self, x: Floats2d, rows: Ints1d) -> None:
        self.k.add_embedding(x, rows, self.w)

    def weight_gradients(self, dx: Floats2d, rows: SortedTokens, accumulate: bool) -> None:
        if self.dw is not None:
            if not accumulate:
                self.k.zero(self.dw)
            self.k.embed_backward(self.dw, None, dx, rows, 1)


class FirstBlock(Block):
    """A layer that adds the table to its input, which the embedding has written and nobody else reads."""

    def __init__(self, config: ModelConfig, index: int, positions: Positions) -> None:
        super().__init__(config, index, positions)
        self.pairs = TokenPairs(f"blocks.{index}.pairs", config)
        self.parts = [*self.parts, self.pairs]
        self.seq_len = config.seq_len

    def before_attention(
        self, acts: LayerActivations, x: Floats2d, r: Floats2d | None, tokens: Ints1d
    ) -> None:
        self.pairs.forward(x, self.pairs.rows(tokens, self.seq_len))
        super().before_attention(acts, x, r, tokens)

    def weight_gradients(
        self,
        acts: LayerActivations,
        tmp: Scratch,
        out_sums: Wide2d | None,
        tokens: SortedTokens,
        accumulate: bool,
    ) -> None:
        super().weight_gradients(acts, tmp, out_sums, tokens, accumulate)
        rows = self.pairs.rows(tokens.tokens, self.seq_len)
        self.pairs.weight_gradients(tmp.din, self.k.sort_tokens(rows, ROWS), accumulate)


def block(config: ModelConfig, index: int, positions: Positions) -> Block:
    return (Block if index else FirstBlock)(config, index, positions)


def architecture(config: ModelConfig) -> Architecture:
    """Return the model with its table; a `ModelKind` builds it (`"models"` in components.py)."""
    return Architecture(config, block)
