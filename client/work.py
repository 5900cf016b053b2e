"""What a device does with a task: from the model that it starts from to the result on its disk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from anabranch.client.base_model import BaseModel
from anabranch.client.disk import DeviceDisk
from anabranch.client.elastic import ElasticTrainer
from anabranch.client.held import HeldModels
from anabranch.client.lease import Cancelled, LeaseKeeper
from anabranch.client.outbox import UpdateEntry
from anabranch.client.stopping import Bell, Interrupted
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent
from anabranch.client.trainer import LocalTrainer
from anabranch.core import effects as ef
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.model.updates import Task

ROOM_LOOK_S = 1.0  # so often it is looked whether the outbox has room


class Work:
    """The tasks of one device, one at a time. `check` raises what ends the agent.

    `trainer` trains: `local` task by task, or another that trains on. `step_time_s`: see `Agent`.
    With `waits_for_room` a result waits until a full outbox has room: others leave meanwhile.
    """

    def __init__(
        self,
        local: LocalTrainer,
        models: HeldModels,
        disk: DeviceDisk,
        lease: LeaseKeeper,
        bell: Bell,
        summary: AgentSummary,
        tell: OnEvent,
        check: Callable[[], None],
        step_time_s: float = 0.0,
    ) -> None:
        self._local, self._models, self._disk, self._lease = local, models, disk, lease
        self._bell, self._summary, self._tell, self._check = bell, summary, tell, check
        self.trainer: LocalTrainer | ElasticTrainer = local
        self.step_time_s = step_time_s
        self.waits_for_room = False
        self._start_model: BaseModel | None = None

    def fetch(self, task: Task) -> None:
        """Have what the task starts from. Raises as `HeldModels.get` and `LocalTrainer.check_uplink`."""
        self._local.check_uplink(task)
        self._start_model = self._models.get(task)

    def train(self, order: ef.Train) -> bool:
        """Train, and put the result in the outbox; False: the task was cancelled meanwhile.

        Raises as the trainer does, and as `DeviceDisk.put`.
        """
        assert self._start_model is not None
        task, lease, began = order.task, self._lease, self._bell.now()
        memory = self._disk.memory()
        self._local.kept = self._disk.kept()

        def each_step() -> None:
            lease.progress.step()
            self._check()
            lease.check(task.task_id)

        lease.progress.begin()
        try:
            entry, pending = self.trainer.train(task, order.update_id, self._start_model, memory, each_step)
            lease.progress.begin()
            self._emulate(began + entry.local_steps * self._step_s(task), task.task_id)
            took_s = self._bell.now() - began
            trained_s = entry.metrics.get(TRAIN_S, took_s)
            metrics = {**entry.metrics, TRAIN_S: trained_s}
            entry = replace(entry, metrics=metrics)
            with suppress(Interrupted):  # who leaves takes it along, beyond the bounds; the next look ends it
                self._await_room(entry, task.task_id)
        except Cancelled:
            return False
        self._summary.training_s += trained_s
        self._disk.put(entry, pending, self._local.kept)
        self._tell("trained", task=task.task_id, steps=entry.local_steps, took_s=took_s, metrics=metrics)
        return True

    def _step_s(self, task: Task) -> float:
        """How long the emulated device needs for a step of the task, seconds; 0 emulates nothing."""
        return self.step_time_s and self.step_time_s * self._local.step_cost(task)

    def _emulate(self, until: float, task_id: str) -> None:
        """Rest while the emulated device would still compute."""
        while (left_s := until - self._bell.now()) > 0:
            self._lease.check(task_id)
            self._bell.rest(left_s)
        self._lease.check(task_id)

    def _await_room(self, entry: UpdateEntry, task_id: str) -> None:
        """Raises `Cancelled`, and what ends the agent."""
        told = not self.waits_for_room
        while self.waits_for_room and not self._disk.has_room(entry):
            if not told:
                self._tell("outbox_full", results=len(self._disk.waiting()), task=task_id)
                told = True
            self._check()
            self._lease.check(task_id)
            self._bell.rest(ROOM_LOOK_S)
