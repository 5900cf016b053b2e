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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from anabranch.core.config.ranges import ENERGY
from anabranch.core.errors import DataError
from anabranch.core.model.updates import NO_WIDTH, is_width
from anabranch.core.spelling import did_you_mean

DEVICE, TIME, STATE, STEP_TIME, WIDTH_MAX = "device", "time_s", "state", "step_time_s", "width_max"
RATES = ("up_mbps", "down_mbps", "latency_s")
NO_RATES = (None, None, None)
OWN = (STEP_TIME, WIDTH_MAX, *ENERGY)  # of a device, whatever the time
COLUMNS = (DEVICE, TIME, STATE, *RATES, *OWN)
ON, OFF, AGAIN = "on", "off", "again"
OTHER_MARKS = {";": "semicolons", "\t": "tabs"}
ROWS_MAX = 20_000_000  # some gigabytes
TOLD_ROWS = 100_000
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
        return self.on == other.on and self.rates == other.rates

    @property
    def rates(self) -> tuple[float | None, float | None, float | None]:
        """Of its link, in the order of `RATES`."""
        return self.up_mbps, self.down_mbps, self.latency_s


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
    def has_rates(self) -> bool:
        """Whether it says anything of a link."""
        return any(m.rates != NO_RATES for d in self.devices for m in d.moments)

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


class _Columns:
    """Where the cells of a row are. Those that a table lacks are at -1: an empty one comes after the last."""

    def __init__(self, names: Sequence[str]) -> None:
        place = {name: number for number, name in enumerate(names)}
        self.count, self.device, self.time = len(names), place[DEVICE], place[TIME]
        self.state = place.get(STATE, -1)
        self.rates = [(name, place.get(name, -1)) for name in RATES]
        self.own = [(name, place[name]) for name in OWN if name in place]
        # What a row says besides: in most nothing. Never of one column alone, whose cell would be no tuple.
        others = [place[name] for name in (*RATES, *OWN) if name in place]
        self.others = itemgetter(-1, -1, *others)
        self.nothing = ("",) * (2 + len(others))

    def row(self, cells: list[str]) -> list[str]:
        """The cells, those that are left out at its end too, and the empty one. Raises `ValueError`."""
        if len(cells) > self.count:
            raise ValueError("it has more cells than there are columns")
        return cells + [""] * (self.count + 1 - len(cells))


class _DeviceRows:
    """The rows of one device, as they are read."""

    __slots__ = ("again_s", "moments", "newest_s", "own")

    def __init__(self) -> None:
        self.moments: list[DeviceMoment] = [DeviceMoment()]
        self.again_s, self.newest_s = math.inf, -math.inf
        self.own: dict[str, float] = {}

    def add(self, time_s: float, row: list[str], columns: _Columns) -> None:
        """One more. Raises `ValueError`."""
        newest = self.moments[-1]
        if not math.isinf(self.again_s):
            raise ValueError(f"it comes after the device's row with {AGAIN!r}, which is its last")
        if time_s <= self.newest_s:
            raise ValueError(
                f"{TIME} {time_s:g} is not later than the device's row before, {self.newest_s:g}"
            )
        self.newest_s = time_s
        state, others = row[columns.state].strip(), columns.others(row)
        if state == AGAIN:
            self._end(time_s, "".join(others))
            return
        if state not in ("", ON, OFF):
            raise ValueError(f"{STATE} must be {ON}, {OFF}, {AGAIN} or empty, not {state!r}")
        on, was = newest.on if not state else state == ON, newest.rates
        rates = was
        if others != columns.nothing:
            for name, place in columns.own:
                self._set_own(name, row[place])
            up, down, latency = (
                _number(name, row[place], before)
                for (name, place), before in zip(columns.rates, was, strict=True)
            )
            rates = up, down, latency
        if time_s == 0.0:
            self.moments = [DeviceMoment(time_s, on, *rates)]
        elif on != newest.on or rates != was:
            self.moments.append(DeviceMoment(time_s, on, *rates))

    def _end(self, time_s: float, more: str) -> None:
        if time_s == 0.0:
            raise ValueError(f"a device's rows cannot come {AGAIN} at once: give its period as {TIME}")
        if more.strip():
            raise ValueError(f"a row with {AGAIN!r} has nothing else to say: its device begins anew")
        self.again_s = time_s

    def _set_own(self, name: str, cell: str) -> None:
        found = _number(name, cell, None)
        if found is None:
            return
        if name == WIDTH_MAX and not is_width(found):
            raise ValueError(f"{name} {NO_WIDTH}, not {cell}")
        if found != self.own.setdefault(name, found) or (name == STEP_TIME and found == 0.0):
            above = ", above 0" if name == STEP_TIME else ""
            raise ValueError(f"{name} must be one number of a device{above}, not {cell}")

    def done(self, name: str) -> DeviceTrace:
        """What came of it. Of a device that is never there, nothing else matters."""
        moments = self.moments if any(m.on for m in self.moments) else [DeviceMoment(on=False)]
        return DeviceTrace(name, tuple(moments), self.again_s, **self.own)


