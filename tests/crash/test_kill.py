"""SIGKILL at random moments: nothing that was acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from contents import package
from crash import Outcome, run
from server_process import Plan

from anabranch.server.store.factory import open_store

# Every payload is larger than this, so that it goes through a spool file and a blob.
NOTHING_INLINE = 512


def check(outcome: Outcome, plan: Plan) -> None:
    restarts = outcome.restarts_s
    said = f"{plan}: {outcome.resent} resent, {outcome.retries} retries"
    assert outcome.problems == [], said
    assert outcome.acknowledged == plan.updates
    assert len(restarts) == plan.kills
    assert outcome.resent > 0
    assert outcome.retries > 0, "no kill hit a call"


def test_sqlite_keeps_its_promises(tmp_path: Path) -> None:
    plan = Plan(seed=1, kills=4, updates=200)
    check(run(tmp_path, plan), plan)


@pytest.mark.prove
def test_postgresql_keeps_its_promises(tmp_path: Path, postgresql_url: str) -> None:
    plan = Plan(seed=2, updates=300, database=postgresql_url)
    check(run(tmp_path, plan), plan)


@pytest.mark.prove
def test_blobs_keep_their_promises(tmp_path: Path) -> None:
    plan = Plan(seed=3, kills=3, updates=150, inline_bytes_max=NOTHING_INLINE)
    check(run(tmp_path, plan), plan)


def test_runs_of_mixed_digests_keep_their_promises(tmp_path: Path) -> None:
    package()
    plan = Plan(seed=11, kills=2, updates=100, inline_bytes_max=NOTHING_INLINE, blake3=True)
    check(run(tmp_path, plan), plan)
    blobs = [path.name for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file()]
    assert {name.partition("-")[0] == "blake3" for name in blobs} == {True, False}


@pytest.mark.slow
def test_large_payloads_in_postgresql_keep_their_promises(tmp_path: Path, postgresql_url: str) -> None:
    plan = Plan(seed=7, kills=3, updates=100, database=postgresql_url, inline_bytes_max=NOTHING_INLINE)
    check(run(tmp_path, plan), plan)


@pytest.mark.prove
def test_compressed_runs_keep_their_promises(tmp_path: Path) -> None:
    plan = Plan(seed=5, kills=3, updates=150, compressed=True)
    check(run(tmp_path, plan), plan)


def test_runs_over_streams_whose_log_drops_what_is_old_keep_their_promises(tmp_path: Path) -> None:
    plan = Plan(seed=8, kills=2, updates=100, stream=True, keeping=True)
    check(run(tmp_path, plan), plan)
    with closing(open_store("", tmp_path / "data")) as store:
        (first, _), *others = store.records()
    assert 1 < plan.updates < first < first + len(others)


def test_private_runs_keep_their_promises_and_their_noise(tmp_path: Path) -> None:
    plan = Plan(seed=9, kills=2, updates=100, private=True)
    check(run(tmp_path, plan), plan)


@pytest.mark.parametrize("stream", [False, True])
def test_runs_that_mix_models_keep_their_promises_and_the_versions_of_their_tasks(
    stream: bool, tmp_path: Path
) -> None:
    plan = Plan(seed=13, kills=3, updates=100, mixing=True, stream=stream)
    check(run(tmp_path, plan), plan)
    assert not list((tmp_path / "data" / "models").rglob("v*.bin"))


def test_runs_of_a_schedule_free_server_keep_their_promises_and_its_mean(tmp_path: Path) -> None:
    plan = Plan(seed=12, kills=2, updates=100, averaged=True)
    check(run(tmp_path, plan), plan)


@pytest.mark.parametrize(
    "compressed", [pytest.param(False, marks=pytest.mark.prove), True], ids=["raw", "compressed"]
)
def test_runs_of_sub_models_keep_their_promises(compressed: bool, tmp_path: Path) -> None:
    plan = Plan(seed=6, kills=2, updates=100, compressed=compressed, units=True)
    check(run(tmp_path, plan), plan)


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.prove)])
def test_a_store_that_acknowledges_early_is_caught(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    plan = Plan(seed=4, kills=3, updates=200, broken=True)
    if database == "postgresql":
        plan = replace(plan, database=request.getfixturevalue("postgresql_url"))
    outcome = run(tmp_path, plan)
    # It loses what it said it had; where a snapshot got ahead of its log, the server notices and stays down.
    signs = ("acknowledged updates are lost", "the acknowledged enrolment of", "does not serve again")
    assert any(sign in problem for problem in outcome.problems for sign in signs), outcome


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [10, 11])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_fifty_kills_in_ten_thousand_updates(
    database: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest, figure: Callable[[str], None]
) -> None:
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else ""
    plan, began = Plan(seed=seed, kills=50, updates=10_000, database=url), time.monotonic()
    outcome = run(tmp_path, plan)
    figure(
        f"{plan.kills} kills in {outcome.acknowledged} updates, {outcome.resent} sent again on purpose and "
        f"{outcome.retries} calls tried again, in {time.monotonic() - began:.0f} s; serving again after "
        f"{statistics.median(outcome.restarts_s):.1f} s, at most {max(outcome.restarts_s):.1f} s; "
        f"nothing lost, nothing twice: {outcome.problems or 'the model is right to the bit'}"
    )
    check(outcome, plan)
