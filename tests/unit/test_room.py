"""Whether there is room, as operators hear of it."""

from __future__ import annotations

import pytest
from virtual import VirtualTime

from anabranch.core.errors import StoreError, StoreFull
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


def test_room_that_was_made_is_seen_before_anybody_sends() -> None:
    free, room = 0, Room()
    room.free_bytes = lambda: free
    room.lacks(StoreFull("a"))
    assert room.lack
    free = 5
    assert room.lack == ""
    free = 0
    room.lacks(StoreFull("b"))
    assert room.lack.startswith("b")


def test_what_no_look_tells_is_told_by_what_is_taken_alone() -> None:
    """A disk without inodes has bytes free, and one that cannot be looked at tells nothing."""
    free, room = 5, Room()
    room.free_bytes = lambda: free
    room.lacks(StoreFull("a"), 10)
    assert room.lack
    free = 0
    assert room.lack
    free = 5
    assert room.lack == "", "it was full after all"

    def fails() -> int:
        raise StoreError("looking at the disk")

    room.free_bytes = fails
    room.lacks(StoreFull("b"), 10)
    assert room.lack
    room.took(10)
    assert room.lack == ""
