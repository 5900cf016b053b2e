"""Every built-in scheduler keeps the laws of strategies/schedulers/scheduler.py."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.strategies.schedulers.registry import BUILT_IN, make_scheduler
from anabranch.strategies.schedulers.scheduler import Scheduler
from anabranch.testing import SchedulerConformance

VARIANTS: list[dict[str, Any]] = [
    *({"name": name} for name in BUILT_IN),
    {"name": "capped", "fraction": 0.5, "least": 1},
    {"name": "equal_time", "task_s": 2.0, "steps_min": 2},
    {"name": "fedluck", "period_s": 1.5, "steps_max": 8, "bits": 8},
]


class TestSchedulers(SchedulerConformance):
    @pytest.fixture(params=VARIANTS, ids=lambda v: f"{v['name']}-{len(v)}")
    def scheduler(self, request: pytest.FixtureRequest) -> Scheduler:
        return make_scheduler(request.param)
