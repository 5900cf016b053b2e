"""A federation of real processes under seeded trouble, for as long as one likes.

Nothing hangs on the machine's speed: after each trouble the soak waits until every device has had answers
again, and whatever comes to a halt is a problem.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from flaky_proxy import FlakyProxy
from guarded import issued
from nursery import COMMAND, run
from server_process import NotServing
from soak_books import Oracle
from soak_device import SHAPE
from soak_fleet import STUCK_S, DeviceProcess, SoakServer

from anabranch.client.operator import open_operator, operator_wallet
from anabranch.core.errors import Unavailable
from anabranch.core.limits import MIB
from anabranch.identity.authority import DAY_S, Authority
from anabranch.identity.certificates import Kind
from anabranch.server.manifest import write_manifest
from anabranch.server.verify import VerifyReport, verify

TROUBLES = (
    *("kill_server", "kill_devices", "cut", "clock", "set") * 2,
    *("copy_folder", "fill_disk", "back_up", "restore"),
)
DISK = "64m"
SKEW_S = 240.0  # what clocks may differ by without a word; beyond it nobody is let in
STEPS_S = (3 * DAY_S, 3600.0, SKEW_S)
CUT_BYTES = 40_000
SETTINGS: dict[str, tuple[float, ...]] = {
    "client.steps": (1, 2, 4),
    "server.lease_s": (5, 10, 20),
    "server.retry_after_max_s": (0.2, 0.5, 1),
    "robust.tasks_per_minute": (600, 1200, 6000),
}


@dataclass(frozen=True)
class Backup:
    """A copy of a sound data folder, the updates that are applied in it, and the settings in force."""

    folder: Path
    applied: frozenset[str]
    settings: dict[str, float]


@dataclass(frozen=True)
class Sample:
    """After a trouble and the progress that followed: memory of the server, and what its disk has."""

    at_s: float
    acknowledged: int
    restart_s: float
    started_bytes: int
    steady_bytes: int
    disk_bytes: int


@dataclass
class Soak:
    """A server, its devices, and the misfortunes that befall them.

    After `begin`, `trouble` makes the next one of the seed, and `finish` ends it all and checks the books.
    AssertionError for the first promise that is not kept. `disk` is the server's, as everybody sees it, and
    `enter` puts a program on it; devices reach the server by the proxy. `tell` hears the figures as lines.
    """

    folder: Path
    enter: Sequence[str]
    disk: Path
    seed: int
    devices: int = 8
    tell: Callable[[str], None] = print
    oracle: Oracle = field(default_factory=Oracle)
    samples: list[Sample] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    told: int = 0  # devices that heard of a restore, counted each time
    report: VerifyReport | None = None  # the last

    def __post_init__(self) -> None:
        self._chance, self._began = random.Random(self.seed), time.monotonic()
        self._server = SoakServer(self.folder, self.enter, self.disk / "data")
        self._fleet: list[DeviceProcess] = []
        self._copied: DeviceProcess | None = None
        self._copy: DeviceProcess | None = None
        self._backup: Backup | None = None
        self._settings: dict[str, float] = {}
        self._restart_s = self._stopped_at = 0.0
        self._started_bytes = 0

    def begin(self, proxy: FlakyProxy) -> None:
        """Found the federation, and start everybody."""
        self._proxy = proxy
        write_manifest(self.folder / "model", "soak", {"w": np.zeros(SHAPE, np.float32)})
        with Authority.create(self.folder / "ca") as authority:
            tokens = [authority.invite(f"device-{number}", DAY_S) for number in range(self.devices)]
            issued(authority, Kind.OPERATOR, "alice", self.folder / "operator")
            sha256 = authority.sha256
        self._start_server()
        for number, token in enumerate(tokens):
            joining = {"join": self._server.join, "token": token, "ca_sha256": sha256}
            self._fleet.append(DeviceProcess(self.folder / f"device-{number}", proxy.address, joining))
            self._fleet[-1].start()
        self._await_answers()
        self._sample("begun")

    @property
    def address(self) -> str:
        """The server's own, which the proxy leads to."""
        return self._server.address

    def trouble(self, name: str = "") -> None:
        """The one that is named, or the next of the seed; then everybody works again."""
        name = name or self._chance.choice(TROUBLES)
        if name in ("copy_folder", "restore") or self._chance.random() < 0.3:
            self._end_copy()
        detail = getattr(self, f"_{name}")()
        self.done[name] += 1
        self._await_answers()
        self._check_settings()
        self._sample(f"{name} {detail}")

    def finish(self) -> None:
        """Let every device send what it has, end them and the server, and check the books a last time."""
        self._server.set_clock(0.0)
        self._end_copy()
        for device in self._fleet:
            device.kill()
            device.start(tasks_max=device.results() + 1)
        ended = [device for device in self._fleet if device.ended()]
        assert not ended, [device.log_tail() for device in ended]
        self._checked_copy()
        self._sample("finished")

    def kill(self) -> None:
        """Whatever it does."""
        self._end_copy()
        for device in self._fleet:
            device.kill()
        if self._server.lives:
            self._server.kill()

    # --- the troubles -------------------------------------------------------------------------------

    def _kill_server(self) -> str:
        self._stop_server()
        if again := self._chance.random() < 0.2:  # it dies as it starts, too
            self._server.launch()
            time.sleep(self._chance.uniform(0.0, 2.0))
            self._server.kill()
        self._start_server()
        return "twice" if again else ""

    def _kill_devices(self) -> str:
        some = self._chance.sample(self._fleet, self._chance.randint(1, len(self._fleet)))
        for device in some:
            device.kill()
        for device in some:
            device.start()
        return str(len(some))

    def _cut(self) -> str:
        bounds = [self._chance.randrange(CUT_BYTES) for _ in range(self._chance.randint(0, 20))]
        self._proxy.cut(bounds)
        return f"all connections, and {len(bounds)} more"

    def _clock(self) -> str:
        ahead_s = self._chance.choice(STEPS_S) * self._chance.uniform(-1.0, 1.0)
        if dead := self._chance.random() < 0.5:
            self._stop_server()
        self._server.set_clock(ahead_s)
        if dead:
            self._start_server()
        if abs(ahead_s) > SKEW_S:
            self._await_news()
            self._server.set_clock(0.0)
        return f"by {ahead_s:.0f} s, {'dead' if dead else 'alive'}"

    def _copy_folder(self) -> str:
        device = self._chance.choice(self._fleet)
        device.kill()
        self._copied = device
        self._copy = device.copied(self.folder / f"copy-{self.done['copy_folder']}")
        for process in self._chance.sample([device, self._copy], 2):
            process.start()
        return device.state_dir.name

    def _fill_disk(self) -> str:
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file:
            for piece in (MIB, 1024, 1):
                try:
                    while file.write(bytes(piece)):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
            size = file.tell()
        self._await_news(server=False)
        said = "" if self._server.lives else ", the server ended"
        if self._chance.random() < 0.5:
            self._stop_server()
            try:
                self._start_server()
            except NotServing as error:
                if "StoreFull" not in str(error):
                    raise
                said += ", no start on it"
        filler.unlink()
        if not self._server.lives:
            self._start_server()
        return f"{size / MIB:.0f} MiB{said}"

    def _set(self) -> str:
        path = self._chance.choice(list(SETTINGS))
        value = self._chance.choice(SETTINGS[path])
        words = ("--admin", self._server.admin, "--identity", str(self.folder / "operator"))
        self._await("a setting is taken", lambda: self._admin("set", f"{path}={value}", *words) == 0)
        self._settings[path] = value
        return f"{path}={value}"

    def _back_up(self) -> str:
        self._backup = self._checked_copy()
        self._start_server()
        return f"of version {len(self._backup.applied)}"

    def _restore(self) -> str:
        if self._backup is None:
            return self._back_up()
        backup, version = self._backup, len(self._backup.applied)
        self._stop_server()
        # Whatever was answered is noted once a device has found that nobody is there.
        self._await(
            "devices miss it", lambda: min(d.failed_at for d in self._fleet) > self._stopped_at, False
        )
        lost = self.oracle.go_back(backup.applied)
        self._settings = dict(backup.settings)
        shutil.rmtree(self._server.data_dir)
        shutil.copytree(backup.folder, self._server.data_dir)
        data_dir, authority = self._server.seen_data_dir, self.folder / "ca"
        assert self._admin("attest-restore", "--data-dir", str(data_dir), "--folder", str(authority)) == 0
        astray = [(device, device.discarded) for device in self._fleet if device.newest_base > version]
        for device in self._fleet:
            device.newest_base = 0
        self._start_server()
        self._await("devices discard what is lost", lambda: all(d.discarded > n for d, n in astray))
        self.told += len(astray)
        return f"version {version}, {lost} updates lost, {len(astray)} devices told"

    # --- steps --------------------------------------------------------------------------------------

    def _admin(self, *words: str) -> int:
        """The exit code of an operator's command; it is told if it is none of success."""
        done = run(COMMAND, "admin", *words, enter=self.enter)
        if done.returncode:
            self.tell(done.stderr)
        return done.returncode

    def _end_copy(self) -> None:
        if self._copy is not None:
            self._copy.kill()
            self._read()
            self._copy = None

    def _start_server(self) -> None:
        self._restart_s = self._server.start()
        self._started_bytes = self._resident_bytes()

    def _check_settings(self) -> None:
        """They stay what they were set to."""
        found: list[dict[str, float]] = []

        def look() -> bool:
            with (
                suppress(Unavailable),  # a call takes longer than calls may, where the machine is that busy
                open_operator(
                    self._server.admin, operator_wallet(self.folder / "operator"), False
                ) as operator,
            ):
                config = operator.status().config
                found.append({p: config[p.partition(".")[0]][p.partition(".")[2]] for p in self._settings})
            return bool(found)

        self._await("an operator has an answer", look)
        assert found == [self._settings]

    def _stop_server(self) -> None:
        """Kill it, unless it has ended."""
        self._server.kill()
        self._look_up()

    def _checked_copy(self) -> Backup:
        """End the server as one should, copy its data, and hold them to what the devices have noted."""
        assert self._server.drain() == 0, self._server.log_tail()
        self._look_up()
        folder = self.folder / "backup"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._server.data_dir, folder)
        self.report = verify(folder)
        problems = self.oracle.problems(self.report)
        assert problems == [], problems
        return Backup(folder, frozenset(self.oracle.applied), dict(self._settings))

    def _look_up(self) -> None:
        self._stopped_at = time.monotonic()
        self._read()
        self.oracle.look_up(self._server.data_dir)

    def _read(self) -> None:
        for device in [*self._fleet, *([self._copy] if self._copy else [])]:
            for note in device.news():
                self.oracle.take(note)

    def _await(self, what: str, met: Callable[[], bool], server: bool = True) -> None:
        """Until this is so. Meanwhile all devices live, and the server does, if it should."""
        until = time.monotonic() + STUCK_S
        while not met():
            self._read()
            for device in [*self._fleet, *([self._copy] if self._copy else [])]:
                assert device.lives, f"{device.state_dir} has ended: {device.log_tail()}"
            assert self._server.lives or not server, f"the server has ended: {self._server.log_tail()}"
            assert time.monotonic() < until, f"{what}: not in {STUCK_S} s\n{self._server.log_tail()}"
            time.sleep(0.05)

    def _await_answers(self) -> None:
        """A few more for each device, whichever of its processes has them."""

        def answers(device: DeviceProcess) -> int:
            twice = self._copy is not None and device is self._copied
            return device.answers + (self._copy.answers if self._copy is not None and twice else 0)

        targets = [(device, answers(device) + self._chance.randint(2, 20)) for device in self._fleet]
        self._await("every device has answers", lambda: all(answers(d) >= target for d, target in targets))

    def _await_news(self, server: bool = True) -> None:
        """Until each device was answered or not, whatever the answer."""
        since = time.monotonic()
        devices = self._fleet
        self._await(
            "every device hears", lambda: min(max(d.heard_at, d.failed_at) for d in devices) > since, server
        )

    def _resident_bytes(self) -> int:
        rss: int = psutil.Process(self._server.pid).memory_info().rss
        return rss

    def _sample(self, what: str) -> None:
        room = os.statvfs(self.disk)
        steady = self._resident_bytes() if self._server.lives else 0
        found = Sample(
            time.monotonic() - self._began,
            self.oracle.acknowledged,
            self._restart_s,
            self._started_bytes,
            steady,
            (room.f_blocks - room.f_bfree) * room.f_frsize,
        )
        self.samples.append(found)
        self.tell(
            f"{found.at_s:6.0f} s {found.acknowledged:7d} answers, version {len(self.oracle.applied):6d}, "
            f"disk {found.disk_bytes / MIB:5.1f} MiB, server {found.started_bytes / MIB:4.0f} to "
            f"{steady / MIB:4.0f} MiB, its start {found.restart_s:4.1f} s: {what}"
        )
