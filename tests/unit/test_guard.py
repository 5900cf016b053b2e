"""Shares, rates and quarantine: what one client may have, and what becomes of one that may have nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import Bench, decision

from anabranch.core import events as ev
from anabranch.core.effects import Barred, Finished, Granted, LeaseEnd, LeaseEnded, Refused, Unbarred
from anabranch.core.engine.clipping import KEPT
from anabranch.core.engine.guard import READY_KEPT, Guard
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.journal import from_record, to_record
from anabranch.core.model.updates import Reason, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot


def reason(effects: list[Any]) -> Reason | None:
    """Why an ask was refused; None if it was granted."""
    return effects[0].reason if isinstance(effects[0], Refused) else None


def test_a_client_has_at_most_its_share_of_a_version() -> None:
    b = Bench("fedbuff", buffer_size=4, buffer_max=2, tasks_per_client=3)
    b.enrol("a", "b")
    b.work("a", "a0")
    assert reason(b.ask("a", "a1")) is None
    assert reason(b.ask("a", "a2")) is Reason.OVER_SHARE, "the live task counts"
    b.push("a", "a1")
    assert reason(b.ask("a", "a3")) is Reason.OVER_SHARE
    b.work("b", "b0")
    b.work("b", "b1")
    assert b.engine.version == 1
    assert reason(b.ask("a", "a4")) is None, "a new version, a new share"


def test_a_client_has_at_most_its_share_of_a_window() -> None:
    b = Bench("fedasync", window_max=2, window_versions=3)
    b.enrol("a", "b")
    for task in ("a0", "a1"):
        assert b.work("a", task).verdict is Verdict.PUBLISHED
    assert reason(b.ask("a", "a2")) is Reason.OVER_SHARE
    b.work("b", "b0")
    assert reason(b.ask("a", "a3")) is Reason.OVER_SHARE
    b.work("b", "b1")
    assert reason(b.ask("a", "a4")) is None, "its first one has left the window"


def test_tasks_under_way_count_in_the_window_as_well() -> None:
    b = Bench("fedasync", window_max=2, window_versions=3, tasks_per_client=3)
    b.enrol("a")
    b.work("a", "a0")
    assert reason(b.ask("a", "a1")) is None
    (refused,) = b.ask("a", "a2")
    assert refused.detail == "has 2 updates of the 2 that one client may have in 3 versions"


def test_a_task_that_is_given_up_by_asking_anew_is_no_part_of_a_share() -> None:
    b = Bench("fedbuff", buffer_size=4, buffer_max=1)
    b.enrol("a")
    b.ask("a", "before")
    ended, granted = b.ask("a", "after")
    assert (ended.end, granted.task.task_id) == (LeaseEnd.SUPERSEDED, "after")


def test_a_device_of_a_private_run_has_no_more_tasks_under_way_than_it_may_answer() -> None:
    b = Bench("fedasync", participations_max=2, tasks_per_client=3)
    b.enrol("a")
    b.work("a", "a0")
    assert reason(b.ask("a", "a1")) is None
    (refused,) = b.ask("a", "a2")
    assert refused.reason is Reason.OVER_SHARE
    assert refused.detail == "has given the 2 updates that [privacy] lets one device give"


def test_a_fold_of_a_log_in_which_it_was_decided_looks_at_no_share() -> None:
    for admits_all, found in ((False, Reason.OVER_SHARE), (True, None)):
        b = Bench("fedbuff", buffer_size=9, buffer_max=1, admits_all=admits_all)
        b.enrol("a")
        b.work("a", "a0")
        assert reason(b.ask("a", "a1")) is found


@pytest.mark.parametrize("bound", ["buffer_max", "window_max"])
def test_leases_that_expire_do_not_add_to_a_share(bound: str) -> None:
    limits: dict[str, Any] = {bound: 1}
    b = Bench("fedbuff", buffer_size=9, tasks_per_client=3, lease_s=10.0, lease_min_s=10.0, **limits)
    b.enrol("a")
    for i in range(3):
        b.ask("a", f"a{i}", now=100.0 * i)
        b.do(ev.Ticked(100.0 * i + 50.0))
    for i in range(3):
        b.push("a", f"a{i}", now=300.0)
    assert b.engine.counters.applied == 1, "only the newest may still be answered"


def test_an_update_that_was_not_taken_costs_no_share() -> None:
    b = Bench("fedbuff", buffer_size=9, buffer_max=1)
    b.enrol("a")
    b.ask("a", "a0")
    b.push("a", "a0", flaw="damaged")
    assert reason(b.ask("a", "a1")) is None


def test_a_minutes_worth_of_tasks_may_come_at_once_and_then_the_rate_holds() -> None:
    b = Bench("fedbuff", buffer_size=100, tasks_per_minute=3.0)
    b.enrol("a", "b")
    for i in range(3):
        b.work("a", f"a{i}", now=0.0)
    assert reason(b.ask("a", "x", now=19.9)) is Reason.TOO_FAST
    assert reason(b.ask("b", "b0", now=19.9)) is None, "everybody has a rate of their own"
    b.work("a", "a3", now=20.0)
    assert reason(b.ask("a", "y", now=39.9)) is Reason.TOO_FAST
    for i in range(3):
        assert reason(b.ask("a", f"z{i}", now=200.0)) is None
        b.push("a", f"z{i}", now=200.0)
    assert reason(b.ask("a", "z3", now=200.0)) is Reason.TOO_FAST


def test_what_is_kept_of_a_fleet_that_comes_and_goes_is_bounded() -> None:
    """And who was forgotten is treated as who is remembered: the oracle forgets nobody."""
    guard, limits = Guard(), EngineSettings(tasks_per_minute=2.0)
    ready_at: dict[str, float] = {}
    kept = []
    for n in range(3 * READY_KEPT):
        now, client = 0.05 * n, f"c{n * 7919 % (2 * READY_KEPT)}"
        due = max(ready_at.get(client, now), now)
        refused = guard.refusal(client, 0, now, limits)
        assert (refused is not None) == (due - now > 30.0), n
        if refused is None:
            guard.granted(client, now, limits)
            ready_at[client] = due + 30.0
        kept.append(len(guard.ready_at))
    assert len(ready_at) == 2 * READY_KEPT
    assert max(kept) == READY_KEPT
    assert min(kept[READY_KEPT:]) < 1000


@settings(max_examples=50)
@given(
    gaps=lists_up_to(80, st.floats(0.0, 30.0), least=1),
    rate=st.floats(0.5, 20.0),
)
def test_in_no_minute_are_there_more_than_two_minutes_worth(gaps: list[float], rate: float) -> None:
    b = Bench("fedbuff", buffer_size=1000, tasks_per_minute=rate)
    b.enrol("a")
    granted = []
    for i, now in enumerate(np.cumsum(gaps).tolist()):
        if isinstance(b.ask("a", f"t{i}", now=now)[0], Granted):
            granted.append(now)
            b.push("a", f"t{i}", now=now)
    for start in granted:
        assert sum(start <= t < start + 60.0 for t in granted) <= 2 * rate + 2


@pytest.mark.parametrize("limits", [{"buffer_max": 1}, {"window_max": 2, "window_versions": 4}])
@settings(max_examples=30)
@given(turns=lists_up_to(60, st.tuples(st.sampled_from("abcd"), st.booleans())))
def test_no_version_has_more_of_a_client_than_it_may(limits: Any, turns: list[tuple[str, bool]]) -> None:
    b = Bench("fedbuff", buffer_size=3, tasks_per_client=2, **limits)
    b.enrol(*"abcd")
    versions: list[list[str]] = [[]]
    for i, (client, finish) in enumerate(turns):
        b.ask(client, f"t{i}", now=float(i))
        for task in b.engine.ledger.live_of(client) if finish else ():
            verdict = decision(b.push(client, task.task_id, now=float(i))).verdict
            versions[-1].append(client)
            if verdict is Verdict.PUBLISHED:
                versions.append([])
    span = limits.get("window_versions", 0) + 1
    most = limits.get("buffer_max") or limits["window_max"]
    for i in range(len(versions)):
        together = [c for version in versions[i : i + span] for c in version]
        assert all(together.count(c) <= most for c in "abcd")


# --- quarantine ----------------------------------------------------------------------------------


def barred(client: str = "a") -> ev.Quarantined:
    return ev.Quarantined(5.0, client, "as an example")


def test_a_client_in_quarantine_gets_no_task_and_its_tasks_end() -> None:
    b = Bench("fedbuff", buffer_size=3)
    b.enrol("a", "b")
    b.ask("a", "a0")
    b.ask("b", "b0")
    effects = b.do(barred())
    assert [e for e in effects if isinstance(e, Barred)] == [Barred("a", "as an example")]
    (ended,) = [e for e in effects if isinstance(e, LeaseEnded)]
    assert (ended.task.task_id, ended.end) == ("a0", LeaseEnd.CANCELLED)
    refused = b.ask("a", "a1")[0]
    assert (refused.reason, refused.detail, refused.final) == (Reason.QUARANTINED, "as an example", False)
    late = decision(b.push("a", "a0", base=0))
    assert (late.verdict, late.reason) == (Verdict.REJECTED, Reason.QUARANTINED)
    assert decision(b.push("b", "b0")).verdict is Verdict.HELD


def test_a_late_update_of_an_expired_task_is_not_taken_from_quarantine() -> None:
    b = Bench("fedbuff", buffer_size=3, lease_s=1.0)
    b.enrol("a")
    b.ask("a", "a0")
    b.tick(2.0)
    b.do(barred())
    assert decision(b.push("a", "a0", base=0, now=6.0)).reason is Reason.QUARANTINED


def test_a_client_that_is_released_goes_on() -> None:
    b = Bench("fedbuff", buffer_size=3)
    b.enrol("a")
    b.do(barred())
    assert b.do(ev.Released(6.0, "a")) == [Unbarred("a")]
    assert b.do(ev.Released(6.0, "a")) == []
    assert b.work("a", "a0", now=7.0).verdict is Verdict.HELD


def test_the_past_of_a_client_that_is_released_is_forgotten() -> None:
    guard, limits = Guard(), EngineSettings(buffer_max=9)
    for client in "ab":
        guard.flawed(client, Reason.INVALID, "not finite", 9, limits)
        for cut in (True, True, False):
            guard.taken(client, 1.0, cut, limits)
    guard.flawed("a", Reason.INVALID, "not finite", 9, limits)
    assert [guard.suspicion(client) for client in "ab"] == [4, 3]
    assert guard.flaws_in_row == {"a": 1}
    guard.bar("a", "as an example")
    assert guard.release("a")
    assert not guard.release("a")
    assert [guard.suspicion(client) for client in "ab"] == [0, 3]
    assert guard.flaws_in_row == {}
    assert guard.folded == [{"a": 3, "b": 3}], "its shares are what they were"


def test_of_the_lengths_the_newest_are_kept() -> None:
    guard, limits = Guard(), EngineSettings()
    for length in range(KEPT + 3):
        guard.taken("a", float(length), False, limits)
    guard.taken("a", None, False, limits)
    assert guard.lengths == [float(length) for length in range(3, KEPT + 3)]
    assert guard.folded == [{}], "without bounds no shares are counted"


def test_enrolling_again_is_no_way_out() -> None:
    b = Bench("fedbuff", buffer_size=3)
    b.do(barred())
    b.enrol("a", now=6.0)
    assert reason(b.ask("a", "a0", now=7.0)) is Reason.QUARANTINED


def test_the_last_flaw_puts_a_client_into_quarantine() -> None:
    b = Bench("fedbuff", buffer_size=3, flaws_max=2)
    b.enrol("a", "b")
    b.ask("a", "a0")
    b.push("a", "a0", flaw="not finite")
    b.work("a", "a1")  # only flaws in a row count
    b.ask("a", "a2")
    assert not [e for e in b.push("a", "a2", flaw="not finite") if isinstance(e, Barred)]
    b.ask("a", "a22")
    effects = b.push("a", "a22", base=7)
    (found,) = [e for e in effects if isinstance(e, Barred)]
    assert found.why == "sent 2 updates in a row that cannot be used, the last: future_base"
    assert reason(b.ask("a", "a3")) is Reason.QUARANTINED
    assert reason(b.ask("b", "b0")) is None
    b.do(ev.Released(9.0, "a"))
    b.ask("a", "a4", now=9.0)
    assert not [e for e in b.push("a", "a4", flaw="again", now=9.0) if isinstance(e, Barred)]


def flawed(b: Bench, client: str, number: int) -> list[Any]:
    """A task of a client, and an update of it without numbers."""
    b.ask(client, f"{client}{number}", now=float(number))
    return b.push(client, f"{client}{number}", flaw="delta is not finite", now=float(number))


def test_every_flaw_of_a_client_is_counted_against_it() -> None:
    b = Bench("fedbuff", buffer_size=1, flaws_max=0, rejections_max=0)
    b.enrol("a", "b")
    for client, number in (("a", 0), ("a", 1), ("b", 0)):
        flawed(b, client, number)
    b.work("a", "good")
    assert [b.engine.guard.suspicion(client) for client in "ab"] == [2, 1]


def test_a_run_whose_last_updates_were_all_rejected_is_given_up() -> None:
    b = Bench("fedbuff", buffer_size=1, rejections_max=4, flaws_max=2)
    b.enrol("a", "b")
    for number in range(3):
        flawed(b, "ab"[number % 2], number)
    b.work("a", "good", now=3.0)  # it was not all of them
    for number in range(4, 7):
        assert not [e for e in flawed(b, "ab"[number % 2], number) if isinstance(e, Finished)]
    (end,) = [e for e in flawed(b, "b", 7) if isinstance(e, Finished)]
    assert end.given_up
    assert end.why == (
        "the last 4 updates were all rejected (delta is not finite): "
        "learning rate too large, or NaN in the data?"
    )
    assert b.engine.finished == end.why
    assert reason(b.ask("a", "late", now=9.0)) is Reason.RUN_FINISHED
    assert not b.engine.guard.quarantined, "it is not the fault of one of them"


def test_where_all_others_are_in_quarantine_it_is_not_the_fault_of_the_last_one() -> None:
    b = Bench("fedbuff", buffer_size=1, flaws_max=2)
    b.enrol("a", "b")
    b.do(barred("b"))
    for number in range(3):
        assert not [e for e in flawed(b, "a", number) if isinstance(e, Barred)]
    b.enrol("c")
    assert [e.client_id for e in flawed(b, "a", 4) if isinstance(e, Barred)] == ["a"]


def test_what_comes_of_a_client_in_quarantine_counts_against_nobody() -> None:
    guard, limits = Guard(), EngineSettings(flaws_max=1, rejections_max=1)
    guard.bar("a", "as an example")
    assert guard.flawed("a", Reason.INVALID, "not finite", 9, limits) == ""
    assert guard.hopeless(limits) == ""
    assert guard.suspicion("a") == 0


def test_one_client_does_not_end_a_run_of_others() -> None:
    b = Bench("fedbuff", buffer_size=1, rejections_max=4, flaws_max=3)
    b.enrol("hostile", "slow")
    b.ask("slow", "long")
    for number in range(3):
        flawed(b, "hostile", number)
    assert reason(b.ask("hostile", "more", now=5.0)) is Reason.QUARANTINED
    assert decision(b.push("slow", "long", now=9.0)).verdict is Verdict.PUBLISHED
    assert not b.engine.finished


def test_a_training_that_its_device_gives_up_counts_as_rejected() -> None:
    b = Bench("fedbuff", buffer_size=1, rejections_max=2)
    b.enrol("a")
    b.ask("a", "a0")
    assert isinstance(b.do(ev.TaskDropped(1.0, "a", "a0", "the battery"))[0], LeaseEnded)
    for number in (1, 2):
        b.ask("a", f"a{number}")
        b.do(ev.TaskDropped(2.0, "a", f"a{number}", "the loss is NaN", diverged=True))
    assert "all rejected (the loss is NaN)" in b.engine.finished
    told = [to_record(event) for event in b.log if isinstance(event, ev.TaskDropped)]
    assert [sorted(record)[:3] for record in told] == [
        ["client_id", "kind", "now"],
        *2 * [["client_id", "diverged", "kind"]],
    ], "an older journal has the same lines"
    for event, record in zip(b.log[-1:], told[-1:], strict=True):
        assert from_record(record, b.engine.spec, lambda *_: np.empty(0)) == event


def test_a_row_of_flaws_goes_on_after_a_snapshot_and_leaves_no_trace_in_it_when_it_has_ended() -> None:
    def play(restart: bool) -> Bench:
        b = Bench("fedbuff", buffer_size=1, rejections_max=3)
        b.enrol("a")
        for number in range(2):
            flawed(b, "a", number)
        if restart:
            e = b.engine
            b.engine = restore(take_snapshot(e), e.spec, e.strategy, e.settings)
        return b

    whole, again = play(False), play(True)
    assert state_digest(whole.engine) == state_digest(again.engine)
    flawed(again, "a", 2)
    assert again.engine.finished
    assert set(take_snapshot(whole.engine).meta["guard"]) >= {"wasted", "flaws_in_row", "last_flaw"}
    whole.work("a", "good", now=5.0)
    assert not set(take_snapshot(whole.engine).meta["guard"]) & {"wasted", "flaws_in_row", "last_flaw"}


def test_a_stale_update_is_no_flaw() -> None:
    b = Bench("fedasync", flaws_max=1, staleness_max=1)
    b.enrol("a", "b")
    b.ask("a", "a0")
    for i in range(3):
        b.work("b", f"b{i}")
    assert decision(b.push("a", "a0")).reason is Reason.STALE
    assert not b.engine.guard.quarantined


def test_the_guard_survives_a_snapshot_and_its_events_a_journal() -> None:
    limits: dict[str, Any] = {"buffer_max": 2, "window_max": 5, "tasks_per_minute": 9.0, "flaws_max": 3}
    b = Bench("fedbuff", buffer_size=2, clip=2.0, **limits)
    b.enrol("a", "b")
    for i in range(5):
        b.work("ab"[i % 2], f"t{i}", now=float(i))
    b.ask("a", "bad", now=6.0)
    b.push("a", "bad", flaw="damaged", now=6.0)
    for event in (barred("b"), ev.Released(7.0, "b"), barred("a")):
        assert from_record(to_record(event), b.engine.spec, lambda *_: np.empty(0)) == event
        b.do(event)
    e = b.engine
    again = restore(take_snapshot(e), e.spec, e.strategy, e.settings)
    assert state_digest(again) == state_digest(e)
    assert again.guard == e.guard
    assert again.guard is not e.guard


# --- bounds that change while the run goes on ---------------------------------------------------


def set_bounds(b: Bench, now: float, rules: int = 1, **values: float) -> None:
    b.do(ev.SettingsChanged(now, {f"robust.{key}": v for key, v in values.items()}, "alice", rules=rules))


@pytest.mark.parametrize("bound", ["buffer_max", "window_max"])
def test_shares_of_before_there_was_no_bound_do_not_count_under_one_that_comes(bound: str) -> None:
    """Whose updates wait by then has a share; a run that forgot nothing waited for its devices for ever."""
    limits: dict[str, Any] = {bound: 1}
    b = Bench("fedbuff", buffer_size=3, **limits)
    b.enrol("a", "b", "c", "d")
    for client in "ab":
        b.work(client, f"{client}0")
    set_bounds(b, 1.0, **{bound: 0})
    for client in "ca":  # the first makes a version, the second waits
        b.work(client, f"{client}1")
    set_bounds(b, 2.0, **{bound: 1})
    assert (b.engine.version, b.engine.pending) == (1, ["update-of-a1"])
    assert reason(b.ask("a", "a2", now=3.0)) is Reason.OVER_SHARE
    for client in "bc":
        b.work(client, f"{client}2", now=3.0)
    assert b.engine.version == 2


def test_a_smaller_window_counts_no_version_that_is_out_of_it() -> None:
    b = Bench("fedasync", window_max=1, window_versions=5)
    b.enrol("a", "b")
    b.work("a", "a0")
    for i in range(2):
        b.do(ev.SettingsChanged(1.0, {"robust.window_max": 9}, "alice"))
        b.work("b", f"b{i}")
    set_bounds(b, 2.0, window_max=1, window_versions=2)
    assert reason(b.ask("a", "a1", now=2.0)) is None
    assert reason(b.ask("b", "b9", now=2.0)) is Reason.OVER_SHARE


def test_who_owes_tasks_at_a_rate_owes_less_time_at_a_higher_one() -> None:
    b = Bench("fedbuff", buffer_size=100, tasks_per_minute=0.01)
    b.enrol("a")
    b.work("a", "a0", now=0.0)
    set_bounds(b, 10.0, tasks_per_minute=1.0)
    left_s = (100 * 60 - 10) / 100
    assert reason(b.ask("a", "a1", now=10.0 + left_s - 0.1)) is Reason.TOO_FAST
    assert reason(b.ask("a", "a1", now=10.0 + left_s + 0.1)) is None


def test_a_rate_that_is_lowered_is_no_reckoning_for_a_burst_of_before() -> None:
    """As without a word of the change: sixty tasks are owed for a minute, and not for two hours."""
    b = Bench("fedbuff", buffer_size=100, tasks_per_minute=60.0)
    b.enrol("a")
    for i in range(60):
        b.work("a", f"a{i}", now=0.0)
    set_bounds(b, 0.0, tasks_per_minute=0.5)
    assert reason(b.ask("a", "x", now=59.9)) is Reason.TOO_FAST
    assert reason(b.ask("a", "x", now=60.1)) is None


def test_a_rate_that_was_lifted_is_owed_nothing_when_it_is_back() -> None:
    b = Bench("fedbuff", buffer_size=100, tasks_per_minute=0.01)
    b.enrol("a")
    b.work("a", "a0", now=0.0)
    for rate in (0.0, 0.01):
        set_bounds(b, 1.0, tasks_per_minute=rate)
    assert reason(b.ask("a", "a1", now=1.0)) is None


def test_what_an_older_release_has_set_leads_to_what_it_led_to() -> None:
    """Its log has no word of the rules, and its snapshots have the books as they were."""
    b = Bench("fedbuff", buffer_size=3, buffer_max=1, tasks_per_minute=0.01)
    b.enrol("a")
    b.work("a", "a0")
    before = dict(b.engine.guard.ready_at)
    event = ev.SettingsChanged(2.0, {"robust.buffer_max": 0, "robust.tasks_per_minute": 9.0}, "alice")
    record = to_record(event)
    assert record.pop("rules") == 1
    older = from_record(record, b.engine.spec, lambda *_: np.zeros(0))
    assert older == ev.SettingsChanged(event.now, event.values, event.by, rules=0)
    assert "rules" not in to_record(older), "nor is it written anew with one"
    b.do(older)
    assert (b.engine.guard.folded, b.engine.guard.ready_at) == ([{"a": 1}], before)
