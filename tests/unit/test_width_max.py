"""What a device's memory bears: no planner gives it more, and where there is nothing for it, it hears so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.core import events as ev
from anabranch.core.config.tables import SubmodelTable, merge
from anabranch.core.effects import Granted
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.planner import Applicant, Planner, too_narrow
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.step_times import StepTime
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.journal import from_record, to_record
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.units import Member, UnitGroup, units_at_most
from anabranch.core.model.updates import Ask, Capability
from anabranch.core.snapshot import restore, take_snapshot
from anabranch.host.run import NoLine, Run
from anabranch.protos import convert
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.store.ledger_rows import ClientReader, capability_text, record_text
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.planner import GroupPlanner, Units
from anabranch.strategies.submodels.registry import PLANNERS, make_planner
from anabranch.testing.models import SPEC, tensors

OF_UNITS = ("random", "hetero", "heterofl", "fedrolex", "fjord", "ist")
OF_TENSORS = ("fragments", "alternate")


def model(sizes: list[int]) -> ParamSpec:
    """A tensor for each group, whose coordinates are its units."""
    names = [f"g{i}" for i in range(len(sizes))]
    zeros = {name: np.zeros(size, np.float32) for name, size in zip(names, sizes, strict=True)}
    groups = [UnitGroup(n, size, (Member(n, 0),)) for n, size in zip(names, sizes, strict=True)]
    return ParamSpec.of(zeros, groups)


def planner(name: str, spec: ParamSpec, **table: Any) -> Planner:
    found: Planner = PLANNERS.find(name).of(spec, SubmodelTable(**table), 0)
    return found


def share_kept(part: UnitMap | Any, spec: ParamSpec) -> list[float]:
    """Of each group; of the whole model all."""
    if part is None:
        return [1.0 for _ in spec.groups]
    return [len(units) / group.size for units, group in zip(part.kept, spec.groups, strict=True)]


@given(
    name=st.sampled_from(OF_UNITS),
    sizes=st.lists(st.integers(2, 24), min_size=1, max_size=3),
    width_max=st.floats(0.02, 0.999),
    drop=st.floats(0.0, 0.9),
    widths=st.lists(st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.7, 1.0]), min_size=1, max_size=4),
    step_time=st.sampled_from(["linear", "proportional"]),
    slowness=st.sampled_from([None, 0.0, 0.4, 1.0]),
    turn=st.integers(0, 20),
    overdue=st.booleans(),
)
@example(
    "heterofl", [5], 0.5, 0.0, [0.5], "linear", None, 0, False
)  # of five units a half is three, rounded up
@example("random", [7], 0.29, 0.0, [1.0], "linear", 0.4, 3, True)
@example("random", [49, 10], 1 / 10, 0.0, [1.0], "linear", 0.4, 3, True)
def test_no_planner_gives_more_of_a_group_than_a_device_bears(
    name: str,
    sizes: list[int],
    width_max: float,
    drop: float,
    widths: list[float],
    step_time: str,
    slowness: float | None,
    turn: int,
    overdue: bool,
) -> None:
    spec = model(sizes)
    of = planner(name, spec, drop=drop, widths=widths, step_time=step_time, parts=2, coverage_versions=3)
    refused = too_narrow(of, width_max)
    if refused:
        assert "width_max" in refused
        # With as much as the sentence asks for it is let in.
        assert not too_narrow(of, float(refused.split("say width_max = ")[1].split()[0]))
        return
    vector, time = np.zeros(spec.size, np.float32), None if slowness is None else StepTime(0.5, slowness)
    state = of.init(vector)
    version = 50 if overdue else 0  # then every unit is forced in that can be
    for seed in range(4):
        asks = Applicant(slowness, version, seed, "a", turn + seed, time, width_max)
        state, part = of.plan(state, vector, asks)
        assert max(share_kept(part, spec)) <= width_max + 1e-9
        state = of.applied(state, part, version + 1)


# What each gives one device, of the units of two groups; None: the whole model.
GIVEN: dict[str, tuple[tuple[int, ...], ...] | None] = {
    "random": ((0, 1, 3, 4, 5, 7), (0, 1, 2)),
    "hetero": ((1, 2, 3, 4, 5, 6), (0, 1, 2)),
    "heterofl": None,
    "fedrolex": None,
    "fjord": ((0, 1, 2, 3, 4, 5), (0, 1, 2)),
    "ist": ((0, 2, 7), (1,)),
}


@pytest.mark.parametrize("name", OF_UNITS)
def test_who_bears_the_whole_model_gets_what_it_always_got(name: str) -> None:
    of, vector = planner(name, SPEC, parts=3), SPEC.flatten(tensors())
    plain = Applicant(0.5, 3, 7, "a", 9, StepTime(0.2, 0.8))
    assert plain.width_max == 1.0
    assert not too_narrow(of, 1.0)
    part = of.plan(of.init(vector), vector, plain)[1]
    assert (None if part is None else part.kept) == GIVEN[name]  # type: ignore[union-attr]


def test_of_a_ladder_a_device_gets_the_widest_step_that_it_bears() -> None:
    spec = model([20])
    of, vector = planner("heterofl", spec, widths=[1.0, 0.75, 0.5, 0.25]), np.zeros(20, np.float32)
    for width_max, share in ((1.0, 1.0), (0.99, 0.75), (0.75, 0.75), (0.7, 0.5), (0.25, 0.25)):
        asks = Applicant(None, 0, 0, "a", 0, None, width_max)
        assert share_kept(of.plan(of.init(vector), vector, asks)[1], spec) == [share]
    assert "no task is of less than 0.25 of the model's units" in too_narrow(of, 0.24)
    assert "submodel.widths" in too_narrow(of, 0.24)


def test_of_first_units_a_narrow_device_gets_the_first() -> None:
    """A half of five is three, rounded up, which is more than it bears."""
    spec = model([5])
    of, vector = planner("heterofl", spec, widths=[1.0, 0.5]), np.zeros(5, np.float32)
    for seed in range(8):
        _, part = of.plan(of.init(vector), vector, asking(seed, 0.5))
        assert isinstance(part, UnitMap)
        assert part.kept == ((0, 1),)


def test_a_slow_device_gets_less_than_it_bears_and_a_fast_one_does_not() -> None:
    spec = model([20])
    of, vector = planner("heterofl", spec, widths=[1.0, 0.5, 0.25]), np.zeros(20, np.float32)
    for time, share in ((StepTime(0.0, 4.0), 0.25), (StepTime(0.0, 1.0), 0.5)):
        asks = Applicant(0.5, 0, 0, "a", 4, time, 0.5)
        assert share_kept(of.plan(of.init(vector), vector, asks)[1], spec) == [share]


def test_hetero_widens_its_window_and_does_not_cut_off_one_end() -> None:
    """A slow device still trains what has changed most, as much of it as it bears."""
    spec, first = model([8]), np.zeros(8, np.float32)
    of = planner("hetero", spec, drop=0.25)
    state, moved = of.init(first), np.arange(8, dtype=np.float32)
    for slowness, kept in ((0.0, (0, 1, 2, 3)), (1.0, (4, 5, 6, 7)), (0.5, (0, 1, 6, 7))):
        asks = Applicant(slowness, 1, 0, "a", 0, None, 0.5)
        (units,) = of.plan(state, moved, asks)[1].kept  # type: ignore[union-attr]
        assert units == kept


class Whole(GroupPlanner):
    """One of somebody's own, which keeps all units, in their order, and says nothing of narrow devices."""

    name = "whole"

    def kept(self, state: Any, vector: Vector, applicant: Applicant) -> list[Units]:
        return [np.arange(group.size) for group in self.spec.groups]


