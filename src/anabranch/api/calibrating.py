"""`calibrate`: the devices of a run, as its log shows them, made a simulated fleet that foretells other runs.

| symbol | name        | meaning                                                                             |
|--------|-------------|-------------------------------------------------------------------------------------|
| x      | step_time_s | seconds of a local step: the mean of train_s / steps over the device's updates      |
| w      | spread      | (P90 - P10) / 1.6 x: of uniform step times from (1 - w) x to (1 + w) x              |
| g      | gaps_s      | from an update's arrival to the device's next task: an answer and an ask, so 2 l    |
| n      | ways        | latencies of a task: 2, and 2 more where its model was asked for by itself          |
| l      | latency_s   | half the lower quartile of g, at most that of r / n: g may be a wait                |
| r      | rests_s     | from a task's grant to its update's arrival, without the training: n l + 8 B / b    |
| B      | task_bytes  | the bytes of a task, down and up, in the mean                                       |
| b      | mbps        | 8 B over the mean of r - n l, both ways alike; 0, no limit, where nothing is left   |

A live device has the model with its task unless `client.connection` is `calls`, and a simulated one as
`fleet.fetch` says; who holds the version already asks for none.

So whatever a device does beside its steps, such as loading examples, is taken to be travel in proportion to
bytes: what is foretold for the same codecs does not depend on that, what is foretold for others does. Of a
device that has had one task g and w are not known: its link is the fleet's median, its step time exact.
Steps of sub-models and of attackers in haste are simulated as long as they were, and not quicker once more.
All of this is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from anabranch.api.fleets import Fleet, Links, Measured
from anabranch.api.run import Run, open_run
from anabranch.api.simulating import Callback, run_simulation
from anabranch.core.config.ranges import AS_WHOLE, ASKED, BY_CALLS, UNASKED
from anabranch.core.config.tables import Config, FleetTable, merge
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import DataError
from anabranch.core.journal import Record
from anabranch.core.parts import is_code
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.result import ClientShare
from anabranch.simulation.attacks import ATTACKS, hastes, hostile_devices
from anabranch.support.code import let_in
from anabranch.workloads.app import App

TASKS_MIN = 5  # of a device, for its spread
UNIFORM = 0.8  # of a uniform distribution's width lies between its tenth and its ninetieth percentile
SPREAD_MAX = 0.95
LATENCIES_OF_TASK, LATENCIES_OF_MODEL, LATENCIES_BETWEEN = 2, 2, 2
TRAVEL_MIN_S = 1e-6  # less is what subtraction leaves of equal times
_SPEED_UNSAID = {
    "step_time_s": FleetTable.step_time_s,
    "speed_ratio": FleetTable.speed_ratio,
}  # of other speeds


@dataclass(frozen=True)
class MeasuredDevice:
    """What a run's log says of a device. `mbps`: both ways, 0 for no limit; see the table above."""

    name: str
    updates: int
    step_time_s: float
    spread: float
    latency_s: float
    mbps: float


@dataclass(frozen=True)
class Foretold:
    """A figure of the run, and what the simulated fleet makes of it."""

    name: str
    measured: float
    foretold: float

    @property
    def error(self) -> float | None:
        """How much too large it was foretold to be, as a part of what it is; None of nothing."""
        return (self.foretold - self.measured) / self.measured if self.measured else None


