"""Kill devices that push in the background at random moments, and their server with them.

What a device had in its outbox when it died must be in the server's log in the end, what was acknowledged as
well, each once; and the model is what the updates in the log come to.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crash import write_model
from crash_writer import VALUES
from left import at_the_end
from nursery import Process
from server_logs import records_of
from server_process import ConfiguredServer, Plan, ServerProcess
from wire import SUM

from anabranch.client.outbox import Outbox, OutboxBounds
from anabranch.core.model.params import digest
from anabranch.server.verify import verify

SCRIPT = Path(__file__).with_name("crash_device.py")
BEGUN_S = 600.0  # a device that hangs fails the test by itself
LAST_TASKS = 3  # of each device, after the last kill
SERVER_DIES_EVERY = 4  # kills of devices
PUSHES: dict[str, dict[str, Any]] = {
    "overlap": {"push": "overlap", "steps": 20},
    "elastic": {"push": "elastic", "push_when": "interval", "push_steps": 10, "merge_weight": 1.0},
}
ENTRY_BYTES_MAX = 4 * VALUES + 2_048


@dataclass
class Found:
    """What happened. `problems` in words: empty when every promise was kept."""

    push: str
    problems: list[str] = field(default_factory=list)
    acknowledged: int = 0
    held: int = 0  # results that were in an outbox when its device died
    again: int = 0  # of these, those that the server knew already
    outbox_most: int = 0
    applied: int = 0
    steps: int = 0


def background_server(folder: Path, push: str) -> ServerProcess:
    """One for devices that push in the background. It adds updates up."""
    server = {
        "tasks_per_client": 2 if push == "overlap" else 1,
        "lease_min_s": 60.0,  # no lease ends by itself, however slow the machine is
        "snapshot_every_versions": 100,
    }
    return ConfiguredServer(folder, {"strategy": SUM, "client": PUSHES[push], "server": server})


class DeviceProcess:
    """A device that can be killed and started again on the same folder. It ends with its test."""

    def __init__(self, folder: Path, client_id: str, address: str, script: Path = SCRIPT) -> None:
        self.client_id, self.address, self.state_dir = client_id, address, folder / client_id
        self._script = script
        self._log = folder / f"{client_id}.log"
        self._process: Process | None = None
        self._before: Counter[str] = Counter()  # what earlier lives told, by kind
        at_the_end(self._end)

    def start(self, tasks_max: int = 0) -> None:
        """Start, without waiting."""
        self._before = self._kinds()
        arguments = [self.address, self.client_id, str(self.state_dir), str(tasks_max)]
        with self._log.open("ab") as log:
            self._process = Process(self._script, *arguments, stdout=log, stderr=log)

    def await_event(self, kind: str, more: int = 1) -> None:
        """Wait until it has told so much of this kind in this life."""
        until = time.monotonic() + BEGUN_S
        while self._kinds()[kind] < self._before[kind] + more:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3_000:]
            assert time.monotonic() < until, f"{self.client_id}: {kind} did not come"
            time.sleep(0.05)

    def kill(self) -> list[str]:
        """SIGKILL; returns the results in its outbox, oldest first."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        return sorted(path.stem for path in (self.state_dir / "outbox").glob("*.update"))

    def _end(self) -> None:
        if self._process is not None:
            self.kill()

    def ended(self) -> int:
        """The exit code, once it ends by itself."""
        assert self._process is not None
        return self._process.wait(BEGUN_S)

    def events(self) -> list[dict[str, Any]]:
        """What it told, in all its lives: the last line of a life may be half a line."""
        found = []
        for line in self._log.read_text(errors="replace").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def told(self, kind: str) -> int:
        """How often it has told something of this kind, in this life."""
        return self._kinds()[kind] - self._before[kind]

    def _kinds(self) -> Counter[str]:
        return Counter(event["kind"] for event in self.events()) if self._log.exists() else Counter()


