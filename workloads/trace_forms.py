"""Traces of others, and a made-up one, as ours (`traces.py`).

FedScale (Lai et al. 2022) publishes two pickled dictionaries, of devices by their ids. Their form is that of
its page "Device Trace File Formats"; what the numbers mean is read from its simulator:

| FedScale                                     | ours                                                        |
|----------------------------------------------|-------------------------------------------------------------|
| capacity, `computation`: ms to infer one     | `step_time_s` = 3 x batch x ms / 1000: a step is taken for  |
| example                                      | three inferences, as FedScale does                          |
| capacity, `communication`: kbit/s of 1024    | `up_mbps` and `down_mbps`, both that                        |
| bits, both ways                              |                                                             |
| behaviour, `active[i]` to `inactive[i]`:     | `on` from the one to the other, else `off`                  |
| seconds                                      |                                                             |
| behaviour, `finish_time`: seconds            | `again`: its simulator takes times modulo that              |

The two are of other devices: they are put together in the order of the files, the shorter again and again,
as its client manager deals behaviours to clients.

MobiPerf's app writes JSON. Of a measurement of type `tcpthroughput` we read `tcp_speed_results`, at the top
or under `values`: bits by milliseconds, so kbit/s of 1000 bits, *sorted*. The rate is their median, as it is
to MobiPerf. With `device_id` and `timestamp` (ISO 8601, or microseconds since 1970) measurements are one
device's, a row each, from the first of the files on; without, as in the lists that are handed round of it,
each is a device.

The made-up one is ours alone: see `synthetic`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from anabranch.core.errors import DataError
from anabranch.core.rng import stream
from anabranch.workloads.plain_pickles import NotPlain, plain_pickle
from anabranch.workloads.traces import DAY_S, DeviceMoment, DeviceTrace, Trace

INFERENCES_OF_STEP = 3.0  # FedScale's augmentation_factor
BROKEN = (TypeError, ValueError, OverflowError, RecursionError)  # of a record that is not as it should be


def fedscale(capacity: Path | None, behaviour: Path | None, batch: int) -> Trace:
    """That of FedScale's files, either or both. Raises `DataError`, naming the file and the device."""
    speeds = list(_fedscale_rows(capacity, _capacity_of, batch))
    moves = list(_fedscale_rows(behaviour, _behaviour_of))
    names = [row[0] for row in max(speeds, moves, key=len)]
    devices = []
    for i, name in enumerate(names):
        _, step_time_s, mbps = speeds[i % len(speeds)] if speeds else ("", None, None)
        _, states, again_s = moves[i % len(moves)] if moves else ("", {0.0: True}, math.inf)
        moments = tuple(DeviceMoment(at_s, on, mbps, mbps) for at_s, on in states.items())
        devices.append(DeviceTrace(str(name), moments, again_s, step_time_s))
    return Trace(tuple(devices))


def mobiperf(down: Path | None, up: Path | None) -> Trace:
    """The links that MobiPerf measured, one way or both. Raises `DataError`, naming file and place."""
    found: dict[str, dict[float, dict[str, float]]] = {}
    starts = [_first_s(path) for path in (down, up) if path is not None]
    first_s = min((s for s in starts if s is not None), default=0.0)
    for path, column in ((down, "down_mbps"), (up, "up_mbps")):
        for name, time_s, mbps in () if path is None else _measured(path):
            at_s = 0.0 if time_s is None else time_s - first_s
            found.setdefault(name, {}).setdefault(at_s, {})[column] = mbps
    if not found:
        raise DataError("MobiPerf: there is no measurement with a rate in what was given")
    return Trace(tuple(_links(name, rows) for name, rows in found.items()))


def synthetic(devices: int, seed: int) -> Trace:
    """Made-up phones, on at night on a charger and Wi-Fi, and twice by day; a day comes again.

    A night begins at 22 h +- 1.5 and lasts 7 h +- 1.5; its link has 20 Mbit/s down in the median (sigma 1 of
    the logarithm) and a third of that up. By day there are two breaks of 10 to 60 minutes with 5 Mbit/s. A
    step takes 0.1 s in the median (sigma 0.5). Every number is a guess of ours; none was measured.
    """
    return Trace(tuple(_phone(number, seed) for number in range(devices)))


def _phone(number: int, seed: int) -> DeviceTrace:
    draws = stream(seed, "synthetic trace", number)
    evening_s = (22.0 + 1.5 * draws.standard_normal()) * 3600.0
    night_s = max(1.0, 7.0 + 1.5 * draws.standard_normal()) * 3600.0
    home, mobile = (float(m * math.exp(draws.standard_normal())) for m in (20.0, 5.0))
    step_time_s = 0.1 * math.exp(0.5 * draws.standard_normal())
    spans = [(evening_s, evening_s + night_s, home)]
    for begins_s, lasts_s in draws.uniform((9 * 3600.0, 600.0), (20 * 3600.0, 3600.0), (2, 2)):
        spans.append((begins_s, begins_s + lasts_s, mobile))
    moments = _day([(round(a), round(b), round(mbps, 2)) for a, b, mbps in spans])
    return DeviceTrace(f"phone-{number:02d}", moments, DAY_S, round(step_time_s, 4))


