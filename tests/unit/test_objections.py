"""Why an update is not for the strategy to see, in numbers, and whose results are still of use."""

from __future__ import annotations

from typing import Any

import pytest
from machines import Bench, decision

from anabranch.core import events as ev
from anabranch.core.engine.objections import tasks_of_use
from anabranch.core.model.updates import Decision, Reason, Verdict


def refused(reason: Reason, detail: str, staleness: int = 0) -> Decision:
    return Decision(Verdict.REJECTED, staleness, None, reason, detail)


def test_a_refusal_has_its_reason_in_words_and_an_age_that_is_never_below_none() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.work("a", "t0")
    bench.ask("a", "t1")
    flawed = decision(bench.push("a", "t1", flaw="delta has 3 values that are not finite"))
    assert flawed == refused(Reason.INVALID, "delta has 3 values that are not finite")
    bench.ask("a", "t2")
    ahead = decision(bench.push("a", "t2", base=9))
    assert ahead == refused(Reason.FUTURE_BASE, "base_version 9 is ahead of version 1")
    bench.ask("a", "t3")
    behind = decision(bench.push("a", "t3", base=0))
    assert behind == refused(Reason.WRONG_BASE, "the task's base_version is 1, not 0", staleness=1)
    again = decision(bench.push("a", "t0", update_id="second"))
    assert again == refused(Reason.DUPLICATE_TASK, "task 't0' was answered by update 'update-of-t0'", 1)
    bench.do(ev.Quarantined(3.0, "a", "as an example"))
    assert decision(bench.push("a", "t9", base=1)) == refused(Reason.QUARANTINED, "as an example")


def test_an_ended_run_says_why_it_takes_nothing_more() -> None:
    bench = Bench(buffer_size=1, versions_max=1)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    bench.work("a", "t0")
    late = decision(bench.push("b", "late"))
    assert late == refused(Reason.RUN_FINISHED, "the run ended at version 1, its budget", staleness=1)


@pytest.mark.parametrize(
    ("strategy", "options", "base", "reason"),
    [
        ("fedavg", {"clients_per_round": 1}, 0, Reason.ROUND_OVER),
        ("fedavg", {"clients_per_round": 1}, 1, Reason.UNKNOWN_TASK),  # of this round, and of nobody
        ("fedbuff", {"buffer_size": 1}, 0, Reason.UNKNOWN_TASK),  # there are no rounds
    ],
)
def test_a_task_that_nobody_has_is_of_an_earlier_round_only_where_there_are_rounds(
    strategy: str, options: Any, base: int, reason: Reason
) -> None:
    bench = Bench(strategy, **options)
    bench.enrol("a", "b")
    bench.work("a", "t0")
    found = decision(bench.push("b", "never granted", base=base))
    words = {
        Reason.ROUND_OVER: "round 0 is over, this is round 1",
        Reason.UNKNOWN_TASK: "client 'b' holds no task 'never granted'",
    }
    assert (found.reason, found.detail) == (reason, words[reason])


def test_the_task_of_another_is_unknown_although_its_round_goes_on_late() -> None:
    bench = Bench("fedavg", clients_per_round=1, over_selection=2.0, lease_s=5.0)
    bench.enrol("a", "b", "c")
    bench.work("a", "t0")
    bench.ask("b", "t1")
    assert decision(bench.push("c", "t1", base=0)).reason is Reason.UNKNOWN_TASK


def test_an_answer_that_is_given_again_says_what_it_is_of() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a")
    bench.ask("a", "t0")
    bench.push("a", "t0", examples=7)
    (again,) = bench.push("a", "t0", examples=7, base=0)
    assert (again.client_id, again.examples, again.duplicate) == ("a", 7, True)


def test_what_may_still_be_taken_is_what_has_a_task_of_an_age_within_the_bound() -> None:
    bench = Bench(buffer_size=1, staleness_max=1, versions_max=3, lease_s=5.0, lease_min_s=5.0)
    bench.enrol("a", "b", "c", "fast")
    bench.ask("a", "a0")
    bench.work("fast", "f0")
    bench.ask("b", "b0")
    bench.tick(5.0)  # late is not too late
    assert tasks_of_use(bench.engine) == {("a", "a0"), ("b", "b0")}
    bench.work("fast", "f1", now=6.0)
    bench.ask("c", "c0", now=6.0)
    assert tasks_of_use(bench.engine) == {("b", "b0"), ("c", "c0")}, "a0 is 2 versions old"
    assert decision(bench.push("a", "a0", now=7.0)).reason is Reason.STALE
    bench.work("fast", "f2", now=8.0)
    assert bench.engine.finished
    assert tasks_of_use(bench.engine) == set()


def test_without_a_bound_every_open_task_is_of_use() -> None:
    bench = Bench(buffer_size=1)
    bench.enrol("a", "fast")
    bench.ask("a", "a0")
    for n in range(5):
        bench.work("fast", f"f{n}")
    assert tasks_of_use(bench.engine) == {("a", "a0")}
