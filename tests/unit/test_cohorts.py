"""Masked sums in the engine: what a cohort is, what keepers' answers make of it, what may not happen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import SPEC, decision, vector
from masked_bench import MASKING, MaskedBench, logged, masked_config
from memory_log import MemoryLog

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.effects import CohortLost, Finished, MaskSumWanted, Published, Refused, RolledBackTo
from anabranch.core.engine.cohorts import MaskedUpdate
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.journal import from_record, line, to_record
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Capability, Reason, Verdict, find_flaw
from anabranch.core.snapshot import state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.host.rollback import Refolder, check_rollback
from anabranch.host.run import NoLine, Run
from anabranch.host.secagg import mask_sum_arrived

NAMES = "abcdef"


def bench(clients: str = NAMES, **tables: Any) -> MaskedBench:
    """A run with masked sums whose devices are enrolled."""
    made = MaskedBench(masked_config(**tables))
    made.enrol(*clients)
    return made


def of(effects: list[Any], kind: type[Any]) -> list[Any]:
    """The effects of a kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


# --- cohorts ---------------------------------------------------------------------------------------------


def test_the_kth_update_closes_a_cohort_and_its_sum_is_a_version_once_the_keeper_has_answered() -> None:
    b = bench()
    held = b.give("a", "a0", (100, -200, 3, 0))
    assert (decision(held).verdict, decision(held).weight) == (Verdict.HELD, 1.0)
    assert not of(held, MaskSumWanted)
    (wanted,) = of(b.give("b", "b0", (1, 1, 1, -1)), MaskSumWanted)
    members = (MaskedUpdate("update-of-a0", "a", 0, 0, 16), MaskedUpdate("update-of-b0", "b", 0, 0, 16))
    assert wanted == MaskSumWanted(1, 0, members)
    assert b.engine.version == 0
    (published,) = b.answer(1)
    assert (published.version, published.update_ids) == (1, ("update-of-a0", "update-of-b0"))
    scale = b.cohorts.terms.ring.scale
    exact = np.array([101.0, -199.0, 4.0, -1.0]) / scale / 2
    assert b.engine.vector == pytest.approx(exact, rel=1e-6)
    assert b.engine.pending == []
    assert b.cohorts.waiting == ()


def test_the_next_cohort_fills_while_one_waits_and_versions_come_in_their_order() -> None:
    b = bench(secagg={"keepers": ["north", "south"]})
    for client in "abcd":
        b.give(client, f"{client}0", (8, 0, 0, 0))
    assert [c.number for c in b.cohorts.wanted("north")] == [1, 2]
    assert not b.answer(2, "south")
    assert not b.answer(2, "north"), "it is whole, but another is before it"
    assert not b.answer(1, "south")
    assert [c.number for c in b.cohorts.wanted("north")] == [1]
    assert b.cohorts.wanted("south") == []
    effects = b.answer(1, "north")
    assert [(e.version, e.update_ids) for e in of(effects, Published)] == [
        (1, ("update-of-a0", "update-of-b0")),
        (2, ("update-of-c0", "update-of-d0")),
    ]


def test_a_weight_is_that_of_the_age_at_arrival_and_the_mean_is_by_the_buffer() -> None:
    b = bench()
    for client in "abc":
        b.ask(client, f"{client}0")
    b.send("a", "a0", (160, 0, 0, 0))
    b.send("b", "b0", (160, 0, 0, 0))
    b.answer(1)
    first = b.engine.vector.copy()
    late = b.send("c", "c0", (160, 0, 0, 0))
    assert (decision(late).staleness, decision(late).weight) == (1, 11 / 16)
    (wanted,) = of(b.give("d", "d0", (32, 0, 0, 0)), MaskSumWanted)
    assert [(m.base_version, m.arrived_version, m.weight) for m in wanted.members] == [(0, 1, 11), (1, 1, 16)]
    assert wanted.version == 1
    b.answer(2)
    moved = (11 / 16 * 160 + 32) / 2 / b.cohorts.terms.ring.scale
    assert float(b.engine.vector[0] - first[0]) == pytest.approx(moved, rel=1e-5)


