"""The same GPT in PyTorch with all fused operations, and distgpt's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The architecture, with names and defaults of distgpt's configuration."""

    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    seq_len: int
    vocab_size: int
    norm: str
    norm_gain: bool
    norm_eps: float
    embed_norm: bool
    final_norm: bool
    mlp: str
    mlp_width: int
    positions: str
    rope_base: float
    bias: bool
    tied: bool
    vocab_multiple: int
    init_std: float

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Shape:
        """Return a Shape from distgpt's settings, ignoring settings that it does not have."""
        return cls(**{each.name: settings[each.name] for each in fields(cls)})

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def hidden(self) -> int:
        if self.mlp_width:
            return self.mlp_width
        return -(-(8 * self.n_embd // 3) // 8) * 8 if self.mlp == "swiglu" else 4 * self.n_embd


def make_norm(shape: Shape) -> nn.Module:
    if shape.norm == "rmsnorm":
        return nn.RMSNorm(shape.n_embd, shape.norm_eps, elementwise_affine=shape.norm_gain)
    return nn.LayerNorm(shape.n_embd, shape.norm_eps, elementwise_affine=shape.norm_gain, bias=shape.bias)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kv, self.size = shape.n_kv_head or shape.n_head, shape.n_embd // shape.n_head
        self.heads = [shape.n_head, kv, kv]
        self.grouped = {"enable_gqa": True} if kv < shape.n_head else {}
        self.qkv = nn.Linear(shape.n_embd, sum(self.heads) * self.size, bias=shape.bias)
        self.proj = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split(self.heads, 1)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **self.grouped)
        return self.proj(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    half = shape.n_embd // shape.n_head // 2
    angles = torch.outer(torch.arange(shape.seq_len), shape.rope_base ** (-torch.arange(half) / half))
    return angles.cos(), angles.sin()


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.kind = shape.mlp
        branches = 2 if shape.mlp == "swiglu" else 1
        self.up = nn.Linear(shape.n_embd, branches * shape.hidden, bias=shape.bias)
        self.proj = nn.Linear(shape.hidden, shape.n_embd, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            return self.proj(F.silu(gate) * value)
        return self.proj(F.gelu(h, approximate="tanh") if self.kind == "gelu" else F.relu(h, inplace=True))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(shape), make_norm(shape)
        self.attention, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The padded rows of the vocabulary start at zero and are never targets, but are not masked."""

    def __init__(self, shape: Shape, head: nn.LinearCrossEntropyOptions | None) -> None:
        super().__init__()
        self.head_options = head
        self.wte = nn.Embedding(shape.padded_vocab, shape.n_embd)
        self.wpe = nn.Embedding(shape.seq_len, shape.n_embd) if shape.positions == "learned" else None
        self.rotation = rope_tables(shape) if shape.positions == "rope" else None
        self.embed_norm = make_norm(shape) if shape.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.final_norm = make_norm(shape) if shape.final_norm else nn.Identity()
        self.head = nn.Linear(shape.n_embd, shape.padded_vocab, bias=False)
        self.initialise(shape)

    @torch.no_grad()
    def initialise(self, shape: Shape) -> None:
        residual_std = shape.init_std / math.sqrt(2 * shape.n_layer)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if ".proj." in name else shape.init_std)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
        if shape.tied:
            self.head.weight = self.wte.weight
        for table in (self.wte.weight, self.head.weight):
            table[shape.vocab_size :] = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.hidden(tokens).flatten(0, 1)
        if self.head_options is not None:
            return F.linear_cross_entropy(x, self.head.weight, targets.flatten(), options=self.head_options)
        return F.cross_entropy(self.head(x).float(), targets.flatten())

    def scores(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe.weight[: tokens.shape[1]]
        x = self.embed_norm(x)
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.final_norm(x)


def fill(model: nn.Module, weights: Any) -> None:
    renamed = {"mlp.fc": "mlp.up", "attn.": "attention."}
    with torch.no_grad():
        own = dict(model.named_parameters())
        for name in weights.files:
            at = name if name.endswith((".w", ".b")) else f"{name}.w"
            for ours, theirs in renamed.items():
                at = at.replace(ours, theirs)
            own.pop(f"{at[:-2]}.{'weight' if at.endswith('w') else 'bias'}").copy_(
                torch.from_numpy(weights[name])
            )
    assert not own, f"no values for {sorted(own)}"