def test_a_planner_of_ones_own_leaves_no_unit_to_wide_devices_alone() -> None:
    """Without the guard that forces old ones in."""
    spec = model([12])
    of, touched = Whole(spec), set[int]()
    assert "group 'g0' has 12 units" in too_narrow(of, 0.05)
    for seed in range(40):
        asks = Applicant(0.5, 0, seed, "a", 0, None, 0.25)
        _, part = of.plan(of.init(np.zeros(12, np.float32)), np.zeros(12, np.float32), asks)
        assert isinstance(part, UnitMap)
        assert len(part.kept[0]) == 3
        touched |= set(part.kept[0])
    assert touched == set(range(12))


@pytest.mark.parametrize("size", [3, 10, 30, 49, 1000])
def test_as_many_units_as_were_meant_whatever_a_float_makes_of_it(size: int) -> None:
    """49 * (1 / 49) is less than 1."""
    for count in range(1, size):
        assert units_at_most(size, count / size) == count


def test_a_group_of_a_single_unit_shuts_nobody_out() -> None:
    """It cannot be less than it is."""
    spec = model([16, 1])
    of, vector = planner("random", spec, drop=0.0), np.zeros(17, np.float32)
    assert too_narrow(of, 0.25) == ""
    assert share_kept(of.plan(of.init(vector), vector, asking(0, 0.25))[1], spec) == [0.25, 1.0]
    assert "every task is of the whole model" in too_narrow(planner("random", model([1])), 0.5)


