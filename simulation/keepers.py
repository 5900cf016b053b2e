"""The keepers of a simulated run: each is asked for one sum after the other, and may be down.

What a keeper has answered it never forgets, as the live one (`keeper/store.py`), which writes it down before
it answers: what it is asked twice it answers twice, alike, and no update in two sums. The server asks for the
oldest sum that waits, and again where no answer comes. Where a keeper refuses, as after the server's disk has
lost sums that it had asked for, its operator drops the cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from anabranch.core import events as ev
from anabranch.core.effects import Effect
from anabranch.core.engine.cohorts import MaskedUpdate, WaitingCohort
from anabranch.core.errors import StoreFull
from anabranch.core.rng import stream
from anabranch.core.secagg.ring import Numbers
from anabranch.core.secagg.sums import mask_sum
from anabranch.core.secagg.terms import Terms
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.masking import mask_seed
from anabranch.simulation.server import DirectServer

ANSWER_S = 0.2  # from a question to its answer
AGAIN_S = 1.0  # after a question that had none
KEY_BYTES = 32


class SimulatedKeeper:
    """One keeper. `answered`: the members of cohorts, by their numbers; `is_up`, or nobody is there."""

    def __init__(self, name: str, terms: Terms, seed: int) -> None:
        self.name, self._terms, self._seed = name, terms, seed
        self.is_up = True
        self.answered: dict[int, tuple[MaskedUpdate, ...]] = {}
        self._used: set[str] = set()

    def unmask(self, cohort: WaitingCohort, task_ids: list[str]) -> Numbers | None:
        """The sum of a cohort's masks, of members by their tasks; None: it refuses."""
        number, members = cohort.number, cohort.members
        if self.answered.get(number) != members:
            ids = set(cohort.update_ids)
            if number <= max(self.answered, default=0) or ids & self._used:
                return None
            if not self._terms.cohort_min <= len({m.client_id for m in members}) == len(members):
                return None
            self.answered[number] = members
            self._used |= ids
        seeds = [
            (mask_seed(self._seed, task_id, self.name), member.weight)
            for task_id, member in zip(task_ids, members, strict=True)
        ]
        # Not of the operating system, as a live keeper's: a simulation repeats itself.
        key = stream(self._seed, "keeper noise", self.name, number).bytes(KEY_BYTES)
        return mask_sum(self._terms, seeds, key)


class Keepers:
    """All keepers of a run, and the server's links to them. `observe` hears of every event.

    `answer_s`: from a question to its answer. At 0 versions come when they would come without masks.
    """

    def __init__(self, terms: Terms, seed: int, clock: VirtualClock, server: DirectServer) -> None:
        self.all = [SimulatedKeeper(name, terms, seed) for name in terms.keepers]
        self.answer_s = ANSWER_S
        self._clock, self._server = clock, server
        self._asking: set[str] = set()  # those that a question is under way to
        self._life = 0  # of the server: what an earlier one has asked is of no interest

    def observe(self, _: ev.Event, __: Sequence[Effect]) -> None:
        """An event was handled: sums may be wanted."""
        for keeper in self.all:
            self._ask(keeper)

    def restarted(self) -> None:
        """The server is back, and asks for what it still wants."""
        self._life += 1
        self._asking.clear()
        for keeper in self.all:
            self._ask(keeper)

    def crash(self, name: str, down_s: float) -> None:
        """A keeper is down for so long; what it was about to say is lost."""
        keeper = next(keeper for keeper in self.all if keeper.name == name)
        keeper.is_up = False
        self._clock.at(self._clock.now + down_s, partial(self._back, keeper))

    def _back(self, keeper: SimulatedKeeper) -> None:
        keeper.is_up = True

    def _wanted(self, keeper: SimulatedKeeper) -> WaitingCohort | None:
        cohorts = self._server.world.engine.cohorts
        assert cohorts is not None, "keepers are of runs with masked sums"
        return next(iter(cohorts.wanted(keeper.name)), None)

    def _ask(self, keeper: SimulatedKeeper) -> None:
        """Ask for the oldest sum, unless a question is under way."""
        if keeper.name in self._asking or self._wanted(keeper) is None:
            return
        self._asking.add(keeper.name)
        self._clock.at(self._clock.now + self.answer_s / 2.0, partial(self._asked, keeper, self._life))

    def _asked(self, keeper: SimulatedKeeper, life: int) -> None:
        """The question is there: the keeper writes down what it will answer, and that is on its way."""
        cohort = self._wanted(keeper)
        if life != self._life or cohort is None:
            self._next(keeper, life)
            return
        if not keeper.is_up:
            self._clock.at(self._clock.now + AGAIN_S, partial(self._asked, keeper, life))
            return
        receipts = self._server.world.engine.ledger.receipts
        found = keeper.unmask(cohort, [receipts[update_id].task_id for update_id in cohort.update_ids])
        answer = partial(self._answered, keeper, life, cohort.number, found)
        self._clock.at(self._clock.now + self.answer_s / 2.0, answer)

    def _answered(self, keeper: SimulatedKeeper, life: int, number: int, found: Numbers | None) -> None:
        """The answer is there, unless its keeper has died in between, or the server has."""
        if life != self._life:
            return
        if not keeper.is_up:
            self._clock.at(self._clock.now + AGAIN_S, partial(self._asked, keeper, life))
            return

        def heard(failed: object) -> None:
            wait_s = AGAIN_S if isinstance(failed, StoreFull) else 0.0
            self._clock.at(self._clock.now + wait_s, partial(self._next, keeper, life))

        if found is None:
            why = f"keeper {keeper.name} refuses it"
            self._server.order(lambda now: ev.CohortDropped(now, number, why), heard)
        else:
            self._server.mask_sum(number, keeper.name, found, heard)

    def _next(self, keeper: SimulatedKeeper, life: int) -> None:
        if life == self._life:
            self._asking.discard(keeper.name)
            self._ask(keeper)
