"""What a scheduler that goes by speed knows of each device: how long a step takes, and how long the way.

| symbol  | name       | meaning                                                                |
|---------|------------|------------------------------------------------------------------------|
| a_i     | step_s     | seconds of a local step of device i                                    |
| c_i     | transfer_s | seconds of a task of device i in which it did not train                |
| d       | sent       | how much of the model the updates of these tasks had, 1 the whole of it |
| mu      | momentum   | how much of the last value stays                                       |

A device says how long it trained (the metric `train_s`), the rest of the time from grant to update is its
way; where it does not say, all of it is training. What has not been answered is remembered until a later
task of the device is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.engine.strategy import Context, Plan, State
from anabranch.core.model.updates import Ask, LocalPlan, Task, Update
from anabranch.strategies.schedulers.scheduler import OpenScheduler

MOMENTUM = 0.5
STEP_S_MIN = 1e-6  # a device may say anything
JUMP_MAX = 4.0  # so many times the last value, one task may tell at the most: a server may have stood still
UNANSWERED_MAX = 8  # of a device: rejected updates are not told, so their tasks stay until then


@dataclass(frozen=True)
class DealtTask:
    """An open task: since when, of how many steps (0: as configured), how much of the model it sends."""

    started_at: float
    steps: int
    sent: float


@dataclass(frozen=True)
class DevicePace:
    """Of a device: seconds of a step, seconds of the way, and how much of the model went it."""

    step_s: float
    transfer_s: float
    sent: float


@dataclass(frozen=True)
class Paces:
    """`begun` by device and task, `known` by device."""

    begun: dict[str, dict[str, DealtTask]] = field(default_factory=dict)
    known: dict[str, DevicePace] = field(default_factory=dict)


class PacedScheduler(OpenScheduler):
    """Learns the paces; `paced` says what a device of a known pace is given."""

    state_type: ClassVar[type[Any]] = Paces

    def paced(
        self, pace: DevicePace, client_id: str, plan: Plan, context: Context
    ) -> tuple[LocalPlan, str, float]:
        """Local training, chain, and how much of the model that sends, of a device of this pace."""
        raise NotImplementedError

    def unpaced(self, client_id: str, plan: Plan, context: Context) -> tuple[LocalPlan, str, float]:
        """The same of a device that has not finished a task: as the strategy has it."""
        return plan.local, plan.uplink, 1.0

    def plan(self, state: State, ask: Ask, plan: Plan, context: Context) -> Plan:
        """As suits the device's pace."""
        pace, given = state.known.get(ask.client_id), (ask.client_id, plan, context)
        local, uplink, sent = self.unpaced(*given) if pace is None else self.paced(pace, *given)
        begun = {**state.begun.get(ask.client_id, {}), ask.task_id: DealtTask(context.now, local.steps, sent)}
        newest = dict(sorted(begun.items(), key=_age)[-UNANSWERED_MAX:])
        return Plan(replace(state, begun={**state.begun, ask.client_id: newest}), local, uplink)

    def arrived(self, state: State, update: Update, context: Context) -> State:
        """The device's pace, by its newest task."""
        client, tasks = update.client_id, state.begun.get(update.client_id, {})
        task = tasks.get(update.task_id)
        if task is None:
            return state
        later = {
            name: other
            for name, other in tasks.items()
            if name != update.task_id and other.started_at >= task.started_at
        }
        state = _with_begun(state, client, later)
        steps, took_s = update.local_steps or task.steps, context.now - task.started_at
        trained_s = min(took_s, update.metrics.get(TRAIN_S, took_s))
        if steps < 1 or not trained_s > 0:
            return state
        newest = DevicePace(max(STEP_S_MIN, trained_s / steps), took_s - trained_s, task.sent)
        return replace(state, known={**state.known, client: _mean(state.known.get(client), newest)})

    def lost(self, state: State, task: Task, context: Context) -> State:
        """Nothing is learned of a task that was lost."""
        tasks = state.begun.get(task.client_id, {})
        if task.task_id not in tasks:
            return state
        left = {name: other for name, other in tasks.items() if name != task.task_id}
        return _with_begun(state, task.client_id, left)

    def reopened(self, state: State, training: Collection[str]) -> State:
        """Tasks that were lost meanwhile are not waited for."""
        return replace(state, begun={c: tasks for c, tasks in state.begun.items() if c in training})


def _age(item: tuple[str, DealtTask]) -> tuple[float, str]:
    """A restart may change the order of a dict, so it is not gone by."""
    return item[1].started_at, item[0]


def _with_begun(state: State, client: str, tasks: dict[str, DealtTask]) -> State:
    begun = {**state.begun, client: tasks}
    if not tasks:
        del begun[client]
    return replace(state, begun=begun)


def _mean(before: DevicePace | None, newest: DevicePace) -> DevicePace:
    if before is None:
        return newest
    step_s = _between(before.step_s, min(newest.step_s, JUMP_MAX * before.step_s))
    known_s = before.step_s + before.transfer_s  # there may have been no way at all
    transfer_s = _between(before.transfer_s, min(newest.transfer_s, JUMP_MAX * known_s))
    return DevicePace(step_s, transfer_s, _between(before.sent, newest.sent))


def _between(old: float, new: float) -> float:
    return MOMENTUM * old + (1 - MOMENTUM) * new