def _day(spans: Sequence[tuple[float, float, float]]) -> tuple[DeviceMoment, ...]:
    """A day of (from, to, Mbit/s), of which the earlier in the list count where two overlap."""
    cuts = sorted({0.0, *(cut % DAY_S for a, b, _ in spans for cut in (a, b))})
    moments: list[DeviceMoment] = []
    for cut in cuts:
        rate = next((m for a, b, m in spans for t in (cut, cut + DAY_S) if a <= t < b), None)
        moment = DeviceMoment(cut, rate is not None, None if rate is None else round(rate / 3.0, 2), rate)
        if not moments or not moment.same_as(moments[-1]):
            moments.append(moment)
    return tuple(moments)


# --- FedScale ------------------------------------------------------------------------------------


def _fedscale_rows(path: Path | None, row_of: Any, *more: Any) -> Iterator[Any]:
    if path is None:
        return
    loaded = _plain(path)
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"FedScale: {path} must be a dictionary of devices by their ids")
    for name, row in loaded.items():
        try:
            yield name, *row_of(row, *more)
        except (KeyError, *BROKEN) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"FedScale: {path}, device {name!r}: {why}") from None


def _plain(path: Path) -> Any:
    try:
        return plain_pickle(path.read_bytes())
    except (OSError, NotPlain) as error:
        raise DataError(f"FedScale: {path} cannot be read: {error}") from error


def _capacity_of(row: Mapping[str, float], batch: int) -> tuple[float, float]:
    computation_ms, kbps = float(row["computation"]), float(row["communication"])
    if not (0 < computation_ms < math.inf and 0 < kbps < math.inf):
        raise ValueError("computation and communication must be numbers above 0")
    return INFERENCES_OF_STEP * batch * computation_ms / 1000.0, kbps * 1024.0 / 1e6


def _behaviour_of(row: Mapping[str, Any]) -> tuple[dict[float, bool], float]:
    """From when on it is on or off, and its `finish_time`."""
    finish_s, spans = float(row["finish_time"]), list(zip(row["active"], row["inactive"], strict=True))
    if not 0 < finish_s < math.inf:
        raise ValueError("finish_time must be a number above 0")
    states, newest_s = {0.0: False}, 0.0
    for on_s, off_s in spans:
        if not newest_s <= on_s <= off_s:
            raise ValueError("active and inactive must take turns, in order")
        states[float(on_s)], newest_s = True, float(off_s)
        states[newest_s] = False
    inside = [(at_s, on) for at_s, on in states.items() if at_s < finish_s]
    return dict(one for i, one in enumerate(inside) if i == 0 or one[1] != inside[i - 1][1]), finish_s


# --- MobiPerf ------------------------------------------------------------------------------------


def _records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The measurements of a file, a JSON list or a line each, counted from 1."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        lines = [line for line in text.splitlines() if line.strip()]
        listed = json.loads(text) if text.startswith("[") else [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"MobiPerf: {path} is no list of measurements in JSON: {error}") from error
    for number, record in enumerate(listed, 1):
        if not isinstance(record, dict):
            raise DataError(f"MobiPerf: {path}, measurement {number} is no object")
        if record.get("type", "tcpthroughput") == "tcpthroughput":
            yield number, record


def _measured(path: Path) -> Iterator[tuple[str, float | None, float]]:
    """Device, time and Mbit/s of each measurement that came to one."""
    for number, record in _records(path):
        rates = record.get("tcp_speed_results", _map(record.get("values")).get("tcp_speed_results"))
        try:
            rates = json.loads(rates) if isinstance(rates, str) else rates
            kbps = median([float(rate) for rate in rates or ()] or [0.0])
            time_s = _time_s(record)
        except BROKEN as error:
            raise DataError(f"MobiPerf: {path}, measurement {number}: {error}") from None
        if 0 < kbps < math.inf:
            yield str(record.get("device_id", f"measurement {number}")), time_s, kbps / 1000.0


def _first_s(path: Path) -> float | None:
    try:
        return min((s for _, record in _records(path) if (s := _time_s(record)) is not None), default=None)
    except (ValueError, OverflowError) as error:
        raise DataError(f"MobiPerf: {path}: {error}") from None


def _time_s(record: Mapping[str, Any]) -> float | None:
    """When it was made, in seconds since 1970; None where that or whose it was is not said."""
    stamp = record.get("timestamp")
    if stamp is None or "device_id" not in record:
        return None
    if isinstance(stamp, int | float) or str(stamp).isdecimal():
        if not math.isfinite(found := float(stamp) / 1e6):
            raise ValueError(f"timestamp must be a number, not {stamp}")
        return found
    when = datetime.fromisoformat(str(stamp))
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _map(values: Any) -> Mapping[str, Any]:
    """Values as the app writes them, an object, or as its page does, a list of such."""
    if isinstance(values, list):
        return {key: value for one in values if isinstance(one, dict) for key, value in one.items()}
    return values if isinstance(values, dict) else {}


def _links(name: str, rows: Mapping[float, Mapping[str, float]]) -> DeviceTrace:
    up = down = None
    moments = [] if 0.0 in rows else [DeviceMoment()]
    for at_s in sorted(rows):
        up, down = rows[at_s].get("up_mbps", up), rows[at_s].get("down_mbps", down)
        moments.append(DeviceMoment(at_s, True, up, down))
    return DeviceTrace(name, tuple(moments))
