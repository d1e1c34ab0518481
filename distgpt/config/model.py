"""The architecture of a model."""

from __future__ import annotations

from dataclasses import dataclass

from distgpt.config.setting import check, setting
from distgpt.errors import UsageError

NORMS = ("layernorm", "rmsnorm")
MLPS = ("gelu", "relu", "swiglu")
POSITIONS = ("learned", "rope", "none")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The same in every stage and in every checkpoint.

    Upper limits lie beyond any such model: a file that claims more is refused before memory is allocated.
    """

    vocab_size: int = setting(
        0, "Vocabulary size, at least the tokenizer's; 0: the tokenizer's.", low=0, most=1 << 24
    )
    seq_len: int = setting(128, "Tokens per sequence: the context length.", low=1, most=1 << 20)
    n_layer: int = setting(4, "Transformer layers.", low=1, most=1000)
    n_head: int = setting(4, "Attention heads per layer.", low=1)
    n_embd: int = setting(128, "Width of the embedding and of every layer.", low=1, most=1 << 17)
    norm: str = setting("layernorm", "Normalization.", choices=NORMS)
    norm_gain: bool = setting(True, "Scale normalized values by trained weights.")
    norm_eps: float = setting(1e-5, "Added to the variance in a normalization.", above=0)
    embed_norm: bool = setting(False, "Normalize the embeddings.")
    final_norm: bool = setting(True, "Normalize before the output layer.")
    mlp: str = setting("gelu", "Activation of the MLP.", choices=MLPS)
    # swiglu's three matrices of 8/3 of the width have as many parameters as two of four times the width
    mlp_width: int = setting(
        0, "Width inside the MLP; 0: 4 n_embd, or 8/3 n_embd for swiglu.", low=0, most=1 << 19
    )
    positions: str = setting("learned", "Encoding of positions.", choices=POSITIONS)
    bias: bool = setting(True, "Biases in linear layers and layer norms.", flag="--bias/--no-bias")
    tied: bool = setting(True, "Share the embedding's weights with the output layer.", flag="--tied/--untied")
    vocab_multiple: int = setting(64, "Pad the embedding's rows to a multiple of this.", low=1)
    init_std: float = setting(0.02, "Standard deviation of the initial weights.", above=0)
    init_residual: bool = setting(
        True, "Scale the initial projections into the residual stream by 1/√(2 n_layer)."
    )

    def __post_init__(self) -> None:
        check(self)
        if self.n_embd % self.n_head:
            raise UsageError(f"n_embd {self.n_embd} cannot be divided among n_head {self.n_head} heads")
        if self.positions == "rope" and self.head_size % 2:
            raise UsageError(
                f"positions is rope, which rotates pairs: n_embd / n_head = {self.head_size} is odd"
            )

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding; those past `vocab_size` stay zero and are never predicted."""
        return _round_up(self.vocab_size, self.vocab_multiple)

    @property
    def hidden(self) -> int:
        """Width inside the MLP, after its activation."""
        if self.mlp_width:
            return self.mlp_width
        return _round_up(8 * self.n_embd // 3, 8) if self.mlp == "swiglu" else 4 * self.n_embd
