"""What the event loop sees of the engine: as it was after a batch, and for ever so."""

from __future__ import annotations

from pathlib import Path

import pytest
from desks import Desk, settings
from hypothesis import given
from hypothesis import strategies as st
from machines import Bench

from anabranch.core import events as ev
from anabranch.core.model.updates import Capability
from anabranch.server.glance import ABOVE_MIN, Glance, Glances, Layered
from anabranch.server.store.memory import MemoryStore

KEYS = [f"k{n}" for n in range(40)]
VALUES = st.dictionaries(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(0, 9)), max_size=30)


@given(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 9)), st.lists(VALUES, max_size=20))
def test_a_map_in_layers_is_a_map_and_stays_what_it_was(
    first: dict[str, int], changes: list[dict[str, int | None]]
) -> None:
    known, plain = [Layered(first)], [dict(first)]
    for change in changes:
        # Keys of their own fill the upper layer, so that layers are merged now and then.
        more = {f"{len(known)}-{n}": n for n in range(ABOVE_MIN // 4)}
        known.append(known[-1].changed({**change, **more}))
        merged = {**plain[-1], **change, **more}
        plain.append({k: v for k, v in merged.items() if v is not None})
    keys = {*KEYS, *plain[-1]}
    for layered, expected in zip(known, plain, strict=True):
        assert {k: v for k in keys if (v := layered.get(k)) is not None} == expected
        assert {k for k in keys if k in layered} == expected.keys()


def test_a_glance_has_all_that_the_engine_has_and_none_changes() -> None:
    bench = Bench("fedasync", receipts_max=3, lease_s=5.0, lease_min_s=5.0, concurrency=3)
    shown = Glances(bench.engine)
    taken: list[tuple[Glance, tuple[object, ...]]] = [(shown.take(), seen(bench))]
    bench.enrol("a", "b", "c")
    for turn in range(8):
        now = 10.0 * turn
        for client in "abc":
            bench.ask(client, f"{client}{turn}", now=now)
        bench.push("a", f"a{turn}", now=now + 1.0)
        bench.do(ev.TaskDropped(now + 1.0, "b", f"b{turn}", "enough"))
        taken.append((shown.take(), seen(bench)))
        bench.do(ev.Ticked(now + 6.0))
        taken.append((shown.take(), seen(bench)))
    bench.do(ev.Enrolled(99.0, "a", Capability(examples=7)))
    bench.do(ev.Quarantined(99.0, "c", "enough"))
    taken.append((shown.take(), seen(bench)))
    names = {f"{client}{turn}" for client in "abc" for turn in range(8)}
    for glance, (version, counters, barred, holders, clients, tasks, receipts) in taken:
        assert (glance.version, repr(glance.counters)) == (version, counters)
        assert (glance.clients_quarantined, glance.clients_training) == (barred, holders)
        assert {c: glance.clients.get(c) for c in "abc" if c in glance.clients} == clients
        assert {t: glance.tasks.get(t) for t in names if t in glance.tasks} == tasks
        updates = {f"update-of-{name}" for name in names}
        assert {u: glance.receipts.get(u) for u in updates if u in glance.receipts} == receipts


def seen(bench: Bench) -> tuple[object, ...]:
    engine = bench.engine
    clients = {c: record.capability for c, record in engine.ledger.clients.items()}
    books = dict(engine.ledger.tasks), dict(engine.ledger.receipts)
    counts = len(engine.guard.quarantined), len(engine.ledger.holders)
    return engine.version, repr(engine.counters), *counts, clients, *books


def test_the_writer_shows_what_its_batch_has_come_to(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(), tmp_path, settings())
    desk.enrol("a")
    task = desk.ask("a", "t")
    shown = desk.books.commit([])
    assert shown.tasks.get("t") == task
    assert (shown.clients_enrolled, shown.live_tasks, shown.deadline) == (1, 1, task.expires_at)
    desk.close()


@pytest.mark.parametrize("change", ["version", "tasks"])
def test_nobody_writes_in_a_glance(change: str) -> None:
    glance = Glances(Bench("fedasync").engine).take()
    with pytest.raises(AttributeError):
        setattr(glance, change, None)
