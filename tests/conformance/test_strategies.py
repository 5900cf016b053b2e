"""Every built-in strategy keeps the laws of core/engine/strategy.py."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Strategy
from anabranch.core.parts import members
from anabranch.strategies.registry import STRATEGIES, make_strategy
from anabranch.testing import StrategyConformance

Variant = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], RobustTable]
PHASES: list[dict[str, Any]] = [
    {"strategy": "fedavg", "clients_per_round": 2, "until_updates": 5},
    {"strategy": "fedbuff", "buffer_size": 2},
]
VARIANTS: list[Variant] = [
    *((name, {}) for name in STRATEGIES.built_in),
    ("fedbuff", {"buffer_size": 2, "momentum": 0.9, "flush_s": 3.0}),
    ("fedbuff", {"buffer_size": 2, "outer": {"name": "nesterov", "lr": 0.7}}),
    ("fedavg", {"clients_per_round": 2}),
    ("fedavg", {"clients_per_round": 1, "outer": {"name": "adam", "lr": 0.1}}),
    ("delayed_nesterov", {"buffer_size": 3, "c": 0.25}),
    ("fadas", {"buffer_size": 2, "flush_s": 3.0}),
    ("ca2fl", {"buffer_size": 2, "flush_s": 3.0}),
    ("aced", {"staleness_max": 2}),
    ("port", {"buffer_size": 2, "flush_s": 3.0}),
    ("annealed", {"buffer_size": 1, "growth": 0.3, "flush_s": 3.0}),
    ("annealed", {"buffer_size": 1, "growth": 0.3, "outer": {"name": "nesterov", "lr": 0.3}}),
    ("fedbuff", {"buffer_size": 2, "flush_s": 3.0, "outer": {"name": "schedule_free", "lr": 0.5}}),
    ("waves", {"share": 0.5, "flush_s": 3.0, "outer": {"name": "nesterov", "lr": 0.3}}),
    ("fedasmu", {"staleness_max": 2, "floor": 0.1}),
    ("fedfa", {"window_size": 2}),
    ("phased", {"phases": PHASES}),
    ("phased", {"phases": [{**PHASES[1], "until_versions": 12}, {"strategy": "fedasync"}]}),
    (
        "phased",
        {"phases": [{**PHASES[1], "until_updates": 5}, {"strategy": "fedavg", "clients_per_round": 1}]},
    ),
    ("fedprox", {"clients_per_round": 1, "over_selection": 2.0}),
    ("teasq", {"cache_size": 3, "flush_s": 3.0, "staleness_max": 4}),
    ("teasq", {"mode": "paper", "cache_size": 2}),
    ("teasq_drop", {"cache_size": 3, "flush_s": 3.0, "staleness_max": 4, "mu": 0.1}),
    ("teasq_drop", {"mode": "paper", "cache_size": 2}),
    ("fedbuff", {"buffer_size": 3, "momentum": 0.9}, RobustTable(rule="median")),
    ("fadas", {"buffer_size": 3}, RobustTable(rule="median")),
    ("waves", {"share": 0.5}, RobustTable(rule="median")),
    ("fedavg", {"clients_per_round": 3}, RobustTable(rule="krum")),
    ("phased", {"phases": PHASES}, RobustTable(rule="median")),
    ("fedprox", {"clients_per_round": 3, "outer": {"name": "momentum"}}, RobustTable(rule="median")),
    ("teasq", {"cache_size": 3, "mode": "paper"}, RobustTable(rule="centred_clipping")),
    ("teasq_drop", {"cache_size": 3, "flush_s": 3.0}, RobustTable(rule="geometric_median")),
    ("teasq_drop", {"cache_size": 4, "mode": "paper"}, RobustTable(rule="multi_krum")),
]

SCHEDULED: list[tuple[str, dict[str, Any]]] = [
    ("fedbuff", {"buffer_size": 2, "flush_s": 3.0, "scheduler": {"name": "fedluck"}}),
    ("fedasync", {"scheduler": {"name": "equal_time", "task_s": 2.0}}),
    ("port", {"buffer_size": 2, "scheduler": {"name": "capped"}}),
]


class TestStrategies(StrategyConformance):
    @pytest.fixture(
        params=VARIANTS, ids=lambda v: "-".join([v[0], str(len(v[1])), *(table.rule for table in v[2:])])
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return make_strategy(*request.param)


class TestScheduledStrategies(StrategyConformance):
    """With a scheduler a strategy is one still; what it is called is what it has, and not its class."""

    @pytest.fixture(params=SCHEDULED, ids=lambda v: f"{v[0]}-{v[1]['scheduler']['name']}")
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        return make_strategy(*request.param)

    def test_it_has_what_a_strategy_has(self, strategy: Strategy) -> None:
        assert [name for name in members(Strategy) if not hasattr(strategy, name)] == []
        assert strategy.name in STRATEGIES.built_in
