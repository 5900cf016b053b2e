"""What a server says while it replays."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from desks import LIMITS, Desk, settings

from anabranch.server import recovery
from anabranch.server.store.factory import open_store


def test_a_replay_that_lasts_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took half an hour for a million events without a snapshot, and said nothing."""
    desk = Desk(open_store("", tmp_path, LIMITS), tmp_path, settings())
    desk.work(3)
    last = desk.books.seq
    desk.drop()

    def said() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=recovery.__name__):
            Desk(open_store("", tmp_path, LIMITS), tmp_path, settings()).drop()
        return [r.getMessage() for r in caplog.records if r.getMessage().startswith("recovering")]

    assert said() == []
    monkeypatch.setattr(recovery, "TOLD_EVERY_S", 0.0)
    assert said() == [f"recovering: replayed up to event {seq} of {last}" for seq in range(1, last + 1)]
