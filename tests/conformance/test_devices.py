"""What a device hears is the same on the live agent and on a simulated one: the texts of what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from agents import Federation

from anabranch.client.local import LocalTransport
from anabranch.client.messages import Enrolment, PushAnswer
from anabranch.client.outbox import UpdateEntry
from anabranch.core import effects as ef
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.device.session import Session
from anabranch.core.model.updates import Capability
from anabranch.simulation.run import open_simulation
from anabranch.workloads.synthetic import Synthetic

Heard = list[tuple[str, str, bool]]
Make = Callable[[float, str], ev.Event]
ENOUGH = 8  # events of the session


class Enough(BaseException):
    """The session has heard what the test wants."""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What sessions are told of refusals and failures, whoever has them: kind, text without ids, flawed."""
    told: Heard = []
    handle, count = Session.handle, [0]

    def listening(session: Session, event: ev.SessionEvent) -> list[ef.SessionEffect]:
        count[0] += 1
        if count[0] > ENOUGH:
            count[0] = 0
            raise Enough
        match event:
            case ev.TaskRefused(detail=detail):
                told.append(("refused", plain(detail), False))
            case ev.CallFailed(detail=detail, flawed=flawed):
                told.append(("failed", plain(detail), flawed))
        return handle(session, event)

    monkeypatch.setattr(Session, "handle", listening)
    return told


def plain(detail: str) -> str:
    """The text without the ids of one device and its task."""
    return re.sub(r"'(device-0000|a)'", "NAME", re.sub(r"'[0-9a-f-]{20,}'", "TASK", detail))


def settings() -> Config:
    tables = {"run": {"versions_max": 50}, "fleet": {"clients": 1}, "strategy": {"name": "fedasync"}}
    return merge([("test", {**tables, "client": {"steps": 3, "batch_size": 8}})])


class Ordered(LocalTransport):
    """Its server has orders of an operator, before the first ask or while the device trains."""

    def __init__(self, federation: Federation, order: Make, at_once: bool) -> None:
        super().__init__(federation.server, "a")
        self._order, self._at_once = order, at_once

    def enrol(self, capability: Capability) -> Enrolment:
        found = super().enrol(capability)
        if self._at_once:
            self.server.take(self._order(self.server.clock(), "a"))
        return found

    def push(self, entry: UpdateEntry) -> PushAnswer:
        if not self._at_once:
            self.server.take(self._order(self.server.clock(), "a"))
        return super().push(entry)


def on_the_agent(order: Make, at_once: bool, folder: Path) -> None:
    federation = Federation(folder)
    with pytest.raises(Enough):
        federation.agent(Ordered(federation, order, at_once), tasks_max=0).run()


def in_the_simulator(order: Make, at_once: bool) -> None:
    with open_simulation(settings(), app=Synthetic()) as simulation:

        def give(now: float) -> ev.Event:
            return order(now, "device-0000")

        def watch(event: ev.Event, effects: object) -> None:
            if isinstance(event, ev.Enrolled if at_once else ev.TaskAsked):
                simulation.clock.at(
                    simulation.clock.now, lambda: simulation.server.order(give, lambda _: None)
                )

        simulation.world.observers.append(watch)
        with pytest.raises(Enough):
            simulation.run()


ORDERS: dict[str, tuple[Make, bool, tuple[str, str, bool]]] = {
    "paused": (lambda now, _: ev.Paused(now), True, ("refused", "paused", False)),
    "quarantined": (
        lambda now, name: ev.Quarantined(now, name, "suspicious"),
        True,
        ("refused", "suspicious", False),
    ),
    "its task is over": (
        lambda now, name: ev.Quarantined(now, name, "suspicious"),
        False,
        ("failed", "task TASK is not open for NAME: it ended, or is another run's: ask anew", False),
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_both_hear_the_same_text(name: str, heard: Heard, tmp_path: Path) -> None:
    order, at_once, (kind, text, flawed) = ORDERS[name]
    on_the_agent(order, at_once, tmp_path)
    live = heard[0]
    assert (live[0], live[2]) == (kind, flawed)
    assert text in live[1]
    heard.clear()
    in_the_simulator(order, at_once)
    assert heard[0] == live
