"""The cockpit of a large fleet: how long it reads the events of a run, how fast it answers, what it holds.

    python benchmarks/cockpit_fleet.py [--devices 100000] [--events 1000000] [--keep FOLDER]

The run is written by the recorder that every run has: devices that get tasks of the newest version, take
their own time, and push; some updates are rejected, some leases are lost, a version comes of ten updates.
"""

from __future__ import annotations

import argparse
import heapq
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from anabranch.core.config.tables import Config
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.reports.recorder import Recorder

BUFFER = 10
RAW, CODEC = 4_000_000, "topk(0.1)|int8"
ROUNDS = 11
ASKED = {
    "fleet": "fleet",
    "fleet, by speed": "fleet?sort=speed&order=desc",
    "fleet, by staleness, page 1,000": "fleet?sort=staleness&order=desc&offset=50000&limit=50",
    "fleet, filtered": "fleet?filter=-0999&sort=updates",
    "river, 64 lanes": "river",
    "river, 1,000 lanes": "river?lanes=1000",
    "series": "series?points=2000",
    "wire": "wire",
    "defence": "defence",
    "device": "devices/device-000042",
}


def write(folder: Path, devices: int, events: int, seed: int = 0) -> None:
    """The folder of a run of so many devices, with that many events or a few more."""
    rng, config = np.random.default_rng(seed), Config()
    recorder = Recorder.of(config, folder)
    recorder.kind = "simulated"
    version = held = task = 0
    has: dict[int, tuple[int, str]] = {}  # its task, and the version that it is of
    queue = [(float(t), i) for i, t in enumerate(rng.uniform(0, 600, devices))]
    heapq.heapify(queue)
    speeds = rng.lognormal(4.0, 0.8, devices)
    with recorder:
        recorder.compressed(0.0, 0, CODEC, "raw")
        while recorder._events < events:
            now, device = heapq.heappop(queue)
            name = f"device-{device:06d}"
            if device not in has:
                task += 1
                has[device] = version, f"{task:032x}"
                recorder.granted(now, name, has[device][1], version)
                recorder.downloaded(now, name, RAW)
                heapq.heappush(queue, (now + speeds[device], device))
                continue
            base, its = has.pop(device)
            luck, staleness = rng.random(), version - base
            if luck < 0.02:
                recorder.note(now, "lease_ended", client=name, task=its, end="expired")
            else:
                verdict = Verdict.REJECTED if luck < 0.04 else Verdict.HELD
                reason = Reason.STALE if verdict is Verdict.REJECTED else Reason.NONE
                held += verdict is Verdict.HELD
                publishes = held == BUFFER
                version += publishes
                decision = Decision(Verdict.PUBLISHED if publishes else verdict, staleness, 1.0, reason)
                recorder.decided(now, name, version, decision, 120_000, 500, RAW, None, its, CODEC)
                if publishes:
                    held = 0
                    recorder.published(now, version)
                    if version % 500 == 0:
                        recorder.evaluated(now, version, {"accuracy": 1 - 1 / (1 + version / 900)})
            heapq.heappush(queue, (now + float(rng.exponential(30.0)), device))
        result = recorder.result("", "", 1.0)
    result.write(folder)


class Page:
    """What a browser asks. `cookie`: of a session that was begun before, as a link is good for one."""

    def __init__(self, link: str, cookie: str = "") -> None:
        parts = urlsplit(link)
        self.line = http.client.HTTPConnection(parts.netloc)
        self.cookie = cookie
        if cookie:
            return
        self.line.request("GET", f"{parts.path}?{parts.query}")
        answer = self.line.getresponse()
        answer.read()
        self.cookie = (answer.headers["set-cookie"] or "").partition(";")[0]

    def ask(self, path: str) -> tuple[float, int]:
        """Milliseconds that an answer took, and the bytes that came."""
        began = time.perf_counter()
        body = self.read(path, "gzip")
        return (time.perf_counter() - began) * 1000, len(body)

    def read(self, path: str, encoding: str = "identity") -> bytes:
        """An answer, as it came."""
        self.line.request("GET", path, headers={"Cookie": self.cookie, "Accept-Encoding": encoding})
        answer = self.line.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return body


def measure(folder: Path) -> None:
    """Print what the cockpit of this folder takes."""
    command = [
        sys.executable,
        "-m",
        "anabranch.cli.main",
        "ui",
        str(folder),
        "--listen",
        "127.0.0.1:0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        page = Page(json.loads(process.stdout.readline())["link"])
        before = psutil.Process(process.pid).memory_info().rss
        run = json.loads(page.read("/api/runs"))["runs"][0]["id"]
        read_ms, _ = page.ask(f"/api/runs/{run}/fleet?limit=1")
        after = psutil.Process(process.pid).memory_info().rss
        print(
            f"read in {read_ms / 1000:.1f} s; {after / 1e6:.0f} MB, the run {(after - before) / 1e6:.0f} MB"
        )
        for what, path in ASKED.items():
            found = [page.ask(f"/api/runs/{run}/{path}") for _ in range(ROUNDS)]
            times = [ms for ms, _ in found]
            print(
                f"{what:34} median {statistics.median(times):7.1f} ms, most {max(times):7.1f} ms,"
                f" {found[0][1] / 1000:8.1f} kB"
            )
        process.terminate()


def main() -> None:
    """Write the run, and look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=100_000)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="write the run here, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary) / "run"
        if not folder.exists():
            began = time.perf_counter()
            write(folder, options.devices, options.events)
            size = (folder / "events.jsonl").stat().st_size
            print(f"{options.devices:,} devices, {options.events:,} events, {size / 1e6:.0f} MB", end=", ")
            print(f"written in {time.perf_counter() - began:.0f} s")
        measure(folder)


if __name__ == "__main__":
    main()
