"""The lines at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch as ab
from anabranch.cli.summary import summary


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
