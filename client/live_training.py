"""Training that goes on in a thread of its own, which owns the weights.

    training thread   step | step | merge, step | step | snapshot, step | step ...
    sync thread                  answer                          take, encode, send, receive

Snapshots and merges happen in the training thread (`host/elastic.py`), so no snapshot is torn. The lock is of
what the two threads hand over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from anabranch.core.model.live import LiveWeights
from anabranch.host.elastic import BetweenSteps, ElasticAnswer, TrainingMoment
from anabranch.host.merging import Merge
from anabranch.host.policies import PushPolicy
from anabranch.workloads.trainer import Hook

JOIN_S = 10.0  # of a step that is under way


class _Ended(BaseException):
    """Leaves the training loop. No `Exception`: an App's own `except` must not eat it."""


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
        self._train, self._clock, self._ring, self._step_time_s = train, clock, ring, step_time_s
        self._lock = threading.Lock()
        self._between = BetweenSteps(merge, policy, clock())
        self._over = False
        self._error: BaseException | None = None
        self._step_at = clock()  # the training thread's own
        self._thread = threading.Thread(target=self._run, name="anabranch-training", daemon=True)

    @property
    def steps(self) -> int:
        """Local steps so far; -1 before the first one begins."""
        return self._between.steps

    # --- for the sync thread -----------------------------------------------------------------

    def start(self) -> None:
        """Begin to train."""
        self._thread.start()

    def want(self) -> None:
        """From now on a snapshot is wanted: the policy says when."""
        with self._lock:
            self._between.want()

    def take(self) -> TrainingMoment | None:
        """The snapshot, once it is there. Raises what has ended the training."""
        if self._error is not None:
            raise self._error
        with self._lock:
            return self._between.take()

    def forgo(self) -> None:
        """No snapshot is wanted any more."""
        with self._lock:
            self._between.forgo()

    def answer(self, answer: ElasticAnswer) -> None:
        """What answers a snapshot: merged before the next step. It must not change."""
        with self._lock:
            self._between.answer(answer)

    def advise(self) -> None:
        """The server wants what there is."""
        with self._lock:
            self._between.advise()

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
        self._emulate()
        with self._lock:
            taken = self._between.step(live, self._clock())
        if taken:
            self._snapped(live)

    def _snapped(self, live: LiveWeights) -> None:  # noqa: ARG002 - the benchmarks wait here for the answer
        self._ring()

    def _emulate(self) -> None:
        """Rest while the emulated device would still compute."""
        if self._step_time_s and self.steps >= 0:
            time.sleep(max(0.0, self._step_at + self._step_time_s - self._clock()))
        self._step_at = self._clock()
