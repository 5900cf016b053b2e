"""A server and devices in two network namespaces, and a link between them that can be cut, lossy and slow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from server_logs import records_of

from anabranch.client.outbox import Outbox
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import verify
from anabranch.workloads import load_app, trainer_for

SERVER, DEVICES = "10.201.7.1", "10.201.7.2"
ADDRESS = f"{SERVER}:7070"
COMMAND = (sys.executable, "-m", "anabranch.cli.main")
START_S = 600.0
CONFIG = """
[strategy]
name = "fedasync"
[server]
address = "{address}"
retry_after_min_s = 0.05
retry_after_max_s = 0.1
lease_min_s = 120.0
lease_s = 120.0
[client]
steps = 2
batch_size = 8
"""


class Link:
    """Two namespaces and a pair of interfaces. Packets are dropped where the devices are."""

    def __init__(self) -> None:
        tag = uuid.uuid4().hex[:6]
        self.server, self.devices = f"ab-{tag}-s", f"ab-{tag}-d"

    def __enter__(self) -> Link:
        for name in (self.server, self.devices):
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                self.__exit__()
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        _run(f"ip link add veth0 netns {self.server} type veth peer name veth0 netns {self.devices}")
        for name, address in ((self.server, SERVER), (self.devices, DEVICES)):
            _run(f"ip -n {name} addr add {address}/24 dev veth0")
            _run(f"ip -n {name} link set veth0 up")
            _run(f"ip -n {name} link set lo up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in (self.server, self.devices):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self, *ways: str) -> None:
        """Let nothing through; `ways`: INPUT is what the devices hear, OUTPUT what they say."""
        for way in ways:
            self._filter(self.devices, f"-A {way} -j DROP")

    def lose(self, fraction: float) -> None:
        """Lose this fraction of the packets, both ways."""
        for name in (self.devices, self.server):
            self._filter(
                name, f"-A INPUT -i veth0 -m statistic --mode random --probability {fraction} -j DROP"
            )

    def heal(self) -> float:
        """Let everything through again; returns when."""
        for name in (self.devices, self.server):
            self._filter(name, "-F")
        return time.monotonic()

    def slow_down(self, mbit: float) -> None:
        """So many Mbit a second, each way."""
        for name in (self.devices, self.server):
            shape = f"tbf rate {mbit}mbit burst 32kb latency 200ms"
            _run(f"ip netns exec {name} tc qdisc add dev veth0 root {shape}")

    def _filter(self, name: str, rule: str) -> None:
        _run(f"ip netns exec {name} iptables -w {rule}")


@dataclass
class Told:
    """Something that a device said, and when."""

    at: float
    kind: str
    data: dict[str, Any]


class DeviceProcess:
    """`anabranch client` in the devices' namespace."""

    def __init__(self, link: Link, app: str, folder: Path, number: int) -> None:
        self.folder = folder / f"device-{number}"
        self.told: list[Told] = []
        options = ["--server", ADDRESS, "--insecure", "--id", f"device-{number}", "--shard", f"{number}/4"]
        command = [*COMMAND, "client", app, *options, "--state-dir", str(self.folder), "--json"]
        with (folder / f"device-{number}.log").open("wb") as log:
            self._process = _start(link.devices, command, log)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            with contextlib.suppress(ValueError):
                row = json.loads(text)
                self.told.append(Told(time.monotonic(), row.pop("kind", ""), row))

    def first(self, since: float, *kinds: str) -> float | None:
        """When it first said one of these after a moment; None: not yet."""
        return next((t.at for t in list(self.told) if t.at > since and t.kind in kinds), None)

    def pushed(self) -> list[str]:
        """The updates that were acknowledged to it."""
        return [t.data["update"] for t in list(self.told) if t.kind == "pushed"]

    @property
    def has_ended(self) -> bool:
        """By itself."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """SIGTERM, and wait."""
        _end(self._process)
        self._thread.join(600)
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass
class Lab:
    """What runs."""

    link: Link
    folder: Path
    server: subprocess.Popen[str]
    devices: list[DeviceProcess] = field(default_factory=list)

    def await_that(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Whether it comes true within this time, and while all are at it."""
        deadline = time.monotonic() + within_s
        while not condition():
            ended = self.server.poll() is not None or any(d.has_ended for d in self.devices)
            if time.monotonic() > deadline or ended:
                return False
            time.sleep(0.005)
        return True

    def updates(self) -> int:
        """Acknowledged ones, so far."""
        return sum(len(device.pushed()) for device in self.devices)

    def resumed_s(self, since: float, *kinds: str) -> list[float]:
        """How long after a moment each device got its first answer. Fails the test where none comes."""
        found = self.await_that(lambda: all(d.first(since, *kinds) for d in self.devices), 60.0)
        assert found, [[t.kind for t in d.told][-6:] for d in self.devices]
        return [(d.first(since, *kinds) or 0.0) - since for d in self.devices]

    def end(self) -> None:
        """Stop everybody."""
        for device in self.devices:
            device.stop()
        _end(self.server)

    def broken_promises(self) -> list[str]:
        """After the end: updates that are lost or there twice, and whatever `verify` finds."""
        data, problems = self.folder / "data", []
        logged = [record["update_id"] for record in records_of(data, kind="update")]
        if len(logged) != len(set(logged)):
            problems.append("an update is in the log twice")
        for device in self.devices:
            told = device.pushed()
            if lost := set(told) - set(logged):
                problems.append(f"acknowledged and lost: {lost}")
            if len(told) != len(set(told)):
                problems.append("an update was acknowledged twice as if it were new")
            mine = [u for u in logged if u in told]
            waiting = Outbox(device.folder / "outbox").pending()
            if len(waiting) > 1:
                problems.append(f"{len(waiting)} updates are in an outbox, {len(mine)} were acknowledged")
        found = verify(data)
        if found.version != len(logged):
            problems.append(f"{len(logged)} updates are in the log, {found.version} were applied")
        return [*problems, *found.problems]


@contextmanager
def lab(folder: Path, devices: int, app: str = "synthetic", mbit: float = 0.0) -> Iterator[Lab]:
    """A server that serves, and devices at work; ended at the end. Skips the test without namespaces."""
    trainer = trainer_for(load_app(app, ""))
    write_manifest(folder / "model", app, trainer.initial(0), trainer.spec.groups)
    (folder / "run.toml").write_text(CONFIG.format(address=ADDRESS))
    arguments = [
        str(folder / "run.toml"),
        "--model",
        str(folder / "model"),
        "--data-dir",
        str(folder / "data"),
    ]
    command = [*COMMAND, "server", *arguments, "--insecure", "--json"]
    with Link() as link:
        if mbit:
            link.slow_down(mbit)
        with (folder / "server.log").open("wb") as log:
            server = _start(link.server, command, log)
        made = Lab(link, folder, server)
        try:
            assert server.stdout is not None
            assert "serving" in server.stdout.readline(), (folder / "server.log").read_text()
            made.devices += [DeviceProcess(link, app, folder, number) for number in range(devices)]
            at_work = made.await_that(lambda: all(d.pushed() for d in made.devices), START_S)
            assert at_work, [path.read_text()[-500:] for path in sorted(folder.glob("device-*.log"))]
            yield made
        finally:
            made.end()
            if server.stdout is not None:
                server.stdout.close()


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command!r} does not work here: {done.stderr.strip()}")


def _start(namespace: str, command: list[str], log: Any) -> subprocess.Popen[str]:
    inside = ["ip", "netns", "exec", namespace, *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(600)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
