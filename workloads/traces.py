"""When each device of a fleet is there, and how its link is: a table that was measured, or made up.

A trace is a CSV file with one row for each change:

| column         | a row's value from `time_s` on; empty: as before                                        |
|----------------|-----------------------------------------------------------------------------------------|
| `device`       | any name. Devices are dealt in the order in which they first come                       |
| `time_s`       | seconds since the start of the run, 0 or more; a device's rows are in order             |
| `state`        | `on`, `off`; `again`, in a device's last row: from this moment its rows come again      |
| `up_mbps`      | Mbit/s from the device (0: no limit)                                                    |
| `down_mbps`    | Mbit/s to the device (0: no limit)                                                      |
| `latency_s`    | seconds one way                                                                         |
| `step_time_s`  | seconds of a local step: of a device, in its first row, for `fleet.speed = "traced"`    |
| `width_max`    | the share of the model's units that the device's memory bears, in its first row         |
| `train_w`      | watts while it trains, in its first row                                                 |
| `up_j_per_mb`  | joules of a MB that it sends, in its first row                                          |
| `down_j_per_mb`| joules of a MB that it receives, in its first row                                       |

`device`, `time_s` and one more are needed; the order of the columns does not matter, nor how rows of several
devices are mixed. Before its first row a device is on, and its link is the fleet's. The form is this
platform's; `trace_forms.py` makes it of those of others.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from anabranch.core.config.ranges import ENERGY
from anabranch.core.errors import DataError
from anabranch.core.model.updates import NO_WIDTH, is_width
from anabranch.core.spelling import did_you_mean

DEVICE, TIME, STATE, STEP_TIME, WIDTH_MAX = "device", "time_s", "state", "step_time_s", "width_max"
RATES = ("up_mbps", "down_mbps", "latency_s")
OWN = (STEP_TIME, WIDTH_MAX, *ENERGY)  # of a device, whatever the time
COLUMNS = (DEVICE, TIME, STATE, *RATES, *OWN)
ON, OFF, AGAIN = "on", "off", "again"
ROWS_MAX = 20_000_000  # some gigabytes
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class DeviceMoment:
    """What a device is from `time_s` on. Mbit/s and seconds; None: the fleet's."""

    time_s: float = 0.0
    on: bool = True
    up_mbps: float | None = None
    down_mbps: float | None = None
    latency_s: float | None = None

    def same_as(self, other: DeviceMoment) -> bool:
        """Whether nothing changes from one to the other."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name != TIME)


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """One device: its moments in order, the first at 0. `again_s`: when they come again; infinite: never.

    What follows is None where the trace says nothing of it.
    """

    name: str
    moments: tuple[DeviceMoment, ...]
    again_s: float = math.inf
    step_time_s: float | None = None
    width_max: float | None = None
    train_w: float | None = None
    up_j_per_mb: float | None = None
    down_j_per_mb: float | None = None

    def at(self, now_s: float) -> tuple[int, int]:
        """Which repetition a time is in, from 0, and which moment of it."""
        turn = 0 if math.isinf(self.again_s) else int(now_s // self.again_s)
        inside_s = max(0.0, now_s - turn * self.again_s) if turn else now_s
        return turn, bisect_right(self.moments, inside_s, key=lambda moment: moment.time_s) - 1

    def after(self, turn: int, number: int) -> tuple[float, int, int] | None:
        """When the next moment is, and which; None where nothing changes any more."""
        if len(self.moments) == 1:
            return None
        if number + 1 < len(self.moments):
            start_s = turn * self.again_s if turn else 0.0
            return start_s + self.moments[number + 1].time_s, turn, number + 1
        return None if math.isinf(self.again_s) else ((turn + 1) * self.again_s, turn + 1, 0)

    def share_on(self, until_s: float) -> float:
        """Which part of the time it is there, up to then, or to its repetition if that is earlier."""
        until_s = min(until_s, self.again_s)
        ends = [*(m.time_s for m in self.moments[1:]), math.inf]
        there_s = sum(
            max(0.0, min(end, until_s) - m.time_s) for m, end in zip(self.moments, ends, strict=True) if m.on
        )
        return there_s / until_s if until_s else float(self.moments[0].on)


@dataclass(frozen=True)
class Trace:
    """The devices of a trace. A larger fleet has the same devices again."""

    devices: tuple[DeviceTrace, ...]

    def of(self, device: int) -> DeviceTrace:
        """That of a simulated device."""
        return self.devices[device % len(self.devices)]

    @property
    def moves(self) -> bool:
        """Whether it says when devices are there."""
        return any(not m.on for device in self.devices for m in device.moments)

    @property
    def has_rates(self) -> bool:
        """Whether it says anything of a link."""
        return any(getattr(m, rate) is not None for d in self.devices for m in d.moments for rate in RATES)

    @property
    def span_s(self) -> float:
        """When the last thing of it is: a device's last change, or its repetition."""
        return max(d.moments[-1].time_s if math.isinf(d.again_s) else d.again_s for d in self.devices)

    def there_by_hour(self) -> list[float]:
        """Which part of the devices is there at the middle of each hour of the first day."""
        middles = [3600.0 * (hour + 0.5) for hour in range(24)]
        return [sum(d.moments[d.at(s)[1]].on for d in self.devices) / len(self.devices) for s in middles]

    def step_times_s(self) -> list[float]:
        """Of each device. Raises `DataError` where one has none."""
        times = [d.step_time_s for d in self.devices]
        for device, time_s in zip(self.devices, times, strict=True):
            if time_s is None:
                raise DataError(
                    f"device {device.name} of the trace has no {STEP_TIME}, which fleet.speed = 'traced' is "
                    "of: give every device one, in its first row"
                )
        return [time_s for time_s in times if time_s is not None]


