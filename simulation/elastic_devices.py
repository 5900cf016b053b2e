"""A simulated device that trains on, and meets the server now and then: see `host/elastic.py`.

Steps take what a task's steps take on this device, a draw for each exchange. What ends a device's process, or
takes it out of reach, ends its training: it begins again from the server's model. A dropout comes within the
first `client.push_steps` steps of an exchange.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import effects as ef
from anabranch.core.device.session import Session
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import InvalidUpdate
from anabranch.host.device import OVER, DeviceCall
from anabranch.host.elastic import TrainingMoment
from anabranch.host.run import AdviceKind
from anabranch.simulation.devices import Device
from anabranch.simulation.elastic import ElasticTraining
from anabranch.simulation.executors.base import Job
from anabranch.simulation.faults import RIGHT, DeviceClock
from anabranch.simulation.lanes import Lane
from anabranch.simulation.surroundings import Surroundings


class ElasticDevice(Device):
    """One device of a simulated fleet that trains on between its exchanges with the server."""

    __slots__ = ("_live", "_steps", "_wanted")
    heeds = (*OVER, AdviceKind.UPLOAD_NOW)

    def __init__(
        self, index: int, examples: int, session: Session, around: Surroundings, time: DeviceClock = RIGHT
    ) -> None:
        super().__init__(index, examples, session, around, time)
        self._steps = Lane(around.clock, around.network, session.client_id)  # of the training
        self._live: ElasticTraining | None = None
        self._wanted: tuple[ef.Train, Job, str] | None = None  # of which task a snapshot is due, and its head

    def _train(self, order: ef.Train) -> None:
        """Merge what the task starts from; once the policy finds a push due, there is the result."""
        model, head = self._begin_task()
        self._works()
        if self._drops_out(self._around.push_steps * self._step_s):
            return
        job = self._job(model, order.task, self._clock.now)
        begins = self._live is None
        if self._live is None:
            assert self._around.elastic is not None, "only runs of devices that train on have some"
            self._live = self._around.elastic.begin(job, lambda: self._now)
        self._wanted = order, job, head
        self._live.meet(job)
        if begins:
            self._step()

    @property
    def _step_s(self) -> float:
        return self._around.profiles.task_time_s(self.index, self._tasks, 1)

    def _step(self) -> None:
        assert self._live is not None
        taken = self._live.step()
        self._steps.after(self._step_s, self._step)
        if taken is not None and self._wanted is not None:
            self._snapped(taken, *self._wanted)

    def _snapped(self, taken: TrainingMoment, order: ef.Train, job: Job, head: str) -> None:
        assert self._live is not None
        self._wanted = None
        job = replace(job, memory=self._disk.remembered, own=self._disk.own)
        try:
            result = self._live.result(job, taken, {TRAIN_S: taken.seconds})
        except InvalidUpdate as error:
            self._failed(DeviceCall.TRAIN, error)
        else:
            self._keep(order, result, head)

    def _stop_work(self, task_id: str) -> None:  # noqa: ARG002 - it has one
        self._work.end()
        self._offer = self._wanted = None
        if self._live is not None:
            self._live.forgo()

    def _advised(self) -> None:
        if self._live is not None:
            self._live.advise()

    def _abandon(self) -> None:
        super()._abandon()
        self._steps.end()
        live, self._live, self._wanted = self._live, None, None
        if live is not None:
            live.end()
