"""Strategies by name; see `core/parts.py` for those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from anabranch.core.config.tables import Config, build
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, check_is_data, members
from anabranch.strategies import PLACES
from anabranch.strategies.buffer import BufferStrategy
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.phased import Phased
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rule import Rule
from anabranch.strategies.scheduled import SCHEDULER_KEY, Scheduled, unscheduled
from anabranch.strategies.schedulers.registry import make_scheduler
from anabranch.strategies.teasq import Teasq
from anabranch.strategies.waves import Waves

OUTER_KEY = "outer"  # of strategies with a server optimiser
FEDCOMPASS = "fedcompass"


def doubt(strategy: Strategy, devices: int) -> str:
    """What its user should know of a strategy that is as they want it; empty: nothing."""
    strategy = unscheduled(strategy)
    if isinstance(strategy, Phased):
        return _of_phases(strategy, lambda part: doubt(part, devices))
    if isinstance(strategy, Teasq) and strategy.cache_size > devices and not strategy.flush_s:
        return (
            f"strategy.cache_size is {strategy.cache_size} and fleet.clients {devices}: of a version the "
            "cache has one of each device, the newest, so that these never fill it, and what they send uses "
            "up the budget without a version; take a smaller cache, say how many devices there are, or set "
            "flush_s"
        )
    if isinstance(strategy, FedAvg) and strategy.clients_per_round > devices:
        waits = f"{strategy.deadline_s:g} s for more devices, its deadline_s"
        return (
            f"strategy.clients_per_round is {strategy.clients_per_round} and fleet.clients {devices}: the "
            f"first round waits {waits if strategy.deadline_s else 'for more devices without an end'}; take "
            "clients_per_round = fleet.clients, or say how many devices there are"
        )
    momentum = getattr(getattr(strategy, "optimiser", None), "momentum", 0.0)
    if isinstance(strategy, FedBuff) and strategy.buffer_size == 1 and momentum > 0:
        return (
            f"strategy {strategy.name!r} with buffer_size = 1 and momentum = {momentum:g}: what a late "
            "update says is followed in later versions too; take a much smaller rate than without momentum, "
            "gather more updates, or take 'delayed_nesterov'"
        )
    return ""


def shortage(strategy: Strategy, devices: int, share: int) -> str:
    """What its user should know of a buffer that these devices never fill; empty: nothing.

    `share`: updates of a device that are in a version at most (0: any number).
    """
    own: Any = unscheduled(strategy)
    if isinstance(own, Phased):
        return _of_phases(own, lambda part: shortage(part, devices, share))
    if not isinstance(own, BufferStrategy) or isinstance(own, FedAvg | Waves) or own.flush_s:
        return ""
    if not share or share * devices >= own.buffer_size:
        return ""
    return (
        f"strategy.buffer_size is {own.buffer_size} and fleet.clients {devices}: with at most {share} "
        "of each one's updates in a version (robust.buffer_max, or [secagg]) they never fill a buffer, and "
        "the run waits without an end; take a smaller buffer, or say how many devices there are"
    )


def _of_phases(phased: Phased, told: Callable[[Strategy], str]) -> str:
    """What is told of the first of its phases of which there is anything to tell, and where that phase is."""
    told_of = ((table.place, told(part)) for table, part in zip(phased.tables, phased.parts, strict=True))
    return next((f"{place}: {said}" for place, said in told_of if said), "")


def _check(found: Any) -> None:
    check_is_data(found, "a strategy is a class, a dataclass of its parameters")


# They are younger than strategies of others.
OPTIONAL = ("keeps_updates", "long_part", "long_in", "may_publish")
NAMED_IN = ("strategy.name", "strategy.phases.strategy")
STRATEGIES = PartKind("strategy", "strategies", NAMED_IN, PLACES, members(Strategy, OPTIONAL), _check)


def strategy_of(config: Config) -> Strategy:
    """The strategy of a configuration. Raises `ConfigError`."""
    strategy = make_strategy(config.strategy.name, config.strategy.params, config.robust)
    return strategy.within(config) if isinstance(strategy, Phased) else strategy


def make_strategy(name: str, params: Mapping[str, Any], robust: RobustTable | None = None) -> Strategy:
    """A strategy of its parameters, with the rule of a `[robust]` table in the place of its mean.

    Raises `ConfigError`, naming the nearest name or key, or where the strategy gathers no buffer.
    """
    cls = STRATEGIES.find(name)
    if SCHEDULER_KEY in params and SCHEDULER_KEY not in {f.name for f in fields(cls)}:
        return _scheduled(name, params, robust)
    if OUTER_KEY in params and OUTER_KEY not in {f.name for f in fields(cls)}:
        raise ConfigError(
            f"strategy.{OUTER_KEY}: {name!r} takes no step along a mean of updates that a server optimiser "
            "could make: leave it out, or take a strategy that does, such as 'fedbuff' or 'fedavg'"
        )
    return with_rule(build(cls, params, "strategy"), None if robust is None else make_rule(robust))


def _scheduled(name: str, params: Mapping[str, Any], robust: RobustTable | None) -> Strategy:
    """A strategy whose tasks a scheduler deals."""
    if name == Phased.name:
        raise ConfigError(
            f"strategy.{SCHEDULER_KEY}: each phase has a scheduler of its own: write it into its table"
        )
    if name == FEDCOMPASS:
        raise ConfigError(
            f"strategy.{SCHEDULER_KEY}: {name!r} deals steps itself, by when groups arrive: leave it out"
        )
    scheduler = make_scheduler(params[SCHEDULER_KEY])
    rest = {key: value for key, value in params.items() if key != SCHEDULER_KEY}
    scheduled: Any = Scheduled(make_strategy(name, rest, robust), scheduler)
    made: Strategy = scheduled  # its name is that of what it has, and not of its class
    return made


def with_rule(strategy: Any, rule: Rule | None) -> Strategy:
    """A strategy with this rule in the place of its mean. Raises `ConfigError` where it gathers no buffer."""
    if isinstance(strategy, Scheduled):
        strategy = replace(strategy, strategy=with_rule(strategy.strategy, rule))
    elif rule is not None:
        if "rule" not in {f.name for f in fields(strategy)}:
            raise ConfigError(
                f"robust.rule is {rule.name!r}, but strategy {strategy.name!r} gathers no buffer that takes "
                "one: set it to 'none', or take a strategy that does, such as 'fedbuff'"
            )
        strategy = replace(strategy, rule=rule)
    made: Strategy = strategy
    return made
