"""Devices that push in the background, and their server, are killed again and again: nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_lives import Found, live_and_die

PUSHES = ["overlap", "elastic"]


def check(found: Found) -> None:
    """All promises were kept, and there was something to keep."""
    assert found.problems == [], found
    assert found.acknowledged > 0
    assert found.steps > found.applied > 0


@pytest.mark.parametrize("push", PUSHES)
def test_devices_and_their_server_die_a_few_times(push: str, tmp_path: Path) -> None:
    check(live_and_die(tmp_path, push, kills=4, seed=1))


@pytest.mark.prove
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("push", PUSHES)
def test_devices_and_their_server_die_twenty_times(push: str, seed: int, tmp_path: Path) -> None:
    found = live_and_die(tmp_path, push, kills=20, seed=seed)
    check(found)
    assert found.held > 0, "no device died with a result in its outbox"
