"""Waves: who may train, and when a version is made, by a reference of sets and fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import SPEC, Bench, decision

from anabranch.compress.delta_log import DeltaLog
from anabranch.core import events as ev
from anabranch.core.effects import Granted, Refused
from anabranch.core.model.updates import Reason, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot

CLIENTS = "abcdef"
LONG: dict[str, Any] = {"lease_s": 1e4, "lease_min_s": 1e4, "lease_max_s": 1e4}
NESTEROV: dict[str, Any] = {"outer": {"name": "nesterov", "lr": 0.5, "momentum": 0.5}}


class Reference:
    """The rule once more, one number for a model: whole sets of names, exact fractions, no states."""

    def __init__(self, share: Fraction, most: int) -> None:
        self.share, self.most = share, most
        self.version, self.model, self.moment = 0, Fraction(0), Fraction(0)
        self.started: dict[str, int] = {}  # who trains, from which version
        self.answers: list[Fraction] = []
        self.answered: set[str] = set()
        self.done: set[str] = set()  # who has trained from the newest version
        self.expected = 0

    def may(self, client: str) -> bool:
        return not self.started or client not in self.done

    def begins(self, client: str) -> None:
        if client in self.done:
            self.expected, self.done = len(self.answered), set()
        self.started[client] = self.version
        self.done.add(client)

    def loses(self, client: str) -> None:
        if self.started.pop(client) == self.version:
            self.done.discard(client)

    def answers_with(self, client: str, value: int) -> bool:
        self.started.pop(client)
        self.answers.append(Fraction(value))
        self.answered.add(client)
        there = self.answered | set(self.started)
        enough = Fraction(len(self.answered), self.expected or len(there)) >= self.share
        if not enough and len(self.answers) < self.most:
            return False
        mean = sum(self.answers, Fraction(0)) / len(self.answers)
        self.moment = self.moment / 2 + mean
        self.model += (mean + self.moment / 2) / 2
        self.version += 1
        self.expected, self.answers, self.answered, self.done = len(there), [], set(), set()
        return True


@given(
    lists_up_to(80, st.tuples(st.sampled_from(CLIENTS), st.sampled_from("aaaaan"), st.integers(-8, 8))),
    st.sampled_from([(0.5, 99), (0.75, 99), (1.0, 99), (0.75, 3)]),
)
def test_a_path_is_the_references(script: list[tuple[str, str, int]], shape: tuple[float, int]) -> None:
    """Each device asks where it has no task; where it has one it answers, or loses it."""
    share, most = shape
    reference = Reference(Fraction(share), most)
    bench = Bench("waves", share=share, buffer_size=most, **NESTEROV, **LONG)
    bench.enrol(*CLIENTS)
    for n, (client, does, value) in enumerate(script):
        if client not in reference.started:
            got = bench.ask(client, f"{client}-{n}", now=float(n))[-1]
            assert isinstance(got, Granted) == reference.may(client)
            if isinstance(got, Granted):
                reference.begins(client)
            continue
        (task,) = bench.engine.ledger.live_of(client)
        if does == "n":
            bench.do(ev.TaskDropped(float(n), client, task.task_id, "by the script"))
            reference.loses(client)
            continue
        verdict = decision(bench.push(client, task.task_id, (value, 0, 0, 0), now=float(n))).verdict
        assert (verdict is Verdict.PUBLISHED) == reference.answers_with(client, value)
    assert bench.engine.version == reference.version
    assert float(bench.engine.vector[0]) == pytest.approx(float(reference.model), rel=1e-4, abs=1e-4)


def begun(*clients: str, **options: Any) -> Bench:
    """All of them train."""
    bench = Bench("waves", **{"share": 0.75, **LONG, **options})
    bench.enrol(*clients)
    for client in clients:
        bench.ask(client, f"{client}-0")
    return bench


def test_who_has_answered_waits_and_who_is_late_counts_in_the_next_version() -> None:
    bench = begun(*"abcd")
    assert decision(bench.push("a", "a-0", (3, 0, 0, 0))).verdict is Verdict.HELD
    refused = bench.ask("a", "a-1", now=1.0)[-1]
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.detail) == (
        Reason.AT_CAPACITY,
        "has trained from version 0: waits for the next",
    )
    bench.push("b", "b-0", (3, 0, 0, 0))
    assert decision(bench.push("c", "c-0", (3, 0, 0, 0))).verdict is Verdict.PUBLISHED  # three of four
    assert bench.engine.vector[0] == 3
    assert all(isinstance(bench.ask(c, f"{c}-1", now=2.0)[-1], Granted) for c in "abc")
    late = decision(bench.push("d", "d-0", (9, 0, 0, 0), now=2.0))
    assert (late.verdict, late.staleness, late.weight) == (Verdict.HELD, 1, 1.0)
    bench.push("a", "a-1", (0, 0, 0, 0), now=3.0)
    bench.push("b", "b-1", (0, 0, 0, 0), now=3.0)
    assert bench.engine.vector[0] == 3 + 9 / 3


def test_a_straggler_alone_after_a_version_makes_none() -> None:
    """Those that have answered are on their way to ask again, and are expected."""
    bench = begun(*"abcd")
    for client in "abc":
        bench.push(client, f"{client}-0")
    assert bench.engine.version == 1
    assert decision(bench.push("d", "d-0")).verdict is Verdict.HELD


def test_devices_that_have_gone_hold_up_nobody_for_ever() -> None:
    """Of eight, five go when all have answered: the others train once more, and are all that counts."""
    bench = begun(*"abcdefgh")
    for client in "abcdef":
        bench.push(client, f"{client}-0")
    assert bench.engine.version == 1
    for client in "gh":
        bench.push(client, f"{client}-0")  # and they are not seen again, as are a, b and c
    for client in "def":
        bench.ask(client, f"{client}-1", now=2.0)
    for client in "def":
        bench.push(client, f"{client}-1", now=3.0)
    assert bench.engine.version == 1  # five of eight
    for n in range(2, 6):
        for client in "def":
            bench.ask(client, f"{client}-{n}", now=float(2 * n))
        for client in "def":
            if f"{client}-{n}" in bench.engine.ledger.tasks:
                bench.push(client, f"{client}-{n}", now=2.0 * n + 1)
    assert bench.engine.version >= 4
    assert bench.engine.state.expected == 3


def test_devices_that_have_gone_hold_up_nobody_where_a_task_is_of_an_older_version() -> None:
    """Every second version is offered: of four devices two go, the others wait for nobody else."""
    bench = begun(*"abcd")
    log = bench.engine.broadcast = DeltaLog(SPEC, every=2)
    bench.engine.broadcast_state = log.init(bench.engine.vector)
    for client in "abcd":
        bench.push(client, f"{client}-0")
    for client in "abcd":
        bench.ask(client, f"{client}-1", now=2.0)
    assert (bench.engine.version, bench.engine.ledger.tasks["a-1"].base_version) == (1, 0)
    for client in "cd":
        bench.do(ev.TaskDropped(3.0, client, f"{client}-1", "gone"))
    for n in range(1, 9):
        for client in "ab":
            if f"{client}-{n}" in bench.engine.ledger.tasks:
                bench.push(client, f"{client}-{n}", now=4.0 * n)
        for client in "ab":
            bench.ask(client, f"{client}-{n + 1}", now=4.0 * n + 2)
    assert bench.engine.version >= 5


def test_an_older_result_that_comes_last_is_no_leave_to_train_again() -> None:
    """Of two tasks of a device, pushed side by side, that of the newer version came first."""
    bench = begun(*"abcd", tasks_per_client=2)
    for client in "bcd":
        bench.push(client, f"{client}-0")
    assert isinstance(bench.ask("a", "a-1", now=2.0)[-1], Granted)
    bench.ask("b", "b-1", now=2.0)
    bench.push("a", "a-1", now=3.0)
    bench.push("a", "a-0", now=3.0)
    assert isinstance(bench.ask("a", "a-2", now=4.0)[-1], Refused)


def test_enough_updates_are_enough_however_many_train() -> None:
    bench = begun(*"abcdef", share=1.0, buffer_size=2)
    for client in "abcd":
        bench.push(client, f"{client}-0")
    assert bench.engine.version == 2


def test_what_is_lost_may_be_begun_again() -> None:
    bench = begun(*"ab", share=1.0)
    bench.do(ev.TaskDropped(1.0, "a", "a-0", "gone"))
    assert isinstance(bench.ask("a", "a-1", now=2.0)[-1], Granted)
    assert decision(bench.push("b", "b-0", now=3.0)).verdict is Verdict.HELD
    assert decision(bench.push("a", "a-1", now=3.0)).verdict is Verdict.PUBLISHED


def test_with_a_whole_share_it_is_rounds_of_all() -> None:
    """Without momentum the mean of all, as FedAvg's of equal examples."""
    deltas = {"a": (1, 2, 3, 4), "b": (3, 2, 1, 0), "c": (5, 5, 5, 5)}
    mine = begun(*deltas, share=1.0)
    theirs = Bench("fedavg", clients_per_round=3, over_selection=1.0, deadline_s=0.0, **LONG)
    theirs.enrol(*deltas)
    for client in deltas:
        theirs.ask(client, f"{client}-0")
    for client, delta in deltas.items():
        mine.push(client, f"{client}-0", delta)
        theirs.push(client, f"{client}-0", delta)
    assert mine.engine.version == theirs.engine.version == 1
    np.testing.assert_allclose(mine.engine.vector, theirs.engine.vector, rtol=1e-6)


