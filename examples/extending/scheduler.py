"""A scheduler of one's own: a device that has had a task rests before the next, so that batteries last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabranch.core.engine.strategy import Context, Plan, Refusal, State
from anabranch.core.model.updates import Ask, Reason
from anabranch.strategies.schedulers.scheduler import OpenScheduler


@dataclass(frozen=True)
class LastTasks:
    """When each device was given its last task."""

    granted_at: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Resting(OpenScheduler):
    name: ClassVar[str] = "resting"
    state_type: ClassVar[type[Any]] = LastTasks

    rest_s: float = 2.0  # strategy.scheduler = {name = "...", rest_s = 60}

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        had_at = state.granted_at.get(ask.client_id)
        if had_at is None or context.now - had_at >= self.rest_s:
            return None
        return Refusal(Reason.NOT_SELECTED, f"it rests for {self.rest_s:g} s after each task")

    def plan(self, state: State, ask: Ask, plan: Plan, context: Context) -> Plan:
        granted_at = {**state.granted_at, ask.client_id: context.now}
        return Plan(LastTasks(granted_at), plan.local, plan.uplink)
