"""Strategies by name; see `core/parts.py` for those of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from anabranch.core.config.tables import Config, build
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, is_data, members
from anabranch.strategies.asyncdrop import AsyncDrop
from anabranch.strategies.fedasync import FedAsync
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.fedprox import FedProx
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.teasq import Teasq
from anabranch.strategies.teasq_drop import TeasqDrop

BUILT_IN: dict[str, type[Any]] = {
    c.name: c for c in (AsyncDrop, FedAsync, FedAvg, FedBuff, FedProx, QAFeL, Teasq, TeasqDrop)
}


def _check(found: Any) -> None:
    if not is_data(found):
        raise ConfigError(
            "a strategy is a class, a dataclass of its parameters: write @dataclass(frozen=True)"
        )


STRATEGIES = PartKind("strategy", "strategies", ("strategy.name",), BUILT_IN, members(Strategy), _check)


def strategy_of(config: Config) -> Strategy:
    """The strategy of a configuration. Raises `ConfigError`."""
    return make_strategy(config.strategy.name, config.strategy.params, config.robust)


def make_strategy(name: str, params: Mapping[str, Any], robust: RobustTable | None = None) -> Strategy:
    """A strategy of its parameters, with the rule of a `[robust]` table in the place of its mean.

    Raises `ConfigError`, naming the nearest name or key, or where the strategy gathers no buffer.
    """
    cls = STRATEGIES.find(name)
    strategy: Any = build(cls, params, "strategy")
    rule = None if robust is None else make_rule(robust)
    if rule is not None:
        if "rule" not in {f.name for f in fields(cls)}:
            raise ConfigError(
                f"robust.rule is {rule.name!r}, but strategy {name!r} gathers no buffer that takes one: "
                "set it to 'none', or take a strategy that does, such as 'fedbuff'"
            )
        strategy = replace(strategy, rule=rule)
    made: Strategy = strategy
    return made