def test_the_strategys_own_step_follows() -> None:
    strategy = {"name": "fedbuff", "buffer_size": 2, "server_lr": 0.5, "momentum": 0.5}
    b = bench(strategy=strategy)
    scale = b.cohorts.terms.ring.scale
    for turn in range(2):
        for client in "ab":
            b.give(client, f"{client}{turn}", (1000, 0, 0, 0))
        b.answer(turn + 1)
    assert float(b.engine.vector[0]) == pytest.approx((0.5 + 0.75) * 1000 / scale, rel=1e-5)


# --- what does not count ---------------------------------------------------------------------------------


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    b = bench()
    for client in "ab":
        b.give(client, f"{client}0", (1, 2, 3, 4))
    answer = b.answer_of(b.cohorts.waiting[0])
    before = state_digest(b.engine)
    for other in (replace(answer, number=2), replace(answer, number=0), replace(answer, keeper="west")):
        assert b.do(other) == []
        assert state_digest(b.engine) == before
    b.do(answer)
    after = state_digest(b.engine)
    assert b.do(answer) == []
    assert state_digest(b.engine) == after


def test_a_run_logs_only_answers_and_drops_that_change_something() -> None:
    b = bench(secagg={"keepers": ["north", "south"]})
    for client in "ab":
        b.give(client, f"{client}0", (1, 2, 3, 4))
    run, (cohort,) = Run(b.engine, NoLine()), b.cohorts.waiting
    answer = b.answer_of(cohort)
    short = mask_sum_arrived(b.cohorts.terms, 2.0, 1, "south", answer.numbers[:3])[0]
    with pytest.raises(InvalidUpdate, match="keeper south sent numbers of another size"):
        run.take(short)
    assert run.take(answer).event == answer
    assert run.take(answer).event is None
    assert run.take(ev.CohortDropped(3.0, 2, "why")).event is None
    assert run.take(ev.CohortDropped(3.0, 1, "why")).event is not None
    assert run.take(b.answer_of(cohort, "south")).event is None
    plain = Run(
        Blueprint.of(masked_config(secagg={"mode": "off", "keepers": [], "clip": 0.0}), SPEC).engine(
            {"w": np.zeros(4, np.float32)}
        ),
        NoLine(),
    )
    assert plain.take(answer).event is None


def test_who_cannot_mask_gets_no_task() -> None:
    b = bench("a")
    b.do(ev.Enrolled(0.0, "old", Capability(codecs=("raw", "int8"))))
    (refused,) = b.ask("old", "old0")
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.NO_MASKS
    assert "'ring'" in refused.detail
    b.do(ev.Enrolled(0.0, "old", MASKING))
    assert not of(b.ask("old", "old0"), Refused)
    assert b.engine.ledger.tasks["old0"].uplink == "ring(32,20)"


@pytest.mark.parametrize(
    "numbers",
    [vector(1, 2, 3, 4), np.zeros(4, np.uint16), np.zeros(3, np.uint32)],
    ids=["floats", "another ring", "another size"],
)
def test_an_update_of_other_numbers_is_flawed(numbers: Any) -> None:
    b = bench()
    b.ask("a", "a0")
    before = b.cohorts.total.copy()
    told = decision(b.send("a", "a0", (), numbers=numbers))
    assert (told.verdict, told.reason) == (Verdict.REJECTED, Reason.INVALID)
    assert np.array_equal(b.cohorts.total, before)
    assert b.cohorts.members == ()


def test_a_masked_update_is_flawed_where_nothing_is_masked() -> None:
    b = MaskedBench()
    b.engine = Blueprint.of(masked_config(secagg={"mode": "off", "keepers": [], "clip": 0.0}), SPEC).engine(
        {"w": np.zeros(4, np.float32)}
    )
    b.enrol("a")
    b.ask("a", "a0")
    told = decision(b.send("a", "a0", (), numbers=np.zeros(4, np.uint32)))
    assert told.reason is Reason.INVALID
    assert "this run's are not" in told.detail


def test_any_numbers_of_the_ring_are_good_ones() -> None:
    assert find_flaw(SPEC, np.full(4, 2**32 - 1, np.uint32), 1, None) is None
    assert find_flaw(SPEC, np.zeros(3, np.uint32), 1, None) == "delta has shape (3,), the manifest needs (4,)"
    assert find_flaw(SPEC, np.zeros(4, np.int32), 1, None) is not None