@dataclass(frozen=True)
class Calibration:
    """The devices of a run. `config` simulates it again; `silent` are devices that have sent no update.

    `of_submodels`: the steps that were measured are of sub-models.
    """

    run: Run = field(repr=False)
    devices: tuple[MeasuredDevice, ...]
    silent: tuple[str, ...] = ()
    of_submodels: bool = False

    @property
    def speed(self) -> Measured:
        """Their speeds and links, for `ab.Fleet(speed=...)`."""
        rates = tuple(device.mbps for device in self.devices)
        return Measured(
            tuple(device.step_time_s for device in self.devices),
            tuple(device.spread for device in self.devices),
            tuple(device.latency_s for device in self.devices),
            rates,
            rates,
        )

    @property
    def config(self) -> Config:
        """The settings of the run with this fleet; without a budget of its own, as many updates as it had.

        Raises `ConfigError` where its attack is code that nobody has said to run.
        """
        before = self.run.config
        links = replace(Links(), fetch=_fetch(self.run))  # these of each device stand for the fleet's one
        fleet = replace(Fleet.of(before.fleet), clients=len(self.devices), speed=self.speed, links=links)
        steps = {"submodel_step": AS_WHOLE} if self.of_submodels else {}
        tables: dict[str, Any] = {"fleet": _SPEED_UNSAID | fleet.keys() | steps}
        if not (before.run.updates_max or before.run.versions_max):
            tables["run"] = {"updates_max": self.run.result.updates_applied}
        return self._unhurried(merge([("run", before.to_json()), ("calibration", tables)]))

    def save(self, path: str | Path) -> Path:
        """Write `config` as a file of settings, for `anabranch simulate`."""
        where = Path(path)
        where.write_text(self.config.to_toml(), encoding="utf-8")
        return where

    def foretell(self, app: App | None = None, callbacks: Iterable[Callback] = ()) -> tuple[Foretold, ...]:
        """Simulate as much of the run as there was with this fleet, and put both side by side.

        Raises as `simulate` does, `DataError` where the run has made no version, and `ConfigError` where its
        folder names code that nobody has said to run.
        """
        self.run.check_code()
        length = {
            "updates_max": self.run.result.updates_applied,
            "virtual_s_max": 0.0,
            "stop_at_target": False,
        }
        config = merge([("calibration", self.config.to_json()), ("foretelling", {"run": length})])
        simulated = run_simulation(config, app=app or self.run.app, callbacks=callbacks)
        return tuple(_side_by_side(RunCourse.of(self.run), RunCourse.of(simulated)))

    def _unhurried(self, config: Config) -> Config:
        """With longer steps of those in haste, so that they take what was measured once they are hurried."""
        fleet, seed = config.fleet, config.run.seed
        if is_code(fleet.attack) and hostile_devices(fleet, seed):
            self.run.check_code()
            let_in(config, [ATTACKS])
        found = hastes(fleet, seed)
        steps = tuple(found.get(i, 1.0) * step_s for i, step_s in enumerate(fleet.step_times_s))
        return replace(config, fleet=replace(fleet, step_times_s=steps))


@dataclass(frozen=True)
class RunCourse:
    """How a run went: seconds are from its first task on."""

    duration_s: float
    time_to_target_s: float | None
    staleness: float

    @classmethod
    def of(cls, run: Run) -> RunCourse:
        """Those of a run, live or simulated. Raises `DataError` of one that has made no version."""
        granted, published = run.events("granted"), run.events("published")
        if not granted or not published:
            raise DataError(f"{run.folder}: the run has made no version, so there is nothing to foretell")
        began_s, to_target_s = granted[0]["time_s"], run.result.time_to_target_s
        return cls(
            published[-1]["time_s"] - began_s,
            None if to_target_s is None else to_target_s - began_s,
            run.result.staleness.mean,
        )


def _side_by_side(measured: RunCourse, foretold: RunCourse) -> Iterable[Foretold]:
    yield Foretold("seconds to the last version", measured.duration_s, foretold.duration_s)
    yield Foretold("mean staleness", measured.staleness, foretold.staleness)
    if measured.time_to_target_s is not None and foretold.time_to_target_s is not None:
        yield Foretold("seconds to the target", measured.time_to_target_s, foretold.time_to_target_s)


