"""Cohorts: masked updates are added up unread, and their sums wait for the keepers of the masks.

| symbol | name         | meaning                                                            |
|--------|--------------|--------------------------------------------------------------------|
| y_i    | update.delta | an update's whole numbers under its masks, modulo 2^r              |
| W_i    | weight       | of its age when it came, by the terms: whole, at least 1           |
| W      |              | the weight of a fresh one                                          |
| K      | terms.cohort | updates in a cohort                                                |
| M_j    |              | keeper j's: the sum of its masks, with its noise in a private run  |
| s      | ring.scale   | integers to a unit                                                 |

    Y <- Y + W_i y_i mod 2^r       an update has come, and is held; the K-th closes the cohort
    Y <- Y - M_j mod 2^r           a keeper has answered
    g  = Y / (s W K)               all have, and no cohort before waits: the strategy's step for g

The next update opens another cohort at once, so who waits for a keeper is the sums, not the devices. A sum
that no honest updates could have is thrown away with its updates: which of them is to blame nobody can see.

Source: specs of `core/secagg/ring.py`; the buffer is that of FedBuff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.events import UpdateArrived
from anabranch.core.journal import Record, to_record
from anabranch.core.model.params import SparseVector, Vector
from anabranch.core.model.updates import Update
from anabranch.core.privacy.mechanism import length_of
from anabranch.core.secagg.ring import Numbers, add_weighted
from anabranch.core.secagg.terms import Terms

# The strategy's step for a sum of K updates, of weight 1 each: (state, vector, sum, context).
StepOfTotal = Callable[[State, Vector, Vector, Context], Step]


@dataclass(frozen=True, slots=True)
class MaskedUpdate:
    """An update of a cohort. `arrived_version`: the newest one when it came; `weight`: W_i.

    `record`: its own, where it is sealed for keepers, who are shown what its device has signed: it is kept
    here, since the log may have lost its beginning by the time that the last keeper answers.
    """

    update_id: str
    client_id: str
    base_version: int
    arrived_version: int
    weight: int
    record: Record = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class WaitingCohort:
    """One that is closed. `version`: the newest when it was. `total`: Y; `answered`: the keepers that have.

    Numbers grow, and none is used twice.
    """

    number: int
    version: int
    members: tuple[MaskedUpdate, ...]
    total: Numbers
    answered: tuple[str, ...] = ()

    @property
    def update_ids(self) -> tuple[str, ...]:
        """Of its members, in the order in which they came."""
        return tuple(member.update_id for member in self.members)


@dataclass(frozen=True, eq=False)
class CohortState:
    """What a snapshot has: the newest number, the cohort in the making, and those that wait, in order."""

    number: int
    total: Numbers
    members: tuple[MaskedUpdate, ...] = ()
    waiting: tuple[WaitingCohort, ...] = ()


@dataclass
class Cohorts:
    """Those of one run. All attributes are for reading; the engine alone calls what changes them."""

    terms: Terms
    step: StepOfTotal
    number: int = 0
    members: tuple[MaskedUpdate, ...] = ()
    waiting: tuple[WaitingCohort, ...] = ()
    total: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.terms.ring.empty()

    # --- updates -----------------------------------------------------------------------------

    def flaw(self, update: Update) -> str:
        """Why an update cannot be added, or nothing."""
        if not _are(update.delta, self.total):
            return f"masked sums take {self.total.size} numbers of {self.terms.bits} bits, under masks"
        if any(member.client_id == update.client_id for member in self.members):
            return "a device is once in a masked sum"
        return ""

    def take(self, event: UpdateArrived, version: int) -> float:
        """Add a good update, which has come at this version; how much it counts, a fresh one 1."""
        update = event.update
        weight = self.terms.weight(version - update.base_version)
        numbers: Any = update.delta
        add_weighted(self.total, numbers, weight)
        member = MaskedUpdate(
            update_id=update.update_id,
            client_id=update.client_id,
            base_version=update.base_version,
            arrived_version=version,
            weight=weight,
            record=to_record(event) if event.seals else {},
        )
        self.members = (*self.members, member)
        return weight / self.terms.weight(0)

    def close(self, version: int) -> WaitingCohort | None:
        """The cohort in the making, if it is full: it waits from now on."""
        if len(self.members) < self.terms.cohort:
            return None
        self.number += 1
        closed = WaitingCohort(self.number, version, self.members, self.total)
        self.waiting = (*self.waiting, closed)
        self.members, self.total = (), self.terms.ring.empty()
        return closed

    # --- keepers -----------------------------------------------------------------------------

    def wanted(self, keeper: str) -> list[WaitingCohort]:
        """Those that this keeper is to be asked about, in the order in which it is: also after a restart."""
        return [cohort for cohort in self.waiting if keeper not in cohort.answered]

    def wants(self, number: int, keeper: str) -> bool:
        """Whether this answer is waited for."""
        asked = keeper in self.terms.keepers
        return asked and any(cohort.number == number for cohort in self.wanted(keeper))

    def fits(self, numbers: Numbers) -> bool:
        """Whether these numbers can be a sum of masks."""
        return _are(numbers, self.total)

    def answer(self, number: int, keeper: str, numbers: Numbers) -> None:
        """Take a keeper's masks off a sum; one that nobody waits for changes nothing."""
        if not self.wants(number, keeper):
            return
        self.waiting = tuple(
            replace(cohort, total=cohort.total - numbers, answered=(*cohort.answered, keeper))
            if cohort.number == number
            else cohort
            for cohort in self.waiting
        )

    def ready(self) -> WaitingCohort | None:
        """The oldest that waits, if all its keepers have answered: it waits no more."""
        if not self.waiting or len(self.waiting[0].answered) < len(self.terms.keepers):
            return None
        return self._gone(self.waiting[0])

    def sum_of(self, cohort: WaitingCohort) -> Vector | None:
        """K g of a cohort that all have answered, (size,) float64; None where its updates were not honest."""
        ring, weight = self.terms.ring, sum(member.weight for member in cohort.members)
        integers = ring.unmasked(cohort.total, ())
        values = integers.astype(np.float64)
        if np.abs(integers).max() > self.terms.values_max(weight):
            return None
        if length_of(values) > self.terms.length_max(weight):
            return None
        return values / (ring.scale * self.terms.weight(0))

    # --- what is lost ------------------------------------------------------------------------

    def numbers_of(self, client_id: str) -> list[int]:
        """The cohorts with an update of this client, in order; that in the making has the next number."""
        made = [*((c.number, c.members) for c in self.waiting), (self.number + 1, self.members)]
        return [number for number, members in made if any(m.client_id == client_id for m in members)]

    def has(self, number: int) -> bool:
        """Whether a cohort waits, or is in the making, so that it can be dropped."""
        making = bool(self.members) and number == self.number + 1
        return making or any(cohort.number == number for cohort in self.waiting)

    def drop(self, number: int) -> WaitingCohort | None:
        """Wait no more for a cohort, or for the rest of that in the making; it is returned if it is there."""
        if not self.has(number):
            return None
        if number > self.number:
            return self._broken_off()
        return self._gone(next(cohort for cohort in self.waiting if cohort.number == number))

    def drop_all(self) -> tuple[WaitingCohort, ...]:
        """Wait for none, the one in the making included."""
        lost, self.waiting = self.waiting, ()
        return (*lost, self._broken_off()) if self.members else lost

    def _broken_off(self) -> WaitingCohort:
        """That in the making, which has a number from now on, as keepers have been told of others."""
        self.number += 1
        lost = WaitingCohort(self.number, 0, self.members, self.total)
        self.members, self.total = (), self.terms.ring.empty()
        return lost

    def _gone(self, cohort: WaitingCohort) -> WaitingCohort:
        self.waiting = tuple(other for other in self.waiting if other is not cohort)
        return cohort

    # --- snapshots ---------------------------------------------------------------------------

    @property
    def state(self) -> CohortState:
        """What a snapshot has; the arrays are our own."""
        return CohortState(self.number, self.total, self.members, self.waiting)

    def restore(self, state: CohortState) -> None:
        """The inverse of `state`."""
        self.number, self.total = state.number, state.total
        self.members, self.waiting = state.members, state.waiting


def is_masked(update: Update) -> bool:
    """Whether an update has numbers of a ring."""
    return not isinstance(update.delta, SparseVector) and update.delta.dtype.kind == "u"


def _are(numbers: Any, like: Numbers) -> bool:
    """Whether these are as many numbers of the same ring."""
    return not isinstance(numbers, SparseVector) and (numbers.dtype, numbers.shape) == (
        like.dtype,
        like.shape,
    )
