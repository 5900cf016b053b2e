"""A server in a process of its own, which can be killed and started again on the same port and data."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from crash_server import ADMIN
from grpc_health.v1 import health_pb2, health_pb2_grpc
from left import at_the_end
from nursery import COMMAND, Process
from ports import free_port
from wire import QUICK

SCRIPT = Path(__file__).with_name("crash_server.py")
SERVING = health_pb2.HealthCheckResponse.SERVING
SERVING_S = 600.0  # a hung server fails the test by itself


@dataclass(frozen=True)
class Plan:
    """How hard to try."""

    kills: int = 6
    updates: int = 600
    writers: int = 8
    seed: int = 0
    database: str = ""
    inline_bytes_max: int = 256 * 1024
    broken: bool = False
    compressed: bool = False
    units: bool = False
    mixing: bool = False  # of whole models, of which devices fetch those that they start from
    phases: bool = False
    standby: bool = False
    private: bool = False
    averaged: bool = False  # by a schedule-free optimiser
    remembering: bool = False  # of every device, on the disk
    stream: bool = False  # devices speak over streams
    blake3: bool = False  # every other device names its updates by that
    saving: bool = False  # a snapshot of every twentieth version
    keeping: bool = False  # of a few versions alone: the log drops what is older
    flaw: str = ""  # "unlogged" or "unsynced": see crash_server.py
    # Where the server kills itself, in this order, each time on the n-th occasion: then `kills` is of no use.
    failpoints: tuple[str, ...] = ()
    nth: int = 3


class NotServing(Exception):
    """A server did not come up."""


class ServerProcess:
    """A server that can be killed and started again on the same port and data. It ends with its test."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        limits: Mapping[str, float] | None = None,
        launcher: Sequence[str] = (),
        data_dir: Path | None = None,
    ) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.data_dir = data_dir or folder / "data"
        # A launcher starts an interpreter, and becomes the server.
        self._launcher = [*launcher, sys.executable] if launcher else []
        self._program, self._enter = [str(SCRIPT)], list[str]()
        self._log = folder / "server.log"
        arguments = [folder / "model", self.data_dir, plan.database, self.address, plan.inline_bytes_max]
        self._arguments = [
            *map(str, arguments),
            *["broken"][: plan.broken],
            *["compressed"][: plan.compressed],
            *["units"][: plan.units],
            *["mixing"][: plan.mixing],
            *["phases"][: plan.phases],
            *["private"][: plan.private],
            *["averaged"][: plan.averaged],
            *["remembering"][: plan.remembering],
            *["blake3"][: plan.blake3],
            *["standby"][: plan.standby],
            *["saving"][: plan.saving],
            *["keeping"][: plan.keeping],
            *[plan.flaw][: bool(plan.flaw)],
            *([json.dumps(dict(limits))] if limits else []),
        ]
        self._process: subprocess.Popen[bytes] | Process | None = None
        at_the_end(self._end)

    def start(self, failpoint: str = "") -> float:
        """Start, and wait for health to say SERVING; returns the seconds it took."""
        began = time.monotonic()
        self.launch(failpoint)
        self.await_health(SERVING)
        return time.monotonic() - began

    def launch(self, failpoint: str = "") -> None:
        """Start."""
        words = [*self._program, *self._arguments, *[failpoint][: bool(failpoint)]]
        with self._log.open("ab") as log:
            if self._launcher:
                self._process = subprocess.Popen([*self._launcher, *words], stdout=log, stderr=log)
            else:
                self._process = Process(*words, stdout=log, stderr=log, enter=self._enter)

    def await_health(self, status: int) -> None:
        """Wait until health says this. Raises `NotServing`, at once where the server dies meanwhile."""
        assert self._process is not None
        began = time.monotonic()
        with grpc.insecure_channel(self.address, options=QUICK) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() - began < SERVING_S and self._process.poll() is None:
                asked = stub.Check.future(health_pb2.HealthCheckRequest(), timeout=30.0, wait_for_ready=True)
                while not asked.done() and self._process.poll() is None:
                    time.sleep(0.02)
                if not asked.done():
                    asked.cancel()
                elif asked.code() is grpc.StatusCode.OK and asked.result().status == status:
                    return
                time.sleep(0.02)
        raise NotServing(f"the server does not serve again; its log ends:\n{self.log_tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Any signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self, within_s: float) -> int:
        """The exit code, which comes within this time. Raises `subprocess.TimeoutExpired`."""
        assert self._process is not None
        return self._process.wait(within_s)

    @property
    def admin_address(self) -> str:
        """Where operators call, of the server that serves."""
        return self.data_dir.with_name(ADMIN).read_text()

    def kill(self) -> None:
        """SIGKILL: no handler, no flush, nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def died(self, within_s: float) -> bool:
        """Whether it is killed, by itself, within this time."""
        assert self._process is not None
        try:
            return self._process.wait(within_s) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def drain(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(SERVING_S)

    def log(self) -> str:
        """All that the server wrote."""
        return self._log.read_text(errors="replace")

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        return "\n".join(self.log().splitlines()[-30:])


class ConfiguredServer(ServerProcess):
    """`anabranch server` with these tables, besides its addresses."""

    def __init__(self, folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(folder, Plan())
        server = {**tables.get("server", {}), "address": self.address, "admin_address": "127.0.0.1:0"}
        config = folder / "config.json"
        config.write_text(json.dumps({**tables, "server": server}), encoding="utf-8")
        self._program = [COMMAND, "server"]
        self._arguments = [str(config), "--model", str(folder / "model"), "--data-dir", str(self.data_dir)]
