"""How long a device's ask waits while heavy versions are made: ten million values, a version of ten updates.

    python -m benchmarks.stalls

Eight writers push updates of 40 MB, one and a half a second of all together; beside them one of two hundred
devices after the other asks for a task, every 10 ms or as soon as the one before is answered, on a connection
of their own. One device alone would soon be held up for asking too often. Each row is a server of its own.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import grpc
import numpy as np

from anabranch.protos.convert import PROTOCOL_VERSION
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from benchmarks.throughput import RUNS, durable_server
from benchmarks.writers import Load, drive

VALUES, UPDATES, RATE, EVERY_S = 10_000_000, 40, 1.5, 0.01
ASKERS = [f"asker-{n}" for n in range(200)]
SHAPE = (2_500, 4_000)  # a tensor of one dimension is never compressed
KINDS = {
    "the mean": (),
    "multi-Krum": ("robust.rule=multi_krum",),
    "median": ("robust.rule=median",),
    "geometric median": ("robust.rule=geometric_median",),
    "the mean, delta log": ("downlink.codec=log",),
}


@dataclass(frozen=True)
class Measured:
    """Of one kind of version: updates a second, and milliseconds that an ask took."""

    kind: str
    updates: float
    median: float
    p99: float
    longest: float


def measure(kind: str) -> Measured:
    """One row."""
    RUNS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=RUNS) as folder,
        durable_server(Path(folder), SHAPE, *KINDS[kind]) as (address, _),
        _asking(address) as waits,
    ):
        rate = UPDATES / drive(Load(address, VALUES, UPDATES, durable=True, rate=RATE))
    found = 1000 * np.array(waits)
    return Measured(kind, rate, *(float(np.quantile(found, q)) for q in (0.5, 0.99, 1.0)))


@contextmanager
def _asking(address: str) -> Iterator[list[float]]:
    """A device asks; yields what it has waited, seconds an ask."""
    waits: list[float] = []
    ended = threading.Event()
    thread = threading.Thread(target=_ask, args=(address, waits, ended))
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()


def _ask(address: str, waits: list[float], ended: threading.Event) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = DevicesStub(channel)
        for name in ASKERS:
            enrol = devices.EnrolRequest(client_id=name, protocol_version=PROTOCOL_VERSION)
            manifest = stub.Enrol(enrol).manifest.sha256
        for number, name in enumerate(cycle(ASKERS)):
            if ended.wait(EVERY_S):
                break
            task = devices.AskTaskRequest(client_id=name, task_id=f"t{number}", manifest_sha256=manifest)
            began = time.perf_counter()
            stub.AskTask(task)
            waits.append(time.perf_counter() - began)


def table(rows: list[Measured]) -> str:
    """As Markdown."""
    lines = ["| a version by | updates, 1/s | ask, median | ask, 99 % | longest |", "|---" * 5 + "|"]
    lines += [
        f"| {m.kind} | {m.updates:.1f} | {m.median:.0f} ms | {m.p99:.0f} ms | {m.longest:.0f} ms |"
        for m in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    print(table([measure(kind) for kind in KINDS]))


if __name__ == "__main__":
    main()
