"""What a snapshot costs a server with many devices, and how much of its memory they take.

    python -m benchmarks.snapshots [DEVICES ...]

Devices enrol through the books of a real server (SQLite), some of them push, and the next snapshot is timed:
how long the server answers nothing, while it is taken and while it is named, and how long until it counts,
with the file that is written in between. Beside it the same state whole, in one piece of JSON, as it was once
written. Each size has a process of its own, whose memory is what it has beyond an empty one's.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.limits import MIB, Limits
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.core.snapshot import take_changes, take_snapshot
from anabranch.server.app import every_of
from anabranch.server.books import Books, Call
from anabranch.server.manifest import Manifest
from anabranch.server.models import Models
from anabranch.server.recovery import recover
from anabranch.server.store.factory import open_store

DEVICES = (10_000, 100_000, 300_000, 1_000_000)
PUSHED = 500  # updates between two snapshots, as servers are set
AT_ONCE = 1_000  # devices in one commit
WHOLE_MAX = 300_000  # in one piece it takes minutes and gigabytes beyond
TENSORS = {"w": np.zeros(64, np.float32)}


@dataclass(frozen=True)
class Measured:
    """Of one number of devices: the snapshot as it is written and whole, seconds and bytes, and the rest."""

    devices: int
    held_up_s: float
    snapshot_s: float
    json_bytes: int
    whole_s: float
    whole_bytes: int
    restart_s: float
    memory_bytes: int
    restarted_bytes: int


def measure(devices: int) -> Measured:
    """Enrol, push, and take snapshots, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        before = _resident_bytes()
        books = _open(Path(folder))
        _enrol(books, devices)
        memory = _resident_bytes() - before
        books.save(1e6)
        _push(books, devices)
        books.project()
        json_bytes = len(json.dumps(take_changes(books.engine).meta))
        times = _snapshot(books)
        whole_s, whole_bytes = _whole(books) if devices <= WHOLE_MAX else (float("nan"), 0)
        books.models.close()
        books.store.close()
        restarted = subprocess.run(
            [sys.executable, "-m", "benchmarks.snapshots", "--restart", folder],
            check=True,
            capture_output=True,
        )
        found = json.loads(restarted.stdout)
        assert found["clients"] == devices, found
        return Measured(
            devices,
            *times,
            json_bytes,
            whole_s,
            whole_bytes,
            found["took_s"],
            memory,
            found["bytes"],
        )


def restart(folder: Path) -> dict[str, Any]:
    """Come back to the run in a folder; how long it took and what it holds."""
    before = _resident_bytes()
    began = time.perf_counter()
    books = _open(folder)
    known = {"clients": len(books.engine.ledger.clients), "took_s": time.perf_counter() - began}
    return {**known, "bytes": _resident_bytes() - before}


def _open(folder: Path) -> Books:
    config: Config = merge([("benchmark", {"strategy": {"name": "fedbuff"}})])
    limits, spec = Limits(free_disk_bytes_min=0), ParamSpec.of(TENSORS)
    store = open_store("", folder, limits)
    found = recover(store, config, Manifest("benchmark", spec, TENSORS), limits)
    models = Models(folder / "models", spec, {})
    place = (found.seq, found.saved, found.history)
    return Books(found.engine, store, models, every_of(config), *place, limits)


def _enrol(books: Books, devices: int) -> None:
    kinds = [Capability(examples=1000, memory_bytes=1 << (30 + n), codecs=("raw", "q8")) for n in range(4)]
    for first in range(0, devices, AT_ONCE):
        some = range(first, min(first + AT_ONCE, devices))
        books.commit([Call(ev.Enrolled(1.0, f"device-{n:07d}", kinds[n % 4])) for n in some])


def _push(books: Books, devices: int) -> None:
    for number in range(PUSHED):
        client = f"device-{number * (devices // PUSHED):07d}"
        books.commit([Call(ev.TaskAsked(2.0, Ask(client, f"task-{number}")))])
        delta = np.full(64, number + 1, np.float32)
        data, base = delta.tobytes(), books.engine.ledger.tasks[f"task-{number}"].base_version
        update = Update(f"update-{number}", f"task-{number}", client, base, 5, delta, local_steps=3)
        payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data))
        books.commit([Call(ev.UpdateArrived(3.0 + number, update, payload), data)])
    assert books.engine.counters.applied == PUSHED


def _snapshot(books: Books) -> tuple[float, float]:
    """Seconds of the writer's own, and all that passed."""
    with ThreadPoolExecutor(1) as executor:
        books.saving.executor = executor
        began = time.perf_counter()
        books.begin_snapshot(2e6)
        begun_s = time.perf_counter() - began
        executor.submit(lambda: None).result()
        named = time.perf_counter()
        books.commit([])
        ended = time.perf_counter()
    assert books.saving.saved.seq == books.seq
    return begun_s + ended - named, ended - began


def _whole(books: Books) -> tuple[float, int]:
    began = time.perf_counter()
    text = json.dumps(take_snapshot(books.engine, copy=False).meta)
    return time.perf_counter() - began, len(text)


def _resident_bytes() -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def table(rows: list[Measured]) -> str:
    """As Markdown."""
    head = [
        "| devices | held up | snapshot | JSON | whole, once | JSON | restart | memory | after a restart |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(_line(row) for row in rows)])


def _line(m: Measured) -> str:
    whole = [f"{m.whole_s:.1f} s", f"{m.whole_bytes / MIB:.1f} MiB"] if m.whole_bytes else ["", ""]
    cells = [
        f"{m.devices:,}",
        f"{m.held_up_s * 1000:.0f} ms",
        f"{m.snapshot_s * 1000:.0f} ms",
        f"{m.json_bytes / MIB:.2f} MiB",
        *whole,
        f"{m.restart_s:.1f} s",
        f"{m.memory_bytes / MIB:.0f} MiB",
        f"{m.restarted_bytes / MIB:.0f} MiB",
    ]
    return "| " + " | ".join(cells) + " |"


def apart(devices: int) -> Measured:
    """The same in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.snapshots", "--one", str(devices)]
    told = subprocess.run(words, check=True, capture_output=True, text=True)
    return Measured(**json.loads(told.stdout))


def main(words: list[str]) -> None:
    """Measure and print."""
    if words[:1] == ["--restart"]:
        print(json.dumps(restart(Path(words[1]))))
    elif words[:1] == ["--one"]:
        print(json.dumps(asdict(measure(int(words[1])))))
    else:
        print(table([apart(devices) for devices in map(int, words or DEVICES)]))


if __name__ == "__main__":
    main(sys.argv[1:])
