"""Kill a server at random moments while writers push: what was acknowledged must count, exactly once.

Every delta has whole numbers, so the sum is exact in any order and one lost, doubled or invented
update shows in the final model. Where tasks are of sub-models, models are mixed instead: what was
acknowledged is then done again by hand, from what the devices were given, and must come to the same bits.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from wire import QUICK, Device

from anabranch.compress.downloads import apply_download
from anabranch.compress.registry import STAGES
from anabranch.core.journal import Record
from anabranch.core.params import Indices, ParamSpec, Vector, digest
from anabranch.core.submodels import Submodel, UnitMap
from anabranch.core.units import Member, UnitGroup
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.manifest import write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.verify import verify

SCRIPT = Path(__file__).with_name("crash_server.py")
VALUES = 300
ROWS = 15  # of the one tensor: what has a single dimension is too small for a chain
SERVING_S = 60.0  # a hung server fails the test by itself
RESENDS = 0.1
WITHIN_S = 30.0  # a failpoint is reached much sooner


@dataclass(frozen=True)
class Plan:
    """How hard to try."""

    kills: int = 20
    updates: int = 2_000
    writers: int = 8
    seed: int = 0
    database: str = ""
    inline_bytes_max: int = 256 * 1024
    broken: bool = False
    compressed: bool = False
    units: bool = False
    # Where the server kills itself, in this order, each time on the n-th occasion: then `kills` is of no use.
    failpoints: tuple[str, ...] = ()
    nth: int = 3


@dataclass(frozen=True, eq=False)
class Applied:
    """An acknowledged update, and the version that came of it.

    Of a part of the model: where that is, and what the device started from there.
    """

    version: int
    delta: Vector
    where: Indices | None = None
    base: Vector | None = None


@dataclass
class Outcome:
    """What happened. `problems` in words: empty when every promise was kept."""

    problems: list[str] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    acknowledged: int = 0
    resent: int = 0
    retries: int = 0


class NotServing(Exception):
    """A server did not come up."""


class ServerProcess:
    """A server that can be killed and started again on the same port and data."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        self.data_dir = folder / "data"
        self._log = folder / "server.log"
        arguments = [folder / "model", self.data_dir, plan.database, self.address, plan.inline_bytes_max]
        self._command = [
            sys.executable,
            str(SCRIPT),
            *map(str, arguments),
            *["broken"][: plan.broken],
            *["compressed"][: plan.compressed],
            *["units"][: plan.units],
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, failpoint: str = "") -> float:
        """Start, and wait for health to say SERVING; returns the seconds it took."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            command = [*self._command, *[failpoint][: bool(failpoint)]]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        with grpc.insecure_channel(self.address, options=QUICK) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() - began < SERVING_S and self._process.poll() is None:
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return time.monotonic() - began
        raise NotServing(f"the server does not serve again; its log ends:\n{self.log_tail()}")

    def kill(self) -> None:
        """SIGKILL: no handler, no flush, nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

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

    def log_tail(self) -> str:
        """The last lines that the server wrote."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])


class Writer(threading.Thread):
    """A device that works through its share of updates, whatever happens to the server."""

    def __init__(self, number: int, share: int, address: str, spec: ParamSpec, seed: int) -> None:
        super().__init__(daemon=True)
        self._share, self._address = share, address
        self._random = random.Random(f"{seed} writer {number}")
        self._numbers = np.random.default_rng([seed, number])
        self._client_id, self._spec = f"writer-{number}", spec
        self.applied: list[Applied] = []
        self.acknowledged: list[str] = []
        self.resent = self.retries = 0
        self.problems: list[str] = []
        self.abandoned = False

    def run(self) -> None:
        """Push until the share is acknowledged."""
        try:
            with grpc.insecure_channel(self._address, options=QUICK) as channel:
                device = Device(channel, self._spec, self._client_id, STAGES)
                self._insist(device.enrol)
                while len(self.acknowledged) < self._share:
                    self._one(device)
        except Exception as error:  # noqa: BLE001 - a thread's error must not be lost
            self.problems.append(f"{self._client_id}: {error!r}")

    def enough(self) -> None:
        """End with the update at hand."""
        self._share = 0

    def _one(self, device: Device) -> None:
        task_id, update_id = self._id(), self._id()
        answer = self._insist(lambda: device.ask(task_id))
        if not answer.HasField("task"):
            return
        part = device.submodel(answer.task)
        base = None if part is None else self._base(device, answer.task, part)
        size, where = (VALUES, None) if part is None else (part.size, part.indices)
        delta = self._numbers.integers(-8, 9, size).astype(np.float32)
        response = self._insist(lambda: device.push(answer.task, delta, update_id))
        if response is None:
            self.problems.append(f"the granted task {task_id} is not known any more")
            return
        if response.decision.verdict != "published":
            self.problems.append(f"update {update_id} was not applied: {response.decision}")
            return
        self.applied.append(Applied(response.version, delta, where, base))
        self.acknowledged.append(update_id)
        if self._random.random() < RESENDS:
            self._resend(device, answer.task, delta, update_id, response)

    def _base(self, device: Device, task: devices.Task, part: Submodel) -> Vector | None:
        """What the device starts from on the part; meanwhile the task must stay what it is."""
        assert isinstance(part, UnitMap)
        version, codecs = task.base_version, device.codecs
        got = self._insist(lambda: device.fetch(version=version, submodel=task.submodel, codecs=codecs))
        if got is None or self._insist(lambda: device.ask(task.task_id)).task.submodel != task.submodel:
            self.problems.append(f"task {task.task_id} is of another part or model than it was granted for")
            return None
        header, data = got
        spec = part.small if header.part_only else part.spec
        vector, _ = apply_download(spec, header.part.encoding.codec, data, None, None)
        return vector if header.part_only else vector[part.indices]

    def _resend(
        self,
        device: Device,
        task: devices.Task,
        delta: Vector,
        update_id: str,
        before: devices.PushUpdateResponse,
    ) -> None:
        self.resent += 1
        again = self._insist(lambda: device.push(task, delta, update_id))
        same = again is not None and (again.decision, again.version) == (before.decision, before.version)
        if not same or again.status != devices.PUSH_STATUS_DUPLICATE:
            self.problems.append(f"update {update_id} was answered otherwise when it was sent again")

    def _insist(self, call: Callable[[], Any]) -> Any:
        """Repeat a call until the server answers; None if the task is unknown."""
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                if self.abandoned:
                    raise
                self.retries += 1
                time.sleep(self._random.uniform(0.01, 0.05))

    def _id(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))


def write_model(folder: Path, first: Vector, plan: Plan) -> ParamSpec:
    """What the server starts from."""
    groups = (UnitGroup("rows", ROWS, (Member("w", 0),)),) if plan.units else ()
    return write_manifest(folder / "model", "crash", {"w": first.reshape(ROWS, -1)}, groups).spec


def run(folder: Path, plan: Plan) -> Outcome:
    """Serve, write, kill and restart as planned; then check every promise."""
    first = np.random.default_rng(plan.seed).integers(-100, 101, VALUES).astype(np.float32)
    spec = write_model(folder, first, plan)
    server, outcome = ServerProcess(folder, plan), Outcome()
    server.start()
    shares = [len(range(n, plan.updates, plan.writers)) for n in range(plan.writers)]
    writers = [Writer(n, share, server.address, spec, plan.seed) for n, share in enumerate(shares)]
    for writer in writers:
        writer.start()
    try:
        if plan.failpoints:
            _kill_at_failpoints(server, writers, plan, outcome)
        else:
            _kill_at_random(server, writers, plan, outcome)
    except NotServing as error:
        outcome.problems.append(str(error))
        _abandon(writers)
        return outcome
    for writer in writers:
        writer.join()
        outcome.problems += writer.problems
    outcome.acknowledged = sum(len(w.acknowledged) for w in writers)
    outcome.resent, outcome.retries = sum(w.resent for w in writers), sum(w.retries for w in writers)
    if (code := server.drain()) != 0:
        outcome.problems.append(f"the drain ended with exit code {code}:\n{server.log_tail()}")
    applied = [update for w in writers for update in w.applied]
    expected = _mixed(first, applied) if plan.units else _summed(first, applied)
    outcome.problems += _broken_promises(server.data_dir, plan, writers, expected)
    return outcome


def _summed(first: Vector, applied: list[Applied]) -> Vector:
    """The model that adds deltas up."""
    return first + np.sum([update.delta for update in applied], axis=0, dtype=np.float32)


def _mixed(first: Vector, applied: list[Applied]) -> Vector:
    """AsyncDrop's model, by hand: on its part half of what is there, half of what the device made of it."""
    half, model = np.float32(0.5), first.copy()
    for update in sorted(applied, key=lambda update: update.version):
        if update.where is not None and update.base is not None:
            model[update.where] = half * model[update.where] + half * update.base + half * update.delta
    return model


