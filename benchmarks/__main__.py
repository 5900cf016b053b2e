"""`python -m benchmarks`: the short benchmarks, written to `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from benchmarks import (
    closed_loop,
    codecs,
    doors,
    fleet_speed,
    hostile_fleet,
    kernels,
    rules,
    sessions,
    simulator,
    simulator_ceilings,
    submodels,
    throughput,
)
from benchmarks.studies import publish

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> None:
    """Measure, print, write."""
    rows = [throughput.measure(size) for size in throughput.SIZES]
    text = f"""# Benchmarks

Made by `make bench`; do not edit. {os.cpu_count()} cores, {platform.machine()}, Python
{platform.python_version()}. Ratios are within one run; absolute figures are this machine's.

## Durable updates through the real server

A server process and two writer processes of four threads share the cores. The bare stream takes the
same messages and throws them away; the durable server checks digests and finiteness, commits (SQLite,
`synchronous=FULL`), aggregates (FedBuff, K = 10) and publishes. Every update has bytes of its own.

{throughput.table(rows)}

{throughput.starts()}

{doors.section()}

{sessions.section()}

## Many devices in a closed loop

Each asks, pushes 1 KB and asks again at once, for {closed_loop.RUNS_S:.0f} s; all devices are one process,
which shares the cores with the server. A call that is shed is made again in the window that it was told.

{closed_loop.table([closed_loop.measure(count) for count in closed_loop.FLEETS])}

## An honest fleet beside a hostile one

A tenth of 1,000 devices is hostile: they crash and ask again, hold places with heartbeats, cut uploads, run
twice, forge, lie and flood. Honest devices train for a second; there are places for a quarter of the fleet.
Server and devices share the cores.

{hostile_fleet.table(list(hostile_fleet.fleets()))}

## The simulator

{simulator.DEVICES} devices that poll, train (nothing), push and send heartbeats, half of them in
training at a time.

{simulator.table(simulator.run_all())}

{fleet_speed.section()}
{simulator_ceilings.section()}
{codecs.section()}
{kernels.section()}
{rules.section()}
{submodels.section()}"""
    publish(PAGE, text, __file__)


if __name__ == "__main__":
    main()
