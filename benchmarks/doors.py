"""Calls against the stream: the same updates by both doors, in interleaved pairs.

    python -m benchmarks.doors

One durable server, and eight devices in two processes, which do what devices do: each pushes an update and
asks for the next task with it, by the transport that devices have. Every round goes by calls and by the
stream, the one first that was last before. The processor time is the server's own, of all its threads.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from anabranch.client.outbox import UpdateEntry
from anabranch.client.transport import GrpcTransport
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec, stages
from anabranch.core.config.ranges import BY_CALLS, BY_STREAM
from anabranch.core.effects import Refused
from anabranch.core.model.updates import Ask, Capability, Task
from benchmarks.crew import Crew
from benchmarks.throughput import RUNS, durable_server

PROCESSES, THREADS, ROUNDS, WARM_UP = 2, 4, 5, 5
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Size:
    """Updates of a model of `shape` in a codec; `updates` a device and round. `fetches`: the models too."""

    name: str
    shape: tuple[int, int]
    codec: str
    updates: int
    fetches: bool = False


SIZES = (
    Size("1 KB", (16, 16), "raw", 40),
    Size("20 KB", (250, 400), "topk(0.04)|int8(256)", 40),
    Size("0.4 MB", (250, 400), "raw", 25),
    Size("1 KB, and its model of 1 KB", (16, 16), "raw", 40, fetches=True),
    Size("20 KB, and its model of 0.4 MB", (250, 400), "topk(0.04)|int8(256)", 40, fetches=True),
)


@dataclass(frozen=True)
class Measured:
    """One round by one door: the server's processor time of an update in ms, and updates a second."""

    size: str
    payload_bytes: int
    door: str
    server_ms: float
    rate: float


class Device:
    """Pushes updates of random values, made beforehand, and asks for the next task with each.

    Over a stream the model comes with its task from the second on, where models are fetched at all.
    """

    def __init__(self, address: str, name: str, door: str, size: Size) -> None:
        self._transport = GrpcTransport(address, name, connection=door)
        self._spec = self._transport.enrol(Capability(examples=1, codecs=stages())).spec
        self._name, self._fetches, self._count = name, size.fetches, 0
        delta = np.random.default_rng(abs(hash(name)) % 2**32).standard_normal(self._spec.size, np.float32)
        payload = make_codec(size.codec).encode(1e-3 * delta, Layout.of(self._spec))
        self.entry = UpdateEntry(
            "", "", self._spec.layout_hash, 0, 1, 1, size.codec, bytes(payload), self._spec.size
        )
        self._task: Task | Refused | None = self._transport.ask(self._ask(), self._spec)

    def _ask(self) -> Ask:
        self._count += 1
        return Ask(self._name, f"{self._name}-t{self._count}")

    def push(self, updates: int) -> None:
        """Push so many."""
        for _ in range(updates):
            task = self._task
            if not isinstance(task, Task):
                raise TypeError(f"no task: {task}")
            if self._fetches:
                self._transport.fetch(self._spec.layout_hash, task.base_version)
            update_id = task.task_id.replace("-t", "-u")
            entry = replace(
                self.entry, update_id=update_id, task_id=task.task_id, base_version=task.base_version
            )
            answer = self._transport.push_and_ask(entry, self._ask(), self._spec)
            if answer.decision.reason:
                raise RuntimeError(f"refused: {answer.decision}")
            self._task = answer.next

    def close(self) -> None:
        """Hang up."""
        self._transport.close()


def _devices(address: str, names: Sequence[str], door: str, size: Size, barrier: threading.Barrier) -> None:
    devices = [Device(address, name, door, size) for name in names]
    for device in devices:
        device.push(WARM_UP)
    barrier.wait()
    with ThreadPoolExecutor(len(devices)) as pool:
        for _ in pool.map(lambda device: device.push(size.updates), devices):
            pass  # what a thread raised is raised here
    barrier.wait()
    for device in devices:
        device.close()


def _round(address: str, pid: int, door: str, size: Size, number: int) -> tuple[float, float]:
    """The server's processor time of an update in ms, and updates a second."""
    names = [[f"{door}-{number}-{process}-{n}" for n in range(THREADS)] for process in range(PROCESSES)]
    crew = Crew(_devices, [(address, mine, door, size) for mine in names])
    crew.meet()
    cpu_s, began = _cpu_s(pid), time.perf_counter()
    crew.meet()
    elapsed_s, used_s = time.perf_counter() - began, _cpu_s(pid) - cpu_s
    crew.end()
    updates = PROCESSES * THREADS * size.updates
    return 1000 * used_s / updates, updates / elapsed_s


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used, of all its threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def measure(size: Size) -> list[Measured]:
    """All rounds by both doors."""
    RUNS.mkdir(exist_ok=True)
    values = size.shape[0] * size.shape[1]
    found: list[Measured] = []
    with (
        tempfile.TemporaryDirectory(dir=RUNS) as folder,
        durable_server(Path(folder), size.shape, f"uplink.codec={size.codec}") as (address, process),
    ):
        with_one = Device(address, "measured", BY_CALLS, size)
        payload_bytes = len(with_one.entry.payload)
        with_one.push(1)
        with_one.close()
        for number in range(ROUNDS):
            doors = (BY_CALLS, BY_STREAM) if number % 2 else (BY_STREAM, BY_CALLS)
            for door in doors:
                server_ms, rate = _round(address, process.pid, door, size, number)
                found.append(Measured(size.name, payload_bytes, door, server_ms, rate))
                print(f"{size.name} ({values} values), {door}: {server_ms:.2f} ms, {rate:.0f}/s", flush=True)
    return found


def table(rows: Sequence[Measured]) -> str:
    """Medians of each size, and of the ratios of the pairs."""
    lines = [
        "| update | payload, bytes | calls, ms | stream, ms | ratio | calls, 1/s | stream, 1/s | ratio |",
        "|---" * 8 + "|",
    ]
    for name in dict.fromkeys(row.size for row in rows):
        mine = {door: [r for r in rows if (r.size, r.door) == (name, door)] for door in (BY_CALLS, BY_STREAM)}
        pairs = list(zip(mine[BY_CALLS], mine[BY_STREAM], strict=True))
        ms = [statistics.median(r.server_ms for r in mine[door]) for door in mine]
        rate = [statistics.median(r.rate for r in mine[door]) for door in mine]
        ms_ratio = statistics.median(s.server_ms / c.server_ms for c, s in pairs)
        rate_ratio = statistics.median(s.rate / c.rate for c, s in pairs)
        lines.append(
            f"| {name} | {pairs[0][0].payload_bytes} | {ms[0]:.2f} | {ms[1]:.2f} | **{ms_ratio:.2f}** |"
            f" {rate[0]:.0f} | {rate[1]:.0f} | **{rate_ratio:.2f}** |"
        )
    return "\n".join(lines)


def section() -> str:
    """The page's."""
    return f"""## Calls, and the stream of a device

Eight devices push an update and ask for the next task with it, by calls and over a stream each
([the protocol](protocol.md#the-exchange)), in {ROUNDS} interleaved pairs on one durable server; medians,
and medians of the pairs' ratios. The time is the server's processor time of an update. In the rows with a
model each also fetches what its task starts from; over a stream that comes with the task.

{table([row for size in SIZES for row in measure(size)])}"""


def main(arguments: Sequence[str]) -> None:
    """Measure the sizes named, or all of them, and print."""
    rows = [row for size in SIZES if not arguments or size.name in arguments for row in measure(size)]
    print(table(rows))
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main(sys.argv[1:])