class _DeviceRows:
    """The rows of one device, as they are read."""

    __slots__ = ("again_s", "moments", "newest_s", "own")

    def __init__(self) -> None:
        self.moments: list[DeviceMoment] = [DeviceMoment()]
        self.again_s, self.newest_s = math.inf, -math.inf
        self.own: dict[str, float] = {}

    def add(self, time_s: float, row: Mapping[str, str]) -> None:
        """One more. Raises `ValueError`."""
        newest = self.moments[-1]
        if not math.isinf(self.again_s):
            raise ValueError(f"it comes after the device's row with {AGAIN!r}, which is its last")
        if time_s <= self.newest_s:
            raise ValueError(
                f"{TIME} {time_s:g} is not later than the device's row before, {self.newest_s:g}"
            )
        self.newest_s = time_s
        state = (row.get(STATE) or "").strip()
        if state == AGAIN:
            self._end(time_s, row)
            return
        if state not in ("", ON, OFF):
            raise ValueError(f"{STATE} must be {ON}, {OFF}, {AGAIN} or empty, not {state!r}")
        for name in OWN:
            self._set_own(name, row)
        rates = {name: _number(name, row, getattr(newest, name)) for name in RATES}
        moment = DeviceMoment(time_s, newest.on if not state else state == ON, **rates)
        if time_s == 0.0:
            self.moments = [moment]
        elif not moment.same_as(newest):
            self.moments.append(moment)

    def _end(self, time_s: float, row: Mapping[str, str]) -> None:
        if time_s == 0.0:
            raise ValueError(f"a device's rows cannot come {AGAIN} at once: give its period as {TIME}")
        if any((row.get(name) or "").strip() for name in (*RATES, *OWN)):
            raise ValueError(f"a row with {AGAIN!r} has nothing else to say: its device begins anew")
        self.again_s = time_s

    def _set_own(self, name: str, row: Mapping[str, str]) -> None:
        found = _number(name, row, None)
        if found is None:
            return
        if name == WIDTH_MAX and not is_width(found):
            raise ValueError(f"{name} {NO_WIDTH}, not {row[name]}")
        if found != self.own.setdefault(name, found) or (name == STEP_TIME and found == 0.0):
            above = ", above 0" if name == STEP_TIME else ""
            raise ValueError(f"{name} must be one number of a device{above}, not {row[name]}")

    def done(self, name: str) -> DeviceTrace:
        """What came of it. Of a device that is never there, nothing else matters."""
        moments = self.moments if any(m.on for m in self.moments) else [DeviceMoment(on=False)]
        return DeviceTrace(name, tuple(moments), self.again_s, **self.own)


