"""FedCompass: local steps by speed, so that devices arrive in groups, and a group makes a version.

| symbol       | name                 | meaning                                                            |
|--------------|----------------------|--------------------------------------------------------------------|
| v_i          | state.speeds         | seconds from grant to update for each local step of device i       |
| mu           | speed_momentum       | how much of the last v_i stays                                     |
| Q_min, Q_max | steps_min, steps_max | local steps of a task                                              |
| T_g          | group.arrival_at     | when the devices of group g are expected                           |
| L_g          | group.latest_at      | when nobody is waited for any more                                 |
| v_g          | group.fastest_s      | the least v_i in group g                                           |
| lambda       | latest_factor        | L_g of a new group is so many times its time to T_g away           |
| alpha        | alpha                | mixing weight, of which each device has 1/N                        |
| N            | context.clients      | enrolled devices                                                   |
| S(tau)       | staleness            | staleness function                                                 |

    join    the group for which floor((T_g - now) / v_i) is largest, of those in [Q_min, Q_max]: so many steps
    create  else: the largest floor((L_g + v_g Q_max - now) / v_i) that is at most Q_max, at least Q_min;
            Q_max where no group gives one. T = now + steps v_i, L = now + lambda steps v_i
    alpha_i = alpha S(tau_i) / N
    w <- (1 - A) w + sum alpha_i (w_base,i + Delta_i), A = sum alpha_i, of all that has been gathered

A group is applied when its last device has arrived, at L_g without those that have not. Who comes after
that, or has no group, waits for the next group, and for nobody where there is none.

Ours: a device whose speed is not known trains as `[client]` says, in no group. All groups gather in one
buffer, so that what has come of another group goes into the same version: a version then has all updates
before it, and one vector is kept instead of one for each group. Where A is over 1 it counts as 1. A device's
time has its transfers in it, since they decide when it arrives. lambda is small, since slow devices aim by
L_g and not by T_g: of four devices of steady speeds 1 to 3, with Q from 2 to 8, a version had 3.7 at 1.1 and
2.4 at 1.5.

Source: Li et al., "FedCompass", ICLR 2024, arXiv 2309.14675. alpha = 0.9 is that of APPFL, its authors'
project; the other defaults are ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from anabranch.core.engine.strategy import Context, Plan, State, Step
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Ask, LocalPlan, Task, Update
from anabranch.strategies.composition import ComposedStrategy
from anabranch.strategies.parameters import AT_LEAST_ONE, LESS_THAN_ONE, POSITIVE_FRACTION

NO_GROUP = ""


@dataclass(frozen=True)
class ArrivalGroup:
    """Devices that are expected together. Times in seconds, on the server's clock."""

    arrival_at: float
    latest_at: float
    fastest_s: float


@dataclass(frozen=True)
class Running:
    """An open task: whose it is, in which group, since when, and of how many steps (0: as configured)."""

    client_id: str
    group: str
    started_at: float
    steps: int


@dataclass(frozen=True)
class FedCompassState:
    """`total`: sum of alpha_i w_i, shape (size,); `share`: A; `count`: of how many updates these are.

    `speeds` by device, `running` by task, `groups` by the task that began each.
    """

    total: Vector
    share: float = 0.0
    count: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    groups: dict[str, ArrivalGroup] = field(default_factory=dict)


