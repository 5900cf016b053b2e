"""What one tracker does with what it is told, no other one hears; and what it raises is its own end."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest

from anabranch.reports.trackers import Trackers
from anabranch.reports.tracking.run import TrackedRun


class Hears:
    name: ClassVar[str] = "hears"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        self.heard.append(run.config)

    def metrics(self, version: int, values: Any) -> None:
        self.heard.append(values)

    def finish(self, result: Any) -> None:
        self.heard.append(result)


class Scribbles(Hears):
    name: ClassVar[str] = "scribbles"

    def start(self, run: TrackedRun) -> None:
        run.config["run"]["seed"] = 9

    def metrics(self, version: int, values: Any) -> None:
        values["loss"] = 0.0

    def finish(self, result: Any) -> None:
        result["history"].clear()


class Exits(Hears):
    name: ClassVar[str] = "exits"

    def metrics(self, version: int, values: Any) -> None:
        sys.exit("no licence")


def test_what_a_tracker_writes_to_what_it_is_told_is_told_to_nobody_else() -> None:
    config, result = {"run": {"seed": 0}}, {"history": [1, 2]}
    hears = Hears()
    trackers = Trackers([Scribbles(), hears])
    trackers.start(TrackedRun("mine", "fedbuff", "digits", 0, "simulated", config))
    trackers.metrics(1, {"loss": 0.5})
    trackers.finish(result)
    assert hears.heard == [{"run": {"seed": 0}}, {"loss": 0.5}, {"history": [1, 2]}]
    assert (config, result) == ({"run": {"seed": 0}}, {"history": [1, 2]})


def test_a_tracker_that_leaves_ends_its_own_part_alone(caplog: pytest.LogCaptureFixture) -> None:
    hears = Hears()
    trackers = Trackers([Exits(), hears])
    for version in (1, 2):
        trackers.metrics(version, {"loss": 0.5})
    assert hears.heard == [{"loss": 0.5}] * 2
    (told,) = caplog.messages
    assert "tracker exits.metrics" in told
    assert "the run goes on without it" in told
