"""Hostile devices, one class for each way; they speak the protocol well, and none does its part.

They run in an event loop of their own, as light as the honest ones (`light_devices.py`), and honour no window
that they are told. `tally` has what came back: refusals' reasons, verdicts, statuses.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import numpy as np
from grpc import aio

from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from benchmarks.light_devices import Device, Heard, Payload, connected

PATIENCE_S = 1.0  # before it asks again, whatever it was told


class Hostile(Device):
    """Does its deed, rests for `pace_s`, and does it again."""

    pace_s: ClassVar[float] = 0.0

    def __init__(self, stub: Any, name: str, payload: Payload, values: int) -> None:
        super().__init__(stub, name, Heard(), payload)
        self.values = values
        self.tally: Counter[str] = Counter()
        self.session, self._task = str(uuid.uuid4()), devices.Task()

    async def _deed(self) -> None:
        """Once."""
        raise NotImplementedError

    async def harass(self, done_once: Callable[[], object]) -> None:
        """Until it is cancelled."""
        await self.enrol()
        await self._deed()
        done_once()
        while True:
            await asyncio.sleep(self.pace_s)
            await self._deed()

    async def heard_of(self, call: Awaitable[Any]) -> Any:
        """The answer, or None; either is counted."""
        try:
            answer = await call
        except aio.AioRpcError as error:
            self.tally[error.code().name] += 1
            return None
        self.tally[_said(answer)] += 1
        return answer

    async def task(self, fresh: bool = True) -> devices.Task:
        """A task of its own, however long it takes; not `fresh`: the last one, while there is one."""
        while fresh or not self._task.task_id:
            answer = await self.heard_of(self.stub.AskTask(self.asking(session=self.session)))
            if answer is not None and answer.HasField("task"):
                self._task.CopyFrom(answer.task)
                break
            await asyncio.sleep(PATIENCE_S)
        return self._task

    async def send(self, header: devices.UpdateHeader, payload: Payload | None = None) -> Any:
        """Push, and the answer or None."""
        return await self.heard_of(self.push(header, payload or self.payload))


class Crashing(Hostile):
    """Asks, crashes, is started again from the same folder and asks; it never pushes."""

    pace_s = 4.0

    async def _deed(self) -> None:
        before, self.session = self.session, str(uuid.uuid4())
        await self.heard_of(self.stub.AskTask(self.asking(session=self.session, succeeds=before)))


class Holding(Hostile):
    """Has a task, and heartbeats for ever that tell of progress."""

    pace_s = 2.0
    at_once: ClassVar[int] = 1
    progress = 0.0

    async def _deed(self) -> None:
        task = await self.task(fresh=False)
        await asyncio.gather(*(self._beat(task) for _ in range(self.at_once)))

    async def _beat(self, task: devices.Task) -> None:
        self.progress += 1.0
        beat = devices.HeartbeatRequest(
            client_id=self.name, task_id=task.task_id, progress=self.progress, session=self.session
        )
        answer = await self.heard_of(self.stub.Heartbeat(beat))
        if answer is not None and any(n.kind == devices.NOTICE_KIND_CANCEL for n in answer.notices):
            self._task.Clear()


class Cutting(Hostile):
    """Begins large uploads under one id after the other, and cuts each off half way."""

    pace_s = 1.0

    async def _deed(self) -> None:
        task = await self.task(fresh=False)
        whole = Payload(bytes(4 * self.values))
        call: Any = self.stub.PushUpdate()
        try:
            await call.write(devices.PushUpdateRequest(header=self.header(task, whole)))
            for chunk in whole.chunks(until=0.5):
                await call.write(chunk)
            call.cancel()
            self.tally["cut"] += 1
        except (aio.AioRpcError, asyncio.InvalidStateError):
            self.tally[(await call.code()).name] += 1
            self._task.Clear()


class Alternating(Hostile):
    """Enrols again and again, each time with other capabilities."""

    pace_s = 0.05
    turn = 0

    async def _deed(self) -> None:
        self.turn += 1
        await self.heard_of(self.stub.Enrol(self.enrolment(memory_bytes=1 << (20 + self.turn % 2))))


class Copied(Hostile):
    """Two processes from two copies of one folder, both of which work."""

    async def _deed(self) -> None:
        await asyncio.gather(*(self._live(str(uuid.uuid4())) for _ in range(2)))

    async def _live(self, session: str) -> None:
        for _ in range(20):
            answer = await self.heard_of(self.stub.AskTask(self.asking(session=session)))
            if answer is None or not answer.HasField("task"):
                await asyncio.sleep(PATIENCE_S)
                continue
            await asyncio.sleep(PATIENCE_S)
            await self.send(self.header(answer.task))
            return


class Poisoning(Hostile):
    """Sends what is no number."""

    async def _deed(self) -> None:
        payload = Payload(np.full(self.values, np.nan, np.float32).tobytes())
        task = await self.task()
        await self.send(self.header(task, payload), payload)


class Forging(Hostile):
    """Sends an update as it should, and then other bytes under its id."""

    pace_s = 0.2

    async def _deed(self) -> None:
        other = Payload(bytes(4 * self.values))
        header = self.header(await self.task())
        await self.send(header)
        for _ in range(5):
            fields = {"update_id": header.update_id, "task_id": header.task_id}
            await self.send(self.header(self._task, other, **fields), other)


class Inventing(Hostile):
    """Names codecs that there are not: where it enrols, fetches and pushes."""

    pace_s = 0.2

    async def _deed(self) -> None:
        names = [f"stage{n}" for n in range(64)]
        await self.heard_of(self.stub.Enrol(self.enrolment(codecs=names)))
        fetch = devices.FetchModelRequest(
            client_id=self.name, manifest_sha256=self.manifest, codecs=[*names, "rot(13"]
        )
        await self.heard_of(self.stub.FetchModel(fetch).read())
        payload = Payload(self.payload.data, "rot13|zip")
        await self.send(self.header(await self.task(fresh=False), payload), payload)


class FloodingAsks(Hostile):
    """Asks as fast as it is answered, with many calls under way."""

    at_once: ClassVar[int] = 8

    async def _deed(self) -> None:
        calls = (self.stub.AskTask(self.asking(session=self.session)) for _ in range(self.at_once))
        await asyncio.gather(*map(self.heard_of, calls))


class FloodingBeats(Holding):
    """Heartbeats as fast as they are answered, with many calls under way."""

    pace_s = 0.0
    at_once = 8


class Lying(Hostile):
    """Says that its update is of another base than its task: none, one to come, one of another history."""

    pace_s = 0.2

    async def _deed(self) -> None:
        for odd in ({"base_kind": model.BASE_KIND_UNSPECIFIED}, {"base_head": os.urandom(32)}):
            await self.send(self.header(await self.task(fresh=False), **odd))
        task = await self.task()
        await self.send(self.header(task, base_version=task.base_version + 1000))
        self._task.Clear()


KINDS: tuple[type[Hostile], ...] = (
    *(Crashing, Holding, Cutting, Alternating, Copied, Poisoning, Forging, Inventing),
    *(FloodingAsks, FloodingBeats, Lying),
)


def _said(answer: Any) -> str:
    """What an answer comes to, in a word."""
    match answer:
        case devices.AskTaskResponse():
            return "task" if answer.HasField("task") else str(answer.refusal.reason)
        case devices.PushUpdateResponse():
            return str(answer.decision.verdict or "duplicate")
        case devices.HeartbeatResponse():
            return "cancel" if answer.notices else "beat"
    return "OK"


async def harass(
    address: str,
    count: int,
    payload: Payload,
    values: int,
    ready: Callable[[], object],
    until: Awaitable[object],
) -> dict[str, Counter[str]]:
    """So many hostile devices, of each kind in turn, until then; what each kind heard.

    `ready` is called once each has done its deed.
    """
    async with connected(address, count) as stubs:
        fleet = [KINDS[n % len(KINDS)](stub, f"hostile-{n}", payload, values) for n, stub in enumerate(stubs)]
        first = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(device.harass(first.release)) for device in fleet]
        for _ in fleet:
            await first.acquire()
        ready()
        await until
        ended = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ended:
            raise RuntimeError("a hostile device gave up") from ended[0]
    told = {kind.__name__: Counter[str]() for kind in KINDS}
    for device in fleet:
        told[type(device).__name__].update(device.tally)
    return told