def read_trace(path: str) -> Trace:
    """The trace in a file. Raises `DataError`, naming the file, the line and the fix."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return trace_of(csv.DictReader(file), path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"fleet.trace: {path} cannot be read as a table: {error}") from error


def trace_of(rows: csv.DictReader[str], where: str) -> Trace:
    """The trace of a table's rows. Raises `DataError`."""
    _check_columns(rows.fieldnames or (), where)
    found: dict[str, _DeviceRows] = {}
    for count, row in enumerate(rows, 1):
        try:
            _take(row, found, count)
        except ValueError as error:
            raise DataError(f"fleet.trace: {where}, line {rows.line_num}: {error}") from None
    trace = Trace(tuple(rows_of.done(name) for name, rows_of in found.items()))
    if not any(m.on for device in trace.devices for m in device.moments):
        raise DataError(f"fleet.trace: {where} has no device that is ever {ON}: nothing would be learned")
    return trace


def _take(row: Mapping[Any, Any], found: dict[str, _DeviceRows], count: int) -> None:
    """One row more, of whichever device it is. Raises `ValueError`."""
    if count > ROWS_MAX:
        raise ValueError(f"a trace has at most {ROWS_MAX} rows: leave devices out")
    if None in row:
        raise ValueError("it has more cells than there are columns")
    name, time_s = (row[DEVICE] or "").strip(), _number(TIME, row, None)
    if not name or time_s is None:
        raise ValueError(f"it names no {DEVICE if not name else TIME}")
    found.setdefault(name, _DeviceRows()).add(time_s, row)


def write_trace(trace: Trace, path: Path) -> None:
    """The same as a file; of what devices have of their own with the columns that any of them fills."""
    own = [n for n in OWN if n == STEP_TIME or any(getattr(d, n) is not None for d in trace.devices)]
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow((DEVICE, TIME, STATE, *RATES, *own))
        for device in trace.devices:
            table.writerows(_rows_of(device, own))


def _rows_of(device: DeviceTrace, own: Sequence[str]) -> Iterable[Sequence[str]]:
    before = DeviceMoment()
    for number, moment in enumerate(device.moments):
        state = "" if number and moment.on == before.on else ON if moment.on else OFF
        rates = [
            "" if (v := getattr(moment, r)) in (None, getattr(before, r)) else f"{v:.12g}" for r in RATES
        ]
        mine = ["" if number or (v := getattr(device, n)) is None else f"{v:.12g}" for n in own]
        yield [device.name, f"{moment.time_s:.12g}", state, *rates, *mine]
        before = moment
    if not math.isinf(device.again_s):
        yield [device.name, f"{device.again_s:.12g}", AGAIN, *("" for _ in (*RATES, *own))]


def _check_columns(columns: Iterable[str], where: str) -> None:
    there = list(columns)
    for name in there:
        if name not in COLUMNS:
            near = did_you_mean(name, COLUMNS)
            raise DataError(
                f"fleet.trace: {where} has an unknown column {name!r}{'; ' + near if near else '.'} "
                f"It may have {', '.join(COLUMNS)}"
            )
    if len(set(there)) != len(there):
        raise DataError(f"fleet.trace: {where} has a column twice: {', '.join(there)}")
    missing = [name for name in (DEVICE, TIME) if name not in there]
    if missing or len(there) < 3:
        need = f"no column {missing[0]}" if missing else f"nothing but {DEVICE} and {TIME}"
        raise DataError(f"fleet.trace: {where} has {need}: its first line must name the columns")


def _number(name: str, row: Mapping[str, str], before: float | None) -> float | None:
    text = (row.get(name) or "").strip()
    if not text:
        return before
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} must be a number from 0 up, not {text!r}")
    return found
