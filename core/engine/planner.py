"""Who trains which part of the model: the interface of a sub-model planner.

A planner chooses the units, or the tensors, of a task's sub-model, whatever the strategy then does with the
update. Pure, like a strategy: its state is data, equal calls give equal results, and arrays of a state are
never written to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from anabranch.core.engine.answers import checked_part, checked_state
from anabranch.core.engine.step_times import StepTime
from anabranch.core.model.arrays import read_only
from anabranch.core.model.params import Indices, ParamSpec, Vector
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap, is_borne, unit_map
from anabranch.core.model.units import units_at_most
from anabranch.core.rng import stream
from anabranch.core.rules import NEWEST

PlannerState = Any


@dataclass(frozen=True)
class Applicant:
    """The device that asks, and the moment at which it does.

    `slowness`: its place among the devices whose step time is known, 0 the fastest, 1 the slowest; None
    until its own is known. `seed` is of this task alone. `turn`: how many tasks it has answered or has open.
    `step_time`: how long its steps take by the part that it trains, for planners that ask; None until known.
    `width_max`: the share of each group's units that its memory bears, 1 for the whole model. `rules`: the
    run's (`core/rules.py`).
    """

    slowness: float | None
    version: int
    seed: int
    client_id: str = ""
    turn: int = 0
    step_time: StepTime | None = None
    width_max: float = 1.0
    rules: int = NEWEST


@dataclass(frozen=True)
class Narrowest:
    """The narrowest part that there is: a share of the model's units, and why there is no narrower one."""

    width: float
    why: str


WHOLE = Narrowest(1.0, "submodel.name = 'heterofl' or 'random', for example, would have parts")


class Planner(Protocol):
    """One method of choosing sub-models.

    A class of one has `of(spec, table, seed)` as well: a planner for the model `spec`, by `[submodel]`, in a
    run of this seed. One whose sub-models are of whole tensors says `of_tensors = True`: it wants no units;
    with `grows = True` as well it knows stages, without which a model that has some is refused. One whose
    sub-models differ in size says `times_steps = True`: what a step takes by that is then learned. One that
    has parts for devices without the memory for a whole model has `narrowest()`: devices that bear as much
    come, and of no group any gets more units than `applicant.width_max` says (`units_at_most`): what is more
    is cut off by a draw. All others are only for devices that bear the whole model.
    """

    name: ClassVar[str]
    state_type: ClassVar[type[Any]]

    def init(self, vector: Vector) -> PlannerState:
        """The state at version 0. The vector, shape (size,), is read-only here and below, and not kept."""
        ...

    def plan(
        self, state: PlannerState, vector: Vector, applicant: Applicant
    ) -> tuple[PlannerState, UnitMap | TensorSet | None]:
        """The sub-model of a task (None: the whole model), and the state with the task counted."""
        ...

    def applied(self, state: PlannerState, submodel: Submodel | None, version: int) -> PlannerState:
        """An update of this sub-model was taken; `version` is the model's after that."""
        ...

    def released(self, state: PlannerState, submodel: Submodel | None) -> PlannerState:
        """A task with this sub-model has ended without an update of use."""
        ...


def too_narrow(planner: Planner | None, width_max: float) -> str:
    """Why a run has nothing to train for a device that bears so much of a model, and the fix; else empty."""
    if width_max >= 1:
        return ""
    narrowest = getattr(planner, "narrowest", None)  # there are older ones of others
    least: Narrowest = WHOLE if narrowest is None else narrowest()
    if width_max >= least.width:
        return ""
    # Rounded up, so that whoever takes the number from here is let in.
    wanted = f"{math.ceil(least.width * 1e4 - 1e-9) / 1e4:g}"
    tasks = "every task is of the whole model"
    if least.width < 1:
        tasks = f"no task is of less than {wanted} of the model's units"
    return (
        f"width_max is {width_max:g}, and in this run {tasks} ({least.why}): "
        f"say width_max = {wanted} if the device's memory does bear that, else keep it out of this run"
    )


def started(planner: Planner, vector: Vector) -> PlannerState:
    """Its state at version 0. Raises `AppError` for what is none, as the calls below do."""
    return _checked(planner, planner.init(read_only(vector)), "init")


def planned(
    planner: Planner, state: PlannerState, vector: Vector, applicant: Applicant, spec: ParamSpec
) -> tuple[PlannerState, UnitMap | TensorSet | None]:
    """The part of a task that the device bears, and the state with the task counted."""
    found = planner.plan(state, read_only(vector), applicant)
    of_tensors = getattr(planner, "of_tensors", False)
    state, part = checked_part(found, f"planner {planner.name!r}", planner.state_type, spec, of_tensors)
    return state, borne(spec, part, applicant)


def ended(
    planner: Planner, state: PlannerState, submodel: Submodel | None, version: int | None
) -> PlannerState:
    """A task has: with an update that was taken, after which this is the version; None: without one."""
    if version is None:
        return _checked(planner, planner.released(state, submodel), "released")
    return _checked(planner, planner.applied(state, submodel, version), "applied")


def _checked(planner: Planner, found: PlannerState, method: str) -> PlannerState:
    return checked_state(found, f"planner {planner.name!r}: {method}", planner.state_type)


def borne(
    spec: ParamSpec, part: UnitMap | TensorSet | None, applicant: Applicant
) -> UnitMap | TensorSet | None:
    """The part, and no more of any group than the device bears, where a planner has not heeded that."""
    if isinstance(part, TensorSet) or is_borne(part, applicant.width_max):
        return part
    whole = [np.arange(group.size) for group in spec.groups]
    kept = whole if part is None else [np.array(units) for units in part.kept]
    return unit_map(spec, [np.sort(drawn(spec, g, units, applicant)) for g, units in enumerate(kept)])


def drawn(spec: ParamSpec, group: int, units: Indices, applicant: Applicant) -> Indices:
    """Of the units of a group as many as the device bears, in no order."""
    most = units_at_most(spec.groups[group].size, applicant.width_max)
    if len(units) <= most:
        return units
    return stream(applicant.seed, "borne", group).permutation(units)[:most]
