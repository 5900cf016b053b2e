"""ACE and ACED: at every update the model goes along the mean of what all devices have sent last.

| symbol  | name            | meaning                                                       |
|---------|-----------------|---------------------------------------------------------------|
| t       | context.version | version before the update is applied                          |
| eta     | server_lr       | server learning rate                                          |
| Delta_i | update.delta    | w_i - w_base of device i                                      |
| U_i     | state.kept      | device i's newest update                                      |
| b_i     | base_version    | the version that it started from                              |
| tau_max | staleness_max   | ACED: so many versions at most since then                     |
| A       |                 | devices that have sent one; ACED: of which t - b_i <= tau_max |
| H       | state.total     | sum of U_i over A, float64                                    |

    U_i <- Delta_i of the device i whose update has come
    w <- w + eta (1/|A|) sum over A of U_i

So a fast device counts as much as a slow one: by its newest update, once. There is no buffer, updates are not
weighed by age, and every one makes a version. One that is older than tau_max counts never again, and one that
comes so late is not used. Each update is applied about as often as there are devices, hence a small eta.

The paper's mean is of all N devices, after a pass over the whole fleet; here it grows as devices come, so
that nobody waits for one that never does. tau_max by the version that an update started from, its default and
eta's are ours.

Source: Chang et al., "Mitigating participation imbalance bias in asynchronous federated learning", arXiv
2511.19066, by its abstract and a published re-implementation's notes; the formula of ACED is inferred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Annotated, Any, ClassVar

from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.model.params import Vector, add_scaled
from anabranch.core.model.updates import Update
from anabranch.strategies.memory import (
    MEMORY_BYTES_MAX,
    PLACES,
    RAM,
    Kept,
    RememberingStrategy,
    last_delta,
    no_total,
    shifted_kept,
)
from anabranch.strategies.parameters import AT_LEAST_ONE, POSITIVE, one_of


@dataclass(frozen=True)
class ACEState:
    """`kept`: U_i by device; `total`: H, shape (size,)."""

    kept: dict[str, Kept]
    total: Vector


@dataclass(frozen=True)
class ACE(RememberingStrategy):
    """Goes along the mean of every device's newest update, whenever one comes.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "ace"
    state_type: ClassVar[type[Any]] = ACEState

    server_lr: Annotated[float, POSITIVE] = 0.1
    memory: Annotated[str, one_of(PLACES)] = RAM
    memory_bytes_max: Annotated[int, AT_LEAST_ONE] = MEMORY_BYTES_MAX

    def init(self, vector: Vector) -> State:
        """Nothing remembered."""
        return self.state_type({}, no_total(vector))

    def fold(self, state: State, vector: Vector, update: Update, weight: float, context: Context) -> Step:
        """Remember it, forget what is too old, and go along the mean; publish."""
        leaving, counting = self._renewed(state, update, context)
        for client in leaving:
            last = state.kept[client]
            add_scaled(state.total, -1.0, last_delta(last, context))
            state.kept[client] = last.emptied()
        self.with_newest(state.kept, update, context)
        add_scaled(state.total, 1.0, update.delta)
        add_scaled(vector, self.server_lr / counting, state.total)
        return Step(state, vector)

    def _renewed(self, state: State, update: Update, context: Context) -> tuple[list[str], int]:
        """Whose updates count no more, this device's last one among them, and |A| with this one."""
        leaving = [update.client_id] if update.client_id in state.kept else []
        return leaving, len(state.kept) + 1 - len(leaving)

    def shifted(self, state: State, versions: int) -> State:
        """Other numbers for the versions that the updates started from."""
        return replace(state, kept=shifted_kept(state.kept, versions))


class Ages:
    """The devices whose updates count, by the versions that these started from.

    The oldest are found without a look at the others: a heap has an entry of each, and of those that newer
    ones have replaced, until it is too old. Each update makes a version, so there are never more entries
    than tau_max + 1 beside those that it began with.
    """

    def __init__(self, bases: dict[str, int]) -> None:
        self._bases = bases
        self._oldest = [(base, client) for client, base in bases.items()]
        heapify(self._oldest)

    def __len__(self) -> int:
        return len(self._bases)

    def renew(self, client: str, base_version: int, oldest: int) -> list[str]:
        """A device has a newer one, and those of versions before `oldest` leave: whose do, with its last."""
        left = {client} & self._bases.keys()
        while self._oldest and self._oldest[0][0] < oldest:
            base, other = heappop(self._oldest)
            if self._bases.get(other) == base:  # else a newer one has come since, or it has left
                left.add(other)
        for each in left:
            del self._bases[each]
        self._bases[client] = base_version
        heappush(self._oldest, (base_version, client))
        return sorted(left)  # in an order that is the same after a restart, since sums depend on it


@dataclass(frozen=True)
class ACEDState(ACEState):
    """The same; who counts is found from it once, at the first update after every start."""

    @cached_property
    def ages(self) -> Ages:
        """Of `kept`, with which it is kept up from then on. No snapshot has it."""
        return Ages({client: last.base_version for client, last in self.kept.items() if last.counts})


@dataclass(frozen=True)
class ACED(ACE):
    """ACE by the updates that are not too old.

    Symbols and equations: see the module.
    """

    name: ClassVar[str] = "aced"
    state_type: ClassVar[type[Any]] = ACEDState

    staleness_max: Annotated[int, AT_LEAST_ONE] = 100

    def _renewed(self, state: State, update: Update, context: Context) -> tuple[list[str], int]:
        """This device's last one, and what is too old; those that are not."""
        ages: Ages = state.ages
        oldest = context.version - self.staleness_max
        return ages.renew(update.client_id, update.base_version, oldest), len(ages)
