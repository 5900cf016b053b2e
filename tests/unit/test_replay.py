"""A log once more: the same records give the same digest, and what cannot be read is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from desks import LIMITS, Desk, settings
from machines import SPEC
from rollbacks import World, seq_of_version

from anabranch.core.effects import Decided
from anabranch.core.errors import ReplayMismatch, StoreNewer
from anabranch.core.events import RolledBack, SettingsChanged
from anabranch.core.journal import Record, from_record, to_record
from anabranch.core.model.updates import Receipt
from anabranch.core.snapshot import state_digest
from anabranch.host.journal import Replay, replay
from anabranch.server.store.base import VersionRow
from anabranch.server.store.memory import MemoryStore

TURNS = [("a", 0, 1.0), ("b", 2, 2.0), ("c", 0, 3.0), ("b", 0, 4.0), ("a", 1, 5.0), ("d", 0, 6.0)] * 3


def played() -> World:
    world = World("fedasync", {}, {})
    world.enrol()
    world.play(TURNS)
    return world


def test_every_record_comes_with_its_place_and_its_effects() -> None:
    world, fresh = played(), played().fresh()
    replayed = list(replay(fresh, world.records(), world.load))
    assert [(seq, record) for seq, record, _ in replayed] == [
        (seq, record) for seq, record in world.records()
    ]
    decided = [e.receipt.update_id for _, _, effects in replayed for e in effects if isinstance(e, Decided)]
    assert decided == [record["update_id"] for _, record in world.log if record["kind"] == "update"] != []
    assert state_digest(fresh) == state_digest(world.engine)


def test_a_whole_log_with_rollbacks_gives_the_same_state() -> None:
    world = played()
    world.roll_back(2, seq_of_version(world, 2), "c")
    world.play(TURNS)
    again = Replay(world.refold.log, world.refold.begin)
    assert [seq for seq, _, _ in again] == list(range(1, len(world.log) + 1))
    assert state_digest(again.engine) == state_digest(world.engine)


def test_what_an_engine_has_forgotten_that_it_refused_is_refused_again() -> None:
    """A rollback counts what was taken. Here no receipt is left at the rollback; one update was too late."""
    world = World("fedasync", {}, {}, receipts_max=1, staleness_max=1)
    world.enrol()
    world.play([("a", 5, 64.0), ("b", 0, 1.0), ("c", 0, 1.0), ("b", 0, 1.0), ("c", 0, 1.0), ("b", 1, 1.0)])
    world.play([("b", 0, 1.0), ("c", 0, 1.0)])
    told: dict[str, Receipt] = {}
    for _, _, effects in replay(world.fresh(), world.records(), world.load):
        told |= {e.receipt.update_id: e.receipt for e in effects if isinstance(e, Decided)}
    assert [r.decision.reason.value for r in told.values() if r.client_id == "a"] == ["stale"]
    assert len(world.engine.ledger.receipts) == 1
    object.__setattr__(world.refold, "receipt", told.get)  # as a store knows all of them
    world.roll_back(0, 0, "c")
    assert abs(world.engine.vector).max() < 10.0
    again = Replay(world.refold.log, world.refold.begin)
    list(again)
    assert state_digest(again.engine) == state_digest(world.engine)


def test_what_cannot_be_read_is_named() -> None:
    world = played()

    def records(spoiled: Record) -> Iterator[tuple[int, Record]]:
        yield from list(world.records())[:4]
        yield 5, spoiled

    (_, asked), *_ = [(s, r) for s, r in world.log if r["kind"] == "asked"]
    for spoiled in (
        {"now": 1.0},  # no kind
        {**asked, "now": "noon"},
        {"kind": "enrolled", "now": 1.0, "client_id": "x", "capability": {"codecs": 3}},
    ):
        with pytest.raises(ReplayMismatch, match="event 5 of the log cannot be read"):
            list(replay(world.fresh(), records(json.loads(json.dumps(spoiled))), world.load))


def test_what_a_newer_release_has_logged_is_no_damage() -> None:
    """An event, a field, and numbers of rules that are not known here."""
    world = played()
    (_, asked), *_ = [(s, r) for s, r in world.log if r["kind"] == "asked"]
    changed = to_record(SettingsChanged(1.0, {"server.lease_s": 9.0}, "op"))
    back = to_record(RolledBack(1.0, 0, 0, ("a",)))
    for newer in (
        {**asked, "colour": "blue"},
        {"kind": "unheard_of", "now": 1.0},
        {**changed, "rules": 1 + changed["rules"]},
        {**back, "rules": 1 + back["rules"]},
    ):
        with pytest.raises(StoreNewer, match=r"^event 5 of the log .*: a newer release has written it"):
            list(replay(world.fresh(), [(5, json.loads(json.dumps(newer)))], world.load))
    (event,) = [from_record(changed, SPEC, world.load)]
    assert event == SettingsChanged(1.0, {"server.lease_s": 9.0}, "op"), "the newest that is known is"


def test_a_rollback_needs_the_whole_log() -> None:
    world = played()
    world.roll_back(2, seq_of_version(world, 2), "c")
    assert world.spec == SPEC
    with pytest.raises(ReplayMismatch, match=f"event {len(world.log)} of the log is a rollback"):
        list(replay(world.fresh(), world.records(), world.load))


class TwoAtATime(MemoryStore):
    """Its pages of versions are short, however long one may be."""

    def versions(self, after: int = 0, limit: int = 1000) -> list[VersionRow]:
        """At most two of them."""
        return super().versions(after, min(limit, 2))


def test_a_start_holds_every_version_to_the_record_however_many_follow_a_snapshot(tmp_path: Path) -> None:
    store, config = TwoAtATime(LIMITS), settings(server={"snapshot_every_versions": 1000})
    Desk(store, tmp_path, config).work(8)
    assert Desk(store, tmp_path, config).found.replayed > 0
    store.books.versions[4] = replace(store.books.versions[4], sha256="0" * 64)
    with pytest.raises(ReplayMismatch, match="version 4 has the digest"):
        Desk(store, tmp_path, config)
