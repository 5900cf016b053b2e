"""Rules by name, from the `[robust]` table."""

from __future__ import annotations

from anabranch.core.engine.robust import RobustTable
from anabranch.strategies.robust.centred_clipping import CentredClipping
from anabranch.strategies.robust.coordinatewise import Median, TrimmedMean
from anabranch.strategies.robust.geometric_median import GeometricMedian
from anabranch.strategies.robust.krum import Krum, MultiKrum
from anabranch.strategies.robust.rule import Rule


def make_rule(table: RobustTable) -> Rule | None:
    """The rule of a table that was checked; None: strategies take their own mean."""
    rules: dict[str, Rule] = {
        TrimmedMean.name: TrimmedMean(table.attackers),
        Median.name: Median(),
        GeometricMedian.name: GeometricMedian(table.iterations),
        Krum.name: Krum(table.attackers),
        MultiKrum.name: MultiKrum(table.attackers, table.selected),
        CentredClipping.name: CentredClipping(table.radius, table.iterations),
    }
    return rules.get(table.rule)
