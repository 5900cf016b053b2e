"""Which of the known words was meant by one that there is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A question to end an error with, `did you mean 'seed'?`; empty where no known word is like this one.

    `likeness`: how like it a word must be, 0 to 1, as `difflib.get_close_matches` counts it.
    """
    near = difflib.get_close_matches(word, [*known], n=1, cutoff=likeness)
    return f"did you mean {near[0]!r}?" if near else ""
