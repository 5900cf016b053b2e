"""Training that goes on, and meets the server now and then: what is done between two of its steps.

A task here is one exchange, in the order in which a `Session` goes through it:

    ask, fetch   the server's model as it was right after it had taken the last snapshot: merged
    train        until the policy wants a push; the update is snapshot - fetched model
    push         and, in the same call, the ask for the next task

With FedAsync the server's side is w_PS <- (1 - a) w_PS + a w_s, which is ShadowEASGD's (Zheng et al., arXiv
2003.03477): the fetched model plus the update is the snapshot.

One exchange at a time: a snapshot is taken when one is wanted and the policy finds it due, and stays as it is
while it is in flight. Whoever trains calls `BetweenSteps.step` where no step is half done, so no snapshot is
torn; who calls from another thread has a lock, or a baton.

Tasks may be of a part of the model, some whole tensors (`strategies/submodels/fragments.py`): all of it is
trained, the update is the part's, and the answer is merged where the snapshot was sent. Streaming DiLoCo
(Douillard et al., arXiv 2501.18512) is that, with the rule `blend`.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.config.ranges import TRAINS_WHOLE
from anabranch.core.config.tables import ClientTable
from anabranch.core.engine.buffers import LOCAL, DeviceBuffers
from anabranch.core.errors import ConfigError
from anabranch.core.model.arrays import inner
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.params import Vector
from anabranch.core.model.submodels import TensorSet, gathered, scatter
from anabranch.core.model.updates import Task
from anabranch.host.merging import Merge, WithBuffers, make_merge
from anabranch.host.policies import ExchangeState, PushPolicy

SILENT_S = 120.0
SILENT = (
    "%s: no local step has ended so far: if its `train` does not use anabranch.workloads.batches, it never "
    "meets the server: use them, or set client.push to 'task' or 'overlap'"
)


@dataclass(frozen=True, eq=False)
class TrainingMoment:
    """The weights at one moment, (spec.size,); local steps and seconds since the snapshot before."""

    vector: Vector
    steps: int
    seconds: float


@dataclass(frozen=True, eq=False)
class ElasticAnswer:
    """What to merge: the snapshot that was sent, and the server's model since then; how long that took.

    Of a `part` both are (part.size,), and nothing else changes; None: the whole model.
    """

    snapshot: Vector
    center: Vector
    exchange_s: float
    part: TensorSet | None = None


class BetweenSteps:
    """Merges and snapshots of one training that begins `now`, in seconds of any clock."""

    def __init__(self, merge: Merge, policy: PushPolicy, now: float) -> None:
        self._merge, self._policy = merge, policy
        self.steps = -1  # the hook is called before the first one, too
        self._wanted = self._advised = False
        self._taken: TrainingMoment | None = None
        self._answer: ElasticAnswer | None = None
        self._exchange_s = 0.0
        self._steps_before = 0
        self._snapshot_at = self._exchanged_at = now
        self._last: Vector | None = None

    def want(self) -> None:
        """From now on a snapshot is wanted: the policy says when."""
        self._wanted, self._taken = True, None

    def take(self) -> TrainingMoment | None:
        """The snapshot, once it is there."""
        taken, self._taken = self._taken, None
        return taken

    def forgo(self) -> None:
        """No snapshot is wanted any more."""
        self._wanted, self._taken = False, None

    def answer(self, answer: ElasticAnswer) -> None:
        """What comes of a snapshot: merged before the next step. It must not change."""
        self._answer, self._exchange_s = answer, answer.exchange_s

    def advise(self) -> None:
        """The server wants what there is."""
        self._advised = True

    def step(self, live: LiveWeights, now: float) -> bool:
        """A step has ended, or the first one begins: whether there is a snapshot to take."""
        self.steps += 1
        norm2 = self._step_norm2(live) if self._policy.watches_steps else None
        self.merge(live, now)
        steps, rested_s = self.steps - self._steps_before, now - self._exchanged_at
        since = ExchangeState(steps, rested_s, self._exchange_s, self._wanted, self._advised, norm2)
        if not self._policy.due(since):
            return False
        snapshot = TrainingMoment(live.flat(), steps, now - self._snapshot_at)
        self._steps_before, self._snapshot_at = self.steps, now
        if self._wanted:
            self._taken = snapshot
        self._wanted = self._advised = False
        return True

    def merge(self, live: LiveWeights, now: float) -> None:
        """Merge the answer, if there is one."""
        answer, self._answer = self._answer, None
        if answer is not None:
            self._merge.apply(live, *_spread(answer, live))
            self._exchanged_at = now
            self._last = live.flat() if self._policy.watches_steps else None

    def _step_norm2(self, live: LiveWeights) -> float | None:
        before, self._last = self._last, live.flat()
        if before is None:
            return None
        step = self._last - before
        return inner(step, step)


class Exchanges:
    """What one exchange after the other leaves to be merged. `follows`: the server adds updates up."""

    def __init__(self, follows: bool) -> None:
        self._follows = follows
        self._base: Vector | None = None  # of the task before
        self._part: TensorSet | None = None  # that it is of
        self._sent: tuple[Vector, float] | None = None  # a snapshot without its answer, and when it was taken

    @classmethod
    def of(cls, table: ClientTable) -> Exchanges:
        """As the run's `[client]` says."""
        return cls(follows=table.merge_weight == 1)

    def meet(self, base: Vector, now: float, part: TensorSet | None = None) -> ElasticAnswer | None:
        """A task begins, of a part of this model of the server's: what is to be merged."""
        before, of, sent = self._base, self._part, self._sent
        self._base, self._part, self._sent = base, part, None
        if sent is not None:
            snapshot, taken_at = sent
            if of is None or before is None or not self._follows:
                return ElasticAnswer(snapshot, gathered(base, of), now - taken_at, of)
            # What others did to the parts that were not sent is taken over; what was learned there stays.
            whole = before.copy()
            scatter(snapshot, whole, of)
            return ElasticAnswer(whole, base, now - taken_at)
        if before is not None and self._follows:
            # The task before came to nothing. A server that adds updates up must not be sent, with what was
            # learned, the way back from what the others did meanwhile; one that mixes wants the snapshot.
            return ElasticAnswer(before, base, 0.0)
        return None

    def leave(self, taken: TrainingMoment, now: float) -> None:
        """A snapshot is on its way."""
        self._sent = gathered(taken.vector, self._part), now


def _spread(answer: ElasticAnswer, live: LiveWeights) -> tuple[Vector, Vector]:
    """Snapshot and center of the whole model: where nothing was sent both are what there is."""
    if answer.part is None:
        return answer.snapshot, answer.center
    snapshot = live.flat()
    center = snapshot.copy()
    scatter(answer.snapshot, snapshot, answer.part)
    scatter(answer.center, center, answer.part)
    return snapshot, center


def part_of(task: Task) -> TensorSet | None:
    """The tensors that a task is of; None: the whole model. Raises `ConfigError` for a smaller model."""
    if task.submodel is None or isinstance(task.submodel, TensorSet):
        return task.submodel
    raise ConfigError(TRAINS_WHOLE)


def merge_of(table: ClientTable, buffers: DeviceBuffers) -> Merge:
    """The rule of a run's `[client]` for a device's model. Raises `ConfigError`."""
    pull = 0.0 if buffers.policy == LOCAL else table.merge_weight
    return WithBuffers(make_merge(table.merge, table.merge_weight), buffers.spec.buffer_places, pull)
