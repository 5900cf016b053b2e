"""Pickles of plain data, read without Python's own reader, which calls whatever a file names.

Of the machine that a pickle is a program of (`pickletools`, PEP 3154 and before) there are the steps here
that make dictionaries, lists, tuples, numbers, texts, None and truth values, and no other.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

Step = Callable[["_Machine", Any], None]
# No tuples: a deep one's hash ends the process, and one of pairs of pairs of the same is hashed forever.
KEYS = (str, int, float, bool, type(None))


class NotPlain(ValueError):
    """A pickle has something else in it, or is broken."""


class _Machine:
    """A stack, with marks, and what is remembered by number."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """What was put on the stack since the last mark; it is taken off."""
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def pop(self, count: int) -> tuple[Any, ...]:
        """The newest so many; they are taken off."""
        if count > len(self.stack):
            raise IndexError("the stack has less")
        taken = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return taken

    def pairs(self, items: list[Any] | tuple[Any, ...]) -> dict[Any, Any]:
        """Keys and values, in turn."""
        if any(type(key) not in KEYS for key in items[::2]):
            raise TypeError("a key is neither a text nor a number")
        return dict(zip(items[::2], items[1::2], strict=True))


def _push(m: _Machine, value: Any) -> None:
    m.stack.append(value)


def _nothing(m: _Machine, _: Any) -> None: ...


def _put(m: _Machine, number: int | None) -> None:
    m.memo[len(m.memo) if number is None else number] = m.stack[-1]


VALUES = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
STEPS: dict[str, Step] = {
    **dict.fromkeys(VALUES, _push),
    **dict.fromkeys(("PROTO", "FRAME"), _nothing),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, n: m.stack.append(m.memo[n])),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "DICT": lambda m, _: m.stack.append(m.pairs(m.since_mark())),
    "LIST": lambda m, _: m.stack.append(m.since_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.stack.append(m.pop(1)),
    "TUPLE2": lambda m, _: m.stack.append(m.pop(2)),
    "TUPLE3": lambda m, _: m.stack.append(m.pop(3)),
    "SETITEM": lambda m, _: _update(m, m.pop(2)),
    "SETITEMS": lambda m, _: _update(m, m.since_mark()),
    "APPEND": lambda m, _: _extend(m, m.pop(1)),
    "APPENDS": lambda m, _: _extend(m, m.since_mark()),
}


def _update(m: _Machine, items: Any) -> None:
    if type(m.stack[-1]) is not dict:
        raise TypeError("it sets items of what is no dictionary")
    m.stack[-1].update(m.pairs(items))


def _extend(m: _Machine, items: Any) -> None:
    if type(m.stack[-1]) is not list:
        raise TypeError("it appends to what is no list")
    m.stack[-1].extend(items)


def plain_pickle(data: bytes) -> Any:
    """What a pickle of plain data holds. Raises `NotPlain` of any other, having called nothing of it."""
    try:
        return _run(data)
    except NotPlain:
        raise
    except Exception as error:  # a broken one ends anywhere
        raise NotPlain(f"it is broken: {error}") from error


def _run(data: bytes) -> Any:
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name == "STOP":
            break
        step = STEPS.get(opcode.name)
        if step is None:
            named = f" ({argument})" if isinstance(argument, str) else ""
            raise NotPlain(f"it has more than plain data in it: {opcode.name}{named}")
        step(machine, argument)
    (found,) = machine.stack
    return found
