"""The laws of core/engine/planner.py, for every planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest

from anabranch.core.config.tables import merge
from anabranch.core.engine.planner import Applicant, Planner
from anabranch.core.engine.step_times import StepTime
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.stages import Growth, ModelStage
from anabranch.core.model.submodels import Kept, TensorSet, UnitMap
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.alternate import Alternate
from anabranch.strategies.submodels.asyncdrop import scores
from anabranch.strategies.submodels.planner import GroupPlanner
from anabranch.strategies.submodels.progressive import Progressive
from anabranch.strategies.submodels.registry import PLANNERS, make_planner
from anabranch.testing import PlannerConformance
from anabranch.testing.data import frozen
from anabranch.testing.models import SPEC, line
from anabranch.testing.planner import VECTOR, applicant, life


def planner(name: str, spec: Any = SPEC, strategy: str = "asyncdrop", **table: Any) -> Planner:
    config = merge([("test", {"submodel": {"name": name, "parts": 3, **table}})])
    found = make_planner(spec, make_strategy(strategy, {}), config)
    assert found is not None
    return found


class Writing(GroupPlanner):
    """Changes the model that it is to read."""

    name: ClassVar[str] = "writing"

    def kept(self, state: Any, vector: Any, applicant: Applicant) -> Any:
        vector[0] = 0.0
        return [np.arange(group.size) for group in self.spec.groups]


def test_the_kit_notices_who_writes_to_the_model() -> None:
    with pytest.raises(ValueError, match="read-only"):
        life(Writing.of(SPEC, PlannerConformance.table, 0))


def kept_of(part: UnitMap | TensorSet | None) -> Kept:
    """The units of a part that is of units."""
    assert isinstance(part, UnitMap)
    return part.kept


@pytest.fixture(params=[of for of in PLANNERS.ours().values() if of not in (Alternate, Progressive)])
def built_in(request: pytest.FixtureRequest) -> type[Any]:
    found: type[Any] = request.param
    return found


class TestPlanners(PlannerConformance):
    @pytest.fixture(autouse=True)
    def _planner(self, built_in: type[Any]) -> None:
        self.planner = built_in


class TestProgressive(PlannerConformance):
    """In three stages: by the tenth task the second has begun, by the twentieth the third."""

    planner = Progressive
    spec = replace(
        SPEC,
        stages=(
            ModelStage(["hidden.weight"], ["hidden.bias"]),
            ModelStage(["lstm.weight_hh"], ["lstm.bias"]),
            ModelStage(["out.weight"], ["out.bias"]),
        ),
    )

    def make(self) -> Planner:
        return Progressive(self.spec, Growth((0, 10, 20), 3))


class TestAlternate(PlannerConformance):
    """The model of the kit has no adapters: its layers take turns."""

    planner = Alternate

    def make(self) -> Planner:
        return Alternate(SPEC, [["hidden.*"], ["lstm.*"]], 3)


@pytest.mark.parametrize("name", ["random", "hetero", "heterofl", "fedrolex", "fjord"])
@pytest.mark.parametrize("versions", [3, 10])
def test_no_unit_goes_untouched_for_more_than_g_versions(name: str, versions: int) -> None:
    # One task at a time, every one applied: what is overdue at a grant is touched by that very update.
    of = planner(name, line(40), coverage_versions=versions, widths=[0.5], drop=0.5)
    state, vector = of.init(np.zeros(40, np.float32)), np.zeros(40, np.float32)
    waits = np.zeros(40, np.int64)
    for version in range(80):
        state, part = of.plan(state, vector, applicant(version, version, slowness=0.0))
        assert part is not None
        assert len(kept_of(part)[0]) == 20
        vector[list(kept_of(part)[0])] += 1
        waits += 1
        waits[list(kept_of(part)[0])] = 0
        state = of.applied(state, part, version + 1)
        assert waits.max() <= versions + 1


def test_without_the_guard_the_first_channels_alone_are_trained() -> None:
    _, found = life(planner("heterofl", coverage_versions=0, widths=[0.5]))
    assert {kept_of(part) for part in found if part is not None} == {(tuple(range(4)), (0, 1))}


def test_random_leaves_out_the_share_that_was_asked_for() -> None:
    spec = line(128)
    of = planner("random", spec, drop=0.25, coverage_versions=0)
    state, counts = of.init(np.zeros(128, np.float32)), Counter[int]()
    for i in range(400):
        state, part = of.plan(state, np.zeros(128, np.float32), applicant(i))
        assert part is not None
        assert len(kept_of(part)[0]) == 96
        counts.update(kept_of(part)[0])
    assert set(counts) == set(range(128))
    assert min(counts.values()) > 240  # 300 expected, 8.7 is one standard deviation
    assert max(counts.values()) < 360


def test_nothing_left_out_is_the_whole_model() -> None:
    for name in ("random", "hetero"):
        of = planner(name, drop=0.0)
        assert of.plan(of.init(VECTOR), VECTOR, applicant(0))[1] is None
    of = planner("heterofl", widths=[1.0])
    assert of.plan(of.init(VECTOR), VECTOR, applicant(0))[1] is None


def windows(slownesses: list[float], spec: Any, drop: float = 0.25) -> list[list[int]]:
    """The ranks (0: changed most) that Hetero AsyncDrop leaves out, by slowness; unit u is of rank u."""
    of = planner("hetero", spec, drop=drop, coverage_versions=0)
    n = spec.groups[0].size
    state, now = of.init(np.zeros(n, np.float32)), np.arange(n, 0, -1, dtype=np.float32)
    found = []
    for q in slownesses:
        _, part = of.plan(state, now, applicant(0, 1, q))
        assert part is not None
        found.append(sorted(set(range(n)) - set(kept_of(part)[0])))
    return found


def test_the_windows_are_those_of_the_published_script_up_to_rounding_and_none_coincide() -> None:
    # specs: n = 128, d = 32, R = 8; the script gives ranks 6 and 7 the same window.
    published = [(0, 32), (16, 48), (32, 64), (48, 80), (64, 96), (80, 112), (96, 128), (96, 128)]
    found = windows([r / 7 for r in range(8)], line(128))
    starts = [window[0] for window in found]
    for window, start in zip(found, starts, strict=True):
        assert window == list(range(start, start + 32))
    assert all(abs(start - low) <= 16 for start, (low, _) in zip(starts, published, strict=True))
    assert starts[0] == 0
    assert starts[-1] == 96
    assert all(b > a for a, b in pairwise(starts))


def test_a_device_of_unknown_speed_draws_its_window() -> None:
    of = planner("hetero", line(64), coverage_versions=0)
    state, now = of.init(np.zeros(64, np.float32)), np.arange(64, 0, -1, dtype=np.float32)
    parts = {of.plan(state, now, applicant(i, 1, None))[1] for i in range(12)}
    assert len(parts) > 6


def test_asks_for_one_version_share_its_scores_and_another_model_of_its_number_has_its_own() -> None:
    vectors = list(np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32))
    of = planner("hetero", line(64), coverage_versions=0)
    state = of.init(np.zeros(64, np.float32))
    for number, which in [(1, 0), (1, 0), (1, 1), (1, 0), (2, 2)]:
        vector = vectors[which]
        alone = planner("hetero", line(64), coverage_versions=0)
        expected = alone.plan(alone.init(np.zeros(64, np.float32)), vector, applicant(0, number, 0.4))[1]
        assert of.plan(state, vector, applicant(0, number, 0.4))[1] == expected
    vectors[2] *= vectors[0]  # the next version in the memory of the last
    alone = planner("hetero", line(64), coverage_versions=0)
    expected = alone.plan(alone.init(np.zeros(64, np.float32)), vectors[2], applicant(0, 3, 0.4))[1]
    assert of.plan(state, vectors[2], applicant(0, 3, 0.4))[1] == expected


def test_a_score_is_the_sum_of_the_changes_of_a_unit_s_weights() -> None:
    change = np.abs(np.random.default_rng(1).standard_normal(SPEC.size)).astype(np.float32)
    hidden_scores, cell_scores = scores(SPEC, 1 + change, np.ones_like(change))
    arrays = SPEC.unflatten(change)
    hidden = arrays["hidden.weight"].sum(axis=1) + arrays["out.weight"].reshape(2, 8, 2).sum(axis=(0, 2))
    np.testing.assert_allclose(hidden_scores, hidden, rtol=1e-6)
    w = arrays["lstm.weight_hh"]
    cells = w.reshape(4, 3, 3).sum(axis=(0, 2)) + w.sum(axis=0)
    np.testing.assert_allclose(cell_scores, cells, rtol=1e-6)


def units_of(name: str, applicants: Iterable[Applicant], widths: list[float], **table: Any) -> list[int]:
    """How many of 16 units each gets; the first ones."""
    of = planner(name, line(16), widths=widths, coverage_versions=0, **table)
    state, zero = of.init(np.zeros(16, np.float32)), np.zeros(16, np.float32)
    found = [of.plan(state, zero, one)[1] for one in applicants]
    assert all(part is None or kept_of(part)[0] == tuple(range(len(kept_of(part)[0]))) for part in found)
    return [16 if part is None else len(kept_of(part)[0]) for part in found]


def of_times(*times: tuple[float, float] | None, turn: int = 5) -> list[Applicant]:
    """Devices of these a and b, or of unknown ones."""
    known = [None if time is None else StepTime(*time) for time in times]
    return [Applicant(0.5, 0, 0, turn=turn, step_time=time) for time in known]


def test_a_device_gets_the_widest_width_that_hardly_makes_it_slower_than_a_fast_one() -> None:
    # A step may take 1.25: 1.25 x <= 1.25, 2.5 x <= 1.25 at 1/2, and 5 x at 1/4.
    times = [(0.0, 1.0), (0.0, 1.25), (0.0, 1.26), (0.0, 2.5), (0.0, 2.51), (0.0, 90.0), (0.7, 1.1), None]
    assert units_of("heterofl", of_times(*times), [0.25, 1.0, 0.5]) == [16, 16, 8, 8, 4, 4, 8, 16]


def test_nobody_trains_less_of_the_model_where_that_saves_no_time() -> None:
    # 3 whatever is trained; 3 + 1 against 3.25 with a quarter; 2 + 2 against 2.5, and 1.25 of that is 3.125.
    times = [(3.0, 0.0), (3.0, 1.0), (2.0, 2.0)]
    assert units_of("heterofl", of_times(*times), [1.0, 0.5, 0.25]) == [16, 16, 8]


def test_the_first_tasks_of_a_device_are_of_the_widest_width_and_some_later_ones() -> None:
    slow = [one for turn in range(18) for one in of_times((0.0, 4.0), turn=turn)]
    assert units_of("heterofl", slow, [0.75, 0.25]) == [12] * 3 + [4] * 5 + [12] + [4] * 7 + [12, 4]


def test_in_runs_of_older_releases_widths_go_by_a_devices_place_in_the_fleet() -> None:
    slow = StepTime(0.0, 9.0)
    asks = [Applicant(q, 0, 0, turn=5, step_time=slow) for q in (0.0, 0.3, 0.34, 0.66, 0.67, 1.0, None)]
    sizes = units_of("heterofl", asks, [0.25, 1.0, 0.5], step_time="proportional")
    assert sizes == [16, 16, 8, 8, 4, 4, 4]
    assert not getattr(planner("fedrolex", step_time="proportional"), "times_steps", True)


def test_fedrolex_rolls_by_one_a_version_and_goes_round() -> None:
    of = planner("fedrolex", line(6), widths=[0.5], coverage_versions=0)
    state, zero = of.init(np.zeros(6, np.float32)), np.zeros(6, np.float32)
    kept = [kept_of(of.plan(state, zero, applicant(0, v))[1])[0] for v in (0, 1, 5, 6)]
    assert kept == [(0, 1, 2), (1, 2, 3), (0, 1, 5), (0, 1, 2)]


def test_fjord_draws_among_the_widths_up_to_the_device_s_own() -> None:
    of = planner("fjord", line(8), widths=[1.0, 0.5, 0.25], coverage_versions=0)
    state, zero = of.init(np.zeros(8, np.float32)), np.zeros(8, np.float32)

    def sizes(q: float) -> set[int]:
        parts = [of.plan(state, zero, applicant(i, 0, q, turn=5))[1] for i in range(60)]
        return {8 if part is None else len(kept_of(part)[0]) for part in parts}

    assert (sizes(0.0), sizes(0.25), sizes(1.0)) == ({8, 4, 2}, {4, 2}, {2})


def test_ist_deals_every_unit_once_and_a_lost_part_comes_back() -> None:
    of = planner("ist", line(10), parts=3)
    state, zero = of.init(np.zeros(10, np.float32)), np.zeros(10, np.float32)
    out = []
    for i in range(3):
        state, part = of.plan(state, zero, applicant(i))
        assert part is not None
        out.append(part)
    assert sorted(u for part in out for u in kept_of(part)[0]) == list(range(10))
    state, second = of.plan(state, zero, applicant(3))
    assert second == out[0]  # all are out: the one that has been for longest gets a second chance
    state = of.released(state, out[1])
    state, again = of.plan(state, zero, applicant(4))
    assert again == out[1]
    for part in out:
        state = of.applied(state, part, 1)
    state = of.applied(state, second, 2)  # of the pass before: nothing comes of it
    state, fresh = of.plan(state, zero, applicant(5))
    assert fresh not in out
    assert frozen(of, state) == frozen(of, of.plan(of.state_type(1), zero, applicant(5))[0])


@pytest.mark.parametrize(
    ("spec", "strategy", "table", "words"),
    [
        (line(4), "fadas", {"name": "random"}, "strategy 'fadas' takes whole models only"),
        (None, "asyncdrop", {}, "submodel.name is 'hetero', but no units"),
        (line(2), "fedavg", {"name": "ist", "parts": 3}, "group 'w' has 2 units only"),
    ],
)
def test_what_cannot_be_planned_is_refused(spec: Any, strategy: str, table: Any, words: str) -> None:
    spec = spec or ParamSpec.of({"w": np.zeros(3)})
    with pytest.raises(ConfigError, match=words):
        make_planner(spec, make_strategy(strategy, {}), merge([("test", {"submodel": table})]))


def test_auto_is_the_strategy_s_own_choice() -> None:
    config = merge([("test", {})])
    assert make_planner(SPEC, make_strategy("fedasync", {}), config) is None
    found = make_planner(SPEC, make_strategy("asyncdrop", {}), config)
    assert found is not None
    assert found.name == "hetero"
    off = merge([("test", {"submodel": {"name": "none"}})])
    assert make_planner(SPEC, make_strategy("asyncdrop", {}), off) is None
