"""Two servers, one database: the leader is killed, paused and cut off while writers push."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from crash import broken_promises, expected_model, write_model
from crash_writer import VALUES, Writer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import SERVING, SERVING_S, NotServing, Plan, ServerProcess
from wire import QUICK, Device

from anabranch.compress.registry import STAGES
from anabranch.core.errors import LeadershipLost, outcome_of
from anabranch.core.model.params import Vector
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub

MANY = 1_000_000  # the writers stop when they are told to
AHEAD = 60  # updates that writers push without anybody waiting: some are under way when something happens
CALL_S = 3.0  # of a writer: a paused server takes calls and never answers
LOST = outcome_of(LeadershipLost("")).exit_code
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class RoamingWriter(Writer):
    """A device that knows several servers, and tries the next one when one fails it."""

    def __init__(
        self, number: int, addresses: list[str], spec: Any, seed: int, is_ahead: Callable[[], bool]
    ) -> None:
        super().__init__(number, MANY, addresses[0], spec, seed)
        self._addresses, self._at, self._is_ahead = addresses, number, is_ahead
        self._stubs: list[Any] = []
        self._device: Device | None = None

    @contextmanager
    def device(self) -> Iterator[Device]:
        """One device on a connection to each server."""
        with ExitStack() as stack:
            channels = [stack.enter_context(grpc.insecure_channel(a, options=QUICK)) for a in self._addresses]
            self._stubs = [_Impatient(DevicesStub(channel)) for channel in channels]
            self._device = Device(channels[0], self._spec, self._client_id, STAGES)
            self.turn()
            yield self._device

    def _one(self, device: Device) -> None:
        while self._share and self._is_ahead():
            self._pause(1)
        super()._one(device)

    def turn(self) -> None:
        """To the next server."""
        assert self._device is not None
        self._at += 1
        self._device.stub = self._stubs[self._at % len(self._stubs)]


class _Impatient:
    """A stub whose calls have a short deadline."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._stub, name)
        return lambda request, timeout: call(request, timeout=min(timeout, CALL_S))


@dataclass
class Federation:
    """Two servers on one database, each with a folder of its own, and the writers."""

    folder: Path
    database: str
    seed: int = 0
    databases: tuple[str, str] = ("", "")  # each server's way to the database, where that is not the same
    failpoint: str = ""  # of the first leader
    remembering: bool = False  # see `Plan`
    servers: list[ServerProcess] = field(default_factory=list)
    writers: list[RoamingWriter] = field(default_factory=list)
    takeovers_s: list[float] = field(default_factory=list)
    wanted: int = MANY  # updates that somebody waits for, or waited

    def start(self) -> None:
        """Both servers, the first as the leader; then the writers."""
        self._first: Vector = np.random.default_rng(self.seed).integers(-100, 101, VALUES).astype(np.float32)
        for name, database in zip(("one", "two"), self.databases, strict=True):
            plan = Plan(database=database or self.database, standby=True, remembering=self.remembering)
            spec = self._spec = write_model(self.folder / name, self._first, plan)
            server = ServerProcess(self.folder / name, plan)
            server.launch("" if self.servers else self.failpoint)
            server.await_health(NOT_SERVING if self.servers else SERVING)
            self.servers.append(server)
        addresses = [server.address for server in self.servers]
        for number in range(4):
            self.writers.append(RoamingWriter(number, addresses, spec, self.seed, self.is_ahead))
        for writer in self.writers:
            writer.start()

    @property
    def acknowledged(self) -> int:
        """Updates, so far."""
        return sum(len(writer.acknowledged) for writer in self.writers)

    def is_ahead(self) -> bool:
        """Whether there are more updates than anybody needs: each is work, in the end as well."""
        return self.acknowledged >= self.wanted + AHEAD

    def await_updates(self, more: int) -> None:
        """Until so many more are acknowledged. Raises `NotServing`."""
        self.wanted, deadline = self.acknowledged + more, time.monotonic() + SERVING_S
        while self.acknowledged < self.wanted:
            if time.monotonic() > deadline:
                raise NotServing("\n".join(server.log_tail() for server in self.servers))
            time.sleep(0.005)

    def leader(self) -> ServerProcess:
        """The one that serves."""
        (serving,) = [server for server in self.servers if health(server.address) == SERVING]
        return serving

    def other(self, server: ServerProcess) -> ServerProcess:
        """The one that is not this one."""
        return next(s for s in self.servers if s is not server)

    def hand_over(self, leader: ServerProcess, since: float) -> ServerProcess:
        """Wait for the other one to serve, and an update of its; notes how long that took."""
        other = self.other(leader)
        other.await_health(SERVING)
        self.await_updates(1)
        self.takeovers_s.append(time.monotonic() - since)
        return other

    def restart(self, server: ServerProcess) -> None:
        """Start one that has ended: it stands by."""
        server.launch()
        server.await_health(NOT_SERVING)

    def finish(self) -> list[str]:
        """Let the writers end, drain, and check every promise; returns what is broken, in words."""
        problems = []
        for writer in self.writers:
            writer.enough()
        for writer in self.writers:
            writer.join(SERVING_S)
            problems += [*writer.problems, *["a writer hangs"] * writer.is_alive()]
        for server in self.servers:
            try:
                if code := server.drain():
                    problems.append(f"a drain ended with exit code {code}:\n{server.log_tail()}")
            except subprocess.TimeoutExpired:
                server.kill()
                problems.append(f"a server does not drain:\n{server.log_tail()}")
        applied = [update for writer in self.writers for update in writer.applied]
        plan = Plan(database=self.database, remembering=self.remembering)
        data_dir = self.servers[0].data_dir
        expected = expected_model(data_dir, plan, self._spec, self._first, applied)
        return problems + broken_promises(data_dir, plan, self.writers, expected)

    def stop(self) -> None:
        """Whatever happened, leave no process."""
        for writer in self.writers:
            writer.abandoned = True
        for server in self.servers:
            server.signal(signal.SIGCONT)
            server.kill()


@contextmanager
def federation(folder: Path, database: str, **more: Any) -> Iterator[Federation]:
    """A federation that is stopped at the end."""
    made = Federation(folder, database, **more)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def health(address: str) -> int | None:
    """What a server says of itself; None if nobody is there."""
    with grpc.insecure_channel(address, options=QUICK) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=SERVING_S).status
        except grpc.RpcError:
            return None
    return status