def test_a_flawed_update_is_in_no_cohort_though_the_run_is_private() -> None:
    b = bench(
        secagg={"clip": 0.0},
        privacy={"clip": 0.5, "noise": 0.1, "participations": 2},
        fleet={"clients": 6},
    )
    b.ask("a", "a0")
    told = decision(b.send("a", "a0", (), flaw="it was cut", numbers=vector()))
    assert (told.reason, told.detail) == (Reason.INVALID, "it was cut")


def test_a_device_is_once_in_a_cohort_and_may_be_in_the_next() -> None:
    b = bench()
    b.give("a", "a0", (1, 0, 0, 0))
    (refused,) = b.ask("a", "a1")
    assert refused.reason is Reason.OVER_SHARE
    b.give("b", "b0", (1, 0, 0, 0))
    assert not of(b.ask("a", "a1"), Refused), "the next cohort is open, whatever the keeper does"


def test_a_second_update_of_a_device_is_no_member_whatever_let_it_come() -> None:
    b = bench()
    b.give("a", "a0", (1, 0, 0, 0))
    arrived = b.log[-1]
    assert isinstance(arrived, ev.UpdateArrived)
    assert b.cohorts.flaw(arrived.update) == "a device is once in a masked sum"
    assert b.cohorts.flaw(replace(arrived.update, client_id="b")) == ""


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_no_honest_updates_have_is_no_version(sign: int) -> None:
    b = bench()
    b.give("a", "a0", (sign * (2**19 - 1), 0, 0, 0))
    b.give("b", "b0", (sign * 2**19, 0, 0, 0))
    for client in "cd":
        b.give(client, f"{client}0", (1, 1, 1, 1))
    lost, before = b.answer(1), b.engine.vector.copy()
    assert [(e.number, e.update_ids) for e in of(lost, CohortLost)] == [(1, ("update-of-a0", "update-of-b0"))]
    assert b.engine.version == 0
    assert not before.any()
    assert [e.version for e in of(b.answer(2), Published)] == [1], "the next one is none the worse"


def test_a_sum_that_is_too_long_is_no_version() -> None:
    top = 2**19 - 1
    b = bench(secagg={"clip": 2.0})
    b.give("a", "a0", (top, top, 0, 0))  # longer than the clip, though no value is
    b.give("b", "b0", (top, 0, 0, 0))
    assert of(b.answer(1), CohortLost)
    b.give("c", "c0", (top, 0, 0, 0))
    b.give("d", "d0", (top, 0, 0, 0))
    assert of(b.answer(2), Published)


# --- keepers that are away -------------------------------------------------------------------------------


def test_while_too_many_sums_wait_nobody_gets_a_task_and_who_has_one_may_answer_it() -> None:
    b = bench("abcdefgh", secagg={"cohorts_waiting_max": 2, "keepers": ["north", "south"]})
    b.ask("e", "e0")
    for client in "abcd":
        b.give(client, f"{client}0", (1, 0, 0, 0))
    (refused,) = b.ask("f", "f0")
    assert (refused.reason, refused.final) == (Reason.AT_CAPACITY, False)
    assert refused.detail == "2 sums wait for 2 of their keepers"
    assert not of(b.ask("e", "e0"), Refused), "the ask was granted before"
    assert decision(b.send("e", "e0", (1, 0, 0, 0))).verdict is Verdict.HELD
    b.answer(1, "south")
    b.answer(1, "north")
    assert not of(b.ask("f", "f0"), Refused)


@pytest.mark.parametrize("budget", [{"updates_max": 4}, {"versions_max": 2}])
def test_a_run_ends_with_its_last_sum_and_takes_nothing_more_before(budget: dict[str, int]) -> None:
    b = bench(run=budget)
    b.ask("e", "e0")
    b.ask("f", "f0")
    for client in "abcd":
        assert not of(b.give(client, f"{client}0", (1, 0, 0, 0)), Finished)
    (refused,) = b.ask("a", "a1")
    assert (refused.reason, refused.final) == (Reason.AT_CAPACITY, False)
    assert refused.detail.endswith("once its keepers have answered")
    late = decision(b.send("e", "e0", (1, 0, 0, 0)))
    assert late.reason is Reason.RUN_FINISHED
    assert not of(b.answer(1), Finished)
    (_, finished) = b.answer(2)
    assert isinstance(finished, Finished)
    assert b.engine.version == 2
    (refused,) = b.ask("a", "a2")
    assert refused.final


