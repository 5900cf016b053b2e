"""The lines at the end of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reported_runs import figured_run

import anabranch as ab
from anabranch.cli.summary import summary
from anabranch.reports.result import Energy


def test_the_figures_are_those_of_the_run() -> None:
    run, stale = figured_run(), "staleness 1.50 on average, 7 at most"
    assert summary(run, None).splitlines() == [
        "fedbuff on synthetic, seed 0: accuracy 81.00 % (best 90.00 %), target 60.00 % after 83.1 s",
        f"  9 versions of 30 updates, 10 rejected (invalid, duplicate task); {stale}",
        "  80.0 kB up, 4.00 kB down; 1.50 s of real time",
    ]
    spent = Energy(9000.0, 5000.0, 3000.0, 1000.0, 3, 2500.0, 4000.0, 6000.0)
    told = replace(run, time_to_target_s=None, versions=10, kind="live", updates_left_out=4, energy=spent)
    first, second, *_, last = summary(told, None).splitlines()
    assert first.endswith("accuracy 81.00 % at version 9 (best 90.00 %), target not reached")
    assert second.startswith("  10 versions of 30 updates, 4 of them left out by rollbacks, 10 rejected")
    assert last == ("  energy: 9.00 kJ, 6.00 kJ to the target; 2.50 kJ a device, 4.00 kJ in the worst tenth")


@pytest.mark.parametrize(("updates", "told"), [(3, True), (4, False)])
def test_a_run_without_a_version_says_that_nothing_was_learned(updates: int, told: bool) -> None:
    run = ab.simulate(
        "synthetic",
        strategy=ab.strategies.FedBuff(buffer_size=4),
        fleet=ab.Fleet(clients=4),
        until=ab.Until(updates=updates),
    )
    assert ("nothing was learned" in summary(run.result, None)) == told


@pytest.mark.parametrize(("seconds", "told"), [(0.5, True), (100.0, False)])
def test_a_run_that_ends_before_the_first_update_says_that_its_time_is_too_short(
    seconds: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = ab.simulate("synthetic", fleet=ab.Fleet(clients=4), until=ab.Until(seconds=seconds))
    line = "nothing was learned: no update came within 0.500 s of virtual time; give the run more of it"
    assert (line in summary(run.result, None)) == (line in caplog.text) == told


def test_a_run_that_nobody_comes_to_needs_no_more_time(tmp_path: Path) -> None:
    (tmp_path / "gone.csv").write_text("device,time_s,state\na,0,on\na,0.01,off\n")
    fleet = ab.Fleet(clients=4, trace=str(tmp_path / "gone.csv"))
    run = ab.simulate("synthetic", fleet=fleet, until=ab.Until(seconds=1000.0))
    assert run.result.virtual_s is not None
    assert run.result.virtual_s < 1000.0
    line = "nothing was learned: nothing more can happen: no device is at work, and none will be"
    assert line in summary(run.result, None)
    assert "give the run more" not in summary(run.result, None)


@pytest.mark.parametrize(("shares", "versions", "why"), [(1, 1, "lets 0 devices give"), (9, 3, "its budget")])
def test_a_private_run_says_what_ended_it(shares: int, versions: int, why: str) -> None:
    """Its devices may have given all that they may, long before the versions that were asked for."""
    run = ab.simulate(
        "synthetic",
        strategy=ab.strategies.FedBuff(buffer_size=4),
        fleet=ab.Fleet(clients=4),
        until=ab.Until(versions=3),
        settings={"privacy.clip": 1.0, "privacy.noise": 1.0, "privacy.participations": shares},
    )
    (line,) = [line for line in summary(run.result, None).splitlines() if "the run ended at" in line]
    assert run.result.versions == versions
    assert why in line
