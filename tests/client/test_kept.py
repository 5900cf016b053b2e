"""What an App keeps counts exactly when its result is in the outbox, wherever a crash strikes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from agents import Crash
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.client.kept import Keepsake, KeptState
from anabranch.client.outbox import Outbox, UpdateEntry


def both(kept: bytes) -> Keepsake:
    """What an App keeps, and buffers that are known by it."""
    return Keepsake(kept, kept[::-1])


class Device:
    """A device's folder, opened anew, as at a start."""

    def __init__(self, folder: Path) -> None:
        self.outbox = Outbox(folder / "outbox")
        self.kept = KeptState(folder / "kept", self.outbox.pending())

    def put(self, update_id: str, kept: bytes, run_id: str = "run", crash: str = "") -> None:
        """Put a result, and crash before the outbox has it, or after."""
        with self.kept.beside(update_id, both(kept), run_id):
            if crash == "before":
                raise Crash
            self.outbox.put(UpdateEntry(update_id, f"t{update_id}", "layout", 0, 1, 1, "raw", b"1234", 1))
            if crash == "after":
                raise Crash


def test_what_is_kept_is_that_of_the_newest_result(tmp_path: Path) -> None:
    device = Device(tmp_path)
    assert device.kept.load("run") == Keepsake()
    device.put("a", b"one")
    device.put("b", b"two")
    assert Device(tmp_path).kept.load("run") == both(b"two")
    device.outbox.remove("a")
    device.outbox.remove("b")
    assert Device(tmp_path).kept.load("run") == both(b"two")


def test_another_run_starts_with_nothing(tmp_path: Path) -> None:
    Device(tmp_path).put("a", b"one")
    assert Device(tmp_path).kept.load("another") == Keepsake()


def test_nothing_kept_costs_no_file(tmp_path: Path) -> None:
    Device(tmp_path).put("a", b"")
    assert not (tmp_path / "kept").exists()


def test_what_was_kept_can_be_given_up(tmp_path: Path) -> None:
    Device(tmp_path).put("a", b"one")
    Device(tmp_path).put("b", b"")
    assert Device(tmp_path).kept.load("run") == Keepsake()


@given(st.lists(st.sampled_from(["", "before", "after"]), max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_crash_at_any_moment_leaves_the_two_in_step(crashes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, expected = Path(name), b""
        for number, crash in enumerate(crashes):
            kept, device = f"after {number}".encode(), Device(folder)
            if crash:
                with pytest.raises(Crash):
                    device.put(f"u{number}", kept, crash=crash)
            else:
                device.put(f"u{number}", kept)
            expected = expected if crash == "before" else kept
            again = Device(folder)
            assert again.kept.load("run") == both(expected)
            assert (f"u{number}" in again.outbox.pending()) is (crash != "before")
