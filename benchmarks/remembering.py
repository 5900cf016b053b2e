"""What it costs to remember every device: in memory and on a disk, in memory, disk and processor time.

    python -m benchmarks.remembering [--database URL] [DEVICES:NUMBERS ...]

An engine takes an update of each device, and then of devices at random, as a server's does, without a log.
Its shelf is that of a data directory (in `TMPDIR`), and after that a snapshot is written there. Each place
has a process of its own. Its memory is what it has beyond what it had when every device was enrolled: half
way, and at the end. An update's time is the processor's. With an empty PostgreSQL (`--database`) the rows
lie there as well: what that takes of the processor itself is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.engine.engine import Engine
from anabranch.core.limits import DEFAULT_LIMITS, GIB, MIB
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.core.snapshot import take_changes
from anabranch.host.build import Blueprint
from anabranch.server.store.base import RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.quota import held_bytes
from anabranch.server.store.row_table import TableRows
from anabranch.server.store.shelf import StoredRows
from anabranch.server.store.snapshots import SnapshotFiles
from anabranch.support.shelf import RowShelf

SIZES = ("1000:100000", "10000:100000", "30000:100000")
IN_MEMORY_MAX = 5 * GIB  # of updates
MEASURED = 300  # updates of devices that are known
STRATEGIES = ("ca2fl", "ace")


@dataclass(frozen=True)
class Measured:
    """Of one strategy, place and size: bytes of memory, disk and snapshots, seconds of processor."""

    half_bytes: int
    memory_bytes: int
    disk_bytes: int
    update_s: float
    worst_s: float
    snapshot_bytes: int
    snapshot_s: float


def main(sizes: Sequence[str], database: str) -> None:
    """Print a table."""
    places = ("ram", "disk", database) if database else ("ram", "disk")
    print(
        "| | devices | numbers | `memory` | memory, half way and in the end | disk | an update | a snapshot |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        devices, numbers = map(int, size.split(":"))
        for strategy in STRATEGIES:
            for place in places:
                if place == "ram" and devices * numbers * 4 > IN_MEMORY_MAX:
                    continue
                print(
                    _row(strategy, devices, numbers, place, _apart(strategy, devices, numbers, place)),
                    flush=True,
                )


def _row(strategy: str, devices: int, numbers: int, place: str, found: Measured) -> str:
    memory = f"{found.half_bytes / MIB:,.0f}, {found.memory_bytes / MIB:,.0f} MiB"
    disk = f"{found.disk_bytes / MIB:,.0f} MiB"
    update = f"{1000 * found.update_s:.2f} ms, at most {1000 * found.worst_s:.1f} ms"
    snapshot = f"{found.snapshot_bytes / MIB:,.1f} MiB in {found.snapshot_s:.2f} s"
    where = "disk, PostgreSQL" if is_database(place) else place
    cells = f"`{strategy}`", f"{devices:,}", f"{numbers:,}", where, memory, disk, update, snapshot
    return f"| {' | '.join(cells)} |"


def _apart(strategy: str, devices: int, numbers: int, place: str) -> Measured:
    command = [
        sys.executable,
        "-m",
        "benchmarks.remembering",
        "measure",
        strategy,
        str(devices),
        str(numbers),
        place,
    ]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return Measured(**json.loads(found.stdout))


def is_database(place: str) -> bool:
    """Whether a place is an address."""
    return "://" in place


@contextmanager
def shelf_of(place: str, folder: Path) -> Iterator[RowShelf]:
    """An empty one, of a data directory or in the database."""
    if not is_database(place):
        yield RowShelf(StoredRows(folder, 0))
        return
    store = open_store(place, folder)
    assert isinstance(store, PostgresqlStore)
    store.start(RunInfo("remembering", "remembering", {}, [], "", 0.0))
    yield store.shelf
    with store._database.beside() as connection:
        connection.exec_driver_sql("DROP TABLE shelf_rows")
    store.close()


def _disk_bytes(folder: Path, shelf: RowShelf) -> int:
    if isinstance(shelf.rows, TableRows):
        with shelf.rows._database.beside() as connection:
            return int(connection.exec_driver_sql("SELECT pg_total_relation_size('shelf_rows')").scalar_one())
    rows = folder / "shelf"
    return held_bytes(rows) if rows.exists() else 0


def measure(strategy: str, devices: int, numbers: int, place: str) -> Measured:
    """In this process."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-remembering-") as folder,
        shelf_of(place, Path(folder)) as shelf,
    ):
        memory = "disk" if is_database(place) else place
        table = {"name": strategy, "memory": memory, "memory_bytes_max": 1 << 40}
        tables = {"strategy": table, "fleet": {"clients": devices}}
        spec = ParamSpec.of(first := {"w": np.zeros(numbers, np.float32)})
        engine = Blueprint.of(merge([("benchmark", tables)]), spec, shelf=shelf).engine(first)
        names = [f"device-{n}" for n in range(devices)]
        for name in names:
            engine.handle(ev.Enrolled(0.0, name, Capability()))
        before, rng = _memory_bytes(), np.random.default_rng(1)
        pool = rng.standard_normal(numbers + 4096, np.float32)
        half_bytes = 0
        for number, name in enumerate(names):
            _push(engine, name, number, pool)
            if number == devices // 2:
                half_bytes = _memory_bytes() - before
        chance = random.Random(2)
        took = [_push(engine, chance.choice(names), devices + n, pool) for n in range(MEASURED)]
        memory_bytes = _memory_bytes() - before
        began = time.perf_counter()
        engine.ledger.track(saved=True)
        snapshot = take_changes(engine)
        shelf.flush()
        files = SnapshotFiles(Path(folder), DEFAULT_LIMITS)
        files.prepare()
        sha256 = files.write(snapshot)
        snapshot_s = time.perf_counter() - began
        return Measured(
            half_bytes,
            memory_bytes,
            _disk_bytes(Path(folder), shelf),
            float(np.median(took)),
            max(took),
            files.path(sha256).stat().st_size,
            snapshot_s,
        )


def _push(
    engine: Engine,
    name: str,
    number: int,
    pool: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> float:
    """A task and its update; the seconds of processor that the update takes."""
    engine.handle(ev.TaskAsked(1.0, Ask(name, f"t{number}")))
    values = pool[number % 4096 :][: engine.spec.size] * np.float32(1 + number)
    update = Update(f"u{number}", f"t{number}", name, engine.version, 1, values)
    arrived = ev.UpdateArrived(2.0, update, ev.Payload("00" * 32, 4 * values.size))
    began = time.process_time()
    engine.handle(arrived)
    return time.process_time() - began


def _memory_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(asdict(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]))))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--database", default="")
        parser.add_argument("sizes", nargs="*", default=SIZES)
        arguments = parser.parse_args()
        main(arguments.sizes, arguments.database)
