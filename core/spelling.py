"""Which of the known words was meant by one that there is not."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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


def spelled(
    objects: type[Any] | None = None, but: Collection[str] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of a function: a `TypeError`, as Python's, for what is no argument of it, with the one that is near.

    It takes its own and those of the `TypedDict` objects, `but` for some, which it refuses in its own words.
    """

    def decorated(taker: Callable[P, R]) -> Callable[P, R]:
        own = [p.name for p in inspect.signature(taker).parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = dict.fromkeys([*own, *(objects.__annotations__ if objects else ())])
        known = [name for name in taken if name not in ("self", *but)]
        called = taker.__qualname__.removesuffix(".__init__")

        @wraps(taker)
        def taking(*args: P.args, **given: P.kwargs) -> R:
            if unknown := next((name for name in given if name not in taken), ""):
                hint = did_you_mean(unknown, known) or f"it takes {', '.join(known)}"
                raise TypeError(f"{called}() got an unexpected keyword argument {unknown!r}: {hint}")
            return taker(*args, **given)

        return taking

    return decorated
