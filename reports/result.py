"""`result.json`: what a run came to, in one strict JSON document."""

from __future__ import annotations

import json
import math
import shlex
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from anabranch.core.config.goal import Goal
from anabranch.core.config.privacy import Promise
from anabranch.core.config.secagg import SecaggSummary
from anabranch.core.errors import DataError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY, LOSS
from anabranch.reports.journal_files import JOURNAL
from anabranch.support.folders import check_folder

RESULT_FILE = "result.json"
FLOWER = "flower"  # in the place of a strategy: what a ServerApp of Flower's own made of the app
Kind = Literal["live", "simulated"]
Status = Literal["finished", "interrupted"]
Over = Literal["devices", "groups"]
DEVICES, GROUPS = typing.get_args(Over)
T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One evaluated version, with what had been counted when that version was published.

    `time_s` is the moment of publication, in seconds since the run's start (virtual ones in a
    simulation); `updates` counts applied updates. `metrics` are what else the App's `evaluate` returned.
    A figure is None where it was not finite; accuracy and loss also where the App has none. `energy_j` is
    what all devices had spent, None where nobody counts that.
    """

    time_s: float
    version: int
    updates: int
    accuracy: float | None
    loss: float | None
    uplink_bytes: int
    downlink_bytes: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    energy_j: float | None = None

    @property
    def measured(self) -> dict[str, float | None]:
        """All that was measured, by name: what the App does not have is not there."""
        named = {ACCURACY: self.accuracy, LOSS: self.loss}
        return {name: v for name, v in named.items() if v is not None} | dict(self.metrics)


def measured_names(points: Iterable[Point]) -> list[str]:
    """What was measured and finite at least once: accuracy, loss, then the App's own names."""
    found = [p.measured for p in points]
    names = {ACCURACY: None, LOSS: None, **{n: None for measured in found for n in measured}}
    return [name for name in names if any(measured.get(name) is not None for measured in found)]


@dataclass(frozen=True)
class Staleness:
    """Staleness of the applied updates, in versions; zeros and an empty histogram without any.

    `p50` and `p90` are nearest-rank percentiles; `histogram` maps a staleness to its updates.
    """

    mean: float
    p50: int
    p90: int
    max: int
    histogram: Mapping[int, int]


@dataclass(frozen=True)
class ClientShare:
    """What one device gave. `examples` and `staleness_mean` are over its applied updates.

    `metrics` are those of its training, as its last applied update has them. `heard`: how much a robust rule
    has heard of its updates, their mean, 0 to 1; None where there is none that says so. `energy_j`: what it
    has spent, None where nobody counts that.
    """

    updates: int
    rejected: int
    examples: int
    staleness_mean: float
    uplink_bytes: int
    downlink_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    heard: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class Fairness:
    """How evenly a metric falls out over so many (`count`) devices or groups, at the end of a run.

    `worst_tenth` is the mean of the worst tenth of them, of one at least; None where nobody has said which
    way is better. `deviation` is the standard one of them all. `jain` is Jain's index, (sum x)^2 over
    n sum x^2, from 1 / n to 1; None where a value is negative or none is over 0.
    """

    metric: str
    over: Over
    count: int
    mean: float
    deviation: float
    least: float
    greatest: float
    worst_tenth: float | None
    jain: float | None


@dataclass(frozen=True)
class CompressionStep:
    """From this version on tasks travel by these codecs; `why` says whether at the start or by a schedule."""

    version: int
    time_s: float
    uplink: str
    downlink: str
    why: str


@dataclass(frozen=True)
class ChangedSetting:
    """A setting (`table.key`) got another value while the run went on, at `time_s`; `by` whom, in words."""

    path: str
    value: Any
    was: Any
    by: str
    time_s: float


@dataclass(frozen=True)
class Coverage:
    """Which of a group's units the applied updates trained.

    Neighbouring units share a row: row i stands for `row_units[i]` of them. Column j is from j to j + 1
    times `slot_s` seconds since the run's start: `updates[j]` were applied in it, and `trained[i][j]` counts,
    for each of them, the units of row i that it trained. `device_trained` counts the same for the busiest
    devices, whose applied updates are `device_updates`.
    """

    group: str
    units: int
    row_units: tuple[int, ...]
    slot_s: float
    updates: tuple[int, ...]
    trained: tuple[tuple[int, ...], ...]
    device_updates: Mapping[str, int]
    device_trained: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Energy:
    """Joules that simulated devices spent, see `energy.py`: of all, and for what; of a device.

    The median and the mean of the worst tenth are over the `devices` that spent anything. `to_target_j`: of
    all until the target was reached, None where it was not or there is none.
    """

    total_j: float
    train_j: float
    up_j: float
    down_j: float
    devices: int
    device_median_j: float
    device_worst_tenth_j: float
    to_target_j: float | None