def live_and_die(folder: Path, push: str, kills: int, seed: int, devices: int = 2) -> Found:
    """Serve, train, kill and restart as planned; then check every promise."""
    found = Found(push)
    first = np.random.default_rng(seed).integers(-100, 101, VALUES).astype(np.float32)
    write_model(folder, first, Plan())
    server = background_server(folder, push)
    fleet = [DeviceProcess(folder, f"device-{n}", server.address) for n in range(devices)]
    held: dict[str, list[str]] = {device.client_id: [] for device in fleet}
    server.start()
    try:
        for device in fleet:
            device.start()
        for kill in range(kills):
            _kill(kill, fleet[kill % devices], server, random.Random(f"{seed} {kill}"), held, found)
        for device in fleet:
            box = device.kill()
            held[device.client_id] += box
            device.start(tasks_max=LAST_TASKS + len(box))
        codes = [device.ended() for device in fleet]
        found.problems += [f"a device ended with exit code {code}" for code in codes if code]
        if (code := server.drain()) != 0:
            found.problems.append(f"the drain ended with exit code {code}:\n{server.log_tail()}")
    finally:
        for device in fleet:
            device.kill()
        server.kill()
    _check(server.data_dir, fleet, held, first, found)
    return found


def _kill(
    number: int,
    device: DeviceProcess,
    server: ServerProcess,
    chance: random.Random,
    held: dict[str, list[str]],
    found: Found,
) -> None:
    """End a device's life at a random moment of it; now and then the server's too."""
    with_server = number % SERVER_DIES_EVERY == 1
    device.await_event(chance.choice(["enrolled", "granted", "trained", "pushed"]))
    time.sleep(chance.uniform(0.0, 0.2))
    if with_server:  # first, so that the device has work that goes nowhere
        server.kill()
        time.sleep(chance.uniform(0.0, 0.3))
    box = device.kill()
    held[device.client_id] += box
    most = 2 if found.push == "overlap" else 1
    size = sum(path.stat().st_size for path in (device.state_dir / "outbox").iterdir())
    found.outbox_most = max(found.outbox_most, len(box))
    found.held += len(box)
    # What was half written when it died is beside what is whole.
    if len(box) > most or size > (most + 1) * ENTRY_BYTES_MAX:
        found.problems.append(f"{device.client_id} had {len(box)} results of {size} bytes in its outbox")
    if with_server:
        server.start()
    device.start()


def _check(
    data_dir: Path, fleet: list[DeviceProcess], held: dict[str, list[str]], first: Any, found: Found
) -> None:
    """Lost, doubled or refused updates, a model that is not their sum, and whatever `verify` finds."""
    state, logged = verify(data_dir), records_of(data_dir, kind="update")
    ids = Counter(record["update_id"] for record in logged)
    tasks = Counter(record["task_id"] for record in logged)
    found.problems += state.problems
    found.problems += [f"{what} counts {n} times" for what, n in (ids | tasks).items() if n > 1]
    for device in fleet:
        told = [event for event in device.events() if event["kind"] == "pushed"]
        refused = [event["update"] for event in told if event["verdict"] == "rejected"]
        acknowledged = {event["update"] for event in told}
        found.acknowledged += len(acknowledged)
        found.again += sum(event["duplicate"] for event in told)
        found.problems += [f"acknowledged update {one} is lost" for one in acknowledged - ids.keys()]
        found.problems += [
            f"{one} was in an outbox and is lost" for one in set(held[device.client_id]) - ids.keys()
        ]
        found.problems += [f"update {one} was rejected" for one in refused]
        if left := Outbox(device.state_dir / "outbox", OutboxBounds()).pending():
            found.problems.append(f"{device.client_id} did not send {left}")
    found.steps, found.applied = sum(record["local_steps"] for record in logged), len(logged)
    if state.model_sha256 != digest(first + np.float32(found.steps)):
        found.problems.append("the model is not what the updates in the log come to")
    if state.version != found.applied:
        found.problems.append(f"{found.applied} updates made {state.version} versions")
