"""Rollback is what the log gives when some updates are rejected on arrival, whatever came after them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import SPEC
from rollbacks import CLIENTS, Script, World, ask_of, scripts, seq_of_version

from anabranch.core import events as ev
from anabranch.core.effects import Barred, Published, RolledBackTo
from anabranch.core.engine.buffers import AVERAGE, LATEST, LOCAL
from anabranch.core.errors import ReplayMismatch
from anabranch.core.model.params import digest
from anabranch.core.model.updates import Reason, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.host.journal import replay
from anabranch.host.rollback import Folding

# The names of strategies that may be rolled back, with parameters that make many versions of few updates.
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedasync", {}, {}),
    ("asyncdrop", {}, {}),
    ("fedbuff", {"buffer_size": 3, "momentum": 0.5}, {}),
    ("fedbuff", {"buffer_size": 3}, {"rule": "median"}),
    ("fedbuff", {"buffer_size": 3, "outer": {"name": "schedule_free", "lr": 0.5}}, {}),
    ("qafel", {"buffer_size": 2}, {}),
    ("teasq", {"cache_size": 3, "concurrency_fraction": 1.0}, {}),
    ("teasq", {"cache_size": 3, "concurrency_fraction": 1.0, "mode": "paper"}, {}),
    ("teasq_drop", {"cache_size": 2, "concurrency_fraction": 1.0}, {"rule": "centred_clipping"}),
    ("delayed_nesterov", {"buffer_size": 3, "c": 0.25}, {}),
    ("fadas", {"buffer_size": 2}, {}),
    ("ca2fl", {"buffer_size": 2}, {}),
    ("ace", {}, {}),
    ("aced", {"staleness_max": 3}, {}),
    ("port", {"buffer_size": 2, "similarity_weight": 2.0}, {}),
    ("annealed", {"buffer_size": 1, "growth": 0.3}, {}),
    ("annealed", {"buffer_size": 1, "growth": 0.3, "outer": {"name": "nesterov", "lr": 0.3}}, {}),
    ("fedasmu", {"floor": 0.1}, {}),
    ("fedfa", {"window_size": 3}, {}),
    ("fedbuff", {"buffer_size": 3, "scheduler": {"name": "equal_time"}}, {}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0]}-{len(v[1])}-{v[2].get('rule', '')}")
@settings(max_examples=15)
@given(script=scripts)
def test_the_model_is_that_of_a_run_in_which_the_updates_were_rejected(variant: Any, script: Script) -> None:
    mine, other = World(*variant), World(*variant)
    mine.enrol()
    mine.play(script)
    before = mine.engine.version
    effects = mine.roll_back(0, 0, "b")
    other.enrol()
    other.play(script, hostile="b")
    # With fewer versions an update is less old: what was told it is too old stays so.
    assume(not any(r.decision.reason is Reason.STALE for r in mine.engine.ledger.receipts.values()))
    assert digest(mine.engine.vector) == digest(other.engine.vector)
    assert mine.engine.version == before + 1, "no number is used twice"
    shifted = mine.engine.strategy.shifted(other.engine.state, mine.engine.version - other.engine.version)
    other.engine.state = shifted
    mine_state, other_state = (take_snapshot(w.engine).arrays for w in (mine, other))
    assert {k: v.tolist() for k, v in mine_state.items() if k.startswith("strategy")} == {
        k: v.tolist() for k, v in other_state.items() if k.startswith("strategy")
    }
    (told,) = [e for e in effects if isinstance(e, RolledBackTo)]
    assert told.version == mine.engine.version
    assert "b" in mine.engine.guard.quarantined


def rolled(to_version: int = 2) -> World:
    world = World(*VARIANTS[2])
    world.enrol()
    rng = np.random.default_rng(5)
    world.play(
        [(CLIENTS[rng.integers(4)], int(rng.integers(4)), float(rng.integers(-3, 4))) for _ in range(60)]
    )
    assert world.engine.version > 5
    world.roll_back(to_version, seq_of_version(world, to_version), "c")
    return world


def test_a_second_rollback_counts_and_each_says_whom_it_left_out() -> None:
    world = rolled(4)
    world.roll_back(0, 0, "b")
    assert world.engine.counters.rollbacks == 2
    words = {c: f"a rollback to version {v} left its updates out" for c, v in (("c", 4), ("b", 0))}
    assert world.engine.guard.quarantined == words


def test_who_was_in_quarantine_before_a_rollback_keeps_the_reason() -> None:
    """And what is left out is counted; a rollback of an older release did neither, and still does not."""
    world, older = rolled(4), rolled(4)
    without = [r for r in world.engine.ledger.receipts.values() if r.client_id == "b"]
    taken = [r for r in without if r.decision.verdict is not Verdict.REJECTED]
    before = world.engine.counters.left_out
    for w in (world, older):
        w.do(ev.Quarantined(9e3, "b", "under inspection"))
    effects = world.roll_back(0, 0, "b")
    order = ev.RolledBack(1e4, 0, 0, ("b",), rules=1)
    older.do(older.refold(order, len(older.log) + 1, older.engine))
    assert world.engine.guard.quarantined["b"] == "under inspection"
    assert not [e for e in effects if isinstance(e, Barred)]
    assert world.engine.counters.left_out == before + len(taken) > before
    assert older.engine.guard.quarantined["b"] == "a rollback to version 0 left its updates out"
    assert older.engine.counters.left_out == before
    assert "left_out" not in take_snapshot(World(*VARIANTS[2]).engine).meta["counters"], "as it always was"


@pytest.mark.parametrize("receipts_max", [100_000, 10])
def test_what_is_left_out_is_counted_though_its_receipts_are_gone(receipts_max: int) -> None:
    """By the log, in which every update was taken. A rollback of an older release counted receipts."""
    worlds = [World("fedbuff", {"buffer_size": 2}, {}, receipts_max=receipts_max) for _ in range(2)]
    rng = np.random.default_rng(1)
    turns = [(CLIENTS[rng.integers(4)], int(rng.integers(4)), float(rng.integers(-3, 4))) for _ in range(60)]
    for world in worlds:
        world.enrol()
        world.play(turns)
    world, older = worlds
    sent = [record["client_id"] for _, record in world.log if record["kind"] == "update"]
    kept = [receipt.client_id for receipt in older.engine.ledger.receipts.values()]
    assert world.engine.counters.applied == len(sent) > 10
    (told,) = [e for e in world.roll_back(0, 0, "b") if isinstance(e, RolledBackTo)]
    assert (told.left_out, told.left_out_total) == (sent.count("b"),) * 2
    (told,) = [e for e in world.roll_back(0, 0, everyone=True) if isinstance(e, RolledBackTo)]
    assert (told.left_out, told.left_out_total) == (len(sent),) * 2
    order = ev.RolledBack(1e4, 0, 0, ("b",), rules=4)
    older.do(older.refold(order, len(older.log) + 1, older.engine))
    assert older.engine.counters.left_out == kept.count("b")


@pytest.mark.parametrize("window", [0, 2])
def test_what_still_waits_after_a_rollback_is_a_share_of_its_clients(window: int) -> None:
    """Or two updates of one were in a version, where one is the most. In a window it counts once."""
    bounds: dict[str, Any] = {"buffer_max": 1, "window_max": window, "window_versions": 1}
    world = World("fedbuff", {"buffer_size": 4}, {}, **bounds)
    world.enrol()
    for i, client in enumerate("abcdbd"):
        world.do(ev.TaskAsked(1.0, ask_of(client, f"t{i}")))
        world.push(f"t{i}", client, 1.0, 1.0)
    assert (world.engine.version, len(world.engine.pending)) == (1, 2)
    world.roll_back(0, 0, "a")
    engine = world.engine
    assert engine.version == 2
    waiting = {engine.ledger.receipts[u].client_id for u in engine.pending}
    for client in "bcd":
        refused = engine.refusal(ask_of(client, f"{client}-next"), 1e4)
        assert (refused is not None) == (client in waiting)
    again = world.fresh()
    for _ in replay(again, world.records(), world.load, world.refold):
        pass
    assert state_digest(again) == state_digest(engine)


def test_lengths_of_updates_that_are_left_out_bound_nobodys_any_more() -> None:
    world = World("fedbuff", {"buffer_size": 2}, {}, clip=2.0)
    world.enrol()
    world.play([("a", 0, 1.0), ("b", 0, 1.5), ("d", 0, 1.25), ("b", 0, 1.5)])
    a, _, d, _ = world.engine.guard.lengths
    world.roll_back(0, 0, "b")
    assert world.engine.guard.lengths == [a, d]


def test_the_log_replays_to_the_same_state_with_the_rollback_in_it() -> None:
    world = rolled()
    world.play([(c, 1, 2.0) for c in "abdabdabdabd"])
    again = world.fresh()
    for _ in replay(again, world.records(), world.load, world.refold):
        pass
    assert state_digest(again) == state_digest(world.engine)
    with pytest.raises(ReplayMismatch, match="rollback: it needs the whole log"):
        list(replay(world.fresh(), world.records(), world.load))


def test_a_snapshot_after_a_rollback_goes_on_alike() -> None:
    world = rolled()
    e = world.engine
    world.engine = restore(take_snapshot(e), SPEC, e.strategy, e.settings)
    assert state_digest(world.engine) == state_digest(e)


@pytest.mark.parametrize("policy", [AVERAGE, LATEST, LOCAL])
@pytest.mark.parametrize("variant", VARIANTS[:7:2], ids=lambda v: f"{v[0]}-{len(v[1])}")
@settings(max_examples=10)
@given(script=scripts)
def test_buffers_are_those_of_a_run_in_which_the_updates_were_rejected(
    variant: Any, policy: str, script: Script
) -> None:
    """And they are what a client that is left has reached, at the most; the log has it all."""
    strategy, params, robust = variant
    mine, other = (World(strategy, params, robust, buffers=policy) for _ in range(2))
    mine.enrol()
    mine.play(script)
    mine.roll_back(0, 0, "b")
    other.enrol()
    other.play(script, hostile="b")
    assert mine.engine.vector.tolist() == other.engine.vector.tolist()
    reached = [(0.0, 0.0), *((0.5 * value, value * value) for client, _, value in script if client != "b")]
    for place, values in enumerate(zip(*reached, strict=True), start=2):
        bounds = (0.0, 0.0) if policy == LOCAL else (min(values), max(values))
        assert bounds[0] <= mine.engine.vector[place] <= bounds[1]
    state, same = (w.engine.buffers.bounds for w in (mine, other))
    assert (state.low.tolist(), state.high.tolist()) == (same.low.tolist(), same.high.tolist())
    mine.play([(c, 1, 2.0) for c in "acd"])
    again = mine.fresh()
    for _ in replay(again, mine.records(), mine.load, mine.refold):
        pass
    assert state_digest(again) == state_digest(mine.engine)


def test_tasks_that_were_under_way_go_on_and_the_staleness_counts_the_rollback() -> None:
    world = World(*VARIANTS[0])
    world.enrol()
    world.do(ev.TaskAsked(1.0, ask_of("a", "slow")))
    world.play([("b", 0, 1.0), ("d", 0, 2.0), ("b", 0, 1.0)])
    assert world.engine.version == 3
    world.roll_back(0, 0, "b")
    assert world.engine.version == 4
    (decided, *_) = world.push("slow", "a", 1.0, 2e4)
    assert decided.receipt.decision.verdict is Verdict.PUBLISHED
    assert decided.receipt.decision.staleness == 4


def test_rollbacks_add_up() -> None:
    """First without c, then, further back, without b: the result has neither."""
    world, other = World(*VARIANTS[2]), World(*VARIANTS[2])
    script: Script = [(CLIENTS[i % 4], 2, float(i % 5)) for i in range(40)]
    for w in (world, other):
        w.enrol()
        w.play(script)
    world.roll_back(0, 0, "c")
    world.roll_back(0, 0, "b")
    other.roll_back(0, 0, "b", "c")
    assert digest(world.engine.vector) == digest(other.engine.vector)
    assert set(world.engine.guard.quarantined) == {"b", "c"}


def test_what_was_rejected_stays_rejected() -> None:
    world = World("fedbuff", {"buffer_size": 3}, {})
    world.enrol()
    world.do(ev.TaskAsked(1.0, ask_of("a", "t")))
    world.push("t", "a", 9.0, 2.0, flaw="damaged on the way")
    world.play([(c, 0, 1.0) for c in "abdabdabd"])
    world.roll_back(0, 0, "b")
    assert world.engine.vector[0] == pytest.approx(2.0), "two versions of ones"


def test_an_update_that_is_held_is_in_one_version_once() -> None:
    world = World("fedbuff", {"buffer_size": 2, "staleness": {"name": "constant"}}, {})
    world.enrol()
    world.play([("a", 0, 1.0), ("b", 0, 1.0), ("a", 0, 1.0), ("d", 0, 1.0), ("b", 0, 1.0)])
    held = list(world.engine.pending)
    assert (world.engine.version, len(held)) == (2, 1)
    effects = world.roll_back(0, 0, "b")
    (published,) = [e for e in effects if isinstance(e, Published)]
    assert (published.version, published.update_ids, world.engine.pending) == (3, (), [])
    assert world.engine.state.count == 1, (
        "of the three that are left one waits, as of version 2 already applied"
    )
    assert [e.client_id for e in effects if isinstance(e, Barred)] == ["b"]
    (rolled_back,) = [e for e in effects if isinstance(e, RolledBackTo)]
    assert rolled_back.left_out == 2


def test_what_waits_to_be_mixed_is_mixed_with_the_model_that_it_started_from() -> None:
    """Without b's c and d make version 1, and what a has made of version 0 waits."""
    mine, other = (
        World("teasq", {"cache_size": 2, "concurrency_fraction": 1.0, "mode": "paper"}, {}) for _ in range(2)
    )
    script: Script = [("a", 4, 1.0), ("b", 0, 1.0), ("c", 0, 2.0), ("d", 0, 3.0), ("b", 0, 1.0)]
    for world, hostile in ((mine, ""), (other, "b")):
        world.enrol()
        world.play(script, hostile=hostile)
    mine.roll_back(0, 0, "b")
    assert (other.engine.version, len(mine.engine.pending), len(other.engine.pending)) == (1, 1, 1)
    for world in (mine, other):
        world.play([("d", 0, 4.0)])
    assert other.engine.version == 2
    assert digest(mine.engine.vector) == digest(other.engine.vector)


