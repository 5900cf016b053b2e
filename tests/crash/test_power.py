"""The power goes while updates are written: what was acknowledged is there, and without a flush it is not."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from power import run
from server_process import Plan

pytestmark = pytest.mark.prove

NOTHING_INLINE = 512  # every payload is larger, so that it goes through a spool file and a blob


@pytest.mark.parametrize("inline_bytes_max", [256 * 1024, NOTHING_INLINE], ids=["log", "blobs"])
def test_twenty_power_cuts(inline_bytes_max: int, tmp_path: Path, figure: Callable[[str], None]) -> None:
    plan = Plan(seed=51, kills=20, updates=2_000, inline_bytes_max=inline_bytes_max)
    outcome = run(tmp_path, plan)
    restart_s = statistics.median(outcome.restarts_s)
    figure(
        f"{len(outcome.restarts_s)} cuts in {outcome.acknowledged} updates, "
        f"restart in {restart_s:.2f} s, {len(outcome.problems)} promises broken"
    )
    assert outcome.problems == []
    assert outcome.acknowledged == plan.updates


@pytest.mark.parametrize("flaw", ["unlogged", "unsynced"])
def test_without_a_flush_the_same_cuts_lose_updates(
    flaw: str, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    plan = Plan(seed=51, kills=5, updates=500, inline_bytes_max=NOTHING_INLINE, flaw=flaw)
    outcome = run(tmp_path, plan)
    figure(outcome.problems[0].splitlines()[0] if outcome.problems else "nothing lost")
    signs = ("acknowledged updates are lost", "does not serve again", "is not known any more")
    assert any(sign in problem for problem in outcome.problems for sign in signs), outcome
