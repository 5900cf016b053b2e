"""Strategies by name. Others join through the entry point group `anabranch.strategies`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

from anabranch.core.config.tables import Config, build
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.strategies.asyncdrop import AsyncDrop
from anabranch.strategies.fedasync import FedAsync
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.fedprox import FedProx
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.teasq import Teasq
from anabranch.strategies.teasq_drop import TeasqDrop

GROUP = "anabranch.strategies"
BUILT_IN: dict[str, type[Any]] = {
    c.name: c for c in (AsyncDrop, FedAsync, FedAvg, FedBuff, FedProx, QAFeL, Teasq, TeasqDrop)
}


def strategy_names() -> list[str]:
    """Every name that `make_strategy` knows."""
    return sorted({*BUILT_IN, *entry_points(group=GROUP).names})


def strategy_of(config: Config) -> Strategy:
    """The strategy of a configuration. Raises `ConfigError`."""
    return make_strategy(config.strategy.name, config.strategy.params, config.robust)


def make_strategy(name: str, params: Mapping[str, Any], robust: RobustTable | None = None) -> Strategy:
    """A strategy of its parameters, with the rule of a `[robust]` table in the place of its mean.

    Raises `ConfigError`, naming the nearest name or key, or where the strategy gathers no buffer.
    """
    cls = BUILT_IN.get(name)
    if cls is None:
        found = [e for e in entry_points(group=GROUP) if e.name == name]
        if not found:
            near = difflib.get_close_matches(name, strategy_names(), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(strategy_names())}"
            raise ConfigError(f"unknown strategy: {name!r}; {hint}")
        cls = found[0].load()
    strategy: Any = build(cls, params, "strategy")
    rule = None if robust is None else make_rule(robust)
    if rule is not None:
        if "rule" not in {f.name for f in fields(cls)}:
            raise ConfigError(
                f"robust.rule is {rule.name!r}, but strategy {name!r} gathers no buffer: set it to 'none', "
                "or take a strategy that does, such as 'fedbuff'"
            )
        strategy = replace(strategy, rule=rule)
    made: Strategy = strategy
    return made
