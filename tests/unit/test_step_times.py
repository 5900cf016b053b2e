"""What is learned of devices' steps by the part that they train, and which parts they get by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import pytest

from anabranch.core import events as ev
from anabranch.core.config.tables import SubmodelTable
from anabranch.core.effects import Granted
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.ledger import TRAIN_S, ClientRecord
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.step_times import Seen, fixed_of, observed, quantile, whole_of
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.server.store.ledger_rows import ClientReader, capability_text, record_text
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.widths import HeteroFL
from anabranch.testing.models import line

STEPS = 4
SPEC = line(16)
StepS = Callable[[str, int, float], float]  # of a device, its task and the share: seconds


def seen_of(*pairs: tuple[float, float]) -> Seen:
    seen: Seen = ()
    for share, step_s in pairs:
        seen = observed(seen, share, step_s)
    return seen


# --- one device's numbers -----------------------------------------------------------------------


def test_a_and_b_are_told_apart_once_two_shares_were_seen_three_times() -> None:
    line_of = {share: 2.0 + 6.0 * share for share in (1.0, 0.75, 0.5)}  # f = 2 / 8
    pairs = [(share, line_of[share]) for share in (1.0, 1.0, 1.0, 0.5, 0.5)]
    assert fixed_of(seen_of(*pairs)) is None
    seen = seen_of(*pairs, (0.5, line_of[0.5]))
    assert fixed_of(seen) == 0.25
    assert whole_of(seen, 0.25) == pytest.approx(8.0)
    near = [(share, 2.0 + 6.0 * share) for share in (1.0, 0.8) for _ in range(3)]
    assert fixed_of(seen_of(*near)) is None, "their times differ by less than what else makes them differ"


@pytest.mark.parametrize("late", range(7))
@pytest.mark.parametrize("times", [10.0, 0.1])
def test_one_task_of_another_speed_changes_neither(late: int, times: float) -> None:
    pairs = [(share, 2.0 + 6.0 * share) for share in (1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5)]
    pairs[late] = pairs[late][0], times * pairs[late][1]
    seen = seen_of(*pairs)
    assert fixed_of(seen) == 0.25
    assert whole_of(seen, 0.25) == pytest.approx(8.0)


def test_times_that_fit_no_line_upwards_are_all_fixed_or_all_of_the_part() -> None:
    def fixed(whole: float, half: float) -> float | None:
        return fixed_of(seen_of(*[(1.0, whole)] * 3, *[(0.5, half)] * 3))

    assert (fixed(1.0, 1.0), fixed(1.0, 2.0)) == (1.0, 1.0)
    assert (fixed(4.0, 2.0), fixed(4.0, 1.0)) == (0.0, 0.0)
    assert fixed(0.04, 0.03) == 0.5, "whatever the unit of time"


def test_of_two_steps_the_quicker_counts_and_of_many_the_newest_three() -> None:
    assert whole_of(seen_of((1.0, 9.0), (1.0, 4.0)), 0.0) == 4.0
    assert whole_of(seen_of(*[(1.0, 9.0)] * 3, *[(0.5, 1.0)] * 2), 0.0) == 2.0


def test_what_is_kept_of_a_device_is_bounded() -> None:
    seen = seen_of(*[(share / 10, 1.0 * n) for n in range(5) for share in range(10, 0, -1)])
    assert sorted(seen) == [(share / 10, 4.0) for share in range(1, 7)], "no older than the sixth newest"
    seen = seen_of(*[(share / 10, 1.0 * n) for n in range(5) for share in (2, 1)])
    assert seen == tuple((share, n) for n in (2.0, 3.0, 4.0) for share in (0.2, 0.1))


def test_quantiles_of_counts() -> None:
    counts = Counter({3.0: 1, 1.0: 2, 2.0: 1})
    assert [quantile(counts, q) for q in (0.25, 0.5, 0.75, 1.0)] == [1.0, 1.0, 2.0, 3.0]
    assert quantile(Counter(), 0.5) is None


# --- a fleet ------------------------------------------------------------------------------------


class Fleet:
    """Devices that train widths of a model of 16 units, each after the other, and how wide each task was."""

    def __init__(
        self, devices: Sequence[str], step_s: StepS, widths: tuple[float, ...] = (1.0, 0.75, 0.5)
    ) -> None:
        table = SubmodelTable(widths=list(widths), coverage_versions=0)
        strategy = make_strategy("fedasync", {})
        parts = SPEC, strategy, EngineSettings(lease_s=1e9)
        self.planner = HeteroFL.of(SPEC, table, 0)
        self.engine = Engine(*parts, np.zeros(16, np.float32), planner=self.planner)
        self.devices, self.step_s, self.now = devices, step_s, 0.0
        self.shares: dict[str, list[float]] = {device: [] for device in devices}
        for device in devices:
            self.engine.handle(ev.Enrolled(0.0, device, Capability()))

    def turn(self) -> None:
        """A task of each."""
        for device in self.devices:
            number = len(self.shares[device])
            ask = Ask(device, f"{device}{number}")
            (granted,) = self.engine.handle(ev.TaskAsked(self.now, ask))
            assert isinstance(granted, Granted)
            task = granted.task
            share = 1.0 if task.submodel is None else task.submodel.size / 16
            self.shares[device].append(share)
            took = {TRAIN_S: STEPS * self.step_s(device, number, share)}
            delta = np.zeros(round(16 * share), np.float32)
            named = f"of {task.task_id}", task.task_id, device, task.base_version
            update = Update(
                *named, examples=1, delta=delta, submodel=task.submodel, local_steps=STEPS, metrics=took
            )
            self.now += 1.0
            self.engine.handle(ev.UpdateArrived(self.now, update, ev.Payload("00" * 32, 4 * delta.size)))
            assert violations(self.engine) == []

    def turns(self, count: int) -> dict[str, list[float]]:
        for _ in range(count):
            self.turn()
        return self.shares


@pytest.mark.parametrize("lie", [1.7e308, 1e300, 1e13, 1e-13, 5e-324, 0.0, -1.0, -1.7e308], ids=str)
def test_a_device_that_says_no_time_of_a_step_harms_nobody(lie: float) -> None:
    """Nothing is divided by what it says, and no width is sought by it: it is as if it had said nothing."""

    def step_s(device: str, number: int, share: float) -> float:
        return lie if device == "liar" else 0.1

    fleet = Fleet(["liar", "a", "b"], step_s)
    assert set(chain(*fleet.turns(12).values())) == {1.0}
    assert fleet.engine.ledger.clients["liar"].step_s is None
    assert fleet.engine.ledger.clients["a"].step_s == 0.1


def uneven(fixed: float, speeds: dict[str, float]) -> StepS:
    return lambda device, _, share: speeds[device] * (fixed + (1 - fixed) * share)


@pytest.mark.parametrize("fixed", [0.0, 0.4, 1.0])
def test_an_even_fleet_trains_whole_models(fixed: float) -> None:
    def step_s(device: str, number: int, share: float) -> float:
        noise = np.random.default_rng([ord(device), number]).normal(1.0, 0.05)
        return float(noise * (fixed + (1 - fixed) * share))

    assert set(chain(*Fleet("abcdefgh", step_s).turns(30).values())) == {1.0}


@pytest.mark.parametrize("fixed", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("slow_turn", [0, 1, 2, 5, 12])
def test_one_slow_task_makes_nobody_train_less(fixed: float, slow_turn: int) -> None:
    def step_s(device: str, number: int, share: float) -> float:
        late = 20.0 if (device, number) == ("c", slow_turn) else 1.0
        return late * (fixed + (1 - fixed) * share)

    assert set(chain(*Fleet("abcd", step_s).turns(30).values())) == {1.0}


@pytest.mark.parametrize("fixed", [0.0, 1.0])
def test_a_device_that_was_busy_for_long_trains_whole_models_again(fixed: float) -> None:
    def step_s(device: str, number: int, share: float) -> float:
        busy = 4.0 if device == "c" and number < 6 else 1.0
        return busy * (fixed + (1 - fixed) * share)

    found = Fleet("abcd", step_s).turns(60)
    assert fixed or min(found["c"]) == 0.5, "while it was slow"
    assert found["c"][-24:] == [1.0] * 24


def test_a_slow_device_gets_what_makes_it_as_quick_as_the_others() -> None:
    fleet = Fleet("abcd", uneven(0.0, {"a": 1.0, "b": 1.0, "c": 1.6, "d": 5.0}))
    found = fleet.turns(16)
    assert found["a"] == found["b"] == [1.0] * 16
    assert found["c"] == [1.0] * 3 + [0.75] * 5 + [1.0] + [0.75] * 7
    assert found["d"] == [1.0] * 3 + [0.5] * 5 + [1.0] + [0.5] * 7


def test_a_slow_device_whose_steps_are_no_shorter_with_less_trains_all_of_it() -> None:
    fleet = Fleet("abcd", uneven(1.0, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 5.0}))
    found = fleet.turns(20)
    assert found["d"] == [1.0] * 3 + [0.5] * 3 + [1.0] * 14, "three tasks with half of it have told"
    time = fleet.engine.ledger.step_time("d")
    assert time is not None
    assert time.a == pytest.approx(5.0)
    assert time.b == 0.0


def test_what_one_device_has_found_out_spares_the_others_the_trial() -> None:
    speeds = dict.fromkeys("abcdef", 1.0) | {"x": 5.0, "y": 5.0}
    fleet = Fleet("abcdefx", uneven(1.0, speeds))
    fleet.turns(10)
    fleet.engine.handle(ev.Enrolled(fleet.now, "y", Capability()))
    fleet.devices, fleet.shares["y"] = "y", []
    assert fleet.turns(10)["y"] == [1.0] * 10


def test_after_a_restore_the_books_say_the_same_and_go_on_alike() -> None:
    speeds = {"a": 1.0, "b": 1.3, "c": 2.0, "d": 5.0}
    fleet = Fleet("abcd", uneven(0.3, speeds), widths=(1.0, 0.75, 0.5, 0.25))
    fleet.turns(13)
    before = fleet.engine
    parts = before.spec, before.strategy, before.settings
    again = restore(take_snapshot(before), *parts, planner=fleet.planner)
    assert state_digest(again) == state_digest(before)
    for device in "abcd":
        assert again.ledger.step_time(device) == before.ledger.step_time(device)
        assert again.ledger.slowness(device) == before.ledger.slowness(device)
    fleet.turns(9)
    after = state_digest(fleet.engine), {device: shares[13:] for device, shares in fleet.shares.items()}
    fleet.engine, fleet.now = again, 13.0 * 4
    fleet.shares = {device: shares[:13] for device, shares in fleet.shares.items()}
    fleet.turns(9)
    assert (state_digest(fleet.engine), {d: shares[13:] for d, shares in fleet.shares.items()}) == after


def test_parts_of_one_size_are_timed_as_ever() -> None:
    """A planner that asks for no times: the books of such runs are what they were."""
    table = SubmodelTable(step_time="proportional")
    fleet = Fleet("ab", uneven(0.5, {"a": 1.0, "b": 2.0}))
    fleet.planner = HeteroFL.of(SPEC, table, 0)
    parts = SPEC, fleet.engine.strategy, fleet.engine.settings
    fleet.engine = Engine(*parts, np.zeros(16, np.float32), planner=fleet.planner)
    for device in "ab":
        fleet.engine.handle(ev.Enrolled(0.0, device, Capability()))
    fleet.turns(3)
    assert all(not client.steps for client in fleet.engine.ledger.clients.values())
    assert fleet.engine.ledger.step_time("a") is None
    assert all("steps" not in client for client in take_snapshot(fleet.engine).meta["clients"])


def test_rows_of_snapshots_have_steps_where_there_are_any() -> None:
    client = ClientRecord(Capability(), 3, step_s_ewma=0.1, steps=((1.0, 0.1), (0.5, 0.07)))
    assert ClientReader()(capability_text(client.capability), record_text(client)) == client
    assert "steps" not in record_text(ClientRecord(Capability()))
