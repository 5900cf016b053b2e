"""The server as devices meet it: at once, or, where faults are on, as a process that commits and crashes.

`Process` is the live server's writer in virtual time. A call waits for the next commit; then the engine
handles it and its answer leaves. A crash loses what waits, or, as it may strike between a commit and its
answers, the answers alone. What was committed is rebuilt from the newest snapshot and the log after it.

Where the disk fails too (`[faults]`), a crash may cut off the write in hand, and the disk may have lost
writes that it had confirmed: the server finds out at its start, and its operator says that it shall go on
without them. A disk without room costs a call its answer. A backup that is put back takes the server to where
it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anabranch.core.config.faults import FaultsTable
from anabranch.core.effects import Effect, Refused
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate, LogLost, StoreFull
from anabranch.core.limits import RETRY_FULL_DISK_S
from anabranch.core.model.updates import Ask, Capability, Decision, Reason, Task
from anabranch.core.rng import rank
from anabranch.core.secagg.ring import Numbers
from anabranch.host.run import Advice
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.disk import Backup, Disk, PowerCut
from anabranch.simulation.storage import FinishedUpdate
from anabranch.simulation.versions import Offer
from anabranch.simulation.waiting_room import Sleeper
from anabranch.simulation.world import Order, World

A = TypeVar("A")
Reply = Callable[[A | StoreFull], None]
Granting = Refused | tuple[Task, Offer]
PushOutcome = Decision | AnabranchError  # a verdict, or the error that a live server answers with
Exchange = tuple[PushOutcome, Granting | None]
Objecting = Reply[AnabranchError | None]
Enrolling = Reply[ConfigError | None]


class DirectServer:
    """What a device can say to the server, as its message arrives: every call is answered at once."""

    def __init__(self, world: World) -> None:
        self.world = world

    def enrol(self, client_id: str, capability: Capability, reply: Enrolling) -> None:
        """A device makes itself known, or hears that the run has nothing for it."""
        self._take(partial(self.world.enrol, client_id, capability), reply)

    def ask(self, ask: Ask, reply: Reply[Granting]) -> None:
        """A task and the model it starts from, or why there is none."""
        self._take(partial(self.world.ask, ask), reply)

    def drop(self, client_id: str, task_id: str, why: str, diverged: bool) -> None:
        """A device gives a task back, and waits for no answer."""
        self._take(partial(self.world.drop, client_id, task_id, why, diverged), lambda _: None)

    def objection(self, client_id: str, done: FinishedUpdate, reply: Objecting) -> None:
        """Why the payload of an update shall not come, or None."""
        self._take(partial(self.world.objection, client_id, done), reply)

    def push(self, client_id: str, done: FinishedUpdate, reply: Reply[PushOutcome]) -> None:
        """What becomes of an update whose last byte is here."""
        self._take(partial(self.world.push, client_id, done), reply)

    def exchange(self, client_id: str, done: FinishedUpdate, ask: Ask, reply: Reply[Exchange]) -> None:
        """The same, and a task of the version that the update leads to; nothing comes in between.

        With an error nobody hears of the ask: its device asks anew.
        """
        self._take(partial(self._exchanged, client_id, done, ask), reply)

    def renew(
        self, client_id: str, task_id: str, progress: float, session: str, reply: Reply[Advice]
    ) -> None:
        """A heartbeat, and what its device should know."""
        self._take(partial(self.world.renew, client_id, task_id, progress, session), reply)

    def order(self, order: Order, reply: Reply[list[Effect]]) -> None:
        """What an operator wants."""
        self._take(partial(self.world.order, order), reply)

    def mask_sum(self, number: int, keeper: str, numbers: Numbers, reply: Reply[list[Effect]]) -> None:
        """What a keeper answers for a cohort."""
        self._take(partial(self.world.mask_sum, number, keeper, numbers), reply)

    def downloaded(self, client_id: str, payload_bytes: int, frozen_bytes: int = 0) -> None:
        """A device has received a model, or what leads to it from the one it had, and what is frozen."""
        self.world.downloaded(client_id, payload_bytes, frozen_bytes)

    def gone(self, client_id: str) -> None:
        """A device has vanished, which the server does not see."""
        self.world.gone(client_id)

    def waits(self, refused: Refused, device: Sleeper) -> bool:
        """Whether a device that was just refused shall sleep until it is called, or ask again by itself."""
        return self.world.waits(refused, device)

    def turns_away(self, newcomer: Sleeper) -> bool:
        """Whether a device that asks for its first task is refused, and sleeps until it is called."""
        return self.world.turns_away(newcomer)

    def _take(self, call: Callable[[], A], reply: Reply[A]) -> None:
        reply(call())

    def _asked(self, ask: Ask) -> Granting:
        return self.world.ask(ask)

    def _exchanged(self, client_id: str, done: FinishedUpdate, ask: Ask) -> Exchange:
        outcome = self.world.push(client_id, done)
        return outcome, self._asked(ask) if isinstance(outcome, Decision) else None


@dataclass
class Acknowledgements:
    """All that the server has ever told anybody: what a crash may not take back.

    A task, its client and its version. (An ask that comes late, when its task is over, is a new one: the same
    id may then be granted twice, from different versions.) `last`: the last event in the log when an update
    was answered. What comes after the end of a log that has gone back is taken back, by its operator's word.
    """

    tasks: set[tuple[str, str, int]] = field(default_factory=set)
    decisions: dict[str, Decision] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def grant(self, answer: Granting | StoreFull | None) -> None:
        """An ask has this answer."""
        if isinstance(answer, tuple):
            task, _ = answer
            self.tasks.add((task.task_id, task.client_id, task.base_version))

    def decide(self, update_id: str, decision: Decision, seq: int) -> None:
        """An update was decided so, with `seq` as the last event in the log."""
        self.decisions[update_id], self.last[update_id] = decision, seq

    def take_back(self, _: Engine, seq: int) -> None:
        """The log ends at event `seq` now."""
        for update_id in [u for u, told_at in self.last.items() if told_at > seq]:
            del self.last[update_id], self.decisions[update_id]


class Process(DirectServer):
    """A simulated server that commits in batches, crashes and comes back from its disk.

    `on_restart` is called after every restart; `counts`: what has become of its disk.
    """

    def __init__(self, world: World, disk: Disk, clock: VirtualClock, seed: int, faults: FaultsTable) -> None:
        super().__init__(world)
        self.disk, self._faults = disk, faults
        self.told = Acknowledgements()
        self.counts: Counter[str] = Counter()
        self.restarts = 0
        self.on_restart: list[Callable[[], None]] = []
        self._clock, self._seed = clock, seed
        self._waiting: list[tuple[Callable[[], Any], Reply[Any]]] = []
        self._is_up = True
        self._doomed_s: float | None = None  # it dies in its next write, for so long
        self._offers: dict[str, Offer] = {}
        world.taken_back += [self.told.take_back, self._taken_back]

    def ask(self, ask: Ask, reply: Reply[Granting]) -> None:
        """As `DirectServer`; who asks again for a task gets the model that it is of."""

        def tell(answer: Granting | StoreFull) -> None:
            self.told.grant(answer)
            reply(answer)

        self._take(partial(self._asked, ask), tell)

    def turns_away(self, newcomer: Sleeper) -> bool:  # noqa: ARG002 - the contract's
        """Never: a server that is down would not, and what it answers comes with a commit."""
        return False

    def push(self, client_id: str, done: FinishedUpdate, reply: Reply[PushOutcome]) -> None:
        """As `DirectServer`; the answer may not be taken back."""

        def tell(outcome: PushOutcome) -> None:
            self._told_of(done.update_id, outcome)
            reply(outcome)

        self._take(partial(self.world.push, client_id, done), tell)

    def exchange(self, client_id: str, done: FinishedUpdate, ask: Ask, reply: Reply[Exchange]) -> None:
        """As `DirectServer`: both in one commit."""

        def tell(answer: Exchange | StoreFull) -> None:
            outcome, granting = (answer, None) if isinstance(answer, StoreFull) else answer
            self._told_of(done.update_id, outcome)
            self.told.grant(granting)
            reply(answer)

        self._take(partial(self._exchanged, client_id, done, ask), tell)

    def _told_of(self, update_id: str, outcome: PushOutcome) -> None:
        """A device hears what has become of its update; an error for a flaw says that it was decided."""
        if isinstance(outcome, InvalidUpdate):
            known = self.world.engine.ledger.receipts.get(update_id)
            outcome = outcome if known is None else known.decision
        if isinstance(outcome, Decision):
            self.told.decide(update_id, outcome, self.disk.seq)

    def crash(self, down_s: float) -> None:
        """Stop now, or in the next write; come back after so many seconds."""
        if not self._is_up or self._doomed_s is not None:
            return
        if self._draw("torn-tail") < self._faults.torn_tail and not self._waiting:
            self._doomed_s = down_s
        else:
            self._die(down_s)

    def _die(self, down_s: float) -> None:
        self._doomed_s = None
        committed = int(self._draw("committed") * (len(self._waiting) + 1))
        torn = bool(self._waiting) and self._draw("torn-tail") < self._faults.torn_tail
        if torn:
            committed = min(committed, len(self._waiting) - 1)
        with suppress(StoreFull):
            for call, _ in self._waiting[:committed]:  # what is durable, but whose answers have not left
                call()
            if torn:
                self._die_writing(self._waiting[committed][0])
        if self._draw("lost-tail") < self._faults.lost_tail:
            self.disk.lose(self._draw("lost-length"))
        self._waiting.clear()
        self._is_up = False
        self.world.stop()
        self._clock.at(self._clock.now + down_s, self._restart)

    def _die_writing(self, call: Callable[[], Any]) -> None:
        """The write that a call makes, if it makes any, is cut off."""
        self.disk.tears_at = self._draw("torn-length")
        try:
            call()
        except PowerCut:
            self.counts["torn-tail"] += 1
        finally:
            self.disk.tears_at = None

    def _restart(self) -> None:
        if self._is_up:
            return
        if self.disk.is_full:  # there is no start without room: it is tried again
            self._clock.at(self._clock.now + RETRY_FULL_DISK_S, self._restart)
            return
        self.restarts += 1
        try:
            self.world.restart()
        except LogLost:  # an operator hears of it, who has no backup
            if not self.disk.takes_back:  # of a disk that keeps what it is given
                raise
            self.counts["lost-tail"] += 1
            self.disk.attest()
            self.world.restart()
        self._is_up = True
        for tell in self.on_restart:
            tell()

    def backup(self) -> Backup | None:
        """A copy of the disk; None while the server is down."""
        return self.disk.backup(self.world.engine) if self._is_up else None

    def put_back(self, backup: Backup, down_s: float) -> None:
        """Stop, and come back with what a backup has, unless the disk went back since it was made."""
        if backup.turn != self.disk.turn:
            return
        if self._is_up:
            self._die(down_s)
        if self._clock.is_stopped:  # the last commit has ended the run
            return
        self.counts["restored"] += 1
        self.disk.put_back(backup)

    def _taken_back(self, engine: Engine, _: int) -> None:
        """The model files of lost tasks are lost with them."""
        self._offers = {t: offer for t, offer in self._offers.items() if t in engine.ledger.tasks}

    def _draw(self, purpose: str) -> float:
        return rank(self._seed, "fault", purpose, self.restarts)

    def _take(self, call: Callable[[], A], reply: Reply[A]) -> None:
        """A call that arrives while the server is down is lost."""
        if not self._is_up:
            return
        self._waiting.append((call, reply))
        if len(self._waiting) == 1:
            self._clock.at(self._clock.now + self._faults.commit_s, partial(self._commit, self.restarts))

    def _commit(self, life: int) -> None:
        if life != self.restarts or not self._is_up:
            return
        if self._doomed_s is not None:
            self._die(self._doomed_s)
            return
        batch, self._waiting = self._waiting, []
        answers = [(reply, self._answer(call)) for call, reply in batch]
        self.world.acknowledge()
        for reply, answer in answers:
            reply(answer)

    def _answer(self, call: Callable[[], A]) -> A | StoreFull:
        try:
            return call()
        except StoreFull as full:
            self.counts["not-written"] += 1
            return full

    def _asked(self, ask: Ask) -> Granting:
        answer = self.world.ask(ask)
        return answer if isinstance(answer, Refused) else self._granted(*answer)

    def _granted(self, task: Task, offer: Offer) -> Granting:
        """The offer of the first grant: the model files of tasks outlive a crash, if the disk still has them.

        Then the task is given back, as the live server does, and its device asks anew.
        """
        open_tasks = self.world.engine.ledger.tasks
        if len(self._offers) > 2 * len(open_tasks) + 16:
            self._offers = {t: o for t, o in self._offers.items() if t in open_tasks}
        kept = self._offers.get(task.task_id)
        if kept is not None and kept.model.version == task.base_version:
            return task, kept
        if offer.model.version != task.base_version:
            gone = f"version {task.base_version} is not held any more"
            self.world.drop(task.client_id, task.task_id, gone)
            retry_s = self.world.engine.settings.retry_after_s
            return Refused(Ask(task.client_id, task.task_id), Reason.BASE_GONE, gone, retry_s)
        self._offers[task.task_id] = offer  # the first, or that of a late ask whose task was over
        return task, offer