def asking(seed: int, width_max: float, version: int = 0) -> Applicant:
    return Applicant(0.5, version, seed, "a", 0, None, width_max)


def touched_by(of: Planner, spec: ParamSpec, width_max: float, tasks: int) -> list[int]:
    """How often each unit of the one group was in a task of a fleet of narrow devices; a version each."""
    vector, counts = np.zeros(spec.size, np.float32), [0] * spec.groups[0].size
    state = of.init(vector)
    for n in range(tasks):
        state, part = of.plan(state, vector, asking(n, width_max, n))
        assert isinstance(part, UnitMap)
        for unit in part.kept[0]:
            counts[unit] += 1
        state = of.applied(state, part, n + 1)
    return counts


@pytest.mark.parametrize("name", ["random", "fedrolex"])
def test_a_fleet_of_narrow_devices_trains_all_of_the_model(name: str) -> None:
    """Each unit about as often as any other: not the first ones alone."""
    counts = touched_by(planner(name, model([16]), drop=0.5, widths=[0.5, 0.25]), model([16]), 0.25, 160)
    assert min(counts) > 0.5 * sum(counts) / 16


def test_what_the_guard_forces_in_reaches_narrow_devices_too() -> None:
    of = planner("heterofl", model([16]), widths=[0.25], coverage_versions=8)
    assert min(touched_by(of, model([16]), 0.25, 200)) > 5
    without = planner("heterofl", model([16]), widths=[0.25], coverage_versions=0)
    assert touched_by(without, model([16]), 0.25, 20) == [20] * 4 + [0] * 12


def test_fjord_draws_from_what_a_device_bears() -> None:
    """Half of the time the narrower one of two, and never the first units of one that is too wide."""
    spec = model([20])
    of, vector = planner("fjord", spec, widths=[1.0, 0.9, 0.8, 0.5, 0.25]), np.zeros(20, np.float32)
    shares = [share_kept(of.plan(of.init(vector), vector, asking(n, 0.5))[1], spec)[0] for n in range(300)]
    assert set(shares) == {0.5, 0.25}
    assert shares.count(0.25) == pytest.approx(150, abs=45)


@pytest.mark.parametrize("of", [None, *OF_TENSORS])
def test_where_devices_need_the_whole_model_none_with_less_memory_is_let_in(of: str | None) -> None:
    found = None if of is None else planner(of, SPEC, parts=2, turns=("hidden.*", "lstm.*"))
    assert too_narrow(found, 1.0) == ""
    why = too_narrow(found, 0.99)
    assert why.startswith("width_max is 0.99, and in this run every task is of the whole model")
    assert "submodel.name" in why


def test_the_smallest_group_says_how_narrow_a_device_may_be() -> None:
    of = planner("random", model([12, 3]))
    assert "group 'g1' has 3 units" in too_narrow(of, 0.333)
    assert too_narrow(of, 0.3334) == ""


class Heedless(Whole):
    """It says that it has parts for narrow devices, and gives all of the model."""

    def plan(self, state: Any, vector: Vector, applicant: Applicant) -> tuple[Any, UnitMap | None]:
        return state, None


def test_the_engine_lets_no_planner_break_its_word() -> None:
    run = host(Heedless(SPEC))
    run.take(ev.Enrolled(0.0, "a", Capability(width_max=0.4)))
    granted = run.take(ev.TaskAsked(0.0, Ask("a", "t"))).effects[-1]
    assert isinstance(granted, Granted)
    assert share_kept(granted.task.submodel, SPEC) == [3 / 8, 1 / 3]
    assert granted.task.submodel is not None
    run.take(ev.Enrolled(0.0, "b", Capability()))
    whole = run.take(ev.TaskAsked(0.0, Ask("b", "t2"))).effects[-1]
    assert isinstance(whole, Granted)
    assert whole.task.submodel is None


