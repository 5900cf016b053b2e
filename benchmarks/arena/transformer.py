"""A small transformer for the token after a text."""

from __future__ import annotations

import math

import torch
from torch import nn


class Transformer(nn.Module):
    """One block after Vaswani et al. (2017), with norms before its two halves, read at the last token.

    | symbol | meaning                                                    |
    |--------|------------------------------------------------------------|
    | X      | states of a text, (context, width): token and place, added |
    | x      | that of the last token, the only one that is asked for     |

        x <- x + Attention(query LayerNorm(x), keys and values LayerNorm(X)),  in heads
        x <- x + W2 gelu(W1 LayerNorm(x)),  scores = W LayerNorm(x)
    """

    def __init__(self, tokens: int, context: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Embedding(context, width)
        self.first, self.second, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.query = nn.Linear(width, width)
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.heard = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        self.scores = nn.Linear(width, tokens)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (count, tokens) of what follows token numbers (count, context)."""
        states = self.tokens(x) + self.places.weight
        state = states[:, -1] + self.heard(self._attended(self.first(states)))
        state = state + self.inner(self.second(state))
        found: torch.Tensor = self.scores(self.last(state))
        return found

    def _attended(self, states: torch.Tensor) -> torch.Tensor:
        """What the last token hears of all, (count, width)."""
        q = self._by_head(self.query(states[:, -1:]))
        k, v = self._by_head(self.keys(states)), self._by_head(self.values(states))
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(3)
        return (weights @ v).flatten(1)

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        """(count, length, width) as (count, heads, length, width of a head)."""
        count, length, width = states.shape
        return states.reshape(count, length, self.heads, width // self.heads).transpose(1, 2)
