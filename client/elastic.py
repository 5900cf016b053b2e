"""Elastic training: the device trains on without tasks of fixed length, and meets the server now and then.

A task here is one exchange, in the order in which a `Session` goes through it:

    ask, fetch   the server's model as it was right after it had taken the last snapshot: merged
    train        until the policy wants a push; the update is snapshot - fetched model
    push         and, in the same call, the ask for the next task

With FedAsync the server's side is w_PS <- (1 - a) w_PS + a w_s, which is ShadowEASGD's (Zheng et al., arXiv
2003.03477): the fetched model plus the update is the snapshot.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from anabranch.client.live_training import Hook, LiveTraining, Snapshot
from anabranch.client.merging import WithBuffers, make_merge
from anabranch.client.outbox import UpdateEntry
from anabranch.client.policies import make_policy
from anabranch.client.stopping import Bell
from anabranch.client.trainer import BaseModel, LocalTrainer
from anabranch.compress.feedback import Memory
from anabranch.core.config.tables import ClientTable
from anabranch.core.engine.buffers import LOCAL
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Task

log = logging.getLogger(__name__)

SILENT_S = 120.0
SILENT = (
    "%s: no local step has ended so far: if its `train` does not use anabranch.workloads.batches, it never "
    "meets the server: use them, or set client.push to 'task' or 'overlap'"
)
LOOK_S = 0.5  # at least so often it is looked whether the task is still wanted


class ElasticTrainer:
    """Does tasks as `LocalTrainer.train` does, by training that goes on in between.

    `table` is the run's `[client]`. Raises `ConfigError` where it asks for what is not known here.
    """

    def __init__(self, local: LocalTrainer, table: ClientTable, bell: Bell, step_time_s: float = 0.0) -> None:
        self._local, self._table, self._bell = local, table, bell
        self._step_time_s = step_time_s
        self._merge = make_merge(table.merge, table.merge_weight)
        self._policy = make_policy(table)
        self._live: LiveTraining | None = None
        self._base: Vector | None = None  # of the task before
        self._sent: tuple[Vector, float] | None = None  # a snapshot without its answer, and when it was taken

    def train(
        self,
        task: Task,
        update_id: str,
        base: BaseModel,
        memory: Memory | None,
        each_step: Callable[[], None],
    ) -> tuple[UpdateEntry, Memory | None]:
        """Merge `base`, train until a push is due: the update, and what its uplink then remembers.

        `each_step` is called while steps are made, not at each. Raises what it raises, and what the App does.
        """
        if task.submodel is not None:
            raise ConfigError("client.push = 'elastic' trains the whole model: set submodel.name = 'none'")
        live = self._live or self._begin(task, base)
        if self._sent is not None:
            snapshot, taken_at = self._sent
            self._sent = None
            live.answer(snapshot, base.vector, self._bell.now() - taken_at)
        elif self._base is not None and self._table.merge_weight == 1:
            # The task before came to nothing. A server that adds updates up must not be sent, with what was
            # learned, the way back from what the others did meanwhile; one that mixes wants the snapshot.
            live.answer(self._base, base.vector, 0.0)
        self._base = base.vector
        taken = self._await_snapshot(live, each_step)
        self._sent = taken.vector, self._bell.now()
        delta = taken.vector - base.vector
        seconds = {TRAIN_S: taken.seconds} if math.isfinite(taken.seconds) else {}
        return self._local.pack(task, update_id, base.vector, delta, taken.steps, seconds, memory)

    def advise(self) -> None:
        """From any thread: the server wants what there is."""
        if self._live is not None:
            self._live.advise()

    def stop(self) -> None:
        """End the training."""
        if self._live is not None:
            self._live.stop()

    def _begin(self, task: Task, base: BaseModel) -> LiveTraining:
        # The pull towards the server is the merge's.
        plan = replace(task.local, proximal_mu=0.0)

        def train(hook: Hook) -> None:
            self._local.train_on(base, plan, task.seed, hook)

        buffers = self._local.buffers
        pull = 0.0 if buffers.policy == LOCAL else self._table.merge_weight
        merge = WithBuffers(self._merge, buffers.spec.buffer_places, pull)
        self._live = LiveTraining(
            train, merge, self._policy, self._bell.now, self._bell.ring, self._step_time_s
        )
        self._live.start()
        return self._live

    def _await_snapshot(self, live: LiveTraining, each_step: Callable[[], None]) -> Snapshot:
        live.want()
        try:
            steps, silent_from = live.steps, self._bell.now()
            while (taken := live.take()) is None:
                if live.steps < 1 and self._bell.now() - silent_from >= SILENT_S:
                    log.warning(SILENT, self._local.name)
                    silent_from = math.inf
                if live.steps > steps:  # a lease is renewed for work, not for hanging
                    steps = live.steps
                    each_step()
                self._bell.rest(LOOK_S)
        except BaseException:
            live.forgo()
            raise
        return taken
