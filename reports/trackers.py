"""Trackers: who is told of a run while it goes on, besides its own folder. `[run] trackers` names them.

A tracker of one's own sends the figures wherever they are looked at. It is told in this order: `start` once,
`metrics` of each measurement, `finish` once. What it raises ends its own part, with a warning, not the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.core.parts import PartKind, members, name_of
from anabranch.reports.result import Result
from anabranch.support.own_code import own_code, told

log = logging.getLogger(__name__)
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrackedRun:
    """A run that begins, or that a server goes on with. `kind`: `simulated` or `live`.

    `config` has passwords masked. `folder` is where the run leaves its files; None: nowhere.
    """

    name: str
    strategy: str
    workload: str
    seed: int
    kind: str
    config: Mapping[str, Any]
    folder: Path | None = None

    @classmethod
    def of(cls, config: Config, kind: str, folder: Path | None) -> TrackedRun:
        """The run of a configuration."""
        run = config.run
        return cls(run.name, config.strategy.name, run.workload, run.seed, kind, config.to_json(), folder)

    @classmethod
    def of_result(cls, result: Result, folder: Path) -> TrackedRun:
        """A run that has ended, of which this is left in `folder`."""
        name = str(dict(result.config.get("run", {})).get("name", result.workload))
        told = result.strategy, result.workload, result.seed, result.kind, result.config
        return cls(name, *told, folder)


class Tracker(Protocol):
    """A class of one is made without arguments."""

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
    """`metrics.jsonl` in the run's folder: a line for each measurement."""

    name: ClassVar[str] = "jsonl"

    def __init__(self) -> None:
        self._lines: TextIO | None = None

    def start(self, run: TrackedRun) -> None:
        """Opens the file; lines that are there stay. Raises `ConfigError` where there is no folder."""
        if run.folder is None:
            raise ConfigError("the tracker jsonl writes into the run's folder, and this run has none")
        run.folder.mkdir(parents=True, exist_ok=True)
        self._lines = (run.folder / METRICS_FILE).open("a", encoding="utf-8", buffering=1)

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """One line."""
        assert self._lines is not None, "started"
        self._lines.write(json.dumps({"version": version, **values}) + "\n")

    def finish(self, result: Mapping[str, Any]) -> None:  # noqa: ARG002 - the contract's
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


def _check(found: Any) -> None:
    if not isinstance(found, type):
        raise ConfigError("a tracker is a class, made without arguments")


TRACKERS = PartKind(
    "tracker", "trackers", ("run.trackers",), {JsonLines.name: JsonLines}, members(Tracker), _check
)


class Trackers:
    """All trackers of one run, each guarded: one that fails is told no more."""

    def __init__(self, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = list(trackers)

    @classmethod
    def of(cls, names: Sequence[str], more: Sequence[Tracker] = ()) -> Trackers:
        """Those of `[run] trackers`, and `more`. Raises `ConfigError`."""
        return cls([*(TRACKERS.find(name)() for name in names), *more])

    def start(self, run: TrackedRun) -> None:
        """The run begins."""
        self._tell("start", lambda tracker: tracker.start(run))

    def metrics(self, version: int, values: Mapping[str, float | None]) -> None:
        """A version was measured."""
        finite = _finite(values)
        self._tell("metrics", lambda tracker: tracker.metrics(version, finite))

    def finish(self, result: Mapping[str, Any]) -> None:
        """The run has ended; nothing is told after it."""
        self._tell("finish", lambda tracker: tracker.finish(result))
        self._trackers = []

    def _tell(self, method: str, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:  # noqa: BLE001 - of others' code anything may come
                self._trackers.remove(tracker)
                what = told(f"tracker {name_of(type(tracker))}.{method}", error)
                log.warning("%s\nthe run goes on without it", what)


def tell_of(result: Result, folder: Path, names: Sequence[str]) -> None:
    """Tell trackers of a run that has ended: its begin, its measurements in the order of versions, its end.

    Raises `ConfigError` for a name that is not known, `AppError` for what a tracker raises.
    """
    run = TrackedRun.of_result(result, folder)
    for tracker in [TRACKERS.find(name)() for name in names]:
        with own_code(tracker, "start"):
            tracker.start(run)
        for point in result.history:
            with own_code(tracker, "metrics"):
                tracker.metrics(point.version, _finite(point.measured))
        with own_code(tracker, "finish"):
            tracker.finish(result.to_json())


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
