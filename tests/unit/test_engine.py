"""The server machine as lists of events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, part, vector

from anabranch.core import events as ev
from anabranch.core.effects import Decided, Finished, Granted, LeaseEnd, LeaseEnded, Published, Refused
from anabranch.core.engine.admission import dropped_by
from anabranch.core.engine.ledger import Counters
from anabranch.core.engine.strategy import Context, State
from anabranch.core.model.updates import Ask, Capability, Reason, Task, Verdict
from anabranch.strategies.fedavg import FedAvg, FedAvgState
from anabranch.strategies.fedbuff import FedBuff


def only(effects: Any, kind: Any) -> Any:
    return [e for e in effects if isinstance(e, kind)]


def reason(effects: Any) -> Reason:
    (refused,) = only(effects, Refused)
    found: Reason = refused.reason
    return found


def test_a_task_starts_from_the_newest_version_and_has_a_lease() -> None:
    bench = Bench(buffer_size=1, lease_s=30.0)
    bench.enrol("a")
    bench.work("a", "t0")
    (granted,) = bench.ask("a", "t1", now=5.0)
    assert isinstance(granted, Granted)
    assert (granted.task.base_version, granted.task.expires_at) == (1, 5.0 + granted.task.lease_s)


def test_a_repeated_ask_gets_the_same_task_and_changes_nothing() -> None:
    bench = Bench()
    bench.enrol("a")
    (first,) = bench.ask("a", "t0")
    (again,) = bench.ask("a", "t0", now=3.0)
    assert again == Granted(first.task, again=True)
    assert bench.engine.counters.granted == 1


def test_an_unknown_client_is_told_to_enrol() -> None:
    bench = Bench()
    assert reason(bench.ask("ghost", "t0")) is Reason.UNKNOWN_CLIENT


def test_the_cap_refuses_with_a_window_until_a_slot_is_free() -> None:
    bench = Bench(concurrency=2, retry_after_s=(3.0, 9.0))
    bench.enrol("a", "b", "c")
    bench.ask("a", "ta")
    bench.ask("b", "tb")
    (refused,) = bench.ask("c", "tc")
    assert (refused.reason, refused.retry_after_s, refused.final) == (Reason.AT_CAPACITY, (3.0, 9.0), False)
    bench.push("a", "ta")
    assert only(bench.ask("c", "tc2"), Granted)


def test_a_client_that_asks_anew_gives_up_its_old_task() -> None:
    bench = Bench(concurrency=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    ended, granted = bench.ask("a", "t1")
    assert (ended.end, ended.task.task_id, granted.task.task_id) == (LeaseEnd.SUPERSEDED, "t0", "t1")
    assert decision(bench.push("a", "t0")).reason is Reason.UNKNOWN_TASK


def test_two_tasks_a_client_where_that_is_allowed() -> None:
    bench = Bench(tasks_per_client=2)
    bench.enrol("a")
    assert [len(bench.ask("a", f"t{i}")) for i in range(3)] == [1, 1, 2]


def test_resending_an_update_gets_the_stored_answer_and_counts_once() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    first = only(bench.push("a", "t0"), Decided)[0]
    model = bench.engine.vector.copy()
    (again,) = bench.push("a", "t0", now=9.0)
    assert again.duplicate
    assert again.receipt == first.receipt
    assert np.array_equal(bench.engine.vector, model)
    assert (bench.engine.counters.applied, bench.engine.counters.duplicates) == (1, 1)


def test_a_second_update_for_one_task_is_rejected() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.work("a", "t0")
    assert decision(bench.push("a", "t0", update_id="other")).reason is Reason.DUPLICATE_TASK
    assert bench.engine.version == 1


def test_a_task_id_that_was_used_cannot_be_asked_for_again() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a", "b")
    bench.work("a", "t0")
    assert reason(bench.ask("a", "t0")) is Reason.DUPLICATE_TASK
    bench.ask("a", "t1")
    assert reason(bench.ask("b", "t1")) is Reason.DUPLICATE_TASK


def test_nobody_may_answer_for_another() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a", "b")
    bench.ask("a", "t0")
    assert decision(bench.push("b", "t0", update_id="forged")).reason is Reason.UNKNOWN_TASK
    assert decision(bench.push("a", "t0")).verdict is Verdict.PUBLISHED


@pytest.mark.parametrize(("base", "expected"), [(0, Reason.WRONG_BASE), (9, Reason.FUTURE_BASE)])
def test_a_base_that_is_not_the_tasks_is_rejected(base: Any, expected: Any) -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.work("a", "t0")
    bench.ask("a", "t1")
    before = bench.engine.vector.copy()
    assert decision(bench.push("a", "t1", base=base)).reason is expected
    assert np.array_equal(bench.engine.vector, before)


def test_staleness_counts_the_versions_since_the_base() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("slow", "fast")
    bench.ask("slow", "s")
    for i in range(3):
        bench.work("fast", f"f{i}")
    assert decision(bench.push("slow", "s")).staleness == 3


def test_a_flaw_closes_the_task_and_leaves_the_model() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    verdict = decision(bench.push("a", "t0", flaw="delta has 3 values that are not finite"))
    assert (verdict.reason, bench.engine.version, bench.engine.ledger.live) == (Reason.INVALID, 0, 0)


def test_a_submodel_is_refused_by_a_strategy_of_whole_models() -> None:
    bench = Bench("fadas", buffer_size=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    assert decision(bench.push("a", "t0", (1, 1), submodel=part(0, 2))).reason is Reason.NO_SUBMODELS


def test_fedasync_leaves_the_coordinates_outside_a_submodel() -> None:
    bench = Bench(
        "fedasync", vector(1, 2, 3, 4), alpha=0.5, staleness={"name": "constant"}, any_submodel=True
    )
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.push("a", "t0", (2, 2), submodel=part(0, 2))
    assert bench.engine.vector.tolist() == [2, 2, 4, 4]


def test_another_part_of_the_model_than_the_task_asked_for_is_refused() -> None:
    bench = Bench("fedasync", vector(1, 2, 3, 4))
    bench.enrol("a")
    bench.ask("a", "t0")
    found = decision(bench.push("a", "t0", (2, 2), submodel=part(0, 2)))
    assert (found.verdict, found.reason) == (Verdict.REJECTED, Reason.WRONG_SUBMODEL)
    assert bench.engine.vector.tolist() == [1, 2, 3, 4]


def test_a_lease_expires_and_frees_its_slot() -> None:
    bench = Bench(concurrency=1, lease_s=10.0)
    bench.enrol("a", "b")
    bench.ask("a", "ta")
    assert bench.engine.next_deadline() == 10.0
    assert bench.tick(9.9) == []
    (ended,) = bench.tick(10.0)
    assert ended.end is LeaseEnd.EXPIRED
    assert only(bench.ask("b", "tb", now=10.0), Granted)
    assert bench.engine.counters.leases_lost == 1


def test_late_work_still_counts() -> None:
    bench = Bench(buffer_size=1, lease_s=10.0)
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.tick(20.0)
    assert decision(bench.push("a", "t0", now=21.0)).verdict is Verdict.PUBLISHED


def test_a_late_model_needs_its_base_to_be_held() -> None:
    bench = Bench("fedasync", lease_s=10.0)
    bench.enrol("a", "b")
    bench.ask("a", "t0")
    bench.work("b", "t1")
    bench.tick(20.0)
    gone = decision(bench.push("a", "t0", now=21.0))
    assert (gone.reason, gone.staleness) == (Reason.BASE_GONE, 1)


def test_the_model_of_a_live_tasks_base_is_kept_and_then_let_go() -> None:
    bench = Bench("fedasync", vector(8, 8, 8, 8), alpha=0.5, staleness={"name": "constant"})
    bench.enrol("slow", "fast")
    bench.ask("slow", "s")
    bench.work("fast", "f0", (4, 4, 4, 4))  # 0.5 * 8 + 0.5 * 12
    assert bench.engine.history[0].tolist() == [8, 8, 8, 8]
    bench.push("slow", "s", (0, 0, 0, 0))  # 0.5 * 10 + 0.5 * 8
    assert bench.engine.vector.tolist() == [9, 9, 9, 9]
    assert bench.engine.history == {}


def test_a_heartbeat_renews_only_while_the_work_goes_on() -> None:
    bench = Bench(lease_s=10.0)
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.do(ev.LeaseRenewed(8.0, "a", "t0", progress=1.0))
    assert bench.engine.next_deadline() == 18.0
    bench.do(ev.LeaseRenewed(16.0, "a", "t0", progress=1.0))
    assert bench.engine.next_deadline() == 18.0
    bench.do(ev.LeaseRenewed(16.0, "b", "t0", progress=2.0))
    assert bench.engine.next_deadline() == 18.0


def test_leases_follow_the_devices_own_speed() -> None:
    bench = Bench(buffer_size=1, lease_s=60.0, lease_min_s=1.0)
    bench.enrol("a")
    bench.ask("a", "t0", now=0.0)
    bench.push("a", "t0", now=4.0)
    (granted,) = bench.ask("a", "t1", now=4.0)
    assert granted.task.lease_s == pytest.approx(12.0)


def test_a_task_that_is_given_back_frees_its_slot() -> None:
    bench = Bench(concurrency=1)
    bench.enrol("a", "b")
    bench.ask("a", "t0")
    bench.do(ev.TaskDropped(1.0, "b", "t0", "not mine"))
    assert bench.engine.ledger.live == 1
    (ended,) = bench.do(ev.TaskDropped(1.0, "a", "t0", "battery"))
    assert (ended.end, bench.engine.ledger.live) == (LeaseEnd.DROPPED, 0)


def test_pausing_stops_tasks_but_takes_updates() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.do(ev.Paused(1.0))
    assert reason(bench.ask("a", "t1")) is Reason.PAUSED
    assert decision(bench.push("a", "t0")).verdict is Verdict.PUBLISHED
    bench.do(ev.Resumed(2.0))
    assert only(bench.ask("a", "t2"), Granted)


@pytest.mark.parametrize("budget", [{"versions_max": 2}, {"updates_max": 2}])
def test_a_used_up_budget_ends_the_run(budget: Any) -> None:
    bench = Bench(buffer_size=1, **budget)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    bench.work("a", "t0")
    bench.ask("a", "t1")
    assert only(bench.push("a", "t1"), Finished)
    (refused,) = bench.ask("a", "t2")
    assert (refused.reason, refused.final) == (Reason.RUN_FINISHED, True)
    assert decision(bench.push("b", "late")).reason is Reason.RUN_FINISHED
    assert bench.engine.version == 2


def test_a_published_version_names_the_updates_it_folded() -> None:
    bench = Bench(buffer_size=2)
    bench.enrol("a", "b")
    bench.work("a", "t0")
    bench.ask("b", "t1")
    (published,) = only(bench.push("b", "t1"), Published)
    assert published.update_ids == ("update-of-t0", "update-of-t1")


def test_receipts_in_memory_are_bounded() -> None:
    bench = Bench(buffer_size=1, receipts_max=3)
    bench.enrol("a")
    for i in range(10):
        bench.work("a", f"t{i}")
    assert list(bench.engine.ledger.receipts) == [f"update-of-t{i}" for i in (7, 8, 9)]


def test_an_old_buffer_is_flushed() -> None:
    bench = Bench(buffer_size=10, flush_s=5.0, staleness={"name": "constant"})
    bench.enrol("a", "b")
    bench.work("a", "t0", (2, 2, 2, 2), now=1.0)
    bench.work("b", "t1", (4, 4, 4, 4), now=2.0)
    assert bench.engine.next_deadline() == 6.0
    (published,) = bench.tick(6.0)
    assert published.vector.tolist() == [3, 3, 3, 3]
    assert bench.engine.next_deadline() is None


def test_a_refused_ask_leaves_the_digest() -> None:
    from anabranch.core.snapshot import state_digest

    bench = Bench(concurrency=1)
    bench.enrol("a", "b")
    bench.ask("a", "t0")
    before = state_digest(bench.engine)
    assert only(bench.ask("b", "t1"), Refused)
    assert state_digest(bench.engine) == before


def test_ending_a_round_cancels_its_stragglers() -> None:
    bench = Bench("fedavg", clients_per_round=1, over_selection=2.0)
    bench.enrol("a", "b")
    bench.ask("a", "ta")
    bench.ask("b", "tb")
    effects = bench.push("a", "ta")
    assert [(e.task.task_id, e.end) for e in only(effects, LeaseEnded)] == [("tb", LeaseEnd.CANCELLED)]


def test_a_lost_grant_is_found_again_although_the_run_is_paused() -> None:
    bench = Bench()
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.do(ev.Paused(1.0))
    assert only(bench.ask("a", "t0"), Granted)


def test_an_update_of_no_use_frees_its_place_in_the_round() -> None:
    bench = Bench("fedavg", clients_per_round=2, over_selection=1.0, deadline_s=0.0)
    bench.enrol("a", "b", "c")
    bench.ask("a", "ta")
    bench.ask("b", "tb")
    assert only(bench.ask("c", "tc"), Refused)
    assert decision(bench.push("a", "ta", flaw="delta is broken")).reason is Reason.INVALID
    assert only(bench.ask("c", "tc2"), Granted)
    bench.push("b", "tb", (2, 2, 2, 2))
    bench.push("c", "tc2", (4, 4, 4, 4))
    assert (bench.engine.version, bench.engine.vector.tolist()) == (1, [3, 3, 3, 3])


def test_nobody_counts_twice_in_a_round_by_being_late() -> None:
    bench = Bench("fedavg", clients_per_round=3, over_selection=1.0, deadline_s=0.0, lease_s=5.0)
    bench.enrol("a", "b", "c")
    bench.ask("a", "t0")
    bench.tick(5.0)
    assert decision(bench.push("a", "t0", now=6.0)).verdict is Verdict.HELD
    assert reason(bench.ask("a", "t1", now=7.0)) is Reason.NOT_SELECTED


def test_a_restarted_device_takes_its_place_in_the_round_again() -> None:
    bench = Bench("fedavg", clients_per_round=2, over_selection=1.0)
    bench.enrol("a", "b")
    bench.ask("a", "before")
    ended, granted = bench.ask("a", "after")
    assert (ended.end, granted.task.task_id) == (LeaseEnd.SUPERSEDED, "after")
    assert bench.engine.state.members == ["a"]


def test_the_held_updates_of_a_snapshot_stay_those_of_its_moment() -> None:
    from anabranch.core.snapshot import restore, state_digest, take_snapshot

    bench = Bench(buffer_size=3)
    bench.enrol("a")
    bench.work("a", "t0")
    snapshot, digest = take_snapshot(bench.engine), state_digest(bench.engine)
    engines = [
        restore(snapshot, bench.engine.spec, bench.engine.strategy, bench.engine.settings) for _ in range(2)
    ]
    bench.work("a", "t1")
    engines[0].handle(ev.TaskAsked(9.0, bench.log[-2].ask))  # type: ignore[union-attr]
    engines[0].handle(bench.log[-1])
    assert state_digest(engines[1]) == digest
    assert snapshot.meta["pending"] == ["update-of-t0"]


@pytest.mark.parametrize(
    ("setting", "codecs", "given"),
    [
        ("auto", ("raw",), "raw"),
        ("int8(256)", ("raw",), "raw"),
        ("int8(256)", ("int8:1",), "int8(256)"),
        ("ef(0.9)|topk(0.1)", ("topk:1",), "raw"),
        ("ef(0.9)|topk(0.1)", ("topk:1", "ef:1"), "ef(0.9)|topk(0.1)"),
    ],
)
def test_a_task_names_a_codec_that_its_device_can_do(setting: Any, codecs: Any, given: Any) -> None:
    bench = Bench(uplink=setting)
    bench.do(ev.Enrolled(0.0, "a", Capability(codecs=codecs)))
    (granted,) = bench.ask("a", "t0")
    assert granted.task.uplink == given


# --- what is counted, once each ------------------------------------------------------------------


def test_the_counters_are_of_all_that_has_happened() -> None:
    bench = Bench(buffer_size=1, lease_s=10.0, lease_min_s=10.0)
    bench.enrol("a", "b")
    for n in range(3):
        bench.work("a", f"good{n}")
        for _ in range(2):
            assert only(bench.push("a", f"good{n}"), Decided)[0].duplicate
    for n in range(2):
        bench.ask("a", f"bad{n}")
        bench.push("a", f"bad{n}", flaw="delta is broken")
        bench.ask("b", f"back{n}")
        bench.do(ev.TaskDropped(1.0, "b", f"back{n}", "battery"))
    bench.ask("b", "late", now=1.0)
    bench.tick(11.0)
    bench.push("b", "late", now=12.0)
    assert bench.engine.counters == Counters(granted=8, applied=4, rejected=2, duplicates=6, leases_lost=3)


def test_an_answer_is_found_by_its_update_and_by_the_task_that_it_used_up() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a", "b")
    for task in ("t0", "t1"):
        bench.work("a", task)
    bench.push("b", "t1", update_id="forged")
    engine = bench.engine
    for update_id, task_id, found in (
        ("update-of-t0", "t0", "update-of-t0"),
        ("update-of-t0", "t1", "update-of-t0"),
        ("another", "t1", "update-of-t1"),
        ("forged", "t1", "forged"),
    ):
        receipt = engine.receipt(update_id, task_id)
        assert receipt is not None
        assert receipt.update_id == found
    assert engine.receipt("another", "t2") is None


def test_an_update_is_told_as_it_came_and_of_a_private_run_no_metrics() -> None:
    for private in (False, True):
        bench = Bench("fedasync", any_submodel=True, participations_max=9 * private)
        bench.enrol("a")
        for task, values, raw_bytes in (("whole", 0, 16), ("of a part", 2, 8)):
            bench.ask("a", task)
            payload = ev.Payload("11" * 32, 5, "raw", values)
            submodel = part(0, 2) if values else None
            delta = (1,) * (values or 4)
            effects = bench.push(
                "a", task, delta, examples=7, metrics={"loss": 0.5}, payload=payload, submodel=submodel
            )
            (told,) = only(effects, Decided)
            receipt = bench.engine.ledger.receipts[f"update-of-{task}"]
            metrics = {} if private else {"loss": 0.5}
            assert told == Decided("a", receipt, 7, False, metrics, payload, raw_bytes)
            assert (receipt.client_id, receipt.sha256) == ("a", "11" * 32)
            assert receipt.version == bench.engine.version


def test_a_strategy_hears_once_of_each_lease_that_came_to_nothing() -> None:
    """Of a live one that ends without an update, or with one that is not taken; never of a late one again."""
    told: list[str] = []

    class Noting(FedBuff):
        def on_lost(self, state: State, task: Task, context: Context) -> State:
            told.append(task.task_id)
            return super().on_lost(state, task, context)

    bench = Bench(buffer_size=1, lease_s=5.0, lease_min_s=5.0, lease_max_s=5.0, versions_max=3)
    bench.engine.strategy = Noting(buffer_size=1)
    bench.enrol("a", "b", "c", "d")

    def hears(*tasks: str) -> None:
        assert told == list(tasks)
        told.clear()

    bench.ask("a", "good")
    bench.push("b", "good", update_id="forged", flaw="delta is broken")
    bench.push("a", "good")
    hears()
    bench.ask("a", "bad")
    bench.push("a", "bad", flaw="delta is broken")
    hears("bad")
    for task in ("late and good", "late and bad", "late and dropped", "late and barred"):
        bench.ask("a", task, now=2.0)
        bench.tick(7.0)
        hears(task)
        if task == "late and good":
            assert decision(bench.push("a", task, now=8.0)).verdict is Verdict.PUBLISHED
        elif task == "late and bad":
            bench.push("a", task, now=8.0, flaw="delta is broken")
        elif task == "late and dropped":
            assert bench.do(ev.TaskDropped(8.0, "a", task, "battery")) == []
        else:
            bench.ask("a", "barred", now=8.0)
            hears()
            bench.do(ev.Quarantined(9.0, "a", "as an example"))
            hears("barred")
            assert not bench.engine.ledger.tasks
        hears()
    bench.ask("b", "superseded", now=9.0)
    bench.ask("b", "dropped", now=9.0)
    hears("superseded")
    bench.do(ev.TaskDropped(9.0, "b", "dropped", "battery"))
    hears("dropped")
    bench.ask("b", "after the end", now=9.0)
    bench.ask("d", "when it is over", now=9.0)
    bench.work("c", "the last", now=9.0)
    assert bench.engine.finished
    bench.push("d", "when it is over", now=10.0)
    (lost,) = only(bench.tick(99.0), LeaseEnded)
    assert lost.task.task_id == "after the end"
    hears()


def test_a_strategy_looks_at_an_ask_anew_as_it_would_be_then() -> None:
    """Whether the place that a device gives up by it is free, at the moment at which it asks."""
    told = []

    class Noting(FedAvg):
        def on_lost(self, state: FedAvgState, task: Task, context: Context) -> FedAvgState:
            told.append((task.task_id, context.now, context.version, context.live_tasks))
            return super().on_lost(state, task, context)

    bench = Bench("fedavg", clients_per_round=1, over_selection=1.0)
    bench.engine.strategy = Noting(clients_per_round=1, over_selection=1.0)
    bench.enrol("a", "b")
    bench.ask("a", "before", now=1.0)
    before = bench.engine.state
    assert bench.engine.refusal(Ask("a", "after"), 3.0) is None
    assert told == [("before", 3.0, 0, 1)]
    assert bench.engine.state is before, "looking changes nothing"
    found = bench.engine.refusal(Ask("b", "another"), 3.0)
    assert found is not None
    assert found.detail == "the 1 places of round 0 are taken"


def test_the_next_deadline_is_a_lease_or_the_strategys_timer_whichever_comes_first() -> None:
    for lease_s, ends_at in ((2.0, 3.0), (60.0, 6.0)):
        bench = Bench(buffer_size=10, flush_s=5.0, lease_s=lease_s, lease_min_s=lease_s)
        bench.enrol("a", "b")
        assert bench.engine.next_deadline() is None
        bench.work("a", "t0", now=1.0)
        assert bench.engine.next_deadline() == 6.0
        bench.ask("b", "t1", now=1.0)
        assert bench.engine.next_deadline() == ends_at
        bench.tick(ends_at)
        assert bench.engine.next_deadline() == (6.0 if ends_at == 3.0 else 61.0)


def test_a_late_device_that_says_its_training_diverged_is_told_of_no_lease() -> None:
    bench = Bench(buffer_size=1, flaws_max=1, lease_s=5.0, lease_min_s=5.0)
    bench.enrol("a", "b")
    for task, ends in (("live", 1), ("late", 0)):
        bench.ask("a", task, now=0.0)
        bench.tick(0.0 if ends else 9.0)
        before = bench.engine.counters.leases_lost
        effects = bench.do(ev.TaskDropped(9.0, "a", task, "the loss is NaN", diverged=True))
        assert len(only(effects, LeaseEnded)) == ends
        assert bench.engine.counters.leases_lost == before + ends
        assert [e.diverged for e in only(effects, LeaseEnded)] == ["the loss is NaN"] * ends
        assert bench.engine.guard.release("a"), "one flaw is enough here"


def test_a_run_ends_once_whatever_comes_after() -> None:
    bench = Bench(buffer_size=1, updates_max=1, flaws_max=1, lease_s=5.0, lease_min_s=5.0, flush_s=1.0)
    bench.enrol("a", "b", "c", "d")
    for client in "bcd":
        bench.ask(client, f"t-{client}")
    bench.ask("a", "t-a")
    assert len(only(bench.push("a", "t-a"), Finished)) == 1
    after = [
        bench.push("b", "t-b", flaw="delta is broken"),
        bench.do(ev.TaskDropped(2.0, "c", "t-c", "the loss is NaN", diverged=True)),
        bench.tick(9.0),
        bench.tick(10.0),
    ]
    assert [[type(e) for e in effects] for effects in after] == [[Decided], [LeaseEnded], [LeaseEnded], []]
    assert bench.engine.guard.quarantined == {}, "nobody is to blame any more"


def test_the_model_of_the_newest_version_is_kept_from_an_update_of_an_older_one() -> None:
    """Whose base another task still needs: by w <- (w + base + delta) / 2, and all deltas are 0 but one."""
    bench = Bench("fedasync", vector(8, 8, 8, 8), alpha=0.5, staleness={"name": "constant"})
    bench.enrol("old", "fast", "new")
    bench.ask("old", "of version 0")
    bench.work("fast", "first", (4, 4, 4, 4))
    bench.ask("new", "of version 1")
    models = [bench.engine.vector.tolist()]
    for client, task in (("old", "of version 0"), ("new", "of version 1")):
        bench.push(client, task, (0, 0, 0, 0))
        models.append(bench.engine.vector.tolist())
    assert models == [[10.0] * 4, [9.0] * 4, [9.5] * 4]
    assert bench.engine.history == {}


def test_a_strategy_that_needs_no_base_has_none_kept() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("slow", "fast")
    bench.ask("slow", "s")
    for n in range(3):
        bench.work("fast", f"f{n}")
        assert bench.engine.history == {}


def test_a_model_that_is_lent_stays_as_it_is_while_the_engine_goes_on() -> None:
    bench = Bench(buffer_size=1, staleness={"name": "constant"})
    bench.enrol("a")
    loan = bench.engine.lend()
    for n in range(2):
        bench.work("a", f"t{n}")
        assert loan.vector.tolist() == [0.0] * 4
        assert bench.engine.vector.tolist() == [n + 1.0] * 4
    timed = Bench(buffer_size=9, flush_s=5.0)
    timed.enrol("a")
    loan = timed.engine.lend()
    timed.work("a", "t0", now=1.0)
    timed.tick(6.0)
    assert (timed.engine.version, loan.vector.tolist()) == (1, [0.0] * 4)


def test_a_place_is_freed_for_whoever_must_wait_its_turn_after_asking_anew() -> None:
    """And for none of other refusals: a copy of a device, or one that may not ask, ends no task of it."""
    bench = Bench(tasks_per_client=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    for why in Reason:
        refused = Refused(Ask("a", "t1"), why, "as an example", (1.0, 2.0))
        dropped = dropped_by(refused, 3.0, bench.engine)
        freed = why in (Reason.AT_CAPACITY, Reason.LAPSED, Reason.TOO_FAST)
        assert dropped == (ev.TaskDropped(3.0, "a", "t0", "its device asked anew") if freed else None)


def test_a_version_says_of_each_sender_how_much_of_it_was_heard_the_last_one_too() -> None:
    bench = Bench(buffer_size=3, robust={"rule": "median"})
    bench.enrol(*"abc")
    for client in "abc":
        bench.ask(client, f"t-{client}")
    effects = [bench.push(c, f"t-{c}", (value,) * 4) for c, value in (("a", 1), ("b", 9), ("c", 2))][-1]
    (published,) = only(effects, Published)
    assert published.heard == (("a", 0.0), ("b", 0.0), ("c", 1.0))
    assert bench.engine.vector.tolist() == [2.0] * 4
