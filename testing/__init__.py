"""What a part of your own must keep to, as tests: for your pytest, and for ours.

    from anabranch.testing import StrategyConformance

    class TestMine(StrategyConformance):
        @pytest.fixture
        def strategy(self):
            return Mine(rate=0.5)

Each kit says in its docstring what to write. It needs pytest, and nothing of this project's own tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

_HOMES = {
    "AppConformance": "app",
    "ExecutorConformance": "executor",
    "PlannerConformance": "planner",
    "RuleConformance": "rule",
    "SchedulerConformance": "scheduler",
    "StageConformance": "stage",
    "StoreConformance": "store",
    "StrategyConformance": "strategy",
    "TrackerConformance": "tracker",
    "TransportConformance": "transport",
}
# That a failed law shows what it has compared; before any of them is imported.
pytest.register_assert_rewrite(*(f"anabranch.testing.{home}" for home in _HOMES.values()))

if TYPE_CHECKING:
    from anabranch.testing.app import AppConformance
    from anabranch.testing.executor import ExecutorConformance
    from anabranch.testing.planner import PlannerConformance
    from anabranch.testing.rule import RuleConformance
    from anabranch.testing.scheduler import SchedulerConformance
    from anabranch.testing.stage import StageConformance
    from anabranch.testing.store import StoreConformance
    from anabranch.testing.strategy import StrategyConformance
    from anabranch.testing.tracker import TrackerConformance
    from anabranch.testing.transport import TransportConformance

__all__ = [
    "AppConformance",
    "ExecutorConformance",
    "PlannerConformance",
    "RuleConformance",
    "SchedulerConformance",
    "StageConformance",
    "StoreConformance",
    "StrategyConformance",
    "TrackerConformance",
    "TransportConformance",
]


def __getattr__(name: str) -> Any:
    # Each by itself: who has no torch, or no SQLAlchemy, can test what needs neither.
    if name in _HOMES:
        return getattr(import_module(f"anabranch.testing.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
