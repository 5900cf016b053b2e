"""What comes out of the machines: orders for the driver, released after the event is durable.

The first group is the server's (`Engine.handle`), the second the device's (`Session.handle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from anabranch.core.events import Payload
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Ask, Reason, Receipt, Task
from anabranch.core.unwritten import dataclass

if TYPE_CHECKING:
    from anabranch.core.engine.cohorts import MaskedUpdate

# --- the server's ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Granted:
    """Hand this task out. `again`: the same ask was granted before."""

    task: Task
    again: bool = False


@dataclass(frozen=True)
class Refused:
    """No task now: ask again within the window (earliest, latest), unless `final`."""

    ask: Ask
    reason: Reason
    detail: str
    retry_after_s: tuple[float, float]
    final: bool = False


@dataclass(frozen=True)
class Decided:
    """What became of an update. `duplicate`: it had been decided before, nothing changed now.

    `examples` and `metrics` are what its device says of the training; `payload`: what it came as,
    and `raw_bytes` its size were it not compressed.
    """

    client_id: str
    receipt: Receipt
    examples: int
    duplicate: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    payload: Payload | None = None
    raw_bytes: int = 0


@dataclass(frozen=True)
class Conflicting:
    """An update has the id of another one, which was decided before: it is not taken, and has no receipt."""

    client_id: str
    update_id: str
    why: str


@dataclass(frozen=True)
class Published:
    """A new version. `vector` is the engine's own array: read it before the next event.

    `heard`: of each update in it, the client and how much of it a robust rule has heard, 0 to 1; empty where
    there is no rule, or one that does not say.
    """

    version: int
    vector: Vector
    update_ids: tuple[str, ...]
    heard: tuple[tuple[str, float], ...] = ()


class LeaseEnd(StrEnum):
    """Why a lease ended without an update."""

    EXPIRED = "expired"  # its time ran out; a late update may still count
    SUPERSEDED = "superseded"  # its client asked for another task
    DROPPED = "dropped"  # its client gave it back
    CANCELLED = "cancelled"  # its round is over


@dataclass(frozen=True)
class LeaseEnded:
    """A lease ended without an update. `CANCELLED` is told to the device at its next heartbeat.

    `diverged`: what a device says that gave a task back because its training has diverged.
    """

    task: Task
    end: LeaseEnd
    diverged: str = ""


@dataclass(frozen=True)
class Finished:
    """A budget of the run is used up, or it was `given_up`: no more tasks, no more updates."""

    why: str
    given_up: bool = False


@dataclass(frozen=True)
class Barred:
    """A client is in quarantine from now on: no task, no update."""

    client_id: str
    why: str


@dataclass(frozen=True)
class Unbarred:
    """A client is out of quarantine."""

    client_id: str


@dataclass(frozen=True)
class RolledBackTo:
    """`version` is what the log gives without so many updates `left_out`, which came after `to_version`.

    What earlier rollbacks have left out is among them, unless the log begins after those, or sums are masked;
    `left_out_total` has all. Of masked sums that had made no version `CohortLost` tells.
    """

    version: int
    to_version: int
    left_out: int
    left_out_total: int


@dataclass(frozen=True)
class SettingChange:
    """A setting (`table.key`) has this value since `at`, and had another before; `by` whom, in words."""

    path: str
    value: Any
    was: Any
    by: str
    at: float


@dataclass(frozen=True)
class SettingsSet:
    """Settings of the run were changed."""

    changes: tuple[SettingChange, ...]


@dataclass(frozen=True)
class Reopened:
    """The run had ended, and goes on: a larger budget was set."""


@dataclass(frozen=True)
class MaskSumWanted:
    """A cohort of masked updates is full: every keeper is to be asked for the sum of its masks.

    `version`: the newest one now. What is still wanted after a restart: `Cohorts.wanted`.
    """

    number: int
    version: int
    members: tuple[MaskedUpdate, ...]


@dataclass(frozen=True)
class CohortLost:
    """The updates of a cohort are in no version, and will be in none."""

    number: int
    update_ids: tuple[str, ...]
    why: str


Effect = (
    Granted
    | Refused
    | Decided
    | Conflicting
    | Published
    | LeaseEnded
    | Finished
    | Barred
    | Unbarred
    | RolledBackTo
    | SettingsSet
    | Reopened
    | MaskSumWanted
    | CohortLost
)

# --- the device's ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AskTask:
    """Apply for a task under this id; a repeated ask uses the same id."""

    task_id: str


@dataclass(frozen=True)
class FetchModel:
    """Fetch the task's base version."""

    task: Task


@dataclass(frozen=True)
class Train:
    """Train, then put the result in the outbox under `update_id`."""

    task: Task
    update_id: str


@dataclass(frozen=True)
class Push:
    """Push the outbox entry: the same bytes every time. With a `next_task_id`, ask for that task as well."""

    update_id: str
    next_task_id: str = ""


@dataclass(frozen=True)
class Discard:
    """The server has answered for good: remove the outbox entry."""

    update_id: str


@dataclass(frozen=True)
class Renew:
    """Send a heartbeat for the task."""

    task: Task


@dataclass(frozen=True)
class StopTraining:
    """Abandon the task at hand."""

    task_id: str


@dataclass(frozen=True)
class GiveBack:
    """Tell the server that this task will have no result; if that fails, its lease will end.

    `diverged`: as in `TaskDropped`.
    """

    task_id: str
    why: str
    diverged: bool = False


@dataclass(frozen=True)
class SetTimer:
    """Send `TimerFired(name)` at this moment; a later order of the same name replaces it."""

    name: str
    at: float


@dataclass(frozen=True)
class Stop:
    """Nothing more to do, for this reason."""

    why: str


SessionEffect = (
    AskTask | FetchModel | Train | Push | Discard | Renew | StopTraining | GiveBack | SetTimer | Stop
)