def test_a_private_run_ends_with_its_last_sum_when_its_devices_can_give_no_further_one() -> None:
    b = bench(
        "abcde",
        secagg={"clip": 0.0},
        privacy={"clip": 0.5, "noise": 0.01, "participations": 1},
        fleet={"clients": 5},
    )
    for client in "abcd":
        assert not of(b.give(client, client, (1, 0, 0, 0)), Finished)
    assert b.ask("a", "again")[0].reason is Reason.OVER_SHARE
    assert not of(b.answer(1), Finished)
    (finished,) = of(b.answer(2), Finished)
    assert finished.why == "the run ended at version 2: [privacy] lets 1 devices give another update"


# --- operators -------------------------------------------------------------------------------------------


def test_a_dropped_cohort_is_lost_and_the_next_ones_go_on() -> None:
    b = bench()
    for client in "abcd":
        b.give(client, f"{client}0", (4, 0, 0, 0))
    b.answer(2)
    lost, published = b.do(ev.CohortDropped(3.0, 1, "the keeper's key is gone"))
    assert lost == CohortLost(1, ("update-of-a0", "update-of-b0"), "the keeper's key is gone")
    assert (published.version, published.update_ids) == (1, ("update-of-c0", "update-of-d0"))
    assert b.do(ev.CohortDropped(4.0, 1, "again")) == []


def test_a_cohort_in_the_making_can_be_dropped_by_the_number_that_it_will_have() -> None:
    """Where one of its devices has sent what no keeper takes: full, it would wait for nothing."""
    b = bench()
    for client in "abc":
        b.give(client, f"{client}0", (1, 0, 0, 0))
    assert [b.cohorts.numbers_of(client) for client in "abcd"] == [[1], [1], [2], []]
    assert Run(b.engine, NoLine()).settle(ev.CohortDropped(2.0, 3, "typed wrongly")).event is None
    assert b.do(ev.CohortDropped(2.0, 3, "typed wrongly")) == []
    assert Run(b.engine, NoLine()).settle(ev.CohortDropped(2.0, 2, "why")).event is not None
    (lost,) = of(b.do(ev.CohortDropped(2.0, 2, "why")), CohortLost)
    assert lost == CohortLost(2, ("update-of-c0",), "why")
    assert b.cohorts.numbers_of("c") == []
    assert [published.version for published in of(b.answer(1), Published)] == [1]
    for client in "de":
        b.give(client, f"{client}0", (0, 8, 0, 0))
    assert [cohort.number for cohort in b.cohorts.waiting] == [3], "keepers take no number twice"
    before = b.engine.vector.copy()
    assert of(b.answer(3), Published)
    assert (b.engine.vector - before)[0] == 0, "nothing of c's"
    assert (b.engine.vector - before)[1] > 0


def test_a_drop_can_end_the_run() -> None:
    b = bench(run={"updates_max": 2})
    for client in "ab":
        b.give(client, f"{client}0", (4, 0, 0, 0))
    assert [type(e) for e in b.do(ev.CohortDropped(3.0, 1, "why"))] == [CohortLost, Finished]


def rolled_back(b: MaskedBench, log: MemoryLog, to_version: int, to_seq: int, rules: int = 3) -> list[Any]:
    """Go back, as a driver does; the event is in the log."""
    event = ev.RolledBack(9.0, to_version, to_seq, (), everyone=True, rules=rules)
    check_rollback(b.engine, event)
    place = sum(1 for _ in log.records()) + 1
    refolder = Refolder(log, b.restored, published=lambda _: to_seq)
    event = refolder.folding(event, place - 1, b.engine).finish(place, event.now)
    log.append(to_record(event))
    return b.do(event)


