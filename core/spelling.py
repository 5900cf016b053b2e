"""Which of the known words was meant by one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A question to end an error with, `did you mean 'seed'?`; empty where no known word is like this one.

    `likeness`: how like it a word must be, 0 to 1, as `difflib.get_close_matches` counts it. One whose
    initials it is goes before them all: `client.lr` is `client.learning_rate`.
    """
    words = [*known]
    short = [w for w in words if "_" in w and _initials(w) == word]
    near = short or difflib.get_close_matches(word, words, n=1, cutoff=likeness)
    return f"did you mean {near[0]!r}?" if near else ""


def _initials(word: str) -> str:
    table, dot, name = word.rpartition(".")
    return table + dot + "".join(part[:1] for part in name.split("_"))