def read_trace(path: str, tell: Callable[[int], object] = lambda _: None) -> Trace:
    """The trace in a file. Raises `DataError`, naming the file, the line and the fix.

    `tell` hears every now and then how many rows have been read.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            return trace_of(file, path, tell)
    except UnicodeDecodeError as error:
        raise DataError(f"fleet.trace: {path} is not in UTF-8, in which tables are read: {error}") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"fleet.trace: {path} cannot be read as a table: {error}") from error


def trace_of(lines: Iterable[str], where: str, tell: Callable[[int], object] = lambda _: None) -> Trace:
    """The trace of a table's lines. Raises `DataError`."""
    table, found = csv.reader(lines), dict[str, _DeviceRows]()
    columns = _columns([name.strip() for name in next(table, [])], where)
    for count, cells in enumerate(table):
        try:
            if cells:
                _take(columns.row(cells), columns, found, count)
        except ValueError as error:
            raise DataError(f"fleet.trace: {where}, line {table.line_num}: {error}") from None
        if count % TOLD_ROWS == TOLD_ROWS - 1:
            tell(count + 1)
    if not found:
        raise DataError(f"fleet.trace: {where} has no row after its first line: it names no device")
    trace = Trace(tuple(rows_of.done(name) for name, rows_of in found.items()))
    if not any(m.on for device in trace.devices for m in device.moments):
        raise DataError(f"fleet.trace: {where} has no device that is ever {ON}: nothing would be learned")
    return trace


def _take(row: list[str], columns: _Columns, found: dict[str, _DeviceRows], before: int) -> None:
    """One row more, of whichever device it is. Raises `ValueError`."""
    if before >= ROWS_MAX:
        raise ValueError(f"a trace has at most {ROWS_MAX} rows: leave devices out")
    name, time_s = row[columns.device].strip(), _number(TIME, row[columns.time], None)
    if not name and not "".join(row).strip():
        return  # as spreadsheets write an empty row
    if not name or time_s is None:
        raise ValueError(f"it names no {DEVICE if not name else TIME}")
    rows = found.get(name)
    if rows is None:
        rows = found[name] = _DeviceRows()
    rows.add(time_s, row, columns)


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
            "" if (v := getattr(moment, r)) in (None, getattr(before, r)) else _written(v) for r in RATES
        ]
        mine = ["" if number or (v := getattr(device, n)) is None else _written(v) for n in own]
        yield [device.name, _written(moment.time_s), state, *rates, *mine]
        before = moment
    if not math.isinf(device.again_s):
        yield [device.name, _written(device.again_s), AGAIN, *("" for _ in (*RATES, *own))]


def _written(number: float) -> str:
    """In so many digits that it is read as what it was."""
    short = f"{number:.12g}"
    return short if float(short) == number else repr(float(number))


def _columns(names: Sequence[str], where: str) -> _Columns:
    """Those of a table's first line. Raises `DataError`."""
    other = next((mark for mark in OTHER_MARKS if mark in "".join(names)), "")
    if other and len(names) == 1:
        raise DataError(
            f"fleet.trace: {where} has {OTHER_MARKS[other]} between its columns: write commas, and numbers "
            "with a point"
        )
    for name in names:
        if name not in COLUMNS:
            near = did_you_mean(name, COLUMNS)
            raise DataError(
                f"fleet.trace: {where} has an unknown column {name!r}{'; ' + near if near else '.'} "
                f"It may have {', '.join(COLUMNS)}"
            )
    if len(set(names)) != len(names):
        raise DataError(f"fleet.trace: {where} has a column twice: {', '.join(names)}")
    missing = [name for name in (DEVICE, TIME) if name not in names]
    if missing or len(names) < 3:
        need = f"no column {missing[0]}" if missing else f"nothing but {DEVICE} and {TIME}"
        raise DataError(f"fleet.trace: {where} has {need}: its first line must name the columns")
    return _Columns(names)


def _number(name: str, cell: str, before: float | None) -> float | None:
    text = cell.strip()
    if not text:
        return before
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ValueError(f"{name} must be a number from 0 up, not {text!r}")
    return found
