"""The laws of core/engine/planner.py, for any planner of sub-models."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anabranch.core.config.tables import SubmodelTable
from anabranch.core.engine.planner import Applicant, Planner
from anabranch.core.engine.step_times import StepTime
from anabranch.core.model.arrays import read_only
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import TensorSet, UnitMap, tensor_set
from anabranch.core.parts import PartKind
from anabranch.core.rng import seed_of
from anabranch.strategies.submodels.registry import PLANNERS
from anabranch.testing.data import frozen, read_again
from anabranch.testing.elsewhere import came_to
from anabranch.testing.kind import check_of_kind
from anabranch.testing.models import SPEC, tensors

VECTOR = read_only(SPEC.flatten(tensors()))  # as a run shows its model


def applicant(number: int, version: int = 0, slowness: float | None = 0.5, turn: int = 0) -> Applicant:
    """Of a device of middling speed, unless said otherwise. The slowest takes 5 times the fastest's time."""
    whole = 1 + 4 * (slowness or 0.0)
    step_time = None if slowness is None else StepTime(0.2 * whole, 0.8 * whole)
    return Applicant(slowness, version, seed_of(0, number), turn=turn, step_time=step_time)


def life(
    of: Planner, count: int = 40, width_max: float = 1.0
) -> tuple[Any, list[UnitMap | TensorSet | None]]:
    """Tasks that are planned, applied or lost in turn; the last state and every sub-model."""
    state, found = of.init(VECTOR), []
    drift = VECTOR.copy()
    for i in range(count):
        asks = applicant(i, version=i, slowness=(i % 8) / 7)
        asks = replace(asks, client_id=f"device-{i % 4}", turn=i // 4, width_max=width_max)
        state, part = of.plan(state, read_only(drift), asks)
        found.append(part)
        state = of.released(state, part) if i % 5 == 4 else of.applied(state, part, i + 1)
        drift = drift + np.float32(0.01) * np.random.default_rng(i).standard_normal(drift.size).astype("f4")
    return state, found


def life_as_text(of: Planner) -> tuple[str, list[str]]:
    """The same, for another process."""
    state, found = life(of)
    return frozen(of, state), [repr(part) for part in found]


class PlannerConformance:
    """Say `planner`, your class, or write `make`: a new one, for the model `anabranch.testing.models.SPEC`.

    `table` is the `[submodel]` table that it is made by. `everyone`: whether every unit is to be trained
    sooner or later. `spec`: that model, where the planner wants it to say more, such as stages.
    """

    kind: PartKind = PLANNERS
    planner: type[Any]
    spec: ParamSpec = SPEC
    table = SubmodelTable(parts=3, coverage_versions=6)
    everyone = True

    def make(self) -> Planner:
        made: Planner = self.planner.of(self.spec, self.table, 0)
        return made

    def test_it_has_what_a_planner_has(self) -> None:
        check_of_kind(self.kind, type(self.make()))

    def test_equal_calls_give_equal_results_and_the_state_is_data(self) -> None:
        of = self.make()
        (state, first), (again, second) = life(of), life(self.make())
        assert first == second
        assert frozen(of, state) == frozen(of, again)
        assert frozen(of, read_again(of, state)) == frozen(of, state)

    def test_a_restart_changes_nothing(self) -> None:
        lived, restarted = self.make(), self.make()
        state = life(lived, 9)[0]
        plans = [
            of.plan(known, VECTOR, applicant(9, 9))
            for of, known in ((lived, state), (restarted, read_again(restarted, state)))
        ]
        (before, part), (after, again) = plans
        assert part == again, "what it remembers is not all in its state"
        assert frozen(lived, before) == frozen(restarted, after)

    def test_another_process_comes_to_the_same(self) -> None:
        """As a server does that is started again. There a set of texts has another order."""
        assert life_as_text(self.make()) == came_to(life_as_text, self.make())

    def test_a_submodel_is_of_the_models_own_units_or_tensors(self) -> None:
        for part in life(self.make())[1]:
            if isinstance(part, UnitMap):
                kept = zip(self.spec.groups, part.kept, strict=True)
                assert all(0 < len(set(units)) <= group.size for group, units in kept)
            elif part is not None:
                assert tensor_set(self.spec, part.tensors) == part

    def test_no_device_gets_more_of_a_group_than_its_memory_bears(self) -> None:
        of = self.make()
        if not hasattr(of, "narrowest"):
            pytest.skip("this planner is for devices that bear the whole model alone")
        for width_max in np.linspace(of.narrowest().width, 0.99, 7).tolist():
            for part in life(of, width_max=width_max)[1]:
                assert isinstance(part, UnitMap)
                kept = zip(self.spec.groups, part.kept, strict=True)
                sizes = [(len(units), group.size) for group, units in kept if group.size > 1]
                assert all(count <= width_max * size + 1e-9 for count, size in sizes)

    def test_no_call_writes_to_the_state_or_the_vector(self) -> None:
        of = self.make()
        state, _ = life(of, 7)
        before, vector = frozen(of, state), VECTOR.copy()
        kept = copy.deepcopy(state)
        _, part = of.plan(state, vector, applicant(1, 9))
        of.applied(state, part, 10)
        of.released(state, part)
        assert frozen(of, state) == before == frozen(of, kept)
        assert np.array_equal(vector, VECTOR)

    def test_every_unit_and_tensor_is_touched_sooner_or_later(self) -> None:
        if not self.everyone:
            pytest.skip("this planner leaves some units alone, on purpose")
        _, found = life(self.make(), 60)
        for g, group in enumerate(self.spec.groups):
            touched: set[int] = set()
            for part in found:
                touched |= set(part.kept[g]) if isinstance(part, UnitMap) else set(range(group.size))
            assert touched == set(range(group.size))
        if all(isinstance(part, TensorSet) for part in found):
            tensors = {name for part in found if isinstance(part, TensorSet) for name in part.names}
            assert tensors == set(self.spec.slices)
