"""An update's id is used once: by one client, for one task, with one payload."""

from __future__ import annotations

from dataclasses import replace

from machines import Bench

from anabranch.core import events as ev
from anabranch.core.effects import Conflicting, Decided
from anabranch.core.snapshot import RECEIPTS_OF, Snapshot, restore, state_digest, take_snapshot


def test_an_id_is_of_one_update() -> None:
    bench = Bench()
    bench.enrol("a", "b")
    bench.work("a", "t0")
    arrived, before = bench.log[-1], bench.engine.counters.applied
    assert isinstance(arrived, ev.UpdateArrived)
    (again,) = bench.do(arrived)
    assert isinstance(again, Decided)
    assert again.duplicate
    bench.ask("b", "t1")
    others = {
        "with other bytes": replace(arrived, payload=ev.Payload("11" * 32, 16)),
        "of another task": replace(arrived, update=replace(arrived.update, task_id="t1")),
        "of another client": replace(arrived, update=replace(arrived.update, client_id="b")),
    }
    kept = take_snapshot(bench.engine)
    parts = bench.engine.spec, bench.engine.strategy, bench.engine.settings
    for engine in (bench.engine, restore(kept, *parts)):
        for why, other in others.items():
            (conflict,) = engine.handle(other)
            assert isinstance(conflict, Conflicting)
            assert (conflict.client_id, conflict.update_id) == (other.update.client_id, "update-of-t0")
            assert why in conflict.why
        assert engine.counters.applied == before
        assert "t1" in engine.ledger.tasks
    # One that an older release has written knows nobody's name, and is the same state.
    older = Snapshot({k: v for k, v in kept.meta.items() if k != RECEIPTS_OF}, kept.arrays)
    assert state_digest(restore(older, *parts)) == state_digest(restore(kept, *parts))
    (again,) = restore(older, *parts).handle(arrived)
    assert isinstance(again, Decided)
    assert again.duplicate
