"""A device that works through its share of updates, whatever becomes of its server, and keeps the books."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import numpy as np
from left import at_the_end
from streams import StreamDevice
from wire import QUICK, Device

from anabranch.compress.downloads import apply_download
from anabranch.compress.registry import STAGES
from anabranch.core.model.params import Indices, ParamSpec, Vector
from anabranch.core.model.submodels import Submodel, UnitMap
from anabranch.core.model.updates import Reason
from anabranch.protos.v1 import devices_pb2 as devices

VALUES = 300
RESENDS = 0.1
# What ends a call when a server dies, hangs, or stops at once.
PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


@dataclass(frozen=True, eq=False)
class Applied:
    """An acknowledged update, and the version that came of it.

    Of a part of the model: where that is. Of a model that is mixed: what the device started from there.
    """

    version: int
    delta: Vector
    where: Indices | None = None
    base: Vector | None = None


class Writer(threading.Thread):
    """A device that works through its share of updates, whatever happens to the server."""

    passing: ClassVar[tuple[grpc.StatusCode, ...]] = PASSING

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
        self.abandoned = self.blake3 = self.mixes = False
        at_the_end(self._let_go)  # else it would ask for ever, of a server that a failed test has left

    def run(self) -> None:
        """Push until the share is acknowledged."""
        try:
            with self.device() as device:
                device.blake3 = self.blake3
                self._insist(device.enrol)
                while len(self.acknowledged) < self._share:
                    self._one(device)
        except Exception as error:  # noqa: BLE001 - a thread's error must not be lost
            self.problems.append(f"{self._client_id}: {error!r}")

    @contextmanager
    def device(self) -> Iterator[Device]:
        """How it speaks to the server."""
        with grpc.insecure_channel(self._address, options=QUICK) as channel:
            yield Device(channel, self._spec, self._client_id, STAGES)

    def _let_go(self) -> None:
        self.abandoned = True
        self.enough()

    def turn(self) -> None:
        """A call has failed and will be repeated."""

    def enough(self) -> None:
        """End with the update at hand."""
        self._share = 0

    def _one(self, device: Device) -> None:
        task_id, update_id = self._id(), self._id()
        answer = self._insist(lambda: device.ask(task_id))
        if not answer.HasField("task"):
            self._look_into(answer.refusal, device)
            return
        part = device.submodel(answer.task)
        base = None if part is None and not self.mixes else self._base(device, answer.task, part)
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

    def _look_into(self, refusal: devices.Refusal, device: Device) -> None:
        """A server that has lost an enrolment would refuse this device for ever."""
        if refusal.reason == Reason.UNKNOWN_CLIENT:
            self.problems.append(f"the acknowledged enrolment of {self._client_id} is lost")
            self._insist(device.enrol)
        self._pause(1)

    def _base(self, device: Device, task: devices.Task, part: Submodel | None) -> Vector | None:
        """What the device starts from, on its part if it has one; meanwhile the task must stay what it is."""
        assert part is None or isinstance(part, UnitMap)
        wanted = {"version": task.base_version, "codecs": device.codecs}
        wanted |= {} if part is None else {"submodel": task.submodel}
        got = self._insist(lambda: device.fetch(**wanted))
        again = self._insist(lambda: device.ask(task.task_id)).task
        if got is None or (again.base_version, again.submodel) != (task.base_version, task.submodel):
            self.problems.append(f"task {task.task_id} is of another part or model than it was granted for")
            return None
        header, data = got
        if part is None:
            return apply_download(self._spec, header.part.encoding.codec, data, None, None)[0]
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
        tries = 0
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                if error.code() not in self.passing:
                    raise
                if self.abandoned:
                    raise
                self.retries += 1
                self.turn()
                self._pause(tries := tries + 1)

    def _pause(self, tries: int) -> None:
        """Before it asks again: a server that is away for long is asked more rarely, as asking is work."""
        time.sleep(self._random.uniform(0.01, 0.05) * min(tries, 10))

    def _id(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))


class StreamWriter(Writer):
    """One whose requests go over a stream."""

    @contextmanager
    def device(self) -> Iterator[Device]:
        """How it speaks to the server."""
        with grpc.insecure_channel(self._address, options=QUICK) as channel:
            device = StreamDevice(channel, self._spec, self._client_id, STAGES)
            try:
                yield device
            finally:
                device.close()
