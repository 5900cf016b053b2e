"""The recorder of a run: drivers tell it what happens, it keeps the counts that become a `Result`."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

import numpy as np

from anabranch.core.config.goal import Goal
from anabranch.core.config.privacy import PrivacyTable
from anabranch.core.config.secagg import SecaggTable
from anabranch.core.config.tables import Config
from anabranch.core.effects import SettingChange
from anabranch.core.errors import DataError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap
from anabranch.core.model.updates import Decision, Verdict
from anabranch.reports.coverage_tally import Coverages
from anabranch.reports.energy import EnergyMeter
from anabranch.reports.fairness import fairness_of
from anabranch.reports.origin import here, started_now
from anabranch.reports.result import (
    ChangedSetting,
    ClientShare,
    CompressionStep,
    Energy,
    Kind,
    Point,
    Result,
    Staleness,
    Status,
    measured_names,
)
from anabranch.reports.trackers import Trackers
from anabranch.reports.tracking.run import Moment

EVENTS_FILE = "events.jsonl"
# What its lines are of: docs/files.md.
EVENT_KINDS = (
    *("granted", "downloaded", "decided", "trained", "published", "evaluated", "taken_back", "compression"),
    *("settings_changed", "lease_ended", "sum_wanted", "cohort_lost", "resent", "late", "vanished", "unfit"),
    *("failed", "quarantined", "released", "rolled_back", "finished", "reopened"),
)
HEARD_DIGITS = 4  # of a share

Measured = dict[str, float | None]  # by the name of the metric; None where it was not finite


class _Mark(NamedTuple):
    """What had been counted when a version was published."""

    time_s: float
    updates: int
    uplink_bytes: int
    downlink_bytes: int
    energy_j: float = 0.0


@dataclass(slots=True)
class _Tally:
    """The running counts of one device."""

    updates: int = 0
    rejected: int = 0
    examples: int = 0
    staleness_sum: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes_raw: int = 0
    downlink_bytes_full: int = 0
    metrics: Mapping[str, float] | None = None  # of its last applied update
    heard_sum: float = 0.0  # of its updates that a robust rule has judged
    judged: int = 0

    def share(self) -> ClientShare:
        return ClientShare(
            updates=self.updates,
            rejected=self.rejected,
            examples=self.examples,
            staleness_mean=self.staleness_sum / self.updates if self.updates else 0.0,
            uplink_bytes=self.uplink_bytes,
            downlink_bytes=self.downlink_bytes,
            metrics=dict(self.metrics or {}),
            heard=self.heard_sum / self.judged if self.judged else None,
        )


@dataclass
class Recorder:
    """Counts a run as it happens and, given a path, streams `events.jsonl`.

    Every `now` is in seconds since the run's start, on the driver's clock (virtual or real). One
    thread feeds it. Tell it an update's decision before the version that came of it: a version's
    history point has the time, updates and bytes counted when the version was published, however
    late its evaluation arrives. Version 0 is published at time 0. `goal` is what the versions are judged by.
    `spec` is the model's, which may become known later; `started_at` is ISO 8601, empty: now.
    `trackers` are told what is measured. `energy`: what its devices spend is counted there, if anywhere. A
    context manager, which closes the stream.
    """

    strategy: str
    workload: str
    seed: int
    goal: Goal
    config: Mapping[str, Any]
    kind: Kind
    events_path: Path | None = None
    spec: ParamSpec | None = None
    started_at: str = field(default_factory=started_now)
    trackers: Trackers = field(default_factory=Trackers)
    energy: EnergyMeter | None = None
    _events: int = field(default=0, init=False)
    _last_s: float = field(default=0.0, init=False)
    _total: _Tally = field(default_factory=_Tally, init=False)
    _clients: dict[str, _Tally] = field(default_factory=dict, init=False)
    _staleness: Counter[int] = field(default_factory=Counter, init=False)
    _rejections: Counter[str] = field(default_factory=Counter, init=False)
    _marks: dict[int, _Mark] = field(default_factory=lambda: {0: _Mark(0.0, 0, 0, 0)}, init=False)
    _compression: list[CompressionStep] = field(default_factory=list, init=False)
    _coverage: Coverages = field(default_factory=Coverages, init=False)
    _given_up: str = field(default="", init=False)
    _cohorts_lost: int = field(default=0, init=False)
    _left_out: int = field(default=0, init=False)  # updates, by rollbacks
    _lost: int = field(default=0, init=False)  # updates, with what was taken back
    _unfit: set[str] = field(default_factory=set, init=False)
    _measured: dict[int, Measured] = field(default_factory=dict, init=False)
    _ended_by: str = field(default="", init=False)
    _settings: list[ChangedSetting] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, config: Config, folder: Path, spec: ParamSpec | None = None) -> Recorder:
        """That of a live run of this configuration, which streams its events into `folder`."""
        return cls(
            strategy=config.strategy.name,
            workload=config.run.workload,
            seed=config.run.seed,
            goal=Goal.of(config.run),
            config=config.to_json(),
            kind="live",
            events_path=folder / EVENTS_FILE,
            spec=spec,
        )

    def __post_init__(self) -> None:
        self._stream: TextIO | None = None
        if self.events_path is not None:
            self.events_path.parent.mkdir(parents=True, exist_ok=True)
            # Line by line, so that a run that dies leaves whole lines.
            self._stream = self.events_path.open("w", encoding="utf-8", buffering=1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the stream of events; the counts stay."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def granted(self, now: float, client: str, task: str, version: int, share: float | None = None) -> None:
        """The device got a task on this version, of that share of the model's numbers (None: of all)."""
        self._tally(client)
        part = {} if share is None else {"share": round(share, 4)}
        self._emit(now, "granted", {"client": client, "task": task, "version": version, **part})

    def downloaded(self, now: float, client: str, payload_bytes: int, full_bytes: int = 0) -> None:
        """The device received so many bytes of a model, which whole and raw has `full_bytes` (0: as many)."""
        for tally in (self._total, self._tally(client)):
            tally.downlink_bytes += payload_bytes
            tally.downlink_bytes_full += full_bytes or payload_bytes
        full = {"full_bytes": full_bytes} if full_bytes not in (0, payload_bytes) else {}
        self._emit(now, "downloaded", {"client": client, "bytes": payload_bytes, **full})

    def compressed(self, now: float, version: int, uplink: str, downlink: str) -> None:
        """What a task of this version travels by; only a change is kept."""
        last = self._compression[-1] if self._compression else None
        if last is not None and (last.uplink, last.downlink) == (uplink, downlink):
            return
        why = "start" if last is None else "schedule"
        self._compression.append(CompressionStep(version, now, uplink, downlink, why))
        self._emit(
            now, "compression", {"version": version, "uplink": uplink, "downlink": downlink, "why": why}
        )

    def until(self, now: float) -> None:
        """The run has come so far, whether or not anything happened then."""
        self._last_s = max(self._last_s, now)

    def finished(self, now: float, why: str, given_up: bool = False) -> None:
        """A budget was used up, or the run was given up."""
        self._ended_by, self._given_up = why, why if given_up else ""
        self.note(now, "finished", why=why)

    def set(self, now: float, changes: Iterable[SettingChange]) -> None:
        """Settings of the run were changed."""
        found = [ChangedSetting(c.path, c.value, c.was, c.by, now) for c in changes]
        self._settings += found
        for change in found:
            data = {"path": change.path, "value": change.value, "was": change.was, "by": change.by}
            self._emit(now, "settings_changed", data)

    def reopened(self, now: float) -> None:
        """The run had ended, and goes on."""
        self._ended_by = self._given_up = ""
        self.note(now, "reopened")

    def rolled_back(self, now: float, version: int, to_version: int, left_out: int, total: int) -> None:
        """The run went back to a version, without so many updates; `total`: with those of earlier times."""
        self._left_out = total
        self.note(now, "rolled_back", version=version, to_version=to_version, updates_left_out=left_out)

    def decided(
        self,
        now: float,
        client: str,
        version: int,
        decision: Decision,
        uplink_bytes: int,
        examples: int,
        raw_bytes: int = 0,
        metrics: Mapping[str, float] | None = None,
        task: str = "",
        codec: str = "",
    ) -> None:
        """An update was judged, and `version` is the model's after it. Raw it has `raw_bytes` (0: as many).

        `metrics` are those of its training; its `task` and its `codec` are told where they are known. Once
        for each update: a resend that gets its old receipt is a `note`.
        """
        rejected = decision.verdict is Verdict.REJECTED
        for tally in (self._total, self._tally(client)):
            tally.uplink_bytes += uplink_bytes
            tally.uplink_bytes_raw += raw_bytes or uplink_bytes
            tally.rejected += rejected
            if not rejected:
                tally.updates += 1
                tally.examples += examples
                tally.staleness_sum += decision.staleness
        if not rejected:
            self._tally(client).metrics = metrics
        if rejected:
            self._rejections[decision.reason.value or "unspecified"] += 1
        else:
            self._staleness[decision.staleness] += 1
        row: dict[str, Any] = {
            "client": client,
            "version": version,
            "verdict": decision.verdict.value,
            "staleness": decision.staleness,
            "weight": decision.weight,
            "reason": decision.reason.value,
            "detail": decision.detail,
            "uplink_bytes": uplink_bytes,
            "examples": examples,
        }
        row |= {"raw_bytes": raw_bytes} if raw_bytes not in (0, uplink_bytes) else {}
        row |= {"codec": codec} if codec else {}
        row |= {"task": task} if task else {}
        finite = {name: float(v) for name, v in (metrics or {}).items() if math.isfinite(v)}
        row |= {"metrics": finite} if finite else {}
        self._emit(now, "decided", row)

    def trained(self, now: float, client: str, spec: ParamSpec, submodel: Submodel | None) -> None:
        """An applied update, in a run with sub-models, was of this part of the model (None: the whole).

        What covers whole tensors covers no units: nothing is said of those.
        """
        if isinstance(submodel, TensorSet):
            return
        part = submodel if isinstance(submodel, UnitMap) else None
        self._coverage.add(now, client, spec.groups, part)
        kept = None if part is None else [len(units) for units in part.kept]
        self._emit(now, "trained", {"client": client, "kept": kept})

    def published(self, now: float, version: int, heard: Iterable[tuple[str, float]] = ()) -> None:
        """A new version of the model exists; of whose updates a robust rule has `heard` how much, 0 to 1."""
        self._marks[version] = self._mark(now)
        told = [(client, round(share, HEARD_DIGITS)) for client, share in heard]
        for client, share in told:
            tally = self._tally(client)
            tally.heard_sum, tally.judged = tally.heard_sum + share, tally.judged + 1
        self._emit(now, "published", {"version": version} | ({"heard": told} if told else {}))

    def taken_back(self, now: float, version: int, lost: int, left_out: int) -> None:
        """The run goes on from an earlier version: later ones are lost, and their numbers come again.

        So many applied updates are `lost` with them; rollbacks have `left_out` so many of those before.
        """
        self._lost, self._left_out = self._lost + lost, left_out
        self._marks = {v: mark for v, mark in self._marks.items() if v <= version}
        self._measured = {v: metrics for v, metrics in self._measured.items() if v <= version}
        self._emit(now, "taken_back", {"version": version, "updates_left_out": lost})

    def evaluated(self, now: float, version: int, metrics: Mapping[str, float]) -> None:
        """A version was measured on held-out data; of two measurements the later one counts.

        `metrics` are what the App's `evaluate` returned; those that are not finite are kept as None. A
        version whose publication was not recorded is dated by its first evaluation.
        """
        measured = {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()}
        mark = self._marks.setdefault(version, self._mark(now))
        self._measured[version] = measured
        self.trackers.metrics(version, measured, Moment(version, *mark[:4]))
        self._emit(now, "evaluated", {"version": version, **measured})

    def cohort_lost(self, now: float, number: int, updates: int, why: str) -> None:
        """The updates of a masked sum are in no version."""
        self._cohorts_lost += 1
        self.note(now, "cohort_lost", cohort=number, updates=updates, why=why)

    def unfit(self, now: float, client: str, why: str) -> None:
        """The device's memory bears none of the run's tasks: it is not let in."""
        if client not in self._unfit:
            self._unfit.add(client)
            self.note(now, "unfit", client=client, why=why)

    def note(self, now: float, kind: str, /, **data: Any) -> None:
        """Anything else worth a line: a lost lease, a restart, a change of mode."""
        self._emit(now, kind, data)

    def traffic_bytes(self) -> int:
        """What has travelled so far, up and down."""
        return self._total.uplink_bytes + self._total.downlink_bytes

    def result(
        self,
        model_sha256: str,
        journal_sha256: str,
        wall_s: float,
        status: Status = "finished",
        why: str = "",
    ) -> Result:
        """What was recorded so far. `wall_s` is real time, in simulations too; `why` says what ended it."""
        history, clients = tuple(self._point(v) for v in sorted(self._measured)), self._shares()
        spec = self.spec
        return Result(
            strategy=self.strategy,
            workload=self.workload,
            seed=self.seed,
            kind=self.kind,
            versions=max(self._marks),
            updates_applied=self._total.updates,
            updates_rejected=self._total.rejected,
            updates_left_out=self._left_out + self._lost,
            uplink_bytes=self._total.uplink_bytes,
            downlink_bytes=self._total.downlink_bytes,
            uplink_bytes_raw=self._total.uplink_bytes_raw,
            downlink_bytes_full_equivalent=self._total.downlink_bytes_full,
            compression=tuple(self._compression),
            coverage=self._coverage.coverages(),
            staleness=summarise(self._staleness),
            model_sha256=model_sha256,
            journal_sha256=journal_sha256,
            wall_s=wall_s,
            virtual_s=self._last_s if self.kind == "simulated" else None,
            events=self._events,
            anabranch_version=installed_version("anabranch"),
            config=dict(self.config),
            clients=clients,
            rejections=dict(sorted(self._rejections.items())),
            history=history,
            given_up=self._given_up,
            status=status,
            why=why or self._ended_by,
            started_at=self.started_at,
            host=here(),
            parameters=0 if spec is None else spec.elements,
            model_bytes=0 if spec is None else spec.size_bytes,
            settings_changed=tuple(self._settings),
            fairness=fairness_of(self.goal.among(measured_names(history)), history, clients),
            **self._guarded(),
            devices_unfit=len(self._unfit),
            **self._judged(history),
        )

    def _guarded(self) -> dict[str, Any]:
        """What a private run promises, and whose masked sums were."""
        privacy, secagg = PrivacyTable.of_json(self.config), SecaggTable.of_json(self.config)
        seeded = secagg.on and self.kind == "simulated"
        return {
            "privacy": privacy.promise(max(self._marks) + self._cohorts_lost, seeded),
            "masked": secagg.told(privacy, self._cohorts_lost),
        }

    def _shares(self) -> dict[str, ClientShare]:
        """What each device gave, and spent for it."""
        spent_j = {} if self.energy is None else self.energy.devices_j(self._last_s)
        for client in spent_j:
            self._tally(client)
        shares = {c: t.share() for c, t in sorted(self._clients.items())}
        return {c: replace(s, energy_j=spent_j[c]) if c in spent_j else s for c, s in shares.items()}

    def _spent(self, reached: Point | None) -> Energy | None:
        """What all devices spent, until the end and until the target was reached."""
        to_target_j = None if reached is None else reached.energy_j
        return None if self.energy is None else self.energy.summary(self._last_s, to_target_j)

    def _judged(self, history: Sequence[Point]) -> dict[str, Any]:
        """The fields of the result that say what the run came to by its goal, and by the accuracy."""
        goal = self.goal.among(measured_names(history))
        values = [v for p in history if (v := goal.value(p.measured)) is not None]
        reached = next((p for p in history if goal.reached(p.measured)), None)
        return {
            "metric": goal.metric,
            "mode": goal.mode,
            "target": goal.target,
            "final_value": goal.value(history[-1].measured) if history else None,
            "best_value": max(values, key=goal.signed, default=None),
            "final_accuracy": history[-1].accuracy if history else None,
            "best_accuracy": max((p.accuracy for p in history if p.accuracy is not None), default=None),
            "target_accuracy": (self.goal.target or 0.0) if self.goal.metric in (AUTO, ACCURACY) else 0.0,
            "time_to_target_s": reached.time_s if reached else None,
            "bytes_to_target": reached.uplink_bytes + reached.downlink_bytes if reached else None,
            "energy": self._spent(reached),
        }

    def _tally(self, client: str) -> _Tally:
        tally = self._clients.get(client)
        if tally is None:
            tally = self._clients[client] = _Tally()
        return tally

    def _mark(self, now: float) -> _Mark:
        total = self._total
        spent_j = 0.0 if self.energy is None else self.energy.total_j(now)
        return _Mark(float(now), total.updates, total.uplink_bytes, total.downlink_bytes, spent_j)

    def _point(self, version: int) -> Point:
        mark, others = self._marks[version], dict(self._measured[version])
        accuracy, loss = others.pop("accuracy", None), others.pop("loss", None)
        return Point(
            time_s=mark.time_s,
            version=version,
            updates=mark.updates,
            accuracy=accuracy,
            loss=loss,
            uplink_bytes=mark.uplink_bytes,
            downlink_bytes=mark.downlink_bytes,
            metrics=others,
            energy_j=None if self.energy is None else mark.energy_j,
        )

    def _emit(self, now: float, kind: str, data: Mapping[str, Any]) -> None:
        self._events += 1
        self._last_s = max(self._last_s, float(now))
        if self._stream is None:
            return
        try:
            line = _LINES.encode({"time_s": now, "kind": kind, **data})
        except ValueError as error:
            raise DataError(f"event {kind!r} has a value that JSON cannot carry: {error}") from error
        self._stream.write(line + "\n")


def summarise(counts: Mapping[int, int]) -> Staleness:
    """Mean, nearest-rank percentiles and maximum of staleness -> number of updates."""
    if not counts:
        return Staleness(0.0, 0, 0, 0, {})
    histogram = dict(sorted(counts.items()))
    values = np.fromiter(histogram, np.int64)
    below = np.cumsum(np.fromiter(histogram.values(), np.int64))
    total = int(below[-1])
    mean = sum(s * n for s, n in histogram.items()) / total
    p50, p90 = (int(values[np.searchsorted(below, math.ceil(total * q / 100))]) for q in (50, 90))
    return Staleness(mean, p50, p90, int(values[-1]), histogram)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else str(value)


_LINES = json.JSONEncoder(allow_nan=False, default=_plain)  # `json.dumps` makes one for each line
