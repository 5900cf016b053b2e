"""SIGKILL between every two steps of the acknowledgement: nothing acknowledged lost, nothing twice."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash import run
from server_process import Plan

from anabranch.server.failpoints import MASKED_POINTS, POINTS, SHARED_SHELF_POINTS, SHELF_POINTS

ROOT = Path(__file__).parents[2]
# Every payload is larger than this, so that it goes through a spool file and a blob.
NOTHING_INLINE = 512
OF_FILES = ("payload_synced", "payload_renamed", "log_written", "log_flushed")  # PostgreSQL has these itself
MANY = 100_000  # the writers stop when the last failpoint was reached


def check(plan: Plan, folder: Path, figure: Callable[[str], None]) -> None:
    began = time.monotonic()
    outcome = run(folder, plan)
    figure(
        f"{len(plan.failpoints)} crashes at {len(set(plan.failpoints))} failpoints, when each was reached "
        f"for the {plan.nth}. time, in {time.monotonic() - began:.0f} s; "
        f"{outcome.acknowledged} updates acknowledged"
    )
    assert outcome.problems == [], plan
    assert outcome.acknowledged > 0  # how many there are between two crashes is chance


def test_a_crash_at_every_failpoint(tmp_path: Path, figure: Callable[[str], None]) -> None:
    plan = Plan(seed=21, updates=MANY, failpoints=POINTS, inline_bytes_max=NOTHING_INLINE)
    check(plan, tmp_path, figure)


@pytest.mark.prove
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_a_crash_at_every_failpoint_in_any_order(
    nth: int, database: str, tmp_path: Path, request: pytest.FixtureRequest, figure: Callable[[str], None]
) -> None:
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else ""
    points = [name for name in POINTS if not (url and name in OF_FILES)]
    order = random.Random(nth).sample(points, len(points)) * 2
    plan = Plan(
        seed=nth,
        updates=MANY,
        failpoints=tuple(order),
        nth=nth,
        database=url,
        inline_bytes_max=NOTHING_INLINE,
    )
    check(plan, tmp_path, figure)


def test_every_failpoint_is_somewhere_in_the_server() -> None:
    sources = (ROOT / "server").rglob("*.py")
    reached = [name for path in sources for name in re.findall(r'reach\("(\w+)"\)', path.read_text())]
    shelves = (*SHELF_POINTS, *SHELF_POINTS, *SHARED_SHELF_POINTS)  # a folder's, and a database's
    assert sorted(reached) == sorted((*POINTS, *shelves, *MASKED_POINTS))
