"""Training that goes on: one thread owns the weights, everything else is done between two of its steps.

    training thread   step | step | merge, step | step | snapshot, step | step ...
    sync thread                  answer                          take, encode, send, receive

Snapshots and merges happen in the training thread, where no step is half done, so no snapshot is torn and
nobody waits for a lock. One exchange at a time: a snapshot is taken when one is wanted and the policy finds
it due, and stays as it is while it is in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from anabranch.client.merging import Merge
from anabranch.client.policies import PushPolicy, Since
from anabranch.core.model.params import Vector
from anabranch.workloads.trainer import LiveWeights

JOIN_S = 10.0  # of a step that is under way

Hook = Callable[[LiveWeights], None]


class _Ended(BaseException):
    """Leaves the training loop. No `Exception`: an App's own `except` must not eat it."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights at one moment, (spec.size,); local steps and seconds since the snapshot before."""

    vector: Vector
    steps: int
    seconds: float


class LiveTraining:
    """`train` trains until the hook that it is given raises, and calls that between any two local steps.

    `clock` gives seconds. `ring` is called when there is a snapshot to take, or an error. `step_time_s`
    emulates a device that needs so long for a step.
    """

    def __init__(
        self,
        train: Callable[[Hook], None],
        merge: Merge,
        policy: PushPolicy,
        clock: Callable[[], float] = time.monotonic,
        ring: Callable[[], None] = lambda: None,
        step_time_s: float = 0.0,
    ) -> None:
        self._train, self._merge, self._policy = train, merge, policy
        self._clock, self._ring, self._step_time_s = clock, ring, step_time_s
        self._lock = threading.Lock()  # of what the two threads hand over
        self._wanted = self._advised = self._over = False
        self._taken: Snapshot | None = None
        self._answer: tuple[Vector, Vector] | None = None  # snapshot, center
        self._exchange_s = 0.0
        self._error: BaseException | None = None
        # The training thread's own:
        self._steps_before = 0
        self._snapshot_at = self._exchanged_at = self._step_at = clock()
        self._last: Vector | None = None
        self.steps = -1  # the hook is called before the first one, too
        self._thread = threading.Thread(target=self._run, name="anabranch-training", daemon=True)

    # --- for the sync thread -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to train."""
        self._thread.start()

    def want(self) -> None:
        """From now on a snapshot is wanted: the policy says when."""
        with self._lock:
            self._wanted, self._taken = True, None

    def take(self) -> Snapshot | None:
        """The snapshot, once it is there. Raises what has ended the training."""
        if self._error is not None:
            raise self._error
        with self._lock:
            taken, self._taken = self._taken, None
            return taken

    def forgo(self) -> None:
        """No snapshot is wanted any more."""
        with self._lock:
            self._wanted, self._taken = False, None

    def answer(self, snapshot: Vector, center: Vector, exchange_s: float) -> None:
        """The server's model that answers a snapshot: merged before the next step. It must not change."""
        with self._lock:
            self._answer, self._exchange_s = (snapshot, center), exchange_s

    def advise(self) -> None:
        """The server wants what there is."""
        with self._lock:
            self._advised = True

    def stop(self) -> None:
        """End after the step of the moment."""
        self._over = True
        if self._thread.is_alive():
            self._thread.join(JOIN_S)

    # --- the training thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._train(self._between_steps)
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - the sync thread raises it
            self._error = error
            self._ring()

    def _between_steps(self, live: LiveWeights) -> None:
        if self._over:
            raise _Ended
        self.steps += 1
        self._emulate()
        norm2 = self._step_norm2(live) if self._policy.watches_steps else None
        with self._lock:
            answer, self._answer = self._answer, None
            wanted, advised, exchange_s = self._wanted, self._advised, self._exchange_s
        now = self._clock()
        if answer is not None:
            self._merge.apply(live, *answer)
            self._exchanged_at = now
            self._last = live.flat() if self._policy.watches_steps else None
        steps = self.steps - self._steps_before
        if self._policy.due(Since(steps, now - self._exchanged_at, exchange_s, wanted, advised, norm2)):
            self._snap(live, steps, now)

    def _snap(self, live: LiveWeights, steps: int, now: float) -> None:
        snapshot = Snapshot(live.flat(), steps, now - self._snapshot_at)
        self._steps_before, self._snapshot_at = self.steps, now
        with self._lock:
            if self._wanted:
                self._taken = snapshot
            self._wanted = self._advised = False
        self._ring()

    def _step_norm2(self, live: LiveWeights) -> float | None:
        before, self._last = self._last, live.flat()
        if before is None:
            return None
        step = self._last - before
        return float(np.einsum("i,i->", step, step, dtype=np.float64))

    def _emulate(self) -> None:
        """Rest while the emulated device would still compute."""
        if self._step_time_s and self.steps:
            time.sleep(max(0.0, self._step_at + self._step_time_s - self._clock()))
        self._step_at = self._clock()
