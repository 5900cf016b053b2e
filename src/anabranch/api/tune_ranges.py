"""What a tuning chooses from: points of settings, on logarithmic or even grids, or from a list.

A setting is named `table.key`; of a table in a table, such as the staleness function, `strategy.staleness.a`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from anabranch.api.configuration import Choice
from anabranch.core.config.tables import TABLES, Config, parse_override
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO, RAW
from anabranch.core.rng import stream
from anabranch.core.spelling import did_you_mean
from anabranch.strategies.registry import strategy_of
from anabranch.strategies.scheduled import parameters_of

Scale = Literal["log", "even", "list"]

DIGITS = 2  # of a point that a range is extended by
POINTS = 5
RATES = (0.01, 0.03, 0.1, 0.3)
EPOCHS, STEPS = (1, 2, 4), (2, 5, 10, 20, 40)
BUFFERS = (2, 4, 8, 16, 32)
COHORTS = (5, 10, 20, 40)
FRACTIONS = (0.05, 0.1, 0.2, 0.4)
ALPHAS = (0.2, 0.4, 0.6, 0.8)
EXPONENTS = (0.0, 0.5, 1.0)
KEPT, BITS = (0.02, 0.05, 0.1, 0.2), (4, 8)
CHAINS = ("int8|zstd", "ef(0.9)|topk(0.1)|int8|gaps|zstd")
GRID_KEYS = ("from", "to", "points", "scale")


@dataclass(frozen=True)
class TuneRange:
    """The points of one setting, ascending unless they are a list."""

    path: str
    points: tuple[Any, ...]
    scale: Scale = "log"

    def with_point(self, value: Any) -> TuneRange:
        """The same with this one, unless it is there."""
        if value in self.points or self.scale == "list":
            return self if value in self.points else replace(self, points=(value, *self.points))
        return replace(self, points=tuple(sorted((*self.points, value))))

    def edge(self, value: Any) -> Literal["least", "greatest", ""]:
        """Which end of the grid a value is, if it is one: who has chosen it has not seen both its sides."""
        if self.scale == "list" or len(self.points) < 2:
            return ""
        return "least" if value == self.points[0] else "greatest" if value == self.points[-1] else ""

    def beyond(self, end: Literal["least", "greatest"]) -> Any:
        """The point that would come next at this end, as far off as the one before; None: there is none."""
        last, before = self.points[:2] if end == "least" else self.points[-1:-3:-1]
        whole = isinstance(last, int) and isinstance(before, int)
        found = last * last / before if self.scale == "log" else 2 * last - before
        if whole:
            found = math.floor(found) if end == "least" else math.ceil(found)
        elif found:
            found = round(found, DIGITS - 1 - math.floor(math.log10(abs(found))))
        return None if found == last or (found <= 0 < last and self.scale == "log") else found


def read_range(path: str, said: Any) -> TuneRange:
    """What is said of a setting: a list of points, or `{from, to, points, scale}`. Raises `ConfigError`."""
    where = f"tune.ranges: {path}"
    if isinstance(said, Mapping):
        return _grid(path, said, where)
    points = said if isinstance(said, list | tuple) else [said]
    if not points:
        raise ConfigError(f"{where} is empty: give at least one value, or leave it out")
    found = list(dict.fromkeys(points)) if all(map(_is_plain, points)) else list(points)
    if not all(map(_is_number, found)):
        return TuneRange(path, tuple(found), "list")
    return TuneRange(path, tuple(sorted(found)), "log" if min(found) > 0 else "even")


def parse_range(text: str) -> TuneRange:
    """`table.key=FROM..TO`, or `table.key=a,b,c`. Raises `ConfigError`."""
    path, equals, values = text.partition("=")
    if not (equals and "." in path and values.strip()):
        raise ConfigError(f"--range {text!r}: write table.key=FROM..TO or table.key=VALUE,VALUE")
    first, dots, last = values.partition("..")
    if dots:
        return read_range(path.strip(), {"from": _value(first), "to": _value(last)})
    return read_range(path.strip(), [_value(word) for word in values.split(",")])


def default_ranges(config: Config, bytes_count: bool) -> list[TuneRange]:
    """What is worth tuning of a configuration: of its strategy what that has, about what it is set to.

    `bytes_count`: whether compression is worth its errors, as it is where bytes are paid for.
    """
    client, params = config.client, parameters_of(strategy_of(config))
    found = [TuneRange("client.learning_rate", RATES)]
    found.append(TuneRange("client.steps", STEPS) if client.steps else TuneRange("client.epochs", EPOCHS))
    devices = max(2, config.fleet.clients)
    if "buffer_size" in params:
        found.append(TuneRange("strategy.buffer_size", tuple(k for k in BUFFERS if k <= devices)))
    if "clients_per_round" in params:
        found.append(TuneRange("strategy.clients_per_round", tuple(m for m in COHORTS if m <= devices)))
    if "cache_fraction" in params:
        by_count = params["cache_size"] > 0
        found.append(
            TuneRange("strategy.cache_size", tuple(k for k in BUFFERS if k <= devices))
            if by_count
            else TuneRange("strategy.cache_fraction", FRACTIONS)
        )
    if params.get("alpha"):
        found.append(TuneRange("strategy.alpha", ALPHAS, "even"))
    if "a" in params:
        found.append(TuneRange("strategy.a", EXPONENTS, "even"))
    if params.get("staleness", {}).get("name") == "polynomial":
        found.append(TuneRange("strategy.staleness.a", EXPONENTS, "even"))
    found += _compression(config, params) if bytes_count else []
    return [its.with_point(value_of(config, its.path)) for its in found]


def value_of(config: Config, path: str) -> Any:
    """What a setting is, also by default of the strategy. Raises `ConfigError` where there is none."""
    table, key, inner = _parts(path)
    of_strategy = table == "strategy" and key != "name"
    values = parameters_of(strategy_of(config)) if of_strategy else vars(getattr(config, table, config))
    try:
        return values[key][inner] if inner else values[key]
    except (KeyError, TypeError):
        there = (f"{table}.{known}" for known in values)
        hint = did_you_mean(path, there, likeness=0.7) or "`anabranch config show` has them all"
        raise ConfigError(f"tune.ranges: there is no setting {path!r}: {hint}") from None


def settings_of(config: Config, choice: Choice) -> dict[str, Any]:
    """A choice as settings of `simulate`: a table in a table is whole there."""
    found: dict[str, Any] = {}
    for path, value in choice.items():
        table, key, inner = _parts(path)
        name = f"{table}.{key}"
        found[name] = {**found.get(name, value_of(config, name)), inner: value} if inner else value
    return found


def deal(ranges: Sequence[TuneRange], count: int, seed: int, again: int = 0) -> list[Choice]:
    """So many choices, in which each point of a range comes about as often as any other: a Latin hypercube.

    Others each time that it is dealt `again`.
    """
    rng = stream(seed, "tune", again)
    columns = []
    for r in ranges:
        places = (rng.permutation(count) + rng.random(count)) * len(r.points) / count
        columns.append([r.points[int(place)] for place in places])
    return [dict(zip((r.path for r in ranges), row, strict=True)) for row in zip(*columns, strict=True)]


def _compression(config: Config, params: Mapping[str, Any]) -> list[TuneRange]:
    own = config.uplink.codec == AUTO
    if own and "uplink_bits" in params:
        return [TuneRange("strategy.uplink_bits", (4, 8), "list")]
    if own and "kept" in params:
        return [TuneRange("strategy.kept", KEPT), TuneRange("strategy.bits", BITS, "list")]
    return [TuneRange("uplink.codec", (AUTO if own else RAW, *CHAINS), "list")]


def _grid(path: str, said: Mapping[str, Any], where: str) -> TuneRange:
    """Points from one number to another, as far from each other as can be."""
    if unknown := sorted({*said} - {*GRID_KEYS}):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}: it has {', '.join(GRID_KEYS)}")
    first: Any
    last: Any
    first, last, count = said.get("from"), said.get("to"), said.get("points", POINTS)
    scale = said.get("scale", "log" if _is_number(first) and first > 0 else "even")
    if not (_is_number(first) and _is_number(last)):
        raise ConfigError(f"{where}: give from and to, two numbers, or a list of values")
    if first >= last:
        raise ConfigError(f"{where} is empty: from = {first!r} must be less than to = {last!r}")
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        raise ConfigError(f"{where}: points = {count!r}: give a whole number, at least 2")
    if scale not in ("log", "even") or (scale == "log" and first <= 0):
        raise ConfigError(f"{where}: scale = {scale!r}: give 'even', or 'log' of what is greater than 0")
    spaced = (np.geomspace if scale == "log" else np.linspace)(first, last, count).tolist()
    if isinstance(first, int) and isinstance(last, int):
        return TuneRange(path, tuple(sorted({round(x) for x in spaced})), scale)
    inner = [float(f"{x:.{DIGITS + 1}g}") for x in spaced[1:-1]]
    return TuneRange(path, tuple(sorted({float(first), *inner, float(last)})), scale)


def _parts(path: str) -> tuple[str, str, str]:
    """The table, the key, and the key in its table, if there is one. Raises `ConfigError`."""
    table, _, rest = path.partition(".")
    key, dot, inner = rest.partition(".")
    if table not in TABLES or not key or "." in inner or bool(dot) != bool(inner):
        raise ConfigError(
            f"tune.ranges: {path!r} is no setting: write table.key, such as client.learning_rate, with a "
            f"table of {', '.join(TABLES)}"
        )
    return table, key, inner


def _value(word: str) -> Any:
    return parse_override(f"tune.range={word.strip()}", "--range ")[2]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str)
