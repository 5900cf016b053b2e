"""An honest fleet beside a hostile one, against a real server: what the honest devices still get done.

    python -m benchmarks.hostile_fleet [--devices 1000] [--seconds 60] [--updates N] [--json]

A tenth of the devices is hostile, in every way of `hostile_devices.py`. Honest and hostile ones have a
process each, which share this machine with the server (SQLite, FedBuff, places for a quarter of the fleet).
The same honest devices without the hostile ones are the pair; the two are taken in turns, each on a server of
its own. With `--updates` there is one run, beside the hostile devices, until each honest device has had so
many accepted; it trains in no time then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from anabranch.server.verify import verify
from benchmarks.hostile_devices import harass
from benchmarks.light_devices import Device, Heard, Payload, connected
from benchmarks.throughput import RUNS, durable_server, peak_rss_bytes

DEVICES = 1_000
SHARE = 0.1  # hostile
PLACES = 0.25  # of the fleet: enough for the processor to be the bound, few enough to be fought for
SHAPE = (300, 1_000)  # 1.2 MB: what is cut of an upload is a file
VALUES = 300_000
CODEC = "topk(0.001)|int8(256)|gaps|zstd"
LEASE_S, TRAIN_S = 10.0, 1.0
RUNS_S = 60.0
TURNS = (False, True, True, False)  # hostile devices or not


@dataclass
class Fared:
    """How the honest devices fared in `took_s` seconds; processor seconds and bytes are of the process."""

    hostile: int
    heard: Heard = field(default_factory=Heard)
    accepted: list[int] = field(default_factory=list)
    took_s: float = 0.0
    server_cpu_s: float = 0.0
    driver_cpu_s: float = 0.0
    server_rss_bytes: int = 0
    disk_bytes: int = 0
    told: dict[str, Counter[str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Accepted updates a second."""
        return sum(self.accepted) / self.took_s

    @property
    def jain(self) -> float:
        """Jain's index of the devices' accepted updates: 1 where all have as many, 1/n where one has all."""
        return sum(self.accepted) ** 2 / (len(self.accepted) * sum(n * n for n in self.accepted))

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**vars(self), "heard": vars(self.heard)}

    @property
    def row(self) -> str:
        """A row of the table."""
        cells = [
            f"{len(self.accepted)} honest" + (f", {self.hostile} hostile" if self.hostile else ""),
            f"{self.rate:.1f}",
            f"{self.jain:.3f}",
            f"{min(self.accepted)} / {np.median(self.accepted):.0f} / {max(self.accepted)}",
            *(f"{1000 * np.percentile(self.heard.ask_s, q):.0f} ms" for q in (50, 99)),
            f"{1000 * self.server_cpu_s / sum(self.accepted):.1f} ms",
            f"{self.server_cpu_s / self.took_s:.2f}",
            f"{self.driver_cpu_s / self.took_s:.2f}",
            f"{self.disk_bytes / 1e6:.0f} MB",
            f"{self.server_rss_bytes / 1e6:.0f} MB",
        ]
        return "| " + " | ".join(cells) + " |"


def measure(honest: int, hostile: int, lasts_s: float = RUNS_S, updates: int = 0) -> Fared:
    """One run on a server of its own, for so long or until each honest device has had `updates` accepted."""
    fared = Fared(hostile)
    RUNS.mkdir(exist_ok=True)
    places = max(16, round(PLACES * (honest + hostile)))
    settings = [f"server.concurrency={places}", f"server.lease_s={LEASE_S}", f"uplink.codec={CODEC}"]
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:
        with durable_server(Path(folder), SHAPE, *settings) as (address, process):
            with beside(address, hostile, fared):
                driving = _drive(address, honest, lasts_s, updates, fared, psutil.Process(process.pid))
                asyncio.run(driving)
            fared.server_rss_bytes = peak_rss_bytes(process.pid)
            data = Path(folder) / "data"
            fared.disk_bytes = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
        fared.problems = tuple(verify(data, "").problems)
    return fared