@dataclass(frozen=True)
class FedCompass(ComposedStrategy):
    """Gives each device as many steps as it takes to arrive with others, and mixes what arrives together.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "fedcompass"
    state_type: ClassVar[type[Any]] = FedCompassState

    alpha: Annotated[float, POSITIVE_FRACTION] = 0.9
    steps_min: Annotated[int, AT_LEAST_ONE] = 4
    steps_max: Annotated[int, AT_LEAST_ONE] = 20
    speed_momentum: Annotated[float, LESS_THAN_ONE] = 0.5
    latest_factor: Annotated[float, AT_LEAST_ONE] = 1.1
    staleness: Mapping[str, Any] = field(default_factory=lambda: {"name": "polynomial", "a": 0.5})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps_max < self.steps_min:
            raise ConfigError(
                f"strategy.steps_max must be at least strategy.steps_min = {self.steps_min}, "
                f"not {self.steps_max}"
            )

    @property
    def rolls_back(self) -> bool:
        """Never: without a device in its group others would have had other steps."""
        return False

    @property
    def needs_base(self) -> bool:
        """Models are mixed."""
        return True

    def init(self, vector: Vector) -> State:
        """No speeds, no groups."""
        return FedCompassState(np.zeros_like(vector))

    # --- how many steps ----------------------------------------------------------------------

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        """As many steps as let it arrive with a group."""
        speed_s = state.speeds.get(ask.client_id)
        if speed_s is None:
            return Plan(self._began(state, ask, context, NO_GROUP, 0), local)
        group, steps = self._joined(state, speed_s, context.now) or (ask.task_id, 0)
        if not steps:
            steps = self._steps(state, speed_s, context.now)
            takes_s = steps * speed_s
            new = ArrivalGroup(context.now + takes_s, context.now + self.latest_factor * takes_s, speed_s)
            state = replace(state, groups={**state.groups, group: new})
        known = state.groups[group]
        groups = {**state.groups, group: replace(known, fastest_s=min(known.fastest_s, speed_s))}
        state = self._began(replace(state, groups=groups), ask, context, group, steps)
        return Plan(state, replace(local, steps=steps))

    def _began(self, state: State, ask: Ask, context: Context, group: str, steps: int) -> State:
        task = Running(ask.client_id, group, context.now, steps)
        return replace(state, running={**state.running, ask.task_id: task})

    def _joined(self, state: State, speed_s: float, now: float) -> tuple[str, int] | None:
        """The group to arrive with, and the steps until then."""
        steps = {name: math.floor((group.arrival_at - now) / speed_s) for name, group in state.groups.items()}
        fitting = {name: n for name, n in steps.items() if self.steps_min <= n <= self.steps_max}
        return max(fitting.items(), key=lambda item: item[1]) if fitting else None

    def _steps(self, state: State, speed_s: float, now: float) -> int:
        """The steps of a new group: until the fastest of another could be back from its next task."""
        back = [group.latest_at + group.fastest_s * self.steps_max for group in state.groups.values()]
        steps = [math.floor((at - now) / speed_s) for at in back]
        return max(self.steps_min, max((n for n in steps if n <= self.steps_max), default=self.steps_max))

    # --- what arrives ------------------------------------------------------------------------

    def weight(self, update: Update, context: Context) -> float:
        """alpha_i."""
        return self.alpha * self.s(context.staleness) / max(1, len(context.clients))

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Gather; apply with the last of a group, or where there is no group to wait for."""
        assert context.base is not None, "mixing needs w_base"
        add_scaled(state.total, weight, context.base)
        add_scaled(state.total, weight, update.delta)
        state = replace(state, share=state.share + weight, count=state.count + 1)
        task = state.running.get(update.task_id)
        if task is not None:
            state = self._learned(_without(state, update.task_id), task, update, context.now)
            if task.group in state.groups and not _awaited(state, task.group):
                return self._apply(_closed(state, [task.group]), vector)
        return Step(state) if state.groups else self._apply(state, vector)

    def _learned(self, state: State, task: Running, update: Update, now: float) -> State:
        """With the device's speed."""
        steps, took_s = update.local_steps or task.steps, now - task.started_at
        if steps < 1 or took_s <= 0:
            return state
        newest = took_s / steps
        before = state.speeds.get(task.client_id, newest)
        mean = self.speed_momentum * before + (1 - self.speed_momentum) * newest
        return replace(state, speeds={**state.speeds, task.client_id: mean})

    def _apply(self, state: State, vector: Vector) -> Step:
        """What is gathered becomes a version."""
        scale = 1.0 / max(1.0, state.share)
        vector *= vector.dtype.type(1.0 - scale * state.share)
        add_scaled(vector, scale, state.total)
        state.total.fill(0)
        return Step(replace(state, share=0.0, count=0), vector)

    # --- who does not arrive -----------------------------------------------------------------

    def on_lost(self, state: State, task: Task, context: Context) -> State:
        """Its group waits for the others; where there are none, what it has is due."""
        lost = state.running.get(task.task_id)
        state = _without(state, task.task_id)
        if lost is None or lost.group not in state.groups or _awaited(state, lost.group):
            return state
        if not state.count:
            return _closed(state, [lost.group])
        due = replace(state.groups[lost.group], arrival_at=context.now, latest_at=context.now)
        return replace(state, groups={**state.groups, lost.group: due})

    def timer(self, state: State) -> float | None:
        """When a group is waited for no longer."""
        return min((group.latest_at for group in state.groups.values()), default=None)

    def on_timer(self, state: State, vector: Vector, context: Context) -> Step:
        """Apply what has come."""
        over = [name for name, group in state.groups.items() if group.latest_at <= context.now]
        state = _closed(state, over)
        return self._apply(state, vector) if state.count else Step(state)

    def reopened(self, state: State, training: Collection[str]) -> State:
        """Tasks that were lost meanwhile are awaited by their groups' timers only."""
        return replace(state, running={i: t for i, t in state.running.items() if t.client_id in training})


def _without(state: State, task_id: str) -> State:
    return replace(state, running={i: task for i, task in state.running.items() if i != task_id})


def _awaited(state: State, group: str) -> bool:
    return any(task.group == group for task in state.running.values())


def _closed(state: State, over: Collection[str]) -> State:
    return replace(state, groups={name: group for name, group in state.groups.items() if name not in over})
