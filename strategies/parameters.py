"""Which values a strategy's parameters may have, said where they are: `Annotated[float, POSITIVE] = 1.0`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from anabranch.core.config.tables import check_type
from anabranch.core.errors import ConfigError

PLAIN = (int, float, str, bool, Mapping[str, Any])  # what a class makes of others is not what a table has


@dataclass(frozen=True)
class Range:
    """The values for which `holds` is true; of others it is said that they `must`."""

    must: str
    holds: Callable[[Any], bool]


AT_LEAST_ONE = Range("be at least 1", lambda x: x >= 1)
POSITIVE = Range("be greater than 0", lambda x: x > 0)
NOT_NEGATIVE = Range("not be negative", lambda x: x >= 0)
FRACTION = Range("be in [0, 1]", lambda x: 0 <= x <= 1)
POSITIVE_FRACTION = Range("be in (0, 1]", lambda x: 0 < x <= 1)
LESS_THAN_ONE = Range("be in [0, 1)", lambda x: 0 <= x < 1)


def one_of(choices: Collection[Any]) -> Range:
    """The values that are listed."""
    return Range(f"be one of {', '.join(map(str, choices))}", lambda x: x in choices)


def check_parameters(part: Any, table: str = "strategy") -> None:
    """Raises `ConfigError` for the first value of another type, or else out of its range, naming the key."""
    kind: Any = type(part)
    for key, of, default in _types_of(kind):
        value = getattr(part, key)
        if (type(value), value) != (type(default), default):  # a table's defaults are not looked at either
            check_type(value, of, f"{table}.{key}")
    for key, range_ in _ranges_of(kind):
        value = getattr(part, key)
        if not range_.holds(value):
            raise ConfigError(f"{table}.{key} must {range_.must}, not {value!r}")


@cache
def _types_of(kind: type) -> list[tuple[str, Any, Any]]:
    """Of the keys that have a plain one: key, type and default."""
    hints = get_type_hints(kind)
    keys = [f for f in fields(kind) if f.init] if is_dataclass(kind) else []
    return [(f.name, hints[f.name], f.default) for f in keys if hints[f.name] in PLAIN]


@cache
def _ranges_of(kind: type) -> list[tuple[str, Range]]:
    """By their keys. To read a hint is to compile its text, which takes longer than all checks."""
    hints = get_type_hints(kind, include_extras=True).items()
    return [(k, r) for k, hint in hints for r in getattr(hint, "__metadata__", ()) if isinstance(r, Range)]
