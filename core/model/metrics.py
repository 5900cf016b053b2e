"""The names of metrics: what an App may call its numbers, and which of them are of groups.

`mse` is a metric; `mse[old]` is the same one over a group of the examples that the App calls `old`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

ACCURACY, LOSS = "accuracy", "loss"
NAME_CHARS_MAX = 64
TRAINED_MAX = 64  # metrics of one update
MEASURED_MAX = 1024  # of one evaluation, groups and all
NO_SHARE = "accuracy is a share, from 0 to 1: divide it, or name it otherwise"
_OF_GROUP = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]\Z")
# What is told beside the metrics of a version, in the same JSON object; and what `run.metric` says for none.
RESERVED = frozenset({"version", "time_s", "kind", "auto"})


def name_flaw(name: str) -> str:
    """Why a metric may not be called so, as what it must be; empty for a good name."""
    if not 0 < len(name) <= NAME_CHARS_MAX:
        return f"must have 1 to {NAME_CHARS_MAX} characters"
    if not name.isprintable() or name != name.strip():
        return "must be printable, with no blank at either end"
    if name in RESERVED:
        return "must be another one: that has a meaning of its own"
    return ""


def names_flaw(names: Iterable[str], names_max: int) -> str:
    """What is wrong with the names of metrics that come together, in words; empty where nothing is."""
    found = list(names)
    if len(found) > names_max:
        return f"{len(found)} metrics, and {names_max} is the most"
    flawed = ((name, flaw) for name in found if (flaw := name_flaw(name)))
    return next((f"the name of metric {name!r} {flaw}" for name, flaw in flawed), "")


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those that are not finite: a server takes none, and the rest is of use."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def ungrouped(names: Iterable[str]) -> list[str]:
    """The metrics of all examples, without those of groups."""
    return [name for name in names if not _OF_GROUP.match(name)]


def by_group(metrics: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """The metrics that are of groups: metric -> group -> value, without what is not finite."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if value is not None and (of_group := _OF_GROUP.match(name)):
            found.setdefault(of_group[1], {})[of_group[2]] = value
    return found
