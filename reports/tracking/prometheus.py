"""Prometheus' remote write: measurements are sent to `PROMETHEUS_REMOTE_WRITE_URL`, as they come.

Each is a sample of `anabranch_run_metric{metric="accuracy", ...}` with the run's labels, at the time of the
clock on the wall: a simulation's own time is `anabranch_run_time_seconds`, beside version, updates and bytes.
`PROMETHEUS_REMOTE_WRITE_AUTHORIZATION` is sent as that header, such as `Bearer ...`.
"""

from __future__ import annotations

import os
import struct
import time
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from cramjam import snappy

from anabranch.core.errors import ConfigError
from anabranch.reports.tracking.run import Dated, TrackedRun

ANSWER_S = 10.0
ADDRESS, AUTHORIZATION = "PROMETHEUS_REMOTE_WRITE_URL", "PROMETHEUS_REMOTE_WRITE_AUTHORIZATION"
HEADERS = {
    "Content-Encoding": "snappy",
    "Content-Type": "application/x-protobuf",
    "User-Agent": "anabranch",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
AXES = {
    "time_s": "anabranch_run_time_seconds",
    "updates": "anabranch_run_updates",
    "uplink_bytes": "anabranch_run_uplink_bytes",
    "downlink_bytes": "anabranch_run_downlink_bytes",
}


class PrometheusRemote(Dated):
    """See `Tracker`."""

    name: ClassVar[str] = "prometheus"

    def __init__(self) -> None:
        self._address = os.environ.get(ADDRESS, "")
        if not self._address.startswith(("http://", "https://")):
            raise ConfigError(
                f"the tracker prometheus: set {ADDRESS} to where it is sent, "
                "such as http://127.0.0.1:9090/api/v1/write"
            )
        self._labels: dict[str, str] = {}
        self._sent_ms = 0

    def start(self, run: TrackedRun) -> None:
        """Nothing is sent."""
        self._labels = {
            "job": "anabranch",
            "run": run.name,
            "strategy": run.strategy,
            "workload": run.workload,
            "kind": run.kind,
            "seed": str(run.seed),
        }

    def metrics(self, version: int, values: Mapping[str, float]) -> None:
        """One request. Raises `OSError` where nobody takes it."""
        rows: list[tuple[str, dict[str, str], float]] = [("anabranch_run_version", {}, float(version))]
        if (moment := self.taken()) is not None:
            rows += [(name, {}, float(getattr(moment, axis))) for axis, name in AXES.items()]
        rows += [("anabranch_run_metric", {"metric": name}, value) for name, value in values.items()]
        # Of two samples of a series at one time Prometheus takes neither.
        self._sent_ms = max(self._sent_ms + 1, round(time.time() * 1000))
        series = (
            ({"__name__": name, **self._labels, **labels}, value, self._sent_ms)
            for name, labels, value in rows
        )
        self._send(write_request(series))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Nothing is sent."""

    def _send(self, message: bytes) -> None:
        headers = dict(HEADERS)
        if (authorization := os.environ.get(AUTHORIZATION)) is not None:
            headers["Authorization"] = authorization
        packed = bytes(snappy.compress_raw(message))
        request = urllib.request.Request(self._address, packed, headers)  # noqa: S310 - http alone, see above
        urllib.request.urlopen(request, timeout=ANSWER_S).close()  # noqa: S310


def write_request(series: Iterable[tuple[Mapping[str, str], float, int]]) -> bytes:
    """Prometheus' `WriteRequest` in protobuf: labels, a value and its time in milliseconds, of each.

    Three messages of strings, one double and one integer: what a compiler would generate is longer.
    """
    return b"".join(_field(1, _time_series(*row)) for row in series)


def _time_series(labels: Mapping[str, str], value: float, at_ms: int) -> bytes:
    named = b"".join(
        _field(1, _field(1, k.encode()) + _field(2, v.encode())) for k, v in sorted(labels.items())
    )
    return named + _field(2, b"\x09" + struct.pack("<d", value) + b"\x10" + _number(at_ms))


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _number(len(data)) + data


def _number(value: int) -> bytes:
    """A varint."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