def test_a_client_that_was_left_out_gets_no_more_tasks() -> None:
    world = rolled()
    refused = world.engine.refusal(ask_of("c", "new"), 2e4)
    assert refused is not None
    assert refused.reason is Reason.QUARANTINED
    assert "rollback to version 2" in refused.detail


WITHOUT_B = ev.RolledBack(1.0, 0, 0, ("b",))


@pytest.mark.parametrize("variant", [*VARIANTS[1:5:2], VARIANTS[-1]], ids=lambda v: f"{v[0]}-{len(v[1])}")
@settings(max_examples=20)
@given(before=scripts, during=st.lists(scripts, max_size=3), events=st.integers(1, 40))
def test_a_fold_goes_on_while_the_run_does(
    variant: Any, before: Script, during: list[Script], events: int
) -> None:
    world = World(*variant)
    world.enrol()
    world.play(before)
    folding = Folding(world.refold, WITHOUT_B, len(world.log), world.engine)
    for script in during:
        folding.advance(events)
        world.play(script)
    while folding.advance(events):
        pass
    assert _is_the_whole_fold(folding, world)


def test_tasks_that_end_and_begin_during_a_fold_are_those_of_the_whole_one() -> None:
    """A scheduler remembers open tasks: b's is answered and left out, c's is given back, d's begins.

    And a's has expired, as it was told; what b has begun since ends with the rollback.
    """
    world = World(*VARIANTS[-1])
    world.enrol()
    world.play([("a", 0, 1.0)])
    for client in "bc":
        world.do(ev.TaskAsked(10.0, ask_of(client, f"of-{client}")))
    folding = Folding(world.refold, WITHOUT_B, len(world.log), world.engine)
    while folding.advance(1):
        pass
    world.push("of-b", "b", 2.0, 11.0)
    world.do(ev.TaskDropped(12.0, "c", "of-c", "no room"))
    for now, client in ((12.5, "a"), (74.0, "b"), (75.0, "d")):
        world.do(ev.Ticked(now))
        world.do(ev.TaskAsked(now, ask_of(client, f"{client}-at-{now:g}")))
    assert [t.client_id for t in world.engine.ledger.leased()] == ["b", "d"]
    assert _is_the_whole_fold(folding, world)
    found = folding.finish(len(world.log) + 1, 1.0).fold
    assert found is not None
    assert found.state.schedule.begun.keys() == {"d"}


def test_a_rollback_in_the_middle_of_another_ones_fold_counts() -> None:
    world = rolled(0)
    folding = Folding(world.refold, WITHOUT_B, len(world.log), world.engine)
    folding.advance(10)
    world.roll_back(0, 0, "a")
    assert _is_the_whole_fold(folding, world)


def _is_the_whole_fold(folding: Folding, world: World) -> bool:
    """Whether in steps the same comes out as at once."""
    seq = len(world.log) + 1
    found, direct = folding.finish(seq, 1.0).fold, world.refold(WITHOUT_B, seq, world.engine).fold
    assert found is not None
    assert direct is not None
    same_state = (found.version, found.pending) == (direct.version, direct.pending)
    remembered, same = (take_snapshot(fold).meta["strategy"] for fold in (found, direct))
    return same_state and remembered == same and digest(found.vector) == digest(direct.vector)