@dataclass(frozen=True)
class Result:
    """The contents of `result.json`.

    Accuracies are fractions. None stands for: not known (`final_accuracy`, of the last measurement, and
    `best_accuracy`: never evaluated, not finite, or the App has none),
    target not reached or not set (`time_to_target_s`, `bytes_to_target`: up and down together),
    no virtual clock (`virtual_s` of a live run). `uplink_bytes_raw` and
    `downlink_bytes_full_equivalent` are what the same updates and downloads would be uncompressed (0:
    not known, in results of older versions). `coverage` is of runs with sub-models alone. `history` is in
    the order of versions. `given_up`: why the run ended before its budget was used up, if it did.

    An `interrupted` run did not come to its end, and `why` says what ended it. `started_at` (ISO 8601, with
    its zone) and `host` are of the machine that wrote this; `parameters` and `model_bytes` are the model's,
    buffers included. All of them are empty where they are not known. `config` is what the run was started
    with, and `settings_changed` what became of that, in order.

    `metric`, `mode` (`max`, `min`) and `target` are what the run was judged by: `auto` where nothing was
    measured that could count, and in results of older versions. `final_value` and `best_value` are its.
    `target_accuracy` is 0 where another metric counts. `fairness` is of what at least two devices or groups
    have, and empty in results of older versions. `privacy`: of a private run, what it promises.
    `masked`: of one with masked sums, whose they were. `devices_unfit`: of a simulated fleet, how many were
    not let in, as their memory bears none of the run's tasks. `energy`: of a simulated fleet whose devices'
    powers are known. `code`: of a simulation that keeps its folder, a digest of the file of its App, of
    each part of one's own that it names, and of its trace. `updates_left_out`: of those applied, by
    rollbacks, and by losses of a simulated server.
    """

    strategy: str
    workload: str
    seed: int
    kind: Kind
    versions: int
    updates_applied: int
    updates_rejected: int
    uplink_bytes: int
    downlink_bytes: int
    final_accuracy: float | None
    best_accuracy: float | None
    target_accuracy: float
    time_to_target_s: float | None
    bytes_to_target: int | None
    staleness: Staleness
    model_sha256: str
    journal_sha256: str
    wall_s: float
    virtual_s: float | None
    events: int
    anabranch_version: str
    config: Mapping[str, Any]
    clients: Mapping[str, ClientShare]
    rejections: Mapping[str, int]
    history: tuple[Point, ...]
    uplink_bytes_raw: int = 0
    downlink_bytes_full_equivalent: int = 0
    compression: tuple[CompressionStep, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    given_up: str = ""
    status: Status = "finished"
    why: str = ""
    started_at: str = ""
    host: str = ""
    parameters: int = 0
    model_bytes: int = 0
    settings_changed: tuple[ChangedSetting, ...] = ()
    metric: str = AUTO
    mode: str = AUTO
    target: float | None = None
    final_value: float | None = None
    best_value: float | None = None
    fairness: tuple[Fairness, ...] = ()
    privacy: Promise | None = None
    masked: SecaggSummary | None = None
    devices_unfit: int = 0
    energy: Energy | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    updates_left_out: int = 0

    @property
    def goal(self) -> Goal:
        """What the run was judged by; of results of older versions too."""
        target = self.target_accuracy or None if self.metric == AUTO else self.target
        return Goal(self.metric, self.mode, target).among(measured_names(self.history))

    def to_json(self) -> dict[str, Any]:
        """Plain values, in the order of the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object, where: str = "result") -> Result:
        """The inverse of `to_json`; keys that are not known are passed over. Raises `DataError`."""
        return _build(cls, data, where)

    def write(self, folder: Path) -> Path:
        """Writes `result.json` whole or not at all; makes the folder. Raises `DataError` on NaN."""
        try:
            text = json.dumps(self.to_json(), indent=2, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{RESULT_FILE} cannot be written: {error}; give finite, plain values") from error
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RESULT_FILE
        part = path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)
        return path

    @classmethod
    def read(cls, folder: Path) -> Result:
        """The result of a run folder. Raises `DataError`, naming the file and the field."""
        path = folder / RESULT_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
        except (FileNotFoundError, NotADirectoryError) as error:
            check_folder(folder, "name the folder of a run")
            if (folder / JOURNAL).is_file():
                raise DataError(
                    f"{folder} has a journal and no {RESULT_FILE}: its run is under way, or was killed "
                    "before it could leave a result; a Flower app goes on by `flwr run` as before, a "
                    "simulation by the command that began it and --resume"
                ) from None
            of_server = (folder / "anabranch.db").is_file()
            where = shlex.quote(str(folder))
            makes = f"`anabranch report {where}` makes one, and `anabranch verify {where}` replays the log"
            below = (f for at in ("*", "*/*") for f in sorted(folder.glob(f"{at}/{RESULT_FILE}")))
            such_as = f", such as {run.parent}" if (run := next(below, None)) else ""
            more = f"; of a server's data, {makes}" if of_server else such_as
            raise DataError(f"{path} is missing: name the folder of a run that has ended{more}") from error
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        return cls.from_json(data, str(path))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _build(cls: type[T], data: object, where: str) -> T:
    if not isinstance(data, Mapping):
        raise DataError(f"{where} must be an object, not {_shown(data)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in data:
            values[f.name] = _value(hints[f.name], data[f.name], f"{where}: {f.name}")
        # What has a default came with a later version of the program.
        elif f.default is MISSING and f.default_factory is MISSING:
            raise DataError(f"{where}: {f.name!r} is missing")
    return cls(**values)


def _value(hint: Any, value: object, where: str) -> Any:
    """The value as the type of its field says. Raises `DataError`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _value(args[0], value, where)
    if origin is tuple:
        return tuple(_value(args[0], v, f"{where}[{i}]") for i, v in enumerate(_list(value, where)))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args, value, where)
    if is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where)
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: object, where: str) -> Any:
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise DataError(f"{where} must be one of {', '.join(choices)}, not {_shown(value)}")
        return value
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or isinstance(value, bool):
        raise DataError(f"{where} must be {hint.__name__}, not {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where} must be finite, not {value}")
    return value


def _mapping(args: tuple[Any, ...], value: object, where: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} must be an object, not {_shown(value)}")
    key_type, value_type = args
    try:
        return {key_type(k): _value(value_type, v, f"{where}[{k!r}]") for k, v in value.items()}
    except ValueError as error:
        raise DataError(f"{where}: its keys must be {key_type.__name__}: {error}") from error


def _list(value: object, where: str) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DataError(f"{where} must be a list, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