@dataclass
class _Times:
    """What was seen of one device."""

    steps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    rests_s: list[float] = field(default_factory=list)
    ways: list[int] = field(default_factory=list)
    up_bytes: list[int] = field(default_factory=list)
    asked: dict[str, Record] = field(default_factory=dict)  # by task
    arrived: float | None = None

    def ask(self, record: Record) -> None:
        """It was given a task."""
        if record["task_id"] in self.asked:
            return
        self.asked[record["task_id"]] = record
        if self.arrived is not None:
            self.gaps_s.append(record["now"] - self.arrived)
            self.arrived = None

    def update(self, record: Record, asks_for_models: bool) -> None:
        """Its update has come; one that was counted before says nothing."""
        asked = self.asked.get(record["task_id"])
        train_s = record["metrics"].get(TRAIN_S, 0.0)
        if asked is None or not train_s > 0 or record["local_steps"] < 1:
            return
        self.steps_s.append(train_s / record["local_steps"])
        self.rests_s.append(record["now"] - asked["now"] - train_s)
        fetched = asks_for_models and asked["holds_version"] != record["base_version"]
        self.ways.append(LATENCIES_OF_TASK + fetched * LATENCIES_OF_MODEL)
        self.up_bytes.append(record["payload"]["size_bytes"])
        self.arrived = record["now"]

    def device(self, name: str, share: ClientShare | None, between_s: float) -> MeasuredDevice:
        """The device. `between_s`: the fleet's gap, for one whose own is not known."""
        between_s = quartile(self.gaps_s) if self.gaps_s else between_s
        rests = list(zip(self.rests_s, self.ways, strict=True))
        most_s = quartile([rest_s / ways for rest_s, ways in rests])
        latency_s = max(0.0, min(between_s / LATENCIES_BETWEEN, most_s))
        travel_s = fmean(rest_s - ways * latency_s for rest_s, ways in rests)
        down = share.downlink_bytes / len(self.asked) if share else 0.0
        task_bytes = down + fmean(self.up_bytes)
        mbps = 8e-6 * task_bytes / travel_s if travel_s > TRAVEL_MIN_S else 0.0
        step_s = fmean(self.steps_s)
        spread = 0.0
        if len(self.steps_s) >= TASKS_MIN:
            low, high = np.quantile(self.steps_s, [0.1, 0.9])
            spread = min(SPREAD_MAX, float(high - low) / (2 * UNIFORM * step_s))
        return MeasuredDevice(name, len(self.steps_s), step_s, spread, latency_s, mbps)


def calibrate(run: Run | str | Path) -> Calibration:
    """What the log of a run says of its devices.

    `run`: one that has ended, or its folder; `anabranch report DATA_DIR` makes that of a server's data.
    Raises `FolderMissing` and `DataError`.
    """
    known = run if isinstance(run, Run) else open_run(run)
    times: dict[str, _Times] = {}
    asks_for_models, of_submodels = _fetch(known) == ASKED, False
    for _, record in JournalReader(known.folder).records():
        if record["kind"] in ("enrolled", "asked"):
            seen = times.setdefault(record["client_id"], _Times())
            if record["kind"] == "asked":
                seen.ask(record)
        elif record["kind"] == "update" and record["client_id"] in times:
            times[record["client_id"]].update(record, asks_for_models)
            of_submodels |= bool(record.get("submodel"))
    names = sorted((name for name, seen in times.items() if seen.steps_s), key=_in_order)
    if not names:
        raise DataError(
            f"{known.folder}: no update in its log says how long its training took; take a run whose "
            "devices have trained"
        )
    gaps = [quartile(times[name].gaps_s) for name in names if times[name].gaps_s]
    shares: Mapping[str, ClientShare] = known.result.clients
    between_s = median(gaps) if gaps else 0.0
    devices = tuple(times[name].device(name, shares.get(name), between_s) for name in names)
    silent = tuple(sorted(set(times) - set(names), key=_in_order))
    return Calibration(known, devices, silent, of_submodels)


def _fetch(run: Run) -> str:
    """How the devices of a run came by the models of their tasks, as `fleet.fetch` has it."""
    if run.result.kind == "live":
        return ASKED if run.config.client.connection == BY_CALLS else UNASKED
    return run.config.fleet.fetch


def quartile(values: Sequence[float]) -> float:
    """The lower one."""
    return float(np.quantile(values, 0.25))


def _in_order(name: str) -> list[tuple[int, str]]:
    """So that device-10 comes after device-9, as their parts of the data do."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
