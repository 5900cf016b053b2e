"""The boundary round parts of one's own: what one raises becomes one error, with its own lines alone.

    strategy Mine.weight (mine.py:12): ZeroDivisionError: division by zero
      mine.py:12 in weight
        return 1 / context.staleness

A part is called from many places, so it is known by the frames of the error: a method of its class is among
them, or the function that it is. A method that could not be called at all is known by what Python says of it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType
from typing import Any

from anabranch.core.errors import AnabranchError, AppError
from anabranch.core.parts import PartKind
from anabranch.support.own_code import is_own, is_signal, told


@contextmanager
def own_parts(kinds: Iterable[PartKind]) -> Iterator[None]:
    """Inside, parts of these kinds that were let in may run. Raises `AppError` for what one of them raises.

    Errors that the package raises on purpose, and those of other code, go through as they are.
    """
    try:
        yield
    except AnabranchError:
        raise
    except (Exception, SystemExit) as error:
        found = None if is_signal(error) else told_part(error, kinds)
        if found is None:
            raise
        raise found from error


def told_part(error: BaseException, kinds: Iterable[PartKind]) -> AppError | None:
    """What an error is where a part of one's own has raised it; None where none has."""
    start = _method(error, kinds)
    return AppError(told(start, error)) if start else None


def _method(error: BaseException, kinds: Iterable[PartKind]) -> str:
    """`strategy Mine.weight`: the first method of a part of one's own on the way to an error; empty: none."""
    known = {
        code: f"{kind.word} {name}" for kind in kinds for part in kind.own() for code, name in _codes(part)
    }
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = next((known[frame.f_code] for frame in frames if frame.f_code in known), "")
    return inside or _miscalled(error, known)


def _miscalled(error: BaseException, known: Mapping[CodeType, str]) -> str:
    """The method that takes other arguments than it is given: Python says its name, and no frame has it."""
    if not isinstance(error, TypeError):
        return ""
    called = str(error).partition("()")[0]
    return next((name for code, name in known.items() if code.co_qualname == called), "")


def _codes(part: Any) -> Iterator[tuple[CodeType, str]]:
    """The functions of a part that are no library's, each with its name."""
    if not isinstance(part, type):
        yield from _code(part, getattr(part, "__name__", type(part).__name__))
        return
    for base in reversed(part.__mro__):
        for name, found in vars(base).items():
            yield from _code(found, f"{part.__name__}.{name}")


def _code(found: Any, name: str) -> Iterator[tuple[CodeType, str]]:
    for holder in ("fget", "func", "__func__"):  # a property's, a cached one's, a class method's
        found = getattr(found, holder, None) or found
    code = getattr(found, "__code__", None)
    if code is not None and is_own(code.co_filename):
        yield code, name
