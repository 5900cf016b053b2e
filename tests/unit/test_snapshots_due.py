"""Snapshots are due by versions, by updates and by events of any kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from desks import Desk, settings

from anabranch.server.saving import Every
from anabranch.server.store.factory import open_store


@pytest.mark.parametrize(
    ("every", "gone", "due"),
    [
        (Every(), (9, 9, 9), False),
        (Every(versions=3), (2, 9, 9), False),
        (Every(versions=3), (3, 0, 0), True),
        (Every(updates=3), (9, 2, 9), False),
        (Every(updates=3), (0, 3, 0), True),
        (Every(events=3), (9, 9, 2), False),
        (Every(5, 5, 3), (0, 0, 3), True),
    ],
)
def test_what_makes_a_snapshot_due(every: Every, gone: tuple[int, int, int], due: bool) -> None:
    assert every.due(*gone) is due


def test_a_restart_is_short_where_devices_only_enrol(tmp_path: Path) -> None:
    """Devices that come and go make events, and no update ever."""
    config = settings(server={"snapshot_every_events": 20})
    desk = Desk(open_store("", tmp_path), tmp_path, config)
    for number in range(25):
        desk.enrol(f"passer-by-{number}")
    assert desk.books.engine.version == desk.books.engine.counters.applied == 0
    before = desk.digest
    desk.drop()
    again = Desk(open_store("", tmp_path), tmp_path, config)
    assert (again.found.saved.seq, again.found.replayed) == (20, 5)
    assert again.digest == before
    again.drop()