def _abandon(writers: list[Writer]) -> None:
    """Let writers go whose server is gone."""
    for writer in writers:
        writer.abandoned = True
    for writer in writers:
        writer.join()


def _kill_at_random(server: ServerProcess, writers: list[Writer], plan: Plan, outcome: Outcome) -> None:
    chance = random.Random(f"{plan.seed} kills")
    moments = sorted(chance.sample(range(plan.updates * 19 // 20), plan.kills))
    for moment in moments:
        while sum(len(w.acknowledged) for w in writers) < moment and any(w.is_alive() for w in writers):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        server.kill()
        outcome.restarts_s.append(server.start())


def _kill_at_failpoints(server: ServerProcess, writers: list[Writer], plan: Plan, outcome: Outcome) -> None:
    """Arm one failpoint after the other. A server may die of it before it serves: that is one life less."""
    server.kill()
    for name in plan.failpoints:
        try:
            server.start(f"{name}:{plan.nth}")
        except NotServing:
            if not server.died(0.0):
                raise
        if not server.died(WITHIN_S):
            outcome.problems.append(f"the failpoint {name} was not reached")
            server.kill()
    outcome.restarts_s.append(server.start())
    for writer in writers:
        writer.enough()


def _broken_promises(data_dir: Path, plan: Plan, writers: list[Writer], expected: Vector) -> list[str]:
    """Lost, doubled or altered updates, and whatever `verify` finds."""
    found = verify(data_dir, plan.database)
    problems = list(found.problems)
    if found.model_sha256 != digest(expected):
        problems.append("the model is not what the acknowledged updates come to")
    logged = [r["update_id"] for r in _updates(data_dir, plan.database)]
    if doubled := len(logged) - len(set(logged)):
        problems.append(f"{doubled} updates are in the log twice")
    acknowledged = {update_id for w in writers for update_id in w.acknowledged}
    if lost := acknowledged - set(logged):
        problems.append(f"{len(lost)} acknowledged updates are lost")
    if found.version != len(acknowledged):
        problems.append(f"{len(acknowledged)} updates were acknowledged, {found.version} were applied")
    return problems


def _updates(data_dir: Path, database: str) -> list[Record]:
    store = open_store(database, data_dir)
    try:
        return [record for _, record in store.records() if record["kind"] == "update"]
    finally:
        store.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
