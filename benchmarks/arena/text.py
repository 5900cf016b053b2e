"""Generated text, of which a small transformer says the next token.

| symbol   | meaning                                                                    |
|----------|----------------------------------------------------------------------------|
| V        | tokens that there are                                                      |
| u_t      | the token at t, drawn from softmax(z_t)                                    |
| A, B     | (V, V), standard normal: what follows a token, and what the one before it  |
| C_k      | (V,), standard normal: the words of topic k                                |
| a, b, c  | how much each of them counts                                               |

    z_t = a A[u_{t-1}] + b B[u_{t-2}] + c C_k           (before the first token nothing counts but the topic)

Grammar (A, B) is everybody's, words are a topic's. A text is `CONTEXT` tokens and the next one; its topic is
not told, and has to be read out of all of them, which one attention layer can. Topics are what devices differ
in. All draws are of one named stream, so everybody has the same texts, and nothing is downloaded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from anabranch.core.rng import stream
from anabranch.workloads.app import Array
from benchmarks.arena.pools import Pool, PoolApp, Rows

if TYPE_CHECKING:
    from torch import nn

TOKENS, CONTEXT, TOPICS = 24, 12, 10
GRAMMAR, BEFORE, WORDS = 2.0, 1.0, 1.5  # a, b, c
TRAIN_TEXTS, TEST_TEXTS = 10_000, 2_000
WIDTH, HEADS, INNER = 24, 2, 48


class Text(PoolApp):
    """`x` int64 (count, 12), `y` int64: the token after them. 6,384 parameters."""

    name = "text"

    def model(self) -> nn.Module:
        """One block of a transformer, which is asked at the last token."""
        from benchmarks.arena.transformer import Transformer

        return Transformer(TOKENS, CONTEXT, WIDTH, HEADS, INNER)

    def pools(self) -> tuple[Pool, Pool]:
        """The texts."""
        return _pools()


@lru_cache(maxsize=1)
def _pools() -> tuple[Pool, Pool]:
    draws = stream(0, "arena", "text")
    count = TRAIN_TEXTS + TEST_TEXTS
    topics = draws.integers(TOPICS, size=count)
    tokens = Language.of(draws).texts(topics, CONTEXT + 1, draws)
    return Pool(tokens[:, :-1], tokens[:, -1], topics).cut(TRAIN_TEXTS)


class Language:
    """A, B (V, V) and C (topics, V), by how much they count."""

    def __init__(self, after: Array, before: Array, words: Array) -> None:
        self._after, self._before, self._words = GRAMMAR * after, BEFORE * before, WORDS * words

    @classmethod
    def of(cls, draws: np.random.Generator) -> Language:
        """A language, drawn."""
        square = TOKENS, TOKENS
        return cls(*(draws.standard_normal(shape) for shape in (square, square, (TOPICS, TOKENS))))

    def scores(self, tokens: Rows, topics: Rows) -> Array:
        """The scores z of the token after `tokens` (count, length), (count, V)."""
        found: Array = self._words[topics]
        if tokens.shape[1] >= 1:
            found = found + self._after[tokens[:, -1]]
        if tokens.shape[1] >= 2:
            found = found + self._before[tokens[:, -2]]
        return found

    def texts(self, topics: Rows, length: int, draws: np.random.Generator) -> Rows:
        """A text of each topic, (count, length), token by token.

        The argmax of z with Gumbel noise is a draw of softmax(z).
        """
        tokens = np.empty((len(topics), 0), np.int64)
        for _ in range(length):
            scores = self.scores(tokens, topics)
            drawn = (scores + draws.gumbel(size=scores.shape)).argmax(1)
            tokens = np.column_stack([tokens, drawn])
        return tokens
