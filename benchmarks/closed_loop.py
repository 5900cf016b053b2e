"""Many devices in a closed loop: each asks, pushes 1 KB, and asks again as soon as it has its answer.

    python -m benchmarks.closed_loop [DEVICES ...]

A server process (SQLite, FedBuff, K = 10) and one process with all the devices share this machine. Fifty
devices share a connection. A call that is shed comes again within the window that it was told; one that gRPC
ends by itself (it bounds the calls that a server has not begun) after the devices' own backing off.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.light_devices import SMALL, Device, Heard, connected
from benchmarks.throughput import RUNS, durable_server

VALUES = len(SMALL.data) // 4
FLEETS = (1_000, 5_000)
RUNS_S = 15.0


@dataclass
class Measured:
    """Of one fleet: updates in `RUNS_S`, what its devices heard, and when the last call was answered.

    Who was shed shortly before the end still calls once more, in the window that it was told, while hardly
    anybody else does: a rate over that time would be of no load.
    """

    devices: int
    heard: Heard = field(default_factory=Heard)
    updates: int = 0
    took_s: float = 0.0

    @property
    def row(self) -> str:
        """A row of the table."""
        heard = self.heard
        calls = len(heard.ask_s) + len(heard.push_s) + heard.shed
        quantiles_s = [np.percentile(of, q) for of in (heard.ask_s, heard.push_s) for q in (50, 99)]
        figures = [f"{1000 * s:.0f} ms" for s in quantiles_s]
        cells = [f"{self.devices:,}", f"{self.updates / RUNS_S:.0f}", *figures]
        cells += [f"{heard.shed / calls:.1%}", f"{self.took_s:.0f} s"]
        return "| " + " | ".join(cells) + " |"


async def drive(address: str, count: int) -> Measured:
    """So many devices, for `RUNS_S` seconds once all are enrolled."""
    measured = Measured(count)
    async with connected(address, count) as stubs:
        fleet = [Device(stub, f"device-{n}", measured.heard) for n, stub in enumerate(stubs)]
        await asyncio.gather(*(device.enrol() for device in fleet))
        measured.heard.shed = 0
        began = time.perf_counter()

        async def count_updates() -> None:
            await asyncio.sleep(RUNS_S)
            measured.updates = len(measured.heard.push_s)

        at_work = [device.work(lambda: time.perf_counter() > began + RUNS_S) for device in fleet]
        await asyncio.gather(count_updates(), *at_work)
        measured.took_s = time.perf_counter() - began
    return measured


def measure(count: int) -> Measured:
    """A server of its own for each fleet."""
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder, durable_server(Path(folder), VALUES) as served:
        return asyncio.run(drive(served[0], count))


def table(rows: list[Measured]) -> str:
    """The figures as a Markdown table."""
    calls = ("ask, median", "ask, 99 %", "push, median", "push, 99 %", "calls shed", "last answer after")
    head = ("devices", "updates, 1/s", *calls)
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(m.row for m in rows)])


def section() -> str:
    """The page's."""
    return f"""## Many devices in a closed loop

Each asks, pushes 1 KB and asks again at once, for {RUNS_S:.0f} s; all devices are one process,
which shares the cores with the server. A call that is shed is made again in the window that it was told.

{table([measure(count) for count in FLEETS])}
"""


def main() -> None:
    """Measure and print."""
    print(table([measure(count) for count in map(int, sys.argv[1:] or FLEETS)]))


if __name__ == "__main__":
    main()
