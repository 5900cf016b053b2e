"""Rules by name, from the `[robust]` table; see `core/parts.py` for those of others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.robust import NONE, RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, is_data, members
from anabranch.strategies.robust.centred_clipping import CentredClipping
from anabranch.strategies.robust.coordinatewise import Median, TrimmedMean
from anabranch.strategies.robust.geometric_median import GeometricMedian
from anabranch.strategies.robust.krum import Krum, MultiKrum
from anabranch.strategies.robust.neighbour_mixing import NeighbourMixing
from anabranch.strategies.robust.rule import Rule


def _check(found: Any) -> None:
    if not is_data(found):
        raise ConfigError("a robust rule is a class, a dataclass: write @dataclass(frozen=True)")
    if strange := set(_taken(found)) - {f.name for f in fields(RobustTable)}:
        raise ConfigError(
            f"a robust rule's parameters are keys of [robust], not {', '.join(sorted(strange))}"
        )


def _taken(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.metadata != NO_KEY]


BUILT_IN: dict[str, type[Any]] = {
    c.name: c
    for c in (TrimmedMean, Median, GeometricMedian, Krum, MultiKrum, CentredClipping, NeighbourMixing)
}
RULES = PartKind("robust rule", "rules", ("robust.rule",), BUILT_IN, members(Rule), _check, also=(NONE,))


def make_rule(table: RobustTable) -> Rule | None:
    """The rule of a table, made of the keys that it has as fields; None: strategies take their own mean.

    Raises `ConfigError` for an unknown one.
    """
    if table.rule == NONE:
        return None
    cls = RULES.find(table.rule)
    rule: Rule = cls(**{name: getattr(table, name) for name in _taken(cls)})
    return rule