async def _drive(
    address: str, honest: int, lasts_s: float, updates: int, fared: Fared, server: psutil.Process
) -> None:
    payload, train_s = Payload.of(SHAPE, CODEC, 1e-6), 0.0 if updates else TRAIN_S
    async with connected(address, honest) as stubs:
        fleet = [Device(s, f"honest-{n}", fared.heard, payload, train_s) for n, s in enumerate(stubs)]
        await asyncio.gather(*(device.enrol() for device in fleet))
        fared.heard.shed = 0
        began, before_s, driver_s = time.perf_counter(), _cpu_s(server), time.process_time()

        async def work(device: Device) -> None:
            until = began + lasts_s
            await device.work(lambda: device.accepted >= updates if updates else time.perf_counter() > until)

        await asyncio.gather(*map(work, fleet))
        fared.took_s = time.perf_counter() - began
        fared.server_cpu_s = _cpu_s(server) - before_s
        fared.driver_cpu_s += time.process_time() - driver_s
        fared.accepted = [device.accepted for device in fleet]


@contextmanager
def beside(address: str, hostile: int, fared: Fared) -> Iterator[None]:
    """So many hostile devices, in a process of their own, all of which are at it."""
    if not hostile:
        yield
        return
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_harass, args=(address, hostile, there), daemon=True)
    process.start()
    here.recv()
    try:
        yield
    finally:
        here.send("enough")
        fared.told, cpu_s = here.recv()
        fared.driver_cpu_s += cpu_s
        process.join()


def _harass(address: str, hostile: int, pipe: Connection) -> None:
    """What the process of the hostile devices does."""
    payload, began_s = Payload.of(SHAPE, CODEC, 1e-6), 0.0

    def ready() -> None:
        nonlocal began_s
        began_s = time.process_time()
        pipe.send("ready")

    async def run() -> dict[str, Counter[str]]:
        until = asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        return await harass(address, hostile, payload, VALUES, ready, until)

    told = asyncio.run(run())
    pipe.send((told, time.process_time() - began_s))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def table(rows: list[Fared]) -> str:
    """The figures as a Markdown table, with the ratio below."""
    head = (
        *("fleet", "honest updates, 1/s", "Jain's index", "updates of a device: least / median / most"),
        *("ask, median", "ask, 99 %", "server's processor time an honest update"),
        *("cores: server", "cores: drivers", "disk at the end", "server memory, peak"),
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *(fared.row for fared in rows)]
    alone, beside_them = ([f.rate for f in rows if bool(f.hostile) is of] for of in (False, True))
    if alone and beside_them:
        ratio = np.mean(beside_them) / np.mean(alone)
        lines += [
            "",
            f"Honest updates a second beside the hostile devices, of those without: **{ratio:.2f}**.",
        ]
    return "\n".join(lines)


def fleets(devices: int = DEVICES, lasts_s: float = RUNS_S) -> Iterator[Fared]:
    """Both, in turns."""
    hostile = round(SHARE * devices)
    for turn in TURNS:
        yield measure(devices - hostile, hostile if turn else 0, lasts_s)


def section() -> str:
    """The page's."""
    return f"""## An honest fleet beside a hostile one

A tenth of 1,000 devices is hostile: they crash and ask again, hold places with heartbeats, cut uploads, run
twice, forge, lie and flood. Honest devices train for a second; there are places for a quarter of the fleet.
Server and devices share the cores.

{table(list(fleets()))}
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=DEVICES)
    parser.add_argument("--seconds", type=float, default=RUNS_S, help="of each run")
    parser.add_argument("--hostile", type=int, default=0, help="with --updates: so many of them are hostile")
    parser.add_argument("--updates", type=int, default=0, help="one run, until each has had so many accepted")
    parser.add_argument("--json", action="store_true", help="all there is of each run, as a line")
    arguments = parser.parse_args()
    if arguments.updates:
        hostile = arguments.hostile or round(SHARE * arguments.devices)
        rows = iter([measure(arguments.devices - hostile, hostile, updates=arguments.updates)])
    else:
        rows = fleets(arguments.devices, arguments.seconds)
    if not arguments.json:
        print(table(list(rows)))
        return
    for fared in rows:
        print(json.dumps(fared.to_json()), flush=True)


if __name__ == "__main__":
    main()
