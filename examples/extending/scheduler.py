"""A scheduler of one's own: devices in turn, a device again only after all the others have asked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from anabranch.core.engine.strategy import Context, Plan, Refusal, State
from anabranch.core.model.updates import Ask, Reason
from anabranch.strategies.schedulers.scheduler import OpenScheduler


@dataclass(frozen=True)
class Turns:
    """How many tasks each device has had."""

    tasks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FairTurns(OpenScheduler):
    name: ClassVar[str] = "fair_turns"
    state_type: ClassVar[type[Any]] = Turns

    ahead: int = 1  # strategy.scheduler = {name = "...", ahead = 2}

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        had = state.tasks.get(ask.client_id, 0)
        if had - self._fewest(state, context.clients) < self.ahead:
            return None
        return Refusal(Reason.NOT_SELECTED, f"has had {had} tasks, and it is the others' turn")

    def plan(self, state: State, ask: Ask, plan: Plan, context: Context) -> Plan:
        tasks = {**state.tasks, ask.client_id: state.tasks.get(ask.client_id, 0) + 1}
        return Plan(replace(state, tasks=tasks), plan.local, plan.uplink)

    def _fewest(self, state: State, clients: Collection[str]) -> int:
        return min((state.tasks.get(client, 0) for client in clients), default=0)
