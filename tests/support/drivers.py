"""One run behind each driver, to be spoken to in the same words: what it answers, and what it logs.

Words are those of a device: an answer is what it is told, in a line of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from live_server import live_server
from memory_log import MemoryLog

from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.operator import OperatorClient
from anabranch.client.outbox import UpdateEntry
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.compress.downloads import apply_download
from anabranch.compress.layout import Layout
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core import events as ev
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.effects import Effect, Published, Refused, RolledBackTo
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import AnabranchError
from anabranch.core.journal import Record, line
from anabranch.core.model.params import ParamSpec, Vector, digest
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import Ask, Capability, Decision, LocalPlan, Task
from anabranch.host.build import Begin, Blueprint
from anabranch.host.journal import Replay
from anabranch.host.log import Log
from anabranch.host.rollback import Refolder
from anabranch.host.run import Advice
from anabranch.protos.convert import submodel_to_proto
from anabranch.reports.recorder import Recorder
from anabranch.server.store.factory import open_store
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.executors.base import LocalResult
from anabranch.simulation.server import DirectServer
from anabranch.simulation.storage import FinishedUpdate
from anabranch.simulation.versions import Offer, Versions
from anabranch.simulation.world import World
from anabranch.testing.federation import result_of

FIRST = {"w": np.zeros(8, np.float32)}
GROUPS = (UnitGroup("w", 8, (Member("w", 0),)),)
SPEC = ParamSpec.of(FIRST, GROUPS)
CAPABILITY = Capability(codecs=STAGES)
NOT_HEARD = "not heard"  # the answer to what cannot be said, or that nobody waits for


class Driver(Protocol):
    """A run and its devices. `value`: of each value of an update; `more`: bytes behind it."""

    def enrol(self, client_id: str, capability: Capability = CAPABILITY) -> None: ...
    def ask(self, client_id: str, task_id: str) -> str: ...
    def fetch(self, client_id: str, task_id: str) -> str: ...
    def push(
        self,
        client_id: str,
        task_id: str,
        update_id: str,
        value: float = 1.0,
        codec: str = "",
        more: bytes = b"",
    ) -> str: ...
    def beat(self, client_id: str, task_id: str, progress: float) -> str: ...
    def drop(self, client_id: str, task_id: str) -> None: ...
    def lapse(self, client_id: str, task_id: str) -> None: ...
    def order(self, make: Callable[[float], ev.Event]) -> None: ...
    def roll_back(self, to_version: int, without: str) -> str: ...
    def journal(self) -> Sequence[Record]: ...


def decided(decision: Decision) -> str:
    """What a device is told of its update."""
    return f"{decision.verdict} {decision.reason}".strip()


def asked(answer: Task | Refused) -> str:
    return f"refused {answer.reason}" if isinstance(answer, Refused) else f"of version {answer.base_version}"


def encoded(value: float, codec: str, submodel: Submodel | None = None) -> bytes:
    """An update of one value, or, where no codec takes it, its bytes as they are."""
    layout = Layout.of(SPEC, submodel)
    delta = np.full(layout.size, value, np.float32)
    return make_codec(codec).encode(delta, layout) if np.isfinite(value) else delta.tobytes()


def result(task: Task, update_id: str, value: float, codec: str, more: bytes = b"") -> UpdateEntry:
    """An update of one value."""
    payload = encoded(value, codec, task.submodel) + more
    values = SPEC.size if task.submodel is None else task.submodel.size
    part = submodel_to_proto(task.submodel)
    return result_of(task, SPEC, update_id, codec=codec, payload=payload, values=values, submodel=part)


def folded(event: ev.RolledBack, engine: Engine, begin: Begin, log: Log) -> ev.RolledBack:
    """A rollback with its state, for who has the whole log. Raises as `Refolder.folding` does."""
    at = {
        effect.version: seq
        for seq, _, effects in Replay(log, begin)
        for effect in effects
        if isinstance(effect, Published)
    }
    end = max((seq for seq, _ in log.records()), default=0)
    return Refolder(log, begin, published=at.get).folding(event, end, engine).finish(end + 1, event.now)


def left_out(effects: Sequence[Effect]) -> str:
    (done,) = (e for e in effects if isinstance(e, RolledBackTo))
    return f"version {done.version} without {done.left_out}"


class Tasks:
    """The tasks that were granted, by id. Of one that never was, what a device would make up."""

    def __init__(self) -> None:
        self._of: dict[str, Task] = {}
        self.held: dict[str, tuple[int, Vector]] = {}  # by client: the version that it has fetched last

    def ask(self, client_id: str, task_id: str) -> Ask:
        return Ask(client_id, task_id, holds_version=self.holds(client_id))

    def holds(self, client_id: str) -> int | None:
        return self.held[client_id][0] if client_id in self.held else None

    def begins(self, task: Task, vector: Vector) -> str:
        """What a task is of, and begins with."""
        self.held[task.client_id] = task.base_version, vector
        units = "all" if task.submodel is None else str(task.submodel.to_json())
        return f"{units} of {digest(vector)}"

    def keep(self, answer: Task | Refused) -> str:
        if isinstance(answer, Task):
            self._of.setdefault(answer.task_id, answer)
        return asked(answer)

    def of(self, client_id: str, task_id: str) -> Task:
        made_up = Task(task_id, client_id, 0, 0.0, 60.0, 60.0, 0, LocalPlan())
        return self._of.get(task_id, made_up)


class Wired:
    """Devices that speak through a `Transport`."""

    def __init__(self, connect: Callable[[str], Transport]) -> None:
        self._connect, self._tasks = connect, Tasks()
        self._transports: dict[str, Transport] = {}

    def transport(self, client_id: str) -> Transport:
        if client_id not in self._transports:
            self._transports[client_id] = self._connect(client_id)
        return self._transports[client_id]

    def enrol(self, client_id: str, capability: Capability = CAPABILITY) -> None:
        self.transport(client_id).enrol(capability)

    def ask(self, client_id: str, task_id: str) -> str:
        return self._tasks.keep(self.transport(client_id).ask(self._tasks.ask(client_id, task_id), SPEC))

    def fetch(self, client_id: str, task_id: str) -> str:
        task, held = self._tasks.of(client_id, task_id), self._tasks.held.get(client_id)
        model = self.transport(client_id).fetch(
            SPEC.layout_hash,
            task.base_version,
            holds=self._tasks.holds(client_id),
            submodel=task.submodel,
        )
        vector, _ = apply_download(SPEC, model.codec, bytes(model.data), model.from_version, held)
        return self._tasks.begins(task, vector)

    def push(
        self,
        client_id: str,
        task_id: str,
        update_id: str,
        value: float = 1.0,
        codec: str = "",
        more: bytes = b"",
    ) -> str:
        task = self._tasks.of(client_id, task_id)
        entry = result(task, update_id, value, codec or task.uplink, more)
        try:
            answer = self.transport(client_id).push(entry)
        except AnabranchError as error:
            return type(error).__name__
        return decided(answer.decision)

    def beat(self, client_id: str, task_id: str, progress: float) -> str:
        notices = self.transport(client_id).heartbeat(task_id, progress).notices
        return ", ".join(notice.kind for notice in notices)

    def drop(self, client_id: str, task_id: str) -> None:
        self.transport(client_id).drop(task_id, "not wanted")


class Live(Wired):
    """The server itself, over gRPC; its journal is that of its store, once it has ended."""

    def __init__(self, address: str, admin_address: str, data_dir: Path) -> None:
        super().__init__(lambda client_id: GrpcTransport(address, client_id))
        self._admin_address, self._data_dir = admin_address, data_dir

    def lapse(self, client_id: str, task_id: str) -> None:
        with OperatorClient(self._admin_address) as operator:
            ended = (e for e in operator.watch(0) if e.kind == "lease_ended")
            next(e for e in ended if e.data["task_id"] == task_id)

    def order(self, make: Callable[[float], ev.Event]) -> None:
        with OperatorClient(self._admin_address) as operator:
            match make(0.0):
                case ev.Paused():
                    operator.pause()
                case ev.Resumed():
                    operator.resume()
                case ev.Quarantined(_, client_id, why):
                    operator.quarantine(client_id, why)
                case ev.Released(_, client_id):
                    operator.release(client_id)

    def roll_back(self, to_version: int, without: str) -> str:
        with OperatorClient(self._admin_address) as operator:
            try:
                version, updates = operator.rollback(to_version, [without])
            except AnabranchError as error:
                return type(error).__name__
            return f"version {version} without {updates}"

    def close(self) -> None:
        for transport in self._transports.values():
            assert isinstance(transport, GrpcTransport)
            transport.close()

    def journal(self) -> Sequence[Record]:
        store = open_store("", self._data_dir)
        try:
            return [record for _, record in store.records()]
        finally:
            store.close()


class Local(Wired):
    """The transport without a network."""

    def __init__(self, config: Config) -> None:
        self._now = 1000.0
        self._server = LocalServer(FIRST, config, lambda: self._now, groups=GROUPS)
        super().__init__(lambda client_id: LocalTransport(self._server, client_id))

    def lapse(self, client_id: str, task_id: str) -> None:
        self._now = self._server.engine.ledger.tasks[task_id].expires_at
        self._server.tick()

    def order(self, make: Callable[[float], ev.Event]) -> None:
        self._server.take(make(self._now))

    def roll_back(self, to_version: int, without: str) -> str:
        server, event = self._server, ev.RolledBack(self._now, to_version, 0, (without,))
        begin = partial(Blueprint.of(server.config, server.spec).engine, FIRST)
        log = MemoryLog()
        for record in server.journal:
            sent = server.payloads[record["payload"]["sha256"]] if record["kind"] == "update" else None
            log.append(record, sent)
        try:
            event = folded(event, server.engine, begin, log)
        except AnabranchError as error:
            return type(error).__name__
        return left_out(server.take(event))

    def journal(self) -> Sequence[Record]:
        return self._server.journal


class Simulated:
    """The simulator's server, as its devices meet it. `log`: all that it has logged."""

    def __init__(self, config: Config) -> None:
        self.log = MemoryLog()
        self._clock, self._tasks = VirtualClock(), Tasks()
        self._offers: dict[str, Offer] = {}
        blueprint = Blueprint.of(config, SPEC)
        self._begin = partial(blueprint.engine, FIRST)
        engine = self._begin(None)
        recorder = Recorder(config.strategy.name, "test", 0, Goal(), config.to_json(), "simulated")
        versions = Versions(engine, {})
        self._world = World(self._clock, engine, versions, self.log, recorder, blueprint.codec_at)
        self._server = DirectServer(self._world)

    @property
    def engine(self) -> Engine:
        return self._world.engine

    def enrol(self, client_id: str, capability: Capability = CAPABILITY) -> None:
        self._told(partial(self._server.enrol, client_id, capability))

    def ask(self, client_id: str, task_id: str) -> str:
        answer = self._told(partial(self._server.ask, self._tasks.ask(client_id, task_id)))
        if isinstance(answer, Refused):
            return self._tasks.keep(answer)
        task, self._offers[task_id] = answer
        return self._tasks.keep(task)

    def fetch(self, client_id: str, task_id: str) -> str:
        return self._tasks.begins(self._tasks.of(client_id, task_id), self._offers[task_id].model.vector)

    def push(
        self,
        client_id: str,
        task_id: str,
        update_id: str,
        value: float = 1.0,
        codec: str = "",
        more: bytes = b"",
    ) -> str:
        task = self._tasks.of(client_id, task_id)
        entry = result(task, update_id, value, codec or task.uplink, more)
        trained = LocalResult(bytes(entry.payload), entry.codec, entry.local_steps, entry.metrics)
        done = FinishedUpdate(task, update_id, entry.examples, trained, lambda: entry.digest)
        objection = self._told(partial(self._server.objection, client_id, done))
        if objection is not None:
            return type(objection).__name__
        outcome = self._told(partial(self._server.push, client_id, done))
        return decided(outcome) if isinstance(outcome, Decision) else type(outcome).__name__

    def beat(self, client_id: str, task_id: str, progress: float) -> str:
        said: Advice = self._told(partial(self._server.renew, client_id, task_id, progress, ""))
        return said.notice

    def drop(self, client_id: str, task_id: str) -> None:
        self._server.drop(client_id, task_id, "not wanted", diverged=False)

    def lapse(self, client_id: str, task_id: str) -> None:
        self._clock.run(self._world.engine.ledger.tasks[task_id].expires_at)

    def order(self, make: Callable[[float], ev.Event]) -> None:
        self._told(partial(self._server.order, make))

    def roll_back(self, to_version: int, without: str) -> str:
        def order(now: float) -> ev.Event:
            event = ev.RolledBack(now, to_version, 0, (without,))
            return folded(event, self._world.engine, self._begin, self.log)

        try:
            return left_out(self._told(partial(self._server.order, order)))
        except AnabranchError as error:
            return type(error).__name__

    def journal(self) -> Sequence[Record]:
        return [record for _, record in self.log.records()]

    @staticmethod
    def _told(call: Callable[[Callable[[Any], None]], None]) -> Any:
        answers: list[Any] = []
        call(answers.append)
        (answer,) = answers
        return answer


@contextmanager
def driver(name: str, config: Config, folder: Path) -> Iterator[Driver]:
    """A new run behind the driver of this name. Of the live server's journal is there at the end only."""
    if name == "grid":
        from grid_driver import over_grid  # Flower is not always there

        with over_grid(config, folder) as run:
            yield run
        return
    if name != "live":
        yield Local(config) if name == "local" else Simulated(config)
        return
    with live_server(folder, FIRST, config, groups=GROUPS) as info:
        live = Live(info.address, info.admin_address, folder / "data")
        yield live
        live.close()


def story(records: Sequence[Record]) -> list[Record]:
    """A journal without what time it was; several ticks in a row are as good as one."""
    told = [json.loads(line({key: r[key] for key in r if key != "now"})) for r in records]
    return [r for i, r in enumerate(told) if r["kind"] != "ticked" or not i or told[i - 1] != r]