def two_versions() -> tuple[MaskedBench, MemoryLog, int, Vector]:
    """Two versions, and three updates that wait; the place in the log and the model of the first."""
    b = MaskedBench()
    log = logged(b)
    b.enrol(*NAMES)
    for client in "ab":
        b.give(client, f"{client}0", (4, 0, 0, 0))
    b.answer(1)
    to_seq, first = sum(1 for _ in log.records()), b.engine.vector.copy()
    for client in "cdefa":
        b.give(client, f"{client}1", (4, 0, 0, 0))
    b.answer(2)
    return b, log, to_seq, first


def test_a_rollback_goes_back_to_a_version_and_what_waits_is_lost() -> None:
    b, log, to_seq, first = two_versions()
    effects = rolled_back(b, log, 1, to_seq)
    assert [(e.number, e.update_ids) for e in of(effects, CohortLost)] == [
        (3, ("update-of-e1", "update-of-f1")),
        (4, ("update-of-a1",)),
    ]
    (published,) = of(effects, Published)
    assert (published.version, published.update_ids) == (3, ())
    assert (b.engine.updates_lost, b.engine.sums_lost) == (3, 2)
    assert np.array_equal(b.engine.vector, first)
    for client in "ab":
        assert not of(b.ask(client, f"{client}2"), Refused), "its update was lost"
        b.send(client, f"{client}2", (4, 0, 0, 0))
    assert [c.number for c in b.cohorts.waiting] == [5]
    b.answer(5)
    (told,), before = of(effects, RolledBackTo), b.engine.counters.left_out
    assert told.left_out == before == 2, "those of the version that is undone; what waited is lost"
    (told,) = of(rolled_back(b, log, 3, to_seq + 12), RolledBackTo)
    assert told.left_out == 2
    assert told.left_out_total == b.engine.counters.left_out == before + 2 > 2
    replayed = Replay(log, b.restored)
    for _ in replayed:
        pass
    assert state_digest(replayed.engine) == state_digest(b.engine)


def test_what_waited_at_the_version_of_a_rollback_is_lost_as_well() -> None:
    b = MaskedBench()
    log = logged(b)
    b.enrol(*NAMES)
    for client in "abc":
        b.give(client, f"{client}0", (4, 0, 0, 0))
    b.answer(1)
    to_seq = sum(1 for _ in log.records())
    b.give("d", "d0", (4, 0, 0, 0))
    assert b.engine.pending == ["update-of-c0", "update-of-d0"]
    (lost,) = of(rolled_back(b, log, 1, to_seq), CohortLost)
    assert lost.update_ids == ("update-of-c0", "update-of-d0")
    assert b.engine.pending == []


def test_a_rollback_of_an_older_release_counts_what_was_lost_as_it_did() -> None:
    """Snapshots and marks that came of it have that number."""
    b, log, to_seq, _ = two_versions()
    (told,) = of(rolled_back(b, log, 1, to_seq, rules=2), RolledBackTo)
    assert told.left_out == told.left_out_total == b.engine.counters.left_out == 5, "three of which were lost"


@pytest.mark.parametrize(("rules", "refused"), [(3, False), (4, True)])
def test_a_rollback_with_none_in_the_making_moves_no_window(rules: int, refused: bool) -> None:
    """A keeper counts by the numbers of cohorts, and would decline the next sum for good.

    A rollback of an older release did move it, and still does.
    """
    b = MaskedBench(masked_config(robust={"window_max": 1, "window_versions": 1}))
    log = logged(b)
    b.enrol(*NAMES)
    for client in "ab":
        b.give(client, f"{client}0", (4, 0, 0, 0))
    assert b.cohorts.number == 1
    rolled_back(b, log, 0, 0, rules=rules)
    assert b.cohorts.number == 1
    assert bool(of(b.ask("a", "a1"), Refused)) == refused


def test_nobodys_updates_can_be_taken_out_of_a_sum() -> None:
    b = bench()
    with pytest.raises(ConfigError, match="nobody can take their updates out of a sum: set everyone"):
        check_rollback(b.engine, ev.RolledBack(1.0, 0, 0, ("a",)))


# --- state -----------------------------------------------------------------------------------------------


