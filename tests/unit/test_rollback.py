"""Rollback is what the log gives when some updates are rejected on arrival, whatever came after them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import SPEC, vector

from anabranch.core import events as ev
from anabranch.core.effects import Barred, Published, RolledBackTo
from anabranch.core.engine import Engine
from anabranch.core.errors import ReplayMismatch
from anabranch.core.journal import Record, from_record, replay, to_record
from anabranch.core.params import Delta, digest
from anabranch.core.robust import RobustTable
from anabranch.core.rollback import Refolder
from anabranch.core.settings import EngineSettings
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.core.submodels import Submodel
from anabranch.core.updates import Ask, Capability, Reason, Verdict
from anabranch.strategies.registry import make_strategy

CLIENTS = "abcd"
# The names of strategies that may be rolled back, with parameters that make many versions of few updates.
VARIANTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fedasync", {}, {}),
    ("asyncdrop", {}, {}),
    ("fedbuff", {"buffer_size": 3, "momentum": 0.5}, {}),
    ("fedbuff", {"buffer_size": 3}, {"rule": "median"}),
    ("qafel", {"buffer_size": 2}, {}),
    ("teasq", {"cache_size": 3, "concurrency_fraction": 1.0}, {}),
    ("teasq", {"cache_size": 3, "concurrency_fraction": 1.0, "mode": "paper"}, {}),
    ("teasq_drop", {"cache_size": 2, "concurrency_fraction": 1.0}, {"rule": "centred_clipping"}),
]
Script = list[tuple[str, int, float]]  # client, how many other events its training lasts, value


class World:
    """An engine with its log, and clients whose values do not depend on what they fetch."""

    def __init__(self, strategy: str, params: dict[str, Any], robust: dict[str, Any]) -> None:
        self.make = (strategy, params, robust)
        self.log: list[tuple[int, Record]] = []
        self.payloads: dict[str, np.ndarray] = {}
        self.engine = self.fresh()
        self.refold = Refolder(self.fresh, self.records, self.load)

    def fresh(self) -> Engine:
        name, params, robust = self.make
        table = RobustTable(**robust)
        return Engine(SPEC, make_strategy(name, params, table), EngineSettings(clip=3.0), vector(0, 0, 0, 0))

    def records(self) -> Iterator[tuple[int, Record]]:
        return iter(json.loads(json.dumps(self.log)))

    def load(self, payload: ev.Payload, submodel: Submodel | None) -> Delta:
        return self.payloads[payload.sha256]

    def do(self, event: ev.Event) -> list[Any]:
        self.log.append((len(self.log) + 1, to_record(event)))
        return self.engine.handle(event)

    def push(self, task_id: str, client: str, value: float, now: float, flaw: str = "") -> list[Any]:
        task = self.engine.ledger.tasks[task_id]
        delta = vector(value, -value, 0.5 * value, value * value)
        sha256 = hashlib.sha256(delta.tobytes()).hexdigest()
        self.payloads[sha256] = delta
        record = {
            "kind": "update",
            "now": now,
            "update_id": f"u-{task_id}",
            "task_id": task_id,
            "client_id": client,
            "base_version": task.base_version,
            "examples": 1 + len(task_id),
            "local_steps": 1,
            "metrics": {},
            "submodel": None,
            "payload": {"sha256": sha256, "size_bytes": 16, "codec": "raw", "values": 0},
            "flaw": flaw,
        }
        return self.do(from_record(record, SPEC, self.load))

    def play(self, script: Script, hostile: str = "", first: int = 0) -> None:
        """Ask, and push some turns later; the updates of `hostile` from turn `first` on are flawed."""
        now, waiting = float(len(self.log)), []
        for turn, (client, lasts, value) in enumerate(script):
            now += 1.0
            task_id = f"t{len(self.log)}-{turn}"
            if not self.engine.ledger.live_of(client):
                self.do(ev.TaskAsked(now, _ask(client, task_id)))
                waiting.append((turn + lasts, task_id, client, value))
            for due, task, who, its in sorted(waiting):
                if due <= turn:
                    waiting.remove((due, task, who, its))
                    flaw = "rejected on arrival" if who == hostile and turn >= first else ""
                    self.push(task, who, its, now, flaw)

    def enrol(self) -> None:
        for client in CLIENTS:
            self.do(ev.Enrolled(0.0, client, Capability()))

    def roll_back(self, to_version: int, to_seq: int, *without: str) -> list[Any]:
        event = ev.RolledBack(1e4, to_version, to_seq, without)
        return self.do(self.refold(event, len(self.log) + 1, self.engine))


def _ask(client: str, task_id: str) -> Ask:
    return Ask(client, task_id)


def seq_of_version(world: World, version: int) -> int:
    """The event that published a version, by replaying the log."""
    if version == 0:
        return 0
    fresh = world.fresh()
    for seq, record in world.records():
        fresh.handle(from_record(record, SPEC, world.load))
        if fresh.version == version:
            return seq
    raise AssertionError(version)


scripts = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.integers(0, 5), st.integers(-4, 4).map(float)),
    min_size=12,
    max_size=50,
)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v[0]}-{len(v[1])}-{v[2].get('rule', '')}")
@settings(max_examples=15, deadline=None)
@given(script=scripts)
def test_the_model_is_that_of_a_run_in_which_the_updates_were_rejected(variant: Any, script: Script) -> None:
    mine, other = World(*variant), World(*variant)
    mine.enrol()
    mine.play(script)
    before = mine.engine.version
    effects = mine.roll_back(0, 0, "b")
    other.enrol()
    other.play(script, hostile="b")
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


def rolled(to_version: int = 2, strategy: Any = VARIANTS[2]) -> World:
    world = World(*strategy)
    world.enrol()
    rng = np.random.default_rng(5)
    world.play(
        [(CLIENTS[rng.integers(4)], int(rng.integers(4)), float(rng.integers(-3, 4))) for _ in range(60)]
    )
    assert world.engine.version > 5
    world.roll_back(to_version, seq_of_version(world, to_version), "c")
    return world


def test_updates_up_to_the_version_stay() -> None:
    late, early = rolled(4), rolled(0)
    assert digest(late.engine.vector) != digest(early.engine.vector)


def test_the_log_replays_to_the_same_state_with_the_rollback_in_it() -> None:
    world = rolled()
    world.play([(c, 1, 2.0) for c in "abdabdabdabd"])
    again = world.fresh()
    records = [record for _, record in world.records()]
    for _ in replay(again, records, world.load, world.refold):
        pass
    assert state_digest(again) == state_digest(world.engine)
    with pytest.raises(ReplayMismatch, match="rollback: it needs the whole log"):
        list(replay(world.fresh(), records, world.load))


def test_a_snapshot_after_a_rollback_goes_on_alike() -> None:
    world = rolled()
    e = world.engine
    world.engine = restore(take_snapshot(e), SPEC, e.strategy, e.settings)
    assert state_digest(world.engine) == state_digest(e)


def test_tasks_that_were_under_way_go_on_and_the_staleness_counts_the_rollback() -> None:
    world = World(*VARIANTS[0])
    world.enrol()
    world.do(ev.TaskAsked(1.0, _ask("a", "slow")))
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
    world.do(ev.TaskAsked(1.0, _ask("a", "t")))
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
    assert len(rolled_back.left_out) == 2


def test_a_client_that_was_left_out_gets_no_more_tasks() -> None:
    world = rolled()
    refused = world.engine.refusal(_ask("c", "new"), 2e4)
    assert refused is not None
    assert refused.reason is Reason.QUARANTINED
    assert "rollback to version 2" in refused.detail
