"""What a tracker is told of: a run, and how it stood when a version came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anabranch.core.config.tables import Config
from anabranch.reports.result import Point, Result


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
        return cls(
            name=str(dict(result.config.get("run", {})).get("name", result.workload)),
            strategy=result.strategy,
            workload=result.workload,
            seed=result.seed,
            kind=result.kind,
            config=result.config,
            folder=folder,
        )


@dataclass(frozen=True)
class Moment:
    """How the run stood when a version was published: the x axes that a measurement may be drawn against.

    `time_s`: since the run's start, virtual in simulations. Of a live run the bytes are since its server
    started, and of a version of before that all are of when it was measured.
    """

    version: int
    time_s: float
    updates: int
    uplink_bytes: int
    downlink_bytes: int

    @classmethod
    def of(cls, point: Point) -> Moment:
        """Of a point of a run's history."""
        return cls(point.version, point.time_s, point.updates, point.uplink_bytes, point.downlink_bytes)

    def values(self) -> dict[str, float]:
        """All but the version, by name: `run/time_s` and so on."""
        found = asdict(self)
        del found["version"]
        return {f"run/{name}": float(value) for name, value in found.items()}


class Dated:
    """For a tracker: keeps the moment that it is told of until the measurement comes."""

    _moment: Moment | None = None

    def at(self, moment: Moment) -> None:
        """Kept for the measurement."""
        self._moment = moment

    def taken(self) -> Moment | None:
        """That of this measurement, and of no later one."""
        moment, self._moment = self._moment, None
        return moment

    def dated(self, values: Mapping[str, float]) -> dict[str, float]:
        """The figures of this measurement, and what they may be drawn against."""
        moment = self.taken()
        return {**(moment.values() if moment else {}), **values}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration as `table.key` -> value, as libraries want parameters."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
