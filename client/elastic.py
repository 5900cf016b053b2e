"""Elastic training on a live device: `host/elastic.py`, with a thread that trains and real time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from anabranch.client.base_model import BaseModel
from anabranch.client.live_training import LiveTraining
from anabranch.client.outbox import UpdateEntry
from anabranch.client.stopping import Bell
from anabranch.client.trainer import LocalTrainer
from anabranch.compress.feedback import Memory
from anabranch.core.config.tables import ClientTable
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.model.submodels import gathered
from anabranch.core.model.updates import Task
from anabranch.host.elastic import SILENT, SILENT_S, Exchanges, TrainingMoment, merge_of, part_of
from anabranch.host.merging import make_merge
from anabranch.host.policies import make_policy
from anabranch.workloads.trainer import Hook

log = logging.getLogger(__name__)

LOOK_S = 0.5  # at least so often it is looked whether the task is still wanted


class ElasticTrainer:
    """Does tasks as `LocalTrainer.train` does, by training that goes on in between.

    `table` is the run's `[client]`. Raises `ConfigError` where it asks for what is not known here.
    """

    def __init__(self, local: LocalTrainer, table: ClientTable, bell: Bell, step_time_s: float = 0.0) -> None:
        self._local, self._table, self._bell = local, table, bell
        self._step_time_s = step_time_s
        make_merge(table.merge, table.merge_weight)  # better known before the training
        self._policy = make_policy(table)
        self._exchanges = Exchanges.of(table)
        self._live: LiveTraining | None = None

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
        self._local.check_part(part := part_of(task))
        live = self._live or self._begin(task, base)
        answer = self._exchanges.meet(base.vector, self._bell.now(), part)
        if answer is not None:
            live.answer(answer)
            self._local.reached(task.base_version)
        taken = self._await_snapshot(live, each_step)
        self._exchanges.leave(taken, self._bell.now())
        start = gathered(base.vector, part)
        delta = gathered(taken.vector, part) - start
        seconds = {TRAIN_S: taken.seconds} if math.isfinite(taken.seconds) else {}
        return self._local.pack(task, update_id, start, delta, taken.steps, seconds, memory, base.head)

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
        self._local.reached(task.base_version)

        def train(hook: Hook) -> None:
            self._local.train_on(base, plan, task.seed, hook)

        merge = merge_of(self._table, self._local.buffers)
        self._live = LiveTraining(
            train, merge, self._policy, self._bell.now, self._bell.ring, self._step_time_s
        )
        self._live.start()
        return self._live

    def _await_snapshot(self, live: LiveTraining, each_step: Callable[[], None]) -> TrainingMoment:
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
