"""What every tracker must do: reports/trackers.py."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.parts import PartKind
from anabranch.reports.trackers import TRACKERS, Tracker
from anabranch.reports.tracking.run import Moment, TrackedRun
from anabranch.testing.kind import check_of_kind


class TrackerConformance:
    """Say `tracker`, your class. `read(folder)` gives back what it has told of; None: that cannot be seen."""

    kind: PartKind = TRACKERS
    tracker: type[Any]

    def read(self, folder: Path) -> list[tuple[int, dict[str, float]]] | None:
        return None

    @pytest.fixture
    def run(self, tmp_path: Path) -> TrackedRun:
        return TrackedRun("a run", "fedbuff", "digits", 3, "simulated", {"run": {"seed": 3}}, tmp_path)

    def told(self, tracker: Tracker, version: int, values: dict[str, float]) -> None:
        """As a run tells it: how the run stood first, where the tracker wants to know."""
        if at := getattr(tracker, "at", None):
            at(Moment(version, 1.5 * version, version, 1000 * version, 2000 * version))
        tracker.metrics(version, values)

    def new(self) -> Tracker:
        made: Tracker = self.tracker()
        return made

    def test_it_has_what_a_tracker_has(self) -> None:
        check_of_kind(self.kind, self.tracker)

    def test_it_is_told_of_a_whole_run(self, run: TrackedRun, tmp_path: Path) -> None:
        told = [(0, {"accuracy": 0.1, "loss": 2.5}), (3, {"accuracy": 0.5, "loss": 1.0})]
        tracker = self.new()
        tracker.start(run)
        for version, values in told:
            self.told(tracker, version, values)
        tracker.finish({"versions": 3, "status": "finished"})
        assert self.read(tmp_path) in (None, told)

    def test_any_metrics_will_do(self, run: TrackedRun, tmp_path: Path) -> None:
        told: list[tuple[int, dict[str, float]]] = [
            (1, {}),
            (2, {"perplexity of µ": 1e30}),
            (2, {"mse": -1.0}),
        ]
        tracker = self.new()
        tracker.start(run)
        for version, values in told:
            self.told(tracker, version, values)
        tracker.finish({})
        assert self.read(tmp_path) in (None, told)

    def test_a_run_that_ends_at_once_is_no_error(self, run: TrackedRun, tmp_path: Path) -> None:
        tracker = self.new()
        tracker.start(run)
        tracker.finish({"status": "interrupted"})
        assert self.read(tmp_path) in (None, [])

    def test_nothing_of_it_goes_on_after_the_end(self, run: TrackedRun) -> None:
        before = set(threading.enumerate())
        tracker = self.new()
        tracker.start(run)
        self.told(tracker, 1, {"loss": 1.0})
        tracker.finish({})
        left = [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon]
        assert left == [], "the process would never end: end its threads in `finish`, or make them daemons"

    def test_two_runs_in_one_process_do_not_meddle(self, run: TrackedRun, tmp_path: Path) -> None:
        other = TrackedRun("another", "fedasync", "digits", 4, "simulated", {}, tmp_path / "other")
        one, two = self.new(), self.new()
        one.start(run)
        two.start(other)
        self.told(two, 2, {"loss": 2.0})
        self.told(one, 1, {"loss": 1.0})
        one.finish({})
        two.finish({})
        assert self.read(tmp_path) in (None, [(1, {"loss": 1.0})])
        assert self.read(tmp_path / "other") in (None, [(2, {"loss": 2.0})])
