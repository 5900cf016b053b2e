"""Durable updates a second through the real server, against a bare gRPC stream and against memcpy.

    python -m benchmarks.throughput

Everything runs on one machine in one go: a server process, two writer processes of four threads each.
The bare stream takes the same messages and throws them away. The durable server is `anabranch
server` with SQLite and FedBuff (K = 10): tasks, digests, finiteness, fsync, aggregation, versions.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1.devices_pb2_grpc import DevicesServicer, add_DevicesServicer_to_server
from anabranch.server.manifest import write_manifest
from benchmarks.writers import Load, drive, push_one

SIZES = {"0.4 MB": (100_000, 3_200), "40 MB": (10_000_000, 64)}
STARTED = {"40 MB": 10_000_000, "400 MB": 100_000_000}
WARM_UP = 16
ALONE = 22
SERVING_S = 60.0
_WAITING = "grpc.server.max_pending_requests"
PATIENT = [(_WAITING, 10_000), (f"{_WAITING}_hard_limit", 10_000)]  # thousands of devices call at once
BUFFERED = "strategy.buffer_size=10"
RUNS = Path(__file__).parents[1] / "runs"  # on a real disk, which the system's folder for such may not be


@dataclass(frozen=True)
class Measured:
    """One size of update. Rates in updates a second; memory is the server's peak."""

    size: str
    payload_bytes: int
    bare: float
    durable: float
    memcpy: float
    server_rss_bytes: int

    @property
    def ratio(self) -> float:
        """Durable updates for each one of the bare stream."""
        return self.durable / self.bare


class Bare(DevicesServicer):
    """Takes the messages of an update and throws them away."""

    async def PushUpdate(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[devices.PushUpdateRequest], context: Any
    ) -> devices.PushUpdateResponse:
        """Count the bytes, no more."""
        del context
        total = 0
        async for message in request_iterator:
            total += len(message.chunk.data)
        return devices.PushUpdateResponse(receive_seq=total)


def measure(size: str) -> Measured:
    """All three, one after the other."""
    values, updates = SIZES[size]
    with bare_server() as (address, _):
        drive(Load(address, values, WARM_UP, durable=False))
        bare = updates / drive(Load(address, values, updates, durable=False))
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder, durable_server(Path(folder), values) as served:
        address, process = served
        drive(Load(address, values, WARM_UP, durable=True, name="warm-up"))
        durable = updates / drive(Load(address, values, updates, durable=True))
        peak = peak_rss_bytes(process.pid)
    return Measured(size, 4 * values, bare, durable, _memcpy(values), peak)


Added = Callable[[aio.Server], None]


def no_more(server: aio.Server) -> None:
    """Nothing is added to a bare server."""


@contextmanager
def bare_server(add: Added = no_more) -> Iterator[tuple[str, int]]:
    """A process with the bare stream, and what `add` adds in it; yields its address and its id."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve_bare, args=(there, add), daemon=True)
    process.start()
    assert process.pid is not None
    yield f"127.0.0.1:{here.recv()}", process.pid
    process.terminate()
    process.join()


def _serve_bare(pipe: Connection, add: Added) -> None:
    async def serve() -> None:
        server = aio.server(options=PATIENT)
        add_DevicesServicer_to_server(Bare(), server)  # type: ignore[abstract]
        add(server)
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


@contextmanager
def durable_server(
    folder: Path, shape: int | tuple[int, ...], *more: str, words: Sequence[str] = (), rule: str = BUFFERED
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`anabranch server` on a model of one tensor, with `more` settings; yields address and process.

    `words`: further ones of its command line. `rule`: the setting that says when there is a version.
    """
    model = folder / "model"
    write_manifest(model, "benchmark", {"w": np.zeros(shape, np.float32)})
    settings = ["server.address=127.0.0.1:0", "server.admin_address=127.0.0.1:0", rule, *more]
    command = [sys.executable, "-m", "anabranch.cli.main", "server", "--json", "--model", str(model)]
    command += [
        "--data-dir",
        str(folder / "data"),
        *words,
        *(part for s in settings for part in ("--set", s)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                said = json.loads(text)
                if said.get("kind") == "serving":
                    yield said["address"], process
                    break
            else:
                raise RuntimeError("the server did not serve")
        finally:
            process.terminate()
            process.wait(SERVING_S)


def peak_rss_bytes(pid: int) -> int:
    """The peak of resident memory of a process so far (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(text for text in status.splitlines() if text.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory_peaks(values: int) -> tuple[int, int, int]:
    """The peak of a server's memory over its first start with a model, the next, and some updates; bytes."""
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:
        first, again, loaded = (_memory_peak(Path(folder), values, updates) for updates in (0, 0, ALONE))
    return first, again, loaded


def _memory_peak(folder: Path, values: int, updates: int) -> int:
    with durable_server(folder, values) as (address, process):
        for i in range(updates):
            push_one(Load(address, values, 1, durable=True, name=f"alone-{i}"))
        return peak_rss_bytes(process.pid)


def starts() -> str:
    """What a start takes of memory: a line and a Markdown table."""
    lines = [
        "The peak of a server's memory from its start with a large model of one tensor until it serves, and",
        f"after {ALONE} updates of it, one after the other, of which each tenth makes a version.",
        "",
        "| model | first start | / model | next start | / model | under updates | / model |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, values in STARTED.items():
        cells = [f"{peak / 1e9:.2f} GB | **{peak / (4 * values):.2f}**" for peak in memory_peaks(values)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _memcpy(values: int) -> float:
    source = np.ones(values, np.float32)
    target = np.empty_like(source)
    repeats = max(3, 200_000_000 // values)
    started = time.perf_counter()
    for _ in range(repeats):
        np.copyto(target, source)
    return repeats / (time.perf_counter() - started)


def table(rows: list[Measured]) -> str:
    """The figures as a Markdown table."""
    head = (
        "update",
        "bare stream, 1/s",
        "durable, 1/s",
        "durable / bare",
        "durable, MB/s",
        "durable / memcpy",
    )
    lines = ["| " + " | ".join([*head, "server memory, peak"]) + " |", "|---" * (len(head) + 1) + "|"]
    lines += [
        f"| {m.size} | {m.bare:.1f} | {m.durable:.1f} | **{m.ratio:.2f}** |"
        f" {m.durable * m.payload_bytes / 1e6:.0f} | {m.durable / m.memcpy:.4f} |"
        f" {m.server_rss_bytes / 1e9:.2f} GB |"
        for m in rows
    ]
    return "\n".join(lines)


def section() -> str:
    """The page's."""
    return f"""## Durable updates through the real server

A server process and two writer processes of four threads share the cores. The bare stream takes the
same messages and throws them away; the durable server checks digests and finiteness, commits (SQLite,
`synchronous=FULL`), aggregates (FedBuff, K = 10) and publishes. Every update has bytes of its own.

{table([measure(size) for size in SIZES])}

{starts()}
"""


def main() -> None:
    """Measure and print."""
    rows = [measure(size) for size in SIZES]
    print(table(rows))
    print(starts())
    print(json.dumps([asdict(m) for m in rows]))


if __name__ == "__main__":
    main()
