"""The kinds of part that an engine is made of; other kinds are a driver's own."""

from __future__ import annotations

from anabranch.compress.registry import CODEC_STAGES
from anabranch.core.parts import name_of
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.robust.registry import RULES
from anabranch.strategies.schedulers.registry import SCHEDULERS
from anabranch.strategies.staleness import STALENESS
from anabranch.strategies.submodels.registry import PLANNERS

ENGINE_PARTS = (STRATEGIES, STALENESS, SCHEDULERS, RULES, PLANNERS, CODEC_STAGES)


def own_named() -> str:
    """Those that are somebody's own, by kind and name: `scheduler 'resting' or planner 'odd_even'`."""
    return " or ".join(f"{kind.word} {name_of(part)!r}" for kind in ENGINE_PARTS for part in kind.own())


def or_own() -> str:
    """What else a replay may come to something else for: parts of one's own, if there are any."""
    own = own_named()
    return own and f"; or {own} gives other results than it gave: it draws, reads a clock, or was changed"