def test_a_planner_that_says_a_number_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupPlanner, "narrowest", lambda _: 0.25)
    config = merge([("test", {"strategy": {"name": "fedbuff"}, "submodel": {"name": "random"}})])
    with pytest.raises(ConfigError, match=r"planner 'random': narrowest\(\) must return a Narrowest.*0\.25"):
        make_planner(SPEC, make_strategy("fedbuff", {}), config)


# --- the books -----------------------------------------------------------------------------------


def engine(of: Planner | None) -> Engine:
    settings = EngineSettings(seed=1)
    return Engine(SPEC, make_strategy("fedbuff", {}), settings, SPEC.flatten(tensors()), None, of)


def host(of: Planner | None) -> Run:
    return Run(engine(of), NoLine())


NARROW = Capability(width_max=0.4)


def test_a_device_is_refused_before_anything_is_logged_and_nobody_knows_it() -> None:
    run, log = host(None), []  # type: ignore[var-annotated]
    with pytest.raises(ConfigError, match=r"width_max is 0\.4, .* whole model .*submodel\.name"):
        run.take(ev.Enrolled(0.0, "a", NARROW), log.append)
    assert (log, list(run.engine.ledger.clients)) == ([], [])


def test_who_comes_again_with_another_width_gets_parts_of_that() -> None:
    run, sizes = host(planner("random", SPEC, drop=0.0)), []
    for n, width_max in enumerate((1.0, 0.4, 0.7)):
        run.take(ev.Enrolled(0.0, "a", Capability(width_max=width_max)))
        granted = run.take(ev.TaskAsked(0.0, Ask("a", f"t{n}"))).effects[-1]
        assert isinstance(granted, Granted)
        sizes.append([round(share, 3) for share in share_kept(granted.task.submodel, SPEC)])
    assert sizes == [[1.0, 1.0], [3 / 8, 0.333], [5 / 8, 0.667]]


def test_one_that_was_let_in_and_bears_too_little_now_keeps_its_record() -> None:
    run = host(planner("random", SPEC))
    run.take(ev.Enrolled(0.0, "a", NARROW))
    with pytest.raises(ConfigError, match="lstm"):
        run.take(ev.Enrolled(1.0, "a", Capability(width_max=0.01)))
    assert run.engine.ledger.clients["a"].capability == NARROW


def as_record(capability: Capability) -> Capability:
    record = json.loads(json.dumps(to_record(ev.Enrolled(2.0, "a", capability))))
    found = from_record(record, SPEC, lambda *_: np.empty(0))
    assert isinstance(found, ev.Enrolled)
    return found.capability


def as_snapshot(capability: Capability) -> Capability:
    of = planner("random", SPEC)
    before = engine(of)
    before.handle(ev.Enrolled(0.0, "a", capability))
    after = restore(take_snapshot(before), SPEC, before.strategy, before.settings, None, of)
    return after.ledger.clients["a"].capability


def as_row(capability: Capability) -> Capability:
    before = engine(None)
    before.handle(ev.Enrolled(0.0, "a", capability))
    client = before.ledger.clients["a"]
    return ClientReader()(capability_text(capability), record_text(client)).capability


def as_message(capability: Capability) -> Capability:
    sent = convert.capability_to_proto(capability).SerializeToString()
    return convert.capability_from_proto(devices.Capability.FromString(sent))


@pytest.mark.parametrize("way", [as_record, as_snapshot, as_row, as_message])
@pytest.mark.parametrize("width_max", [0.25, 1.0])
def test_a_width_is_kept(way: Callable[[Capability], Capability], width_max: float) -> None:
    assert way(Capability(examples=3, width_max=width_max)).width_max == width_max


def test_what_is_written_of_devices_that_say_nothing_is_as_it_was() -> None:
    old = {"accelerator", "codecs", "down_bps", "examples", "memory_bytes", "up_bps"}
    assert set(to_record(ev.Enrolled(0.0, "a", Capability()))["capability"]) == old
    assert set(json.loads(capability_text(Capability()))) == old
    assert not convert.capability_to_proto(Capability()).HasField("width_max")
    assert convert.capability_from_proto(devices.Capability()).width_max == 1.0  # an older device


@pytest.mark.parametrize("width_max", [0.0, -0.5, 1.0001, float("inf"), float("nan")])
def test_what_is_no_share_is_refused(width_max: float) -> None:
    with pytest.raises(InvalidUpdate, match=r"capability\.width_max must be above 0 and at most 1"):
        convert.capability_from_proto(devices.Capability(width_max=width_max))
