"""What one tracker does with what it is told, no other one hears; and what it raises is its own end."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from own_parts import forgotten

import anabranch as ab
from anabranch.core.config.tables import merge
from anabranch.core.errors import AppError
from anabranch.reports.trackers import TRACKERS, Trackers, tell_of
from anabranch.reports.tracking.run import TrackedRun
from anabranch.server.run import LiveRun
from anabranch.server.tracking import track, until_told


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
        result["config"].clear()


class Exits(Hears):
    name: ClassVar[str] = "exits"

    def metrics(self, version: int, values: Any) -> None:
        sys.exit("no licence")


class NoKey(Hears):
    name: ClassVar[str] = "no_key"

    def __init__(self) -> None:
        raise KeyError("MY_KEY")


class Hangs(Hears):
    name: ClassVar[str] = "hangs"
    may_go_on = threading.Event()

    def start(self, run: TrackedRun) -> None:
        self.may_go_on.wait()


def test_what_making_a_tracker_raises_is_told_with_its_name_and_lines() -> None:
    with forgotten():
        TRACKERS.let_in("mine.py:NoKey", NoKey)
        with pytest.raises(
            AppError, match=r"tracker NoKey\.__init__ \(.*test_told_trackers.*KeyError: 'MY_KEY'"
        ):
            Trackers.of(["no_key"])


def test_a_server_does_not_end_with_a_tracker_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """Nor does its process: no thread is left that Python waits for."""
    trackers = Trackers([Hangs()])
    run = SimpleNamespace(given=merge([]))

    async def ended() -> None:
        tracking = asyncio.create_task(track(cast("LiveRun", run), trackers))
        await until_told(tracking, trackers, grace_s=0.01)

    asyncio.run(ended())
    (told,) = caplog.messages
    assert told.startswith("tracker hangs.start has not returned within 0.01 s: it is waited for no longer")
    (left,) = [thread for thread in threading.enumerate() if thread.name == "anabranch-tracker"]
    assert left.daemon
    Hangs.may_go_on.set()
    left.join()


def test_what_a_tracker_writes_to_what_it_is_told_is_told_to_nobody_else() -> None:
    config, result = {"run": {"seed": 0}}, {"config": {"seed": 0}}
    hears = Hears()
    trackers = Trackers([Scribbles(), hears])
    trackers.start(TrackedRun("mine", "fedbuff", "digits", 0, "simulated", config))
    trackers.metrics(1, {"loss": 0.5})
    trackers.finish(result)
    assert hears.heard == [{"run": {"seed": 0}}, {"loss": 0.5}, {"config": {"seed": 0}}]
    assert (config, result) == ({"run": {"seed": 0}}, {"config": {"seed": 0}})


def test_trackers_of_a_run_that_has_ended_are_told_by_copies_as_well(tmp_path: Path) -> None:
    result = ab.simulate("synthetic", until=ab.Until(updates=2), out=tmp_path / "run").result
    before = result.to_json()
    with forgotten():
        TRACKERS.let_in("mine.py:Scribbles", Scribbles)
        tell_of(result, tmp_path / "run", ["scribbles"])
    assert result.to_json() == before, "the next one is told of this"


def test_a_tracker_that_leaves_ends_its_own_part_alone(caplog: pytest.LogCaptureFixture) -> None:
    hears = Hears()
    trackers = Trackers([Exits(), hears])
    for version in (1, 2):
        trackers.metrics(version, {"loss": 0.5})
    assert hears.heard == [{"loss": 0.5}] * 2
    (told,) = caplog.messages
    assert "tracker exits.metrics" in told
    assert "the run goes on without it" in told