def test_a_snapshot_has_the_cohorts_and_a_plain_run_says_nothing_of_them() -> None:
    b = bench(secagg={"keepers": ["north", "south"]})
    for client in "abc":
        b.give(client, f"{client}0", (5, 0, 0, 0))
    b.answer(1, "south")
    again = b.restored(take_snapshot(b.engine))
    assert state_digest(again) == state_digest(b.engine)
    assert again.cohorts is not None
    assert [c.number for c in again.cohorts.wanted("north")] == [1]
    assert again.cohorts.wanted("north")[0].members == b.cohorts.waiting[0].members
    snapshot = take_snapshot(b.engine)
    assert snapshot.arrays["cohorts/total"].dtype == np.uint32
    plain = Blueprint.of(masked_config(secagg={"mode": "off", "keepers": [], "clip": 0.0}), SPEC)
    assert "cohorts" not in take_snapshot(plain.engine({"w": np.zeros(4, np.float32)})).meta


def test_an_answer_is_in_the_log_with_its_numbers_beside() -> None:
    b = bench()
    for client in "ab":
        b.give(client, f"{client}0", (5, 0, 0, 0))
    event, data = mask_sum_arrived(b.cohorts.terms, 2.0, 1, "north", np.arange(4, dtype=np.uint32))
    record = json.loads(line(to_record(event)))
    assert record == {
        "kind": "mask_sum",
        "now": 2.0,
        "number": 1,
        "keeper": "north",
        "payload": {"sha256": event.payload.sha256, "size_bytes": 16, "codec": "ring(32,20)", "values": 0},
    }

    def load(payload: ev.Payload, submodel: Any) -> Any:
        return make_codec(payload.codec).decode(data, Layout.of(SPEC, submodel))

    read = from_record(record, SPEC, load)
    assert isinstance(read, ev.MaskSumArrived)
    assert read == event
    assert np.array_equal(read.numbers, event.numbers)
    drop = ev.CohortDropped(3.0, 1, "why")
    assert from_record(json.loads(line(to_record(drop))), SPEC, load) == drop


# --- what a server can see ---------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.integers(-9999, 9999), min_size=4, max_size=4), min_size=8, max_size=8),
    st.integers(0, 10**6),
)
def test_a_server_that_is_shown_noise_with_the_same_sums_publishes_the_same(
    rows: list[list[int]], seed: int
) -> None:
    """Who knows nothing but the sums can draw all that a server is sent: so it uses nothing else of it."""
    secagg, rng = {"keepers": ["north", "south"]}, np.random.default_rng(seed)
    real, made = bench("abcdefgh", secagg=secagg), bench("abcdefgh", secagg=secagg)
    for start in range(0, 8, 2):
        for client, integers in zip("abcdefgh"[start:], rows[start : start + 2], strict=False):
            real.give(client, f"{client}0", integers)
            made.ask(client, f"{client}0")
            made.send(client, f"{client}0", (), numbers=rng.integers(0, 2**32, 4, np.uint32))
        number = real.cohorts.number
        for keeper in ("north", "south"):
            real.answer(number, keeper)
        cohort = next(c for c in made.cohorts.waiting if c.number == number)
        terms, shown = made.cohorts.terms, rng.integers(0, 2**32, 4, np.uint32)
        weights = [m.weight for m in cohort.members]
        total = np.array(rows[start : start + 2]).T @ np.array(weights)
        made.do(mask_sum_arrived(terms, 2.0, number, "north", shown)[0])
        rest = cohort.total - shown - terms.ring.numbers(total)
        made.do(mask_sum_arrived(terms, 2.0, number, "south", rest)[0])
    assert real.engine.version == made.engine.version == 4
    assert np.array_equal(real.engine.vector, made.engine.vector)


# --- any order -------------------------------------------------------------------------------------------

WORDS = ["give", "give", "give", "ask", "late", "resend", "answer", "answer", "again", "drop", "restart"]


SCHEDULES = (
    lists_up_to(70, st.tuples(st.sampled_from(WORDS), st.integers(0, 10**6))),
    st.integers(1, 3),
    st.sampled_from([(32, 20, 16), (16, 9, 8)]),
    st.sampled_from([2, 4]),  # floats are exact then
)


