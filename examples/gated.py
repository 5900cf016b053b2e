"""A transformer of today's form, of which sub-models leave out gated units (docs/submodels.md, "Units").

    anabranch simulate examples/gated.py:Gated --updates 60 --strategy asyncdrop

The rows of a digit are eight tokens. A block is RMSNorm, attention with rotary places, RMSNorm and SwiGLU,

    down(silu(gate(x)) * up(x))

whose hidden unit u is row u of `gate`, row u of `up` and column u of `down`: all are cut together. Widths at
which tensors are added, and the heads of attention that is written by hand, stay whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.workloads import App, Examples, Shard
from anabranch.workloads.digits import Digits

ROWS, WIDTH, HEADS, HIDDEN, BLOCKS, CLASSES = 8, 32, 4, 64, 2, 10


class Attention(nn.Module):
    """Queries and keys are turned by their places (RoPE, Su et al., arXiv 2104.09864)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        rates = 100 ** -torch.arange(0, 1, 2 * HEADS / WIDTH)
        self.angles: Tensor
        self.register_buffer("angles", torch.outer(torch.arange(float(ROWS)), rates), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, rows, width) to the same."""
        batch, rows, _ = x.shape
        q, k, v = (
            layer(x).view(batch, rows, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        heads = functional.scaled_dot_product_attention(self._turned(q), self._turned(k), v)
        mixed: Tensor = self.o(heads.transpose(1, 2).reshape(batch, rows, WIDTH))
        return mixed

    def _turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SwiGlu(nn.Module):
    """The gated feed-forward part (Shazeer, arXiv 2002.05202)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same."""
        found: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return found


class Block(nn.Module):
    """What it finds is added to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attend = nn.RMSNorm(WIDTH), Attention()
        self.between, self.mlp = nn.RMSNorm(WIDTH), SwiGlu()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, rows, width) to the same."""
        x = x + self.attend(self.before(x))
        found: Tensor = x + self.mlp(self.between(x))
        return found


class Transformer(nn.Module):
    """Scores of a picture by the mean over its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(ROWS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (count, 10) of pictures (count, 64)."""
        scores: Tensor = self.head(self.norm(self.blocks(self.embed(x.view(-1, ROWS, ROWS)))).mean(1))
        return scores


class Gated(App):
    """The digits, which are carried by the package of scikit-learn."""

    name = "gated"

    def model(self) -> Any:
        """See the module."""
        return Transformer()

    def data(self, shard: Shard) -> Examples:
        """See `Digits`."""
        return Digits().data(shard)
