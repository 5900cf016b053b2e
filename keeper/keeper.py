"""A keeper at work: a cohort comes in, the sum of its masks goes out, or the reason why not."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from anabranch.core.secagg.cohort import Cohort
from anabranch.core.secagg.sums import mask_sum
from anabranch.identity.keepers import sum_message
from anabranch.keeper.papers import KeeperPapers
from anabranch.keeper.rules import Declined, open_cohort
from anabranch.keeper.store import KeeperStore


@dataclass(frozen=True)
class Unmasked:
    """The sum of a cohort's masks as it travels, and the keeper's signature. `again`: it was given before."""

    cohort_sha256: str
    numbers: bytes
    sha256: str
    signature: bytes
    again: bool


class Keeper:
    """Answers cohorts, one after the other.

    `now`: seconds since 1970. `before_answer` is called once a cohort is remembered: tests end there.
    """

    def __init__(
        self,
        papers: KeeperPapers,
        store: KeeperStore,
        now: Callable[[], float],
        before_answer: Callable[[], None] = lambda: None,
    ) -> None:
        self.papers, self.store = papers, store
        self._now, self._before_answer = now, before_answer
        self._lock = threading.Lock()

    def unmask(self, cohort: Cohort) -> Unmasked | Declined:
        """The sum of its masks. What it is asked twice, byte for byte, it answers twice, alike."""
        with self._lock:
            again = self.store.knows(cohort)
            members = open_cohort(cohort, self.papers, None if again else self._now())
            if isinstance(members, Declined):
                return members
            if not again and (refused := self.store.admit(cohort, members)) is not None:
                return refused
            self._before_answer()
            seeds = [(member.seed, member.weight) for member in members]
            numbers = mask_sum(cohort.terms, seeds, self.papers.noise_key(cohort.digest)).tobytes()
        sha256 = hashlib.sha256(numbers).hexdigest()
        message = sum_message(cohort.run_id, cohort.number, self.papers.name, cohort.digest, sha256)
        return Unmasked(cohort.digest, numbers, sha256, self.papers.sign(message), again)
