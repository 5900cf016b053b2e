"""What is on a simulated device's disk: a value, which copies share, and devices that have nothing yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anabranch.compress.feedback import Memory
from anabranch.core.model.updates import Task
from anabranch.core.unwritten import dataclass
from anabranch.host.held import NOTHING, HeldModel
from anabranch.simulation.executors.base import LocalResult
from anabranch.simulation.versions import Model


@dataclass(frozen=True, eq=False)
class FinishedUpdate:
    """What waits in the outbox until the server has answered for good. `sha256`: of its payload.

    `base_head` names the version that it was trained from, where its number may not do.
    """

    task: Task
    update_id: str
    examples: int
    result: LocalResult
    sha256: Callable[[], str]
    base_head: str = ""


@dataclass(frozen=True, eq=False)
class Storage:
    """`held` has its model where the number may not do: else it is the run's own, one copy of a version.

    `memory` is its uplink's, `kept` its App's, `own` its buffers; `waiting` its outbox, oldest first.
    `has_frozen`: what travels apart from the versions was fetched.
    """

    held: HeldModel[Model] = NOTHING
    memory: Memory | None = None
    kept: bytes = b""
    own: bytes = b""
    waiting: tuple[FinishedUpdate, ...] = ()
    has_frozen: bool = False

    @property
    def remembered(self) -> Memory | None:
        """What the uplink goes on from: the newest result under way has taken over what was before it."""
        under_way = [one.result.memory for one in self.waiting if one.result.memory is not None]
        return under_way[-1] if under_way else self.memory

    def finished(self, update_id: str) -> FinishedUpdate:
        """An update that waits in the outbox."""
        return next(one for one in self.waiting if one.update_id == update_id)

    def put(self, done: FinishedUpdate) -> Storage:
        """With one more result, and what is kept from now on."""
        result, waiting = done.result, (*self.waiting, done)
        return Storage(self.held, self.memory, result.kept, result.own, waiting, self.has_frozen)

    def commit(self, update_id: str) -> Storage:
        """The server has taken a result: its memory counts."""
        memory = self.finished(update_id).result.memory
        return self if memory is None else replace(self, memory=memory)

    def discard(self, update_id: str) -> Storage:
        """Without a result, if it is there."""
        waiting = tuple(one for one in self.waiting if one.update_id != update_id)
        return Storage(self.held, self.memory, self.kept, self.own, waiting, self.has_frozen)

    def fetched(self, held: HeldModel[Model]) -> Storage:
        """With another version, and what is frozen."""
        return Storage(held, self.memory, self.kept, self.own, self.waiting, has_frozen=True)


EMPTY = Storage()
