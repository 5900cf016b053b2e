"""Devices in elastic training and a server, with a network between them that does what it likes.

The engine, the session and the merge rules are the real ones. Every message, there and back, is in flight
until a draw delivers it: late, in any order, more than once, or never. A device that has waited long enough
repeats its call; what then still comes of the earlier one is delivered to it all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.device.session import Session, SessionSettings
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Submodel, TensorSet, gathered, scatter
from anabranch.core.model.updates import Ask, Capability, Task, Update
from anabranch.host.elastic import BetweenSteps, ElasticAnswer
from anabranch.host.merging import Merge
from anabranch.host.policies import EverySteps
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.fragments import Fragments

A = 0.5
SIZE = 7
CLIENTS = 4
LOST, DOUBLED, IMPATIENT = 0.1, 0.1, 0.1

Call = ef.AskTask | ef.FetchModel | ef.Push


class Server:
    """The engine alone; a version is there to fetch as long as a task starts from it."""

    sizes: tuple[int, ...] = (SIZE,)  # of the tensors, each of which is a part

    def __init__(self, first: Vector) -> None:
        strategy = make_strategy("fedasync", {"alpha": A, "rho": 0.0, "staleness": {"name": "constant"}})
        settings = EngineSettings(lease_s=1e9, receipts_max=10**6)
        spec = ParamSpec.of({f"w{n}": np.zeros(size) for n, size in enumerate(self.sizes)})
        planner = Fragments(spec, len(self.sizes))
        self.engine = Engine(spec, strategy, settings, first, planner=planner)
        self.made: dict[str, Vector] = {}  # by update: the model as it was right after
        for n in range(CLIENTS):
            self.engine.handle(ev.Enrolled(0.0, f"c{n}", Capability()))

    def ask(self, client_id: str, task_id: str) -> ef.Granted | ef.Refused:
        """A task, or why there is none: an ask may come when its task is over."""
        effects = self._handle(ev.TaskAsked(0.0, Ask(client_id, task_id)))
        return next(e for e in effects if isinstance(e, ef.Granted | ef.Refused))

    def push(self, update: Update) -> ef.Decided:
        """The update."""
        effects = self._handle(ev.UpdateArrived(0.0, update, ev.Payload("00" * 32, 8 * SIZE)))
        self.made.setdefault(update.update_id, self.engine.vector.copy())
        return next(e for e in effects if isinstance(e, ef.Decided))

    def model(self, version: int) -> Vector | None:
        """A version, or None where nobody needs it any more."""
        if version == self.engine.version:
            return self.engine.vector.copy()
        held = self.engine.history.get(version)
        return None if held is None else held.copy()

    def _handle(self, event: ev.Event) -> list[Any]:
        effects = self.engine.handle(event)
        assert violations(self.engine) == []
        return effects


class InParts(Server):
    """Three parts, one at a time."""

    sizes = (2, 3, 2)


@dataclass
class Device:
    """The session, the weights in training, and the one result under way. It does what the session orders."""

    client_id: str
    vector: Vector
    rule: Merge
    session: Session = field(init=False)
    orders: list[ef.SessionEffect] = field(default_factory=list)
    call: Call | None = None  # the one that it waits for
    base: Vector | None = None
    sent: Vector | None = None
    part: TensorSet | None = None  # that was sent
    update: Update | None = None

    def __post_init__(self) -> None:
        self.session = Session(self.client_id, 3, SessionSettings(ask_with_push=True))
        self.do(ev.Started(0.0))

    def flat(self) -> Vector:
        """As `LiveWeights`."""
        return self.vector.copy()

    def add(self, change: Vector) -> None:
        """As `LiveWeights`."""
        self.vector += change

    def do(self, event: ev.SessionEvent) -> None:
        """Tell the session, and take its orders."""
        orders = self.session.handle(event)
        if orders:  # nothing is waited for any more but what comes of these
            self.call = None
        self.orders += orders

    def fetched(self, task: Task, model: Vector) -> None:
        """The answer to what was sent, and the base of what will be."""
        if self.call != ef.FetchModel(task):
            return  # a fetch ends with its call: it has no id
        if self.sent is not None:
            between = BetweenSteps(self.rule, EverySteps(1), 0.0)
            sent, center = gathered(self.sent, self.part), gathered(model, self.part)
            between.answer(ElasticAnswer(sent, center, 0.0, self.part))
            between.merge(self, 0.0)
        self.base, self.sent = model, None
        self.do(ev.ModelFetched(0.0))

    def snapshot(self, order: ef.Train) -> None:
        """The weights as they are, and the update that they make."""
        assert self.base is not None
        self.sent = self.flat()
        task = order.task
        assert task.submodel is None or isinstance(task.submodel, TensorSet)
        self.part = task.submodel
        delta = gathered(self.sent, self.part) - gathered(self.base, self.part)
        ids = order.update_id, task.task_id, self.client_id
        self.update = Update(*ids, task.base_version, 1, delta, self.part)
        self.do(ev.Trained(0.0, order.update_id))


class World:
    """Devices, a server and a network, moved by draws."""

    def __init__(self, rule: Merge, seed: int, server: type[Server] = Server) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.server = server(self.numbers.standard_normal(SIZE))
        self.devices = [Device(f"c{n}", self.numbers.standard_normal(SIZE), rule) for n in range(CLIENTS)]
        self.flying: list[Callable[[], None]] = []  # messages, there and back
        self.learned = np.zeros(SIZE)
        self.start = self.total()
        self.lost = self.doubled = self.repeated = 0

    def total(self) -> Vector:
        """(1 - a) w_PS + sum_i w_i, and what the devices have still to merge of a (w_PS' - w_s)."""
        total: Vector = (1 - A) * self.server.engine.vector
        for device in self.devices:
            total = total + device.vector
            if device.update is not None and device.sent is not None:
                made = self.server.made.get(device.update.update_id)
                if made is not None:
                    total = total + A * _only(made - device.sent, device.part)
        return total

    def error(self) -> float:
        """How far that is from what the local steps come to, relative to these."""
        expected = self.start + self.learned
        return float(np.linalg.norm(self.total() - expected) / np.linalg.norm(self.learned))

    def move(self) -> None:
        """One thing happens."""
        device, kind = self.random.choice(self.devices), self.random.random()
        if kind < 0.35:
            step = self.numbers.standard_normal(SIZE)
            device.vector += step
            self.learned += step
        elif kind < 0.7 and self.flying:
            self._arrive(self.random.randrange(len(self.flying)))
        elif device.orders:
            self._obey(device, device.orders.pop(0))
        elif device.call is not None and self.random.random() < IMPATIENT:
            self.repeated += 1
            device.do(ev.CallFailed(0.0, "no answer in time", retryable=True))

    def settle(self) -> None:
        """Let every exchange under way come to its end, and begin no other."""
        while True:
            busy = [d for d in self.devices if d.orders and not isinstance(d.orders[0], ef.Train)]
            waiting = [d for d in self.devices if d.call is not None]
            if self.flying:
                self.flying.pop()()
            elif busy:
                self._obey(busy[0], busy[0].orders.pop(0))
            elif waiting:
                waiting[0].do(ev.CallFailed(0.0, "no answer in time", retryable=True))
            else:
                return

    def _arrive(self, index: int) -> None:
        message, fate = self.flying.pop(index), self.random.random()
        if fate < LOST:
            self.lost += 1
            return
        if fate < LOST + DOUBLED:
            self.doubled += 1
            self.flying.append(message)
        message()

    def _obey(self, device: Device, order: ef.SessionEffect) -> None:
        match order:
            case ef.SetTimer("retry"):
                device.do(ev.TimerFired(0.0, "retry"))
            case ef.Train():
                device.snapshot(order)
            case ef.AskTask() | ef.FetchModel() | ef.Push():
                device.call, update = order, device.update
                self.flying.append(lambda: self._serve(device, order, update))

    def _serve(self, device: Device, call: Call, update: Update | None) -> None:
        """At the server: what the call does, and its answer."""
        match call:
            case ef.AskTask(task_id):
                self._answer_ask(device, self.server.ask(device.client_id, task_id))
            case ef.FetchModel(task):
                model = self.server.model(task.base_version)
                if model is not None:
                    self.flying.append(lambda: device.fetched(task, model))
            case ef.Push(update_id, next_task_id):
                assert update is not None
                receipt = self.server.push(update).receipt
                answer = self.server.ask(device.client_id, next_task_id)
                granted = answer.task if isinstance(answer, ef.Granted) else None
                event = ev.PushAcknowledged(0.0, update_id, receipt.decision, granted)
                self.flying.append(lambda: device.do(event))

    def _answer_ask(self, device: Device, answer: ef.Granted | ef.Refused) -> None:
        event: ev.SessionEvent = ev.TaskRefused(0.0, (1.0, 2.0), "")
        if isinstance(answer, ef.Granted):
            event = ev.TaskGranted(0.0, answer.task)
        self.flying.append(lambda: device.do(event))


def _only(vector: Vector, part: Submodel | None) -> Vector:
    """A vector on a part, zero elsewhere."""
    found = np.zeros_like(vector)
    scatter(gathered(vector, part), found, part)
    return found