@settings(max_examples=150, deadline=None)
@given(*SCHEDULES)
def test_whatever_the_order_a_version_is_the_exact_sum_of_its_updates(
    schedule: list[tuple[str, int]], keepers: int, ring: tuple[int, int, int], size: int
) -> None:
    check_sums(schedule, keepers, ring, size)


@pytest.mark.prove
@settings(max_examples=10_000, deadline=None)
@given(*SCHEDULES)
def test_in_ten_thousand_orders_a_version_is_the_exact_sum_of_its_updates(
    schedule: list[tuple[str, int]], keepers: int, ring: tuple[int, int, int], size: int
) -> None:
    check_sums(schedule, keepers, ring, size)


def check_sums(schedule: list[tuple[str, int]], keepers: int, ring: tuple[int, int, int], size: int) -> None:
    """An oracle of its own: integers, weighed as the receipts say, in the cohorts that effects name."""
    bits, value_bits, levels = ring
    secagg = {
        "keepers": [f"k{i}" for i in range(keepers)],
        "bits": bits,
        "value_bits": value_bits,
        "levels": levels,
    }
    b = bench(strategy={"name": "fedbuff", "buffer_size": size}, secagg=secagg)
    model, weights = Model(b), dict[str, int]()
    asked: list[tuple[str, str]] = []
    answered: list[ev.MaskSumArrived] = []
    for number, (what, choice) in enumerate(schedule):
        now, client = float(number), NAMES[choice % len(NAMES)]
        effects: list[Any] = []
        if what in ("give", "ask") and not of(b.ask(client, f"t{number}", now), Refused):
            asked.append((client, f"t{number}"))
        if what in ("give", "late", "resend") and asked:
            client, task = asked[-1 if what == "give" else choice % len(asked)]
            integers = b.integers.get(f"update-of-{task}", model.integers(choice))
            effects = b.send(client, task, integers, now)
        elif what == "answer" and b.cohorts.waiting:
            cohort = b.cohorts.waiting[choice % len(b.cohorts.waiting)]
            answered.append(b.answer_of(cohort, f"k{choice % keepers}", now))
            effects = b.do(answered[-1])
        elif what == "again" and answered:
            effects = b.do(answered[choice % len(answered)])
        elif what == "drop" and b.cohorts.waiting:
            effects = b.do(ev.CohortDropped(now, b.cohorts.waiting[-1].number, "why"))
        elif what == "restart":
            b.engine = b.restored(take_snapshot(b.engine))
        for wanted in of(effects, MaskSumWanted):
            weights |= {m.update_id: m.weight for m in wanted.members}
        model.follow(effects, weights)
    assert np.array_equal(b.engine.vector, model.vector)
    lost = model.version, model.lost, model.lost // b.cohorts.terms.cohort
    assert (b.engine.version, b.engine.updates_lost, b.engine.sums_lost) == lost


class Model:
    """What versions must be, of the integers that the bench's devices had."""

    def __init__(self, b: MaskedBench) -> None:
        self._bench, self.version, self.lost = b, 0, 0
        self.vector = np.zeros(4, np.float32)
        self._used: set[str] = set()

    def integers(self, choice: int) -> list[int]:
        """Of a device that stays within its length."""
        top = self._bench.cohorts.terms.ring.top
        return [((choice * k) % (2 * top + 1) - top) // 2 for k in (1, 7, 31, 101)]

    def follow(self, effects: list[Any], weights: dict[str, int]) -> None:
        """Add up what was published."""
        terms = self._bench.cohorts.terms
        for effect in effects:
            if isinstance(effect, CohortLost):
                assert not self._used & {*effect.update_ids}
                self._used |= {*effect.update_ids}
                self.lost += len(effect.update_ids)
            if not isinstance(effect, Published):
                continue
            assert len(effect.update_ids) == terms.cohort
            assert not self._used & {*effect.update_ids}, "no update counts twice"
            self._used |= {*effect.update_ids}
            exact = [
                sum(weights[u] * self._bench.integers[u][i] for u in effect.update_ids) for i in range(4)
            ]
            total = (np.array(exact, np.float64) / (terms.ring.scale * terms.weight(0))).astype(np.float32)
            self.vector = self.vector + total / np.float32(terms.cohort)
            self.version += 1
