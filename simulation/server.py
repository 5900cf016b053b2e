"""The server as devices meet it: at once, or, where faults are on, as a process that commits and crashes.

`Process` is the live server's writer in virtual time. A call waits for the next commit; then the engine
handles it and its answer leaves. A crash loses what waits, or, as it may strike between a commit and its
answers, the answers alone. What was committed is rebuilt from the newest snapshot and the log after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from anabranch.core.effects import Effect, Refused
from anabranch.core.rng import rank
from anabranch.core.updates import Ask, Capability, Decision, Task
from anabranch.host.run import Advice
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.outbox import Outbox
from anabranch.simulation.versions import Offer
from anabranch.simulation.waiting_room import Sleeper
from anabranch.simulation.world import Order, World

A = TypeVar("A")
Reply = Callable[[A], None]
Granting = Refused | tuple[Task, Offer]


class Server(Protocol):
    """What a device can say to the server, at the moment at which the message arrives."""

    def enrol(self, client_id: str, capability: Capability, reply: Reply[None]) -> None: ...  # noqa: D102
    def ask(self, ask: Ask, reply: Reply[Granting]) -> None: ...  # noqa: D102
    def drop(self, client_id: str, task_id: str, why: str, diverged: bool) -> None: ...  # noqa: D102
    def takes(self, client_id: str, outbox: Outbox, reply: Reply[bool]) -> None: ...  # noqa: D102
    def push(self, client_id: str, outbox: Outbox, reply: Reply[Decision]) -> None: ...  # noqa: D102
    def renew(  # noqa: D102
        self, client_id: str, task_id: str, progress: float, reply: Reply[Advice]
    ) -> None: ...
    def downloaded(self, client_id: str, payload_bytes: int) -> None: ...  # noqa: D102
    def gone(self, client_id: str) -> None: ...  # noqa: D102
    def waits(self, refused: Refused, device: Sleeper) -> bool: ...  # noqa: D102


class Direct:
    """Every call is answered at once."""

    def __init__(self, world: World) -> None:
        self.world = world

    def enrol(self, client_id: str, capability: Capability, reply: Reply[None]) -> None:
        """A device makes itself known."""
        self._take(partial(self.world.enrol, client_id, capability), reply)

    def ask(self, ask: Ask, reply: Reply[Granting]) -> None:
        """A task and the model it starts from, or why there is none."""
        self._take(partial(self.world.ask, ask), reply)

    def drop(self, client_id: str, task_id: str, why: str, diverged: bool) -> None:
        """A device gives a task back, and waits for no answer."""
        self._take(partial(self.world.drop, client_id, task_id, why, diverged), lambda _: None)

    def takes(self, client_id: str, outbox: Outbox, reply: Reply[bool]) -> None:
        """Whether the payload of an update shall come."""
        self._take(partial(self.world.takes, client_id, outbox), reply)

    def push(self, client_id: str, outbox: Outbox, reply: Reply[Decision]) -> None:
        """What becomes of an update whose last byte is here."""
        self._take(partial(self.world.push, client_id, outbox), reply)

    def renew(self, client_id: str, task_id: str, progress: float, reply: Reply[Advice]) -> None:
        """A heartbeat, and what its device should know."""
        self._take(partial(self.world.renew, client_id, task_id, progress), reply)

    def order(self, order: Order, reply: Reply[list[Effect]]) -> None:
        """What an operator wants."""
        self._take(partial(self.world.order, order), reply)

    def downloaded(self, client_id: str, payload_bytes: int) -> None:
        """A device has received a model, or what leads to it from the one it had."""
        self.world.downloaded(client_id, payload_bytes)

    def gone(self, client_id: str) -> None:
        """A device has vanished, which the server does not see."""
        self.world.gone(client_id)

    def waits(self, refused: Refused, device: Sleeper) -> bool:
        """Whether a device that was just refused shall sleep until it is called, or ask again by itself."""
        return self.world.waits(refused, device)

    def _take(self, call: Callable[[], A], reply: Reply[A]) -> None:
        reply(call())


@dataclass
class Told:
    """All that the server has ever told anybody: what a crash may not take back.

    A task, its client and its version. (An ask that comes late, when its task is over, is a new one: the same
    id may then be granted twice, from different versions.)
    """

    tasks: set[tuple[str, str, int]]
    decisions: dict[str, Decision]


class Process(Direct):
    """See the module. `on_restart` is called after every restart."""

    def __init__(self, world: World, clock: VirtualClock, seed: int, commit_s: float) -> None:
        super().__init__(world)
        self.told = Told(set(), {})
        self.restarts = 0
        self.on_restart: list[Callable[[], None]] = []
        self._clock, self._seed, self._commit_s = clock, seed, commit_s
        self._waiting: list[tuple[Callable[[], Any], Reply[Any]]] = []
        self._is_up = True
        self._offers: dict[str, Offer] = {}

    def ask(self, ask: Ask, reply: Reply[Granting]) -> None:
        """As `Direct`; who asks again for a task gets the model that it is of."""

        def call() -> Granting:
            answer = self.world.ask(ask)
            return answer if isinstance(answer, Refused) else self._granted(*answer)

        def tell(answer: Granting) -> None:
            if not isinstance(answer, Refused):
                task, _ = answer
                self.told.tasks.add((task.task_id, task.client_id, task.base_version))
            reply(answer)

        self._take(call, tell)

    def push(self, client_id: str, outbox: Outbox, reply: Reply[Decision]) -> None:
        """As `Direct`; the answer may not be taken back."""

        def tell(decision: Decision) -> None:
            self.told.decisions[outbox.update_id] = decision
            reply(decision)

        self._take(partial(self.world.push, client_id, outbox), tell)

    def crash(self, down_s: float) -> None:
        """Stop now; come back after so many seconds."""
        if not self._is_up:
            return
        committed = int(rank(self._seed, "fault", "committed", self.restarts) * (len(self._waiting) + 1))
        for call, _ in self._waiting[:committed]:  # what is durable, but whose answers have not left
            call()
        self._waiting.clear()
        self._is_up = False
        self.world.stop()
        self._clock.at(self._clock.now + down_s, self._restart)

    def _restart(self) -> None:
        self.restarts += 1
        self.world.restart()
        self._is_up = True
        for tell in self.on_restart:
            tell()

    def _take(self, call: Callable[[], A], reply: Reply[A]) -> None:
        """A call that arrives while the server is down is lost."""
        if not self._is_up:
            return
        self._waiting.append((call, reply))
        if len(self._waiting) == 1:
            self._clock.at(self._clock.now + self._commit_s, partial(self._commit, self.restarts))

    def _commit(self, life: int) -> None:
        if life != self.restarts or not self._is_up:
            return
        batch, self._waiting = self._waiting, []
        answers = [(reply, call()) for call, reply in batch]
        for reply, answer in answers:
            reply(answer)

    def _granted(self, task: Task, offer: Offer) -> Granting:
        """The offer of the first grant: the model files of tasks outlive a crash."""
        open_tasks = self.world.engine.ledger.tasks
        if len(self._offers) > 2 * len(open_tasks) + 16:
            self._offers = {t: o for t, o in self._offers.items() if t in open_tasks}
        return task, self._offers.setdefault(task.task_id, offer)
