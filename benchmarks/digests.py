"""What BLAKE3 saves beside SHA-256: by itself, in the real server at 40 MB, and in a simulation.

    python -m benchmarks.digests

Both are measured in turns in one run: two servers that are up together, and the bare stream; two simulations
without training. Of 0.4 MB over the session stream `benchmarks/sessions.py` has a row.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from anabranch.core.content import ALGORITHMS, BLAKE3, SHA256, content_digest
from benchmarks.fleet_speed import NoOp, settings
from benchmarks.sessions import used_s
from benchmarks.simulator_ceilings import DEVICES, simulated
from benchmarks.throughput import RUNS, SIZES, WARM_UP, bare_server, durable_server
from benchmarks.writers import Load, drive

LENGTHS = 1_000, 10_400, 16_384, 65_536, 400_000, 40_000_000
HASHED_BYTES = 40_000_000  # of each length, at least once
ROUNDS, UPDATES, TASKS = 7, 32, 2_000
Pair = dict[str, float]  # by algorithm


def alone(length: int) -> Pair:
    """Milliseconds of one thread for a digest, the least of the rounds."""
    data, count = os.urandom(length), max(1, HASHED_BYTES // 10 // length)

    def once(algorithm: str) -> float:
        began_s = time.thread_time()
        for _ in range(count):
            content_digest(data, algorithm)
        return 1e3 * (time.thread_time() - began_s) / count

    return {name: min(once(name) for _ in range(ROUNDS)) for name in ALGORITHMS}


def in_turns(measured: Callable[[str], float]) -> Iterator[Pair]:
    """Every round measures both, each time another one first."""
    for number in range(ROUNDS):
        yield {name: measured(name) for name in ALGORITHMS[:: -1 if number % 2 else 1]}


def live(size: str) -> tuple[list[Pair], list[Pair]]:
    """Of two servers: processor time of an update in ms, and updates for each of the bare stream."""
    values, ratios = SIZES[size][0], list[Pair]()
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder, ExitStack() as stack:
        (bare, _), served = stack.enter_context(bare_server()), {}
        drive(Load(bare, values, WARM_UP, durable=False))
        for name in ALGORITHMS:
            (own := Path(folder) / name).mkdir()
            address, process = stack.enter_context(durable_server(own, values, f"run.payload_digest={name}"))
            served[name] = address, process.pid
            drive(Load(address, values, WARM_UP, durable=True, name="warm-up", algorithm=name))
        rates: dict[str, list[float]] = {name: [] for name in ALGORITHMS}

        def measured(name: str) -> float:
            address, pid = served[name]
            load = Load(address, values, UPDATES, True, f"round-{len(rates[name])}", algorithm=name)
            before_s = sum(used_s(pid).values())
            rates[name].append(UPDATES / drive(load))
            return 1e3 * (sum(used_s(pid).values()) - before_s) / UPDATES

        pairs = list[Pair]()
        for pair in in_turns(measured):
            pairs.append(pair)
            bare_rate = UPDATES / drive(Load(bare, values, UPDATES, durable=False))
            ratios.append({name: rates[name][-1] / bare_rate for name in ALGORITHMS})
    return pairs, ratios


def simulation(algorithm: str) -> float:
    """Milliseconds of processor time of a task without training."""
    config = settings(DEVICES, TASKS)
    done, took_s = simulated(NoOp(), replace(config, run=replace(config.run, payload_digest=algorithm)))
    return 1e3 * took_s / done


def row(name: str, pairs: Sequence[Pair], digits: int = 2) -> str:
    """Medians, and the median of the pairs' ratios."""
    sha256, blake3 = (statistics.median(pair[name] for pair in pairs) for name in (SHA256, BLAKE3))
    ratio = statistics.median(pair[BLAKE3] / pair[SHA256] for pair in pairs)
    return f"| {name} | {len(pairs)} | {sha256:.{digits}f} | {blake3:.{digits}f} | **{ratio:.2f}** |"


def main() -> None:
    """Measure and print."""
    print("| what | rounds | SHA-256 | BLAKE3 | ratio |\n|---|---|---|---|---|")
    for length in LENGTHS:
        print(row(f"a digest of {length:,} bytes, ms", [alone(length)], 4))
    simulation(SHA256)  # each once before it counts
    print(row("a simulated task without training, 100,000 values, ms", list(in_turns(simulation)), 3))
    pairs, ratios = live("40 MB")
    print(row("40 MB raw, the server's processor time of an update, ms", pairs, 0))
    print(row("40 MB raw, updates for each of the bare stream", ratios))
    print(f"\nAt a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
