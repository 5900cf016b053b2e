"""Phases: what happens at a switch, as lists of events; nothing is lost, nothing counts twice."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import Bench, decision, vector

import anabranch
from anabranch.core.config.tables import merge
from anabranch.core.effects import Granted, LeaseEnded, Published
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Reason, Verdict
from anabranch.core.snapshot import Snapshot, restore, state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.strategies.phased import Phased
from anabranch.strategies.registry import make_strategy, strategy_of

ROUND = {"strategy": "fedavg", "clients_per_round": 2, "over_selection": 1.5, "until_updates": 2}
BUFFER = {"strategy": "fedbuff", "buffer_size": 2}
LAST = {key: value for key, value in ROUND.items() if key != "until_updates"}  # rounds to the end


def phased(*tables: dict[str, Any], **more: Any) -> Bench:
    bench = Bench("phased", vector(10, 10, 10, 10), phases=list(tables), **more)
    bench.enrol(*"abcd")
    return bench


def phase_of(bench: Bench) -> int:
    found: int = bench.engine.state.phase
    return found


def test_golden_switch() -> None:
    """A round of three tasks, of which two make it: 12; then 4 of staleness 1 and 2 of 0: 14.414214."""
    bench = phased(ROUND, BUFFER)
    for client in "abc":
        bench.ask(client, f"t-{client}")
    bench.push("a", "t-a", (1,) * 4)
    effects = bench.push("b", "t-b", (3,) * 4)
    assert [type(e) for e in effects if isinstance(e, Published | LeaseEnded)] == [Published]
    assert (bench.engine.vector.tolist(), phase_of(bench), bench.engine.ledger.live) == ([12.0] * 4, 1, 1)
    late = decision(bench.push("c", "t-c", (4,) * 4))
    assert (late.verdict, late.staleness) == (Verdict.HELD, 1)
    assert late.weight == pytest.approx(0.707107)
    bench.work("d", "t-d", (2,) * 4)
    assert bench.engine.vector == pytest.approx([14.414214] * 4)


def test_the_same_by_hand() -> None:
    """`aggregate` lets everybody take part."""
    sent = [
        anabranch.Update(client, f"t-{client}", base, 1, {"w": np.array([delta])})
        for client, base, delta in (("a", 0, 1.0), ("b", 0, 3.0), ("c", 0, 4.0), ("d", 1, 2.0))
    ]
    one = [{**ROUND, "over_selection": 1.0}, BUFFER]
    result = anabranch.aggregate("phased", {"phases": one}, {"w": np.array([10.0])}, sent)
    assert [s.decision for s in result.steps] == ["held", "published", "held", "published"]
    assert result.model["w"] == pytest.approx(14.414214)


def test_what_is_held_becomes_a_version_first() -> None:
    """Three of four in the buffer when the phase ends: their mean, under the update that ended it."""
    bench = phased({**BUFFER, "buffer_size": 4, "until_updates": 3}, {"strategy": "fedasync", "alpha": 0.5})
    for n, client in enumerate("abc"):
        last = bench.work(client, f"t{n}", (3 * n,) * 4)
    assert (last.verdict, bench.engine.version, phase_of(bench)) == (Verdict.PUBLISHED, 1, 1)
    assert (bench.engine.vector.tolist(), bench.engine.pending) == ([13.0] * 4, [])


def test_a_model_of_the_first_phase_is_mixed_in_the_second() -> None:
    """Its base is held over the switch: half of 13 and half of 10 + 4."""
    constant = {"strategy": "fedasync", "alpha": 0.5, "staleness": {"name": "constant"}}
    bench = phased({**BUFFER, "until_versions": 1}, constant)
    bench.ask("d", "late")
    bench.work("a", "t0", (2,) * 4)
    bench.work("b", "t1", (4,) * 4)
    assert (bench.engine.vector.tolist(), phase_of(bench)) == ([13.0] * 4, 1)
    assert decision(bench.push("d", "late", (4,) * 4)).staleness == 1
    assert bench.engine.vector.tolist() == [13.5] * 4


def test_a_round_that_has_waited_ends_its_phase_too() -> None:
    bench = phased({**ROUND, "until_updates": 0, "until_versions": 1, "deadline_s": 5.0}, BUFFER)
    bench.work("a", "t0", (2,) * 4)
    bench.tick(5.0)
    assert (bench.engine.version, phase_of(bench), bench.engine.next_deadline()) == (1, 1, None)


def test_rounds_cancel_their_stragglers_until_the_last() -> None:
    bench = phased({**ROUND, "until_updates": 4}, BUFFER)
    for n in range(2):
        cohort = bench.engine.strategy.selected(bench.engine.state) or list("abc")
        for client in cohort:
            bench.ask(client, f"{n}-{client}", now=float(n))
        for client in cohort[:2]:
            effects = bench.push(client, f"{n}-{client}", now=float(n))
        cancelled = [e.task.task_id for e in effects if isinstance(e, LeaseEnded)]
        assert cancelled == ([f"{n}-{cohort[2]}"] if n == 0 else [])
    assert phase_of(bench) == 1
    assert not bench.engine.strategy.is_synchronous(bench.engine.state)


def test_rounds_at_last_begin_with_nobody_of_before() -> None:
    """A buffer of 2 and 4: 13. Who trains is told to stop; then a round of 5 and 7: 19."""
    bench = phased({**BUFFER, "until_updates": 2}, {**ROUND, "over_selection": 1.0, "until_updates": 0})
    for client in "abcd":
        bench.ask(client, f"t-{client}")
    bench.push("a", "t-a", (2,) * 4)
    effects = bench.push("b", "t-b", (4,) * 4)
    assert (bench.engine.vector.tolist(), phase_of(bench)) == ([13.0] * 4, 1)
    assert [e.task.task_id for e in effects if isinstance(e, LeaseEnded)] == ["t-c", "t-d"]
    late = decision(bench.push("c", "t-c", (100,) * 4))
    assert (late.verdict, late.reason) == (Verdict.REJECTED, Reason.ROUND_OVER)
    bench.work("c", "again", (5,) * 4)
    last = bench.work("d", "too", (7,) * 4)
    assert (last.verdict, bench.engine.vector.tolist()) == (Verdict.PUBLISHED, [19.0] * 4)


def test_directions_do_not_outlive_their_phase() -> None:
    nesterov = {"outer": {"name": "nesterov"}}
    bench = phased({**BUFFER, **nesterov, "until_updates": 2}, {**BUFFER, **nesterov})
    bench.work("a", "t0")
    bench.work("b", "t1")
    assert bench.engine.state.of_0 is None
    assert bench.engine.state.of_1.moment.tolist() == [0.0] * 4


def test_a_phase_has_its_own_local_training() -> None:
    calm = {"client": {"learning_rate": 0.01, "momentum": 0.0}}
    bench = phased({**BUFFER, "until_updates": 1}, {"strategy": "fedasync", "rho": 0.2, **calm})
    assert bench.ask("a", "t0")[0].task.local.learning_rate == 0.05
    bench.push("a", "t0")
    local = bench.ask("b", "t1")[0].task.local
    assert (local.learning_rate, local.momentum, local.proximal_mu) == (0.01, 0.0, 0.2)


def test_the_slowest_have_no_part_in_rounds_and_come_in_after_them() -> None:
    """Four speeds; once they are known a quarter is left out, until rounds are over."""
    slow = {**ROUND, "until_updates": 0, "until_versions": 3, "exclude_slowest": 0.25, "deadline_s": 0.0}
    bench = phased(slow, BUFFER)
    for number in range(3):
        cohort = bench.engine.strategy.selected(bench.engine.state)
        asked = [c for c in "dcba" if isinstance(bench.ask(c, f"{number}-{c}", 100.0 * number)[0], Granted)]
        if number == 2:
            assert "d" not in (cohort or ())
            assert bench.ask("d", "once", 200.0)[0].reason is Reason.NOT_SELECTED
        for client in asked[:2]:
            at = 100.0 * number + " abcd".index(client)
            bench.push(client, f"{number}-{client}", now=at, local_steps=1)
    assert phase_of(bench) == 1
    assert isinstance(bench.ask("d", "after", 300.0)[0], Granted)


def test_who_was_drawn_has_its_turn_though_another_turns_out_to_be_faster() -> None:
    """All are as fast until `d` is drawn: then another is ten times faster, and `d` the slowest of all known.

    The round waits for `d`: refused, it would last until its deadline.
    """
    rounds = {**ROUND, "until_updates": 0, "until_versions": 40, "exclude_slowest": 0.4, "deadline_s": 1000.0}
    bench = phased(rounds, BUFFER)

    def work(client: str, number: int, took_s: float) -> None:
        granted, *_ = bench.ask(client, f"{number}-{client}", 100.0 * number)
        assert isinstance(granted, Granted), (number, client)
        bench.push(client, f"{number}-{client}", now=100.0 * number + took_s, local_steps=1)

    for number in range(30):
        cohort = bench.engine.strategy.selected(bench.engine.state) or list("cd")
        others = [client for client in cohort if client != "d"]
        if number > 0 and "d" in cohort:
            work(others[0], number, 1.0)
            work("d", number, 10.0)
            assert bench.engine.version == number + 1
            return
        for client in cohort[:2]:  # which make a round
            work(client, number, 10.0)
    raise AssertionError("d was never drawn")


WORKS = lists_up_to(60, st.tuples(st.sampled_from("abcd"), st.booleans()))  # who asks or, if true, answers
KINDS = {
    "rounds, then a buffer": [{**ROUND, "until_updates": 5}, BUFFER],
    "a buffer, then rounds": [{**BUFFER, "buffer_size": 3, "until_updates": 4},
                              {**ROUND, "until_updates": 0}],
    "a buffer that is flushed": [{**BUFFER, "buffer_size": 3, "until_updates": 4}, BUFFER],
    "three": [{**ROUND, "until_versions": 2, "until_updates": 0}, {**BUFFER, "until_updates": 9},
              {"strategy": "delayed_nesterov", "buffer_size": 2}],
    "a cache": [{"strategy": "teasq", "cap": 4, "cache_size": 3, "until_updates": 4},
                {"strategy": "teasq", "cap": 4, "cache_size": 2, "a": 0.1}],
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(KINDS)), WORKS, st.integers(0, 60))
def test_every_update_that_was_taken_is_in_one_version_or_waits(kind: str, events: Any, cut: int) -> None:
    bench = phased(*KINDS[kind])
    published: list[str] = []
    taken: dict[str, tuple[str, int]] = {}  # whose it is, and of which version
    for n, (client, answers) in enumerate(events):
        mine = [t for t in bench.engine.ledger.tasks.values() if t.client_id == client]
        effects = (
            bench.push(client, mine[0].task_id, (n, 1, 1, 1), now=float(n))
            if answers and mine
            else bench.ask(client, f"task-{n}", now=float(n))
        )
        published += [u for e in effects if isinstance(e, Published) for u in e.update_ids]
        if answers and mine and decision(effects).verdict is not Verdict.REJECTED:
            taken[f"update-of-{mine[0].task_id}"] = (client, mine[0].base_version)
        if n == cut:  # a restart in the middle
            engine, found = bench.engine, take_snapshot(bench.engine)
            found = Snapshot(json.loads(json.dumps(found.meta)), found.arrays)
            bench.engine = restore(found, engine.spec, engine.strategy, engine.settings)
            assert state_digest(bench.engine) == state_digest(engine)
    if kind == "a cache":  # which has one update of a device of each version, the newest
        newest = {whose: update for update, whose in taken.items()}
        replaced = {u for u, whose in taken.items() if newest[whose] != u and u not in published}
    else:
        replaced = set()
    assert sorted([*published, *bench.engine.pending, *replaced]) == sorted(taken)
    assert bench.engine.state.updates == len(taken)
    again = phased(*KINDS[kind])
    for event in bench.log[4:]:
        again.do(event)
    assert state_digest(again.engine) == state_digest(bench.engine)


def test_a_phase_that_never_ends_is_its_strategy_to_the_bit() -> None:
    bench, plain = (
        phased({**BUFFER, "until_updates": 1000}, BUFFER),
        Bench(start=vector(10, 10, 10, 10), buffer_size=2),
    )
    plain.enrol(*"abcd")
    for each in (bench, plain):
        for n in range(9):
            each.work("abcd"[n % 4], f"t{n}", (0.1 * n, 0.7, -0.3, 1 / 3))
    assert np.array_equal(bench.engine.vector, plain.engine.vector)
    assert bench.engine.version == plain.engine.version


def test_two_equal_buffers_differ_by_the_flush_alone() -> None:
    """Where the switch is at the end of a buffer they do not."""
    bench, plain = (
        phased({**BUFFER, "until_updates": 4}, BUFFER),
        Bench(start=vector(10, 10, 10, 10), buffer_size=2),
    )
    plain.enrol(*"abcd")
    for each in (bench, plain):
        for n in range(8):
            each.work("abcd"[n % 4], f"t{n}", (0.1 * n, 0.7, -0.3, 1 / 3))
    assert phase_of(bench) == 1
    assert np.array_equal(bench.engine.vector, plain.engine.vector)


def run_of(*tables: dict[str, Any], **more: Any) -> Phased:
    found = strategy_of(merge([("test", {"strategy": {"name": "phased", "phases": list(tables)}, **more})]))
    assert isinstance(found, Phased)
    return found


def test_an_end_may_be_a_fraction_of_the_budget() -> None:
    made = run_of({**ROUND, "until_updates": 0.05}, BUFFER, run={"updates_max": 90})
    bench = phased({**ROUND, "until_updates": 5}, BUFFER)
    bench.engine.strategy = made
    for n in range(5):
        assert phase_of(bench) == 0
        bench.engine.state = replace(bench.engine.state, updates=n)
    cohort = bench.engine.strategy.selected(bench.engine.state) or list("ab")
    bench.work(cohort[0], "t")
    assert (phase_of(bench), bench.engine.state.updates) == (1, 5), "of 4.5 updates the fifth is the last"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([ROUND], "must be at least two tables"),
        ([ROUND, 3], r"phases\[1\] must be a table, not 3"),
        ([ROUND, {"buffer_size": 2}], r"phases\[1\].strategy must name a strategy, not None"),
        (
            [ROUND, {"strategy": "fedbuf"}],
            r"phases\[1\]: strategy.name must be one of .*did you mean 'fedbuff'",
        ),
        ([ROUND, {**BUFFER, "bufer_size": 2}], r"phases\[1\]: unknown key .*did you mean 'buffer_size'"),
        ([ROUND, {**BUFFER, "until_updates": 9}], r"phases\[1\] goes on to the end of the run"),
        ([BUFFER, BUFFER], r"phases\[0\] needs one of until_updates and until_versions"),
        ([{**ROUND, "until_versions": 2}, BUFFER], r"phases\[0\] needs one of"),
        (
            [{**ROUND, "until_updates": 1.5}, BUFFER],
            r"phases\[0\].until_updates must be a whole number, or a fr",
        ),
        ([{**ROUND, "until_updates": -1}, BUFFER], r"phases\[0\].until_updates must be a whole"),
        ([ROUND, {"strategy": "phased"}], r"phases\[1\]: a phase has no phases of its own"),
        ([ROUND, {**BUFFER, "until_updates": 2}, BUFFER], "each must be more than the one before, not 2, 2"),
        ([{**BUFFER, "until_updates": 2, "exclude_slowest": 0.1}, BUFFER], "exclude_slowest is for rounds"),
        (
            [{**BUFFER, "until_updates": 2}, {**LAST, "exclude_slowest": 0.1}],
            r"phases\[1\].exclude_slowest: no phase follows",
        ),
        ([{**ROUND, "exclude_slowest": 0.5}, BUFFER], r"phases\[0\].exclude_slowest must be in \[0, 0.5\)"),
        ([ROUND, {**BUFFER, "client": {"steps": 3}}], r"phases\[1\].client has unknown fields: steps"),
        (
            [ROUND, {**BUFFER, "client": {"learning_rate": 0.0}}],
            "client.learning_rate must be greater than 0",
        ),
    ],
)
def test_what_is_no_list_of_phases_is_refused_with_its_place(tables: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("phased", {"phases": tables})


@pytest.mark.parametrize(
    ("tables", "more", "words"),
    [
        ([{**ROUND, "until_updates": 0.1}, BUFFER], {}, "until_updates is a fraction of run.updates_max"),
        (
            [ROUND, {"strategy": "teasq"}],
            {"robust": {"clip": 4.0}},
            r"'raw' and 'log\(2\)' for downlink.codec",
        ),
        ([ROUND, {"strategy": "teasq"}], {"downlink": {"codec": "raw"}}, "set robust.clip"),
        ([ROUND, {"strategy": "asyncdrop"}], {}, "'none' and 'hetero' for submodel.name"),
        (
            [ROUND, {"strategy": "fadas"}],
            {"submodel": {"name": "heterofl"}},
            r"phases\[1\]: 'fadas' takes whole models only",
        ),
    ],
)
def test_what_a_run_must_say_for_its_phases(tables: list[Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run_of(*tables, **more)


def test_a_rule_is_of_every_phase_or_refused() -> None:
    made: Any = make_strategy("phased", {"phases": [ROUND, BUFFER]}, RobustTable(rule="median"))
    assert [part.rule.name for part in made.parts] == ["median", "median"]
    with pytest.raises(ConfigError, match=r"phases\[1\]: robust.rule is 'median'"):
        make_strategy("phased", {"phases": [ROUND, {"strategy": "fedasync"}]}, RobustTable(rule="median"))


def test_what_devices_keep_is_not_added_again_in_any_phase() -> None:
    tables = {
        "strategy": {"name": "phased", "phases": [{**BUFFER, "until_updates": 3}, {"strategy": "fedasync"}]}
    }
    with pytest.raises(ConfigError, match=r"client\.merge_weight = 1"):
        Blueprint.of(merge([("test", {**tables, "client": {"push": "elastic"}})]), Bench().engine.spec)
