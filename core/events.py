"""What goes into the machines. Every event carries `now`, in seconds on the driver's clock.

The first group is the server's (`Engine.handle`), the second the device's (`Session.handle`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from anabranch.core.model.updates import Ask, Capability, Decision, Task, Update
from anabranch.core.secagg.ring import Numbers
from anabranch.core.unwritten import dataclass

if TYPE_CHECKING:
    from anabranch.core.engine.engine import Engine

# --- the server's ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Enrolled:
    """A device made itself known, for the first time or again."""

    now: float
    client_id: str
    capability: Capability


@dataclass(frozen=True)
class TaskAsked:
    """A device applies for a task."""

    now: float
    ask: Ask


@dataclass(frozen=True)
class LeaseRenewed:
    """A heartbeat with progress (steps done, bytes sent: any number that grows). `session`: as in `Ask`."""

    now: float
    client_id: str
    task_id: str
    progress: float
    session: str = field(default="", compare=False)


@dataclass(frozen=True)
class TaskDropped:
    """A device gives a task back. `diverged`: its training has led to values that are not finite."""

    now: float
    client_id: str
    task_id: str
    why: str
    diverged: bool = False


@dataclass(frozen=True)
class Payload:
    """The encoded bytes behind an update: the journal keeps the reference, the store the bytes.

    `sha256`: their digest, which says itself what it is of (`core/content.py`); the name is of when all
    were SHA-256. `values`: how many numbers they decode to, 0 for the whole vector.
    """

    sha256: str
    size_bytes: int
    codec: str = "raw"
    values: int = 0


@dataclass(frozen=True)
class Proof:
    """Who signed an update: the certificate of its device and the signature, DER in base64.

    `at`: when it was checked by the machine's clock, as certificates go by that; 0: at the time of its event.
    The engine does not look at it: the driver has checked it, and whoever audits checks it again.
    """

    certificate: str
    signature: str
    at: float = 0.0


@dataclass(frozen=True)
class UpdateArrived:
    """A complete update. With a `flaw` (what the validation found) the delta is empty.

    `other_base`: it was trained from another model than this run's of the same number.

    A masked one has `seals`: the seed of each mask in a box for its keeper, base64. `base_head` (hex)
    is what the boxes are bound to, as the device knows it; of other updates it is not kept.

    `salt` (hex), in a private run: of the server's own, so that no hash of the record tells of its payload.
    """

    now: float
    update: Update
    payload: Payload
    flaw: str = ""
    proof: Proof | None = None
    other_base: bool = False
    seals: Mapping[str, str] = field(default_factory=dict)
    base_head: str = ""
    salt: str = ""


@dataclass(frozen=True)
class Ticked:
    """Time passed: leases may expire, the strategy's timer may fire."""

    now: float


@dataclass(frozen=True)
class Returned:
    """The server is back. While it was away nobody could renew a lease: each that is open begins anew."""

    now: float


@dataclass(frozen=True)
class Paused:
    """An operator stops the handing out of tasks; updates are still taken."""

    now: float


@dataclass(frozen=True)
class Resumed:
    """An operator lets tasks go out again."""

    now: float


@dataclass(frozen=True)
class Quarantined:
    """An operator gives a client no more tasks and takes no more of its updates."""

    now: float
    client_id: str
    why: str


@dataclass(frozen=True)
class Released:
    """An operator lets a client out of quarantine."""

    now: float
    client_id: str


@dataclass(frozen=True)
class RolledBack:
    """An operator goes back to a version, and on from there without the updates of some clients.

    `everyone`: without the later updates of the others too, who are not put into quarantine for it.
    `to_seq`: the place in the log of the event that published the version, 0 for version 0. `fold` is the
    state that the log gives then (`host/rollback.py`); it is no part of the record. `rules`: by which it is
    made, 0 of a record that has none; from 2 on who was in quarantine before keeps the reason for it, and
    what is left out is counted, from 3 on that of masked sums by their versions; from 4 on the updates that
    still wait count as shares of the version in the making, and windows go by the numbers of masked sums;
    from 5 on what is left out is counted though its receipts are gone.
    """

    now: float
    to_version: int
    to_seq: int
    without: tuple[str, ...]
    everyone: bool = False
    rules: int = 5
    fold: Engine | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class SettingsChanged:
    """Settings of the run (`settable.py`) have other `values` from now on, by `table.key`.

    `by`: who has done it, in words. `at_start`: the files and flags of a server's start say so. `rules`: by
    which they are changed, 0 of a record that has none; from 1 on the guard's books follow (`guard.py`).
    """

    now: float
    values: Mapping[str, Any]
    by: str
    at_start: bool = False
    rules: int = 1


@dataclass(frozen=True)
class MaskSumArrived:
    """A keeper has answered: the sum of its masks of the cohort `number`, as whole numbers, (size,)."""

    now: float
    number: int
    keeper: str
    payload: Payload
    numbers: Numbers = field(compare=False, repr=False)


@dataclass(frozen=True)
class CohortDropped:
    """An operator waits no more for the keepers of the cohort `number`: its updates are lost."""

    now: float
    number: int
    why: str


Event = (
    Enrolled
    | TaskAsked
    | LeaseRenewed
    | TaskDropped
    | UpdateArrived
    | Ticked
    | Returned
    | Paused
    | Resumed
    | Quarantined
    | Released
    | RolledBack
    | SettingsChanged
    | MaskSumArrived
    | CohortDropped
)

# --- the device's ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """The device begins, or begins again; what its outbox still holds is named, oldest first."""

    now: float
    pending_update_id: str | None = None
    later_update_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskGranted:
    """The server gave a task."""

    now: float
    task: Task


@dataclass(frozen=True)
class TaskRefused:
    """The server has no task now; `final` says that there will never be one."""

    now: float
    retry_after_s: tuple[float, float]
    detail: str = ""
    final: bool = False


@dataclass(frozen=True)
class ModelFetched:
    """The model of the task's base version is here, its digest checked."""

    now: float


@dataclass(frozen=True)
class Trained:
    """Local training is done; the result waits in the outbox under this id."""

    now: float
    update_id: str


@dataclass(frozen=True)
class PushAcknowledged:
    """The server answered: the update is durable, or was refused for good.

    `task`: the next one, if it was asked for and granted with the push.
    """

    now: float
    update_id: str
    decision: Decision
    task: Task | None = None


@dataclass(frozen=True)
class CallFailed:
    """A call in flight failed. `retryable`: the same call may succeed later.

    `update_id`: it was the push of that update; needed only where another call may be in flight. `flawed`:
    what was trained cannot be used, as the device itself or the server has found.
    """

    now: float
    detail: str
    retryable: bool
    retry_after_s: tuple[float, float] | None = None
    update_id: str | None = None
    flawed: bool = False


@dataclass(frozen=True)
class TaskCancelled:
    """A notice from the server: the task is no longer wanted."""

    now: float
    task_id: str


@dataclass(frozen=True)
class TimerFired:
    """The moment asked for by a `SetTimer` effect has come."""

    now: float
    name: str


SessionEvent = (
    Started
    | TaskGranted
    | TaskRefused
    | ModelFetched
    | Trained
    | PushAcknowledged
    | CallFailed
    | TaskCancelled
    | TimerFired
)
