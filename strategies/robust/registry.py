"""Rules by name, from the `[robust]` table; see `core/parts.py` for those of others."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from anabranch.core.config.tables import NO_KEY
from anabranch.core.engine.robust import NO_RULE, RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, check_is_data, members
from anabranch.strategies.robust.rule import Rule


def _check(found: Any) -> None:
    check_is_data(found, "a robust rule is a class, a dataclass")
    if strange := set(_taken(found)) - {f.name for f in fields(RobustTable)}:
        raise ConfigError(
            f"a robust rule's parameters are keys of [robust], not {', '.join(sorted(strange))}"
        )


def _taken(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.metadata != NO_KEY]


_HERE = "anabranch.strategies.robust"
BUILT_IN = {
    "trimmed_mean": f"{_HERE}.coordinatewise:TrimmedMean",
    "median": f"{_HERE}.coordinatewise:Median",
    "geometric_median": f"{_HERE}.geometric_median:GeometricMedian",
    "krum": f"{_HERE}.krum:Krum",
    "multi_krum": f"{_HERE}.krum:MultiKrum",
    "centred_clipping": f"{_HERE}.centred_clipping:CentredClipping",
    "neighbour_mixing": f"{_HERE}.neighbour_mixing:NeighbourMixing",
}
RULES = PartKind("robust rule", "rules", ("robust.rule",), BUILT_IN, members(Rule), _check, also=(NO_RULE,))


def make_rule(table: RobustTable) -> Rule | None:
    """The rule of a table, made of the keys that it has as fields; None: strategies take their own mean.

    Raises `ConfigError` for an unknown one.
    """
    if table.rule == NO_RULE:
        return None
    cls = RULES.find(table.rule)
    rule: Rule = cls(**{name: getattr(table, name) for name in _taken(cls)})
    return rule
