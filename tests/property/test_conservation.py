"""Elastic training conserves: what the devices learn is what arrives, whatever the network does.

One exchange of a device with a server that mixes by a (FedAsync, no discount for staleness):

    w_PS <- (1 - a) w_PS + a w_s          the engine, when the update arrives
    w_i  <- w_i + a (w_PS' - w_s)         the device, when the answer does; w_PS' as it was right after

so Q = (1 - a) w_PS + sum_i w_i changes by the local steps alone. The engine, the session and the rules are
the real ones; the network reorders, delays, and loses asks, updates and answers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from anabranch.client.merging import ElasticDelta, Merge, PaperInterpolation, Replacement
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.engine import Engine
from anabranch.core.invariants import violations
from anabranch.core.params import ParamSpec, Vector
from anabranch.core.session import Session, SessionSettings
from anabranch.core.settings import EngineSettings
from anabranch.core.updates import Ask, Capability, Task, Update
from anabranch.strategies.registry import make_strategy

A = 0.5
SIZE = 7
CLIENTS = 4
LOST = 0.1  # of the messages, each way
MOVES = 5_000


class Server:
    """The engine alone; versions are fetched as long as it holds them."""

    def __init__(self, first: Vector) -> None:
        strategy = make_strategy("fedasync", {"alpha": A, "rho": 0.0, "staleness": {"name": "constant"}})
        spec = ParamSpec.of({"w": first})
        settings = EngineSettings(lease_s=1e9, receipts_max=10**6)
        self.engine = Engine(spec, strategy, settings, first)
        for n in range(CLIENTS):
            self.engine.handle(ev.Enrolled(0.0, f"c{n}", Capability()))

    def ask(self, client_id: str, task_id: str) -> Task:
        (granted,) = [
            e for e in self._handle(ev.TaskAsked(0.0, Ask(client_id, task_id))) if isinstance(e, ef.Granted)
        ]
        return granted.task

    def push(self, update: Update, next_task_id: str) -> tuple[ef.Decided, Task]:
        """The update and the ask behind it, with nothing in between."""
        effects = self._handle(ev.UpdateArrived(0.0, update, ev.Payload("00" * 32, 8 * SIZE)))
        decided = next(e for e in effects if isinstance(e, ef.Decided))
        return decided, self.ask(update.client_id, next_task_id)

    def model(self, version: int) -> Vector:
        engine = self.engine
        return engine.vector.copy() if version == engine.version else engine.history[version].copy()

    def _handle(self, event: ev.Event) -> list[Any]:
        effects = self.engine.handle(event)
        assert violations(self.engine) == []
        return effects


@dataclass
class Device:
    """The session, the weights in training, and the one result under way. It does what the session orders."""

    client_id: str
    vector: Vector
    rule: Merge
    session: Session = field(init=False)
    orders: list[ef.SessionEffect] = field(default_factory=list)
    base: Vector | None = None
    sent: Vector | None = None
    update: Update | None = None

    def __post_init__(self) -> None:
        self.session = Session(self.client_id, 3, SessionSettings(ask_with_push=True))
        self.do(ev.Started(0.0))

    def flat(self) -> Vector:
        return self.vector.copy()

    def add(self, change: Vector) -> None:
        self.vector += change

    def do(self, event: ev.SessionEvent) -> None:
        self.orders += self.session.handle(event)

    def fetched(self, model: Vector) -> None:
        """The answer to what was sent, and the base of what will be."""
        if self.sent is not None:
            self.rule.apply(self, self.sent, model)
        self.base, self.sent = model, None
        self.do(ev.ModelFetched(0.0))

    def snapshot(self, order: ef.Train) -> None:
        assert self.base is not None
        self.sent = self.flat()
        self.update = Update(
            order.update_id, order.task.task_id, self.client_id, order.task.base_version, 1,
            self.sent - self.base,
        )  # fmt: skip
        self.do(ev.Trained(0.0, order.update_id))


class World:
    """Devices, a server and a network, moved by draws."""

    def __init__(self, rule: Merge, seed: int, server: type[Server] = Server) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.server = server(self.numbers.standard_normal(SIZE))
        self.devices = [Device(f"c{n}", self.numbers.standard_normal(SIZE), rule) for n in range(CLIENTS)]
        self.replies: list[tuple[Device, ev.SessionEvent]] = []  # on their way back, delivered in any order
        self.learned = np.zeros(SIZE)
        self.start = self.q()
        self.duplicates = self.lost = 0

    def q(self) -> Vector:
        total: Vector = np.sum([d.vector for d in self.devices], axis=0)
        return (1 - A) * self.server.engine.vector + total

    def move(self) -> None:
        device = self.random.choice(self.devices)
        kind = self.random.random()
        if kind < 0.5:
            step = self.numbers.standard_normal(SIZE)
            device.vector += step
            self.learned += step
        elif kind < 0.75 and self.replies:
            self._deliver(self.replies.pop(self.random.randrange(len(self.replies))))
        elif device.orders:
            self._carry(device, device.orders.pop(0), LOST)

    def settle(self) -> None:
        """Let every exchange under way come to its end, and begin no other."""
        while True:
            busy = [d for d in self.devices if d.orders and not isinstance(d.orders[0], ef.Train)]
            if self.replies:
                self._deliver(self.replies.pop())
            elif busy:
                self._carry(busy[0], busy[0].orders.pop(0), 0.0)
            else:
                return

    def _carry(self, device: Device, order: ef.SessionEffect, lost: float) -> None:
        match order:
            case ef.SetTimer("retry"):
                device.do(ev.TimerFired(0.0, "retry"))
            case ef.Train():
                device.snapshot(order)
            case ef.FetchModel(task):
                device.fetched(self.server.model(task.base_version))
            case ef.AskTask() | ef.Push() if self.random.random() < lost:
                self._lose(device)
            case ef.AskTask(task_id):
                self._reply(device, ev.TaskGranted(0.0, self.server.ask(device.client_id, task_id)), lost)
            case ef.Push(_, next_task_id):
                assert device.update is not None
                decided, task = self.server.push(device.update, next_task_id)
                self.duplicates += decided.duplicate
                receipt = decided.receipt
                event = ev.PushAcknowledged(0.0, receipt.update_id, receipt.decision, task)
                self._reply(device, event, lost)

    def _reply(self, device: Device, event: ev.SessionEvent, lost: float) -> None:
        if self.random.random() < lost:
            self._lose(device)
        else:
            self.replies.append((device, event))

    def _lose(self, device: Device) -> None:
        self.lost += 1
        self.replies.append((device, ev.CallFailed(0.0, "lost", retryable=True)))

    def _deliver(self, reply: tuple[Device, ev.SessionEvent]) -> None:
        device, event = reply
        device.do(event)

    def error(self) -> float:
        """How far Q is from what the local steps come to, relative to these."""
        expected = self.start + self.learned
        return float(np.linalg.norm(self.q() - expected) / np.linalg.norm(self.learned))


def after_all(rule: Merge, seed: int, server: type[Server] = Server) -> World:
    world = World(rule, seed, server)
    for _ in range(MOVES):
        world.move()
    world.settle()
    return world


@pytest.mark.parametrize("seed", range(4))
def test_the_delta_rule_conserves_exactly_whatever_the_network_does(seed: int) -> None:
    world = after_all(ElasticDelta(A), seed)
    assert world.server.engine.counters.applied > 100
    assert min(world.lost, world.duplicates) > 5, "no answer was lost, so nothing was put to the test"
    assert world.error() < 1e-9


@pytest.mark.parametrize("rule", [PaperInterpolation(A), Replacement()], ids=["interpolation", "replacement"])
def test_the_other_rules_do_not(rule: Merge) -> None:
    assert after_all(rule, 0).error() > 0.1


def test_a_model_of_another_moment_would_not_do() -> None:
    """The answer must be the version that the update made: a later one pulls twice towards the others."""

    class Late(Server):
        def model(self, version: int) -> Vector:
            return self.engine.vector.copy()

    assert after_all(ElasticDelta(A), 0, Late).error() > 0.1


def test_whenever_no_exchange_is_under_way_nothing_is_missing() -> None:
    world = World(ElasticDelta(A), 7)
    for _ in range(20):
        for _ in range(100):
            world.move()
        world.settle()
        assert world.error() < 1e-9
