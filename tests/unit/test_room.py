"""Whether there is room, as operators hear of it."""

from __future__ import annotations

import pytest
from virtual import VirtualTime

from anabranch.core.errors import StoreFull
from anabranch.server.room import Room


def test_what_is_smaller_than_what_was_refused_is_no_sign_of_room(caplog: pytest.LogCaptureFixture) -> None:
    time = VirtualTime()
    room = Room(time.now)
    with caplog.at_level("INFO"):
        room.took(10)
        assert room.lack == ""
        room.lacks(StoreFull("a"), 1000)
        time.pass_s(7.0)
        room.took()
        room.took(999)
        assert room.lack == "a (7 s ago)"
        room.lacks(StoreFull("b"))
        room.took(999)
        assert room.lack == "b (0 s ago)"
        room.took(1000)
        assert room.lack == ""
        room.lacks(StoreFull("c"))
        room.took()
        assert room.lack == ""
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"] * 2