def test_a_robust_rule_takes_the_place_of_the_mean() -> None:
    bench = begun(*"abc", share=1.0, robust={"rule": "median"})
    for client, value in zip("abc", (1, 2, 900), strict=True):
        bench.push(client, f"{client}-0", (value, 0, 0, 0))
    assert bench.engine.vector[0] == 2


def test_a_snapshot_in_the_middle_of_a_wave_goes_on_alike() -> None:
    bench = begun(*"abcde", **NESTEROV)
    for client in "abcd":
        bench.push(client, f"{client}-0", (1, 2, 3, 4))
    bench.ask("a", "a-1", now=2.0)
    bench.push("e", "e-0", now=2.0)
    other = Bench("waves", share=0.75, **NESTEROV, **LONG)
    other.engine = restore(take_snapshot(bench.engine), SPEC, bench.engine.strategy, bench.engine.settings)
    for each in (bench, other):
        assert isinstance(each.ask("b", "b-1", now=3.0)[-1], Granted)
        each.push("a", "a-1", (1, 1, 1, 1), now=4.0)
        each.push("b", "b-1", (2, 1, 1, 1), now=4.0)
    assert state_digest(bench.engine) == state_digest(other.engine)
    assert list(bench.engine.state.answered) == ["e", "a", "b"]


def test_in_a_run_that_goes_on_after_its_end_some_tasks_are_gone() -> None:
    bench = begun(*"abc")
    bench.push("a", "a-0")
    state = bench.engine.strategy.reopened(bench.engine.state, ["b"])
    assert (list(state.training), list(state.begun), list(state.answered)) == (["b"], ["a", "b"], ["a"])
    assert not bench.engine.strategy.rolls_back
