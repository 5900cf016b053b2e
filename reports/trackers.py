"""Trackers: who is told of a run while it goes on, besides its own folder. `[run] trackers` names them.

A tracker of one's own sends the figures wherever they are looked at. It is told in this order: `start` once,
`metrics` of each measurement, `finish` once. What it raises ends its own part, with a warning, not the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, members, name_of
from anabranch.reports.result import Result
from anabranch.reports.tracking.run import Moment, TrackedRun
from anabranch.support.own_code import is_signal, own_code, told
from anabranch.support.own_parts import own_parts

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """A class of one is made without arguments.

    One that has `at(moment)` as well is told, before each `metrics`, how the run stood when the version
    came: a `Moment`, with the time, the updates and the bytes that it may be drawn against.
    """

    name: ClassVar[str]

    def start(self, run: TrackedRun) -> None:
        """The run begins."""
        ...

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """A version of the model was measured; `values` by name, those that are finite."""
        ...

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended: its `result.json`; of a server the counts that it has. Close what is open."""
        ...


class JsonLines:
    """`metrics.jsonl` in the run's folder: a line for each measurement, once, also where it is told again."""

    name: ClassVar[str] = "jsonl"

    def __init__(self) -> None:
        self._lines: TextIO | None = None
        self._there: set[str] = set()

    def start(self, run: TrackedRun) -> None:
        """Opens the file; lines that are there stay. Raises `ConfigError` where there is no folder."""
        if run.folder is None:
            raise ConfigError("the tracker jsonl writes into the run's folder, and this run has none")
        run.folder.mkdir(parents=True, exist_ok=True)
        self._lines = (run.folder / METRICS_FILE).open("a+", encoding="utf-8", errors="replace", buffering=1)
        self._lines.seek(0)
        self._there.update(self._lines)

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """One line."""
        assert self._lines is not None, "started"
        line = json.dumps({"version": version, **values}) + "\n"
        if line not in self._there:
            self._there.add(line)
            self._lines.write(line)

    def finish(self, result: Mapping[str, Any]) -> None:  # noqa: ARG002 - the contract's
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


def _check(found: Any) -> None:
    if not isinstance(found, type):
        raise ConfigError("a tracker is a class, made without arguments")


BUILT_IN: dict[str, Any] = {
    JsonLines.name: JsonLines,
    "tensorboard": "anabranch.reports.tracking.tensorboard:TensorBoard",
    "mlflow": "anabranch.reports.tracking.mlflow:Mlflow",
    "wandb": "anabranch.reports.tracking.wandb:WeightsAndBiases",
    "prometheus": "anabranch.reports.tracking.prometheus:PrometheusRemote",
}
TRACKERS = PartKind("tracker", "trackers", ("run.trackers",), BUILT_IN, members(Tracker), _check)


class Trackers:
    """All trackers of one run, each guarded: one that fails is told no more, and each is told by copies."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)
        self.at_work = ""  # the tracker and its method, while one is told something

    @classmethod
    def of(cls, names: Sequence[str], more: Sequence[Tracker] = ()) -> Trackers:
        """Those of `[run] trackers`, and `more`. Raises `ConfigError`, `AppError`."""
        return cls([*map(_made, names), *more])

    def __bool__(self) -> bool:
        """Whether there is anybody to tell."""
        return bool(self._trackers)

    def start(self, run: TrackedRun) -> None:
        """The run begins."""
        self._tell("start", lambda tracker: tracker.start(_copied(run)))

    def metrics(self, version: int, values: Mapping[str, float | None], moment: Moment | None = None) -> None:
        """A version was measured, which came at this moment."""
        finite = _finite(values)
        if moment is not None:
            self._tell("at", lambda tracker: _at(tracker, moment))
        self._tell("metrics", lambda tracker: tracker.metrics(version, dict(finite)))

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended; nothing is told after it."""
        self._tell("finish", lambda tracker: tracker.finish(deepcopy(dict(result))))
        self._trackers = []

    def _tell(self, method: str, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            self.at_work = f"{name_of(type(tracker))}.{method}"
            try:
                tell(tracker)
            except (Exception, SystemExit) as error:
                if is_signal(error):
                    raise
                self._trackers.remove(tracker)
                what = told(f"tracker {name_of(type(tracker))}.{method}", error)
                log.warning("%s\nthe run goes on without it", what)
        self.at_work = ""


def tell_of(result: Result, folder: Path, names: Sequence[str]) -> None:
    """Tell trackers of a run that has ended: its begin, its measurements in the order of versions, its end.

    Raises `ConfigError` for a name that is not known, `AppError` for what a tracker raises.
    """
    run = TrackedRun.of_result(result, folder)
    for tracker in [_made(name) for name in names]:
        with own_code(tracker, "start"):
            tracker.start(_copied(run))
        for point in result.history:
            with own_code(tracker, "at"):
                _at(tracker, Moment.of(point))
            with own_code(tracker, "metrics"):
                tracker.metrics(point.version, _finite(point.measured))
        with own_code(tracker, "finish"):
            tracker.finish(result.to_json())


def _made(name: str) -> Tracker:
    found = TRACKERS.find(name)
    with own_parts((TRACKERS,)):
        made: Tracker = found()
    return made


def _copied(run: TrackedRun) -> TrackedRun:
    """For one tracker, which may write to it."""
    return replace(run, config=deepcopy(run.config))


def _at(tracker: Tracker, moment: Moment) -> None:
    """Tell it of a moment, if it wants to know."""
    if (at := getattr(tracker, "at", None)) is not None:
        at(moment)


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
