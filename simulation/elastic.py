"""The training of simulated devices that train on (`client.push = "elastic"`): a thread each, one at a time.

    world      event | give the baton                | event | event | give the baton                | ...
    training                          step, merge ...                                 step, snap ...

A step is made when its virtual time is over; what is done between two steps (`host/elastic.py`) is done then,
as on a live device. Each device has a trainer and an App of its own, so its optimizer lives on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from weakref import WeakSet

from anabranch.core.config.ranges import ELASTIC
from anabranch.core.config.tables import Config
from anabranch.core.engine.buffers import DeviceBuffers
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.live import LiveWeights
from anabranch.host.elastic import (
    SILENT,
    SILENT_S,
    BetweenSteps,
    Exchanges,
    TrainingMoment,
    merge_of,
    part_of,
)
from anabranch.host.policies import make_policy
from anabranch.simulation.attacks import ATTACKS
from anabranch.simulation.baton import Baton
from anabranch.simulation.executors.base import Job, LocalResult
from anabranch.simulation.problem import OneThread, Problem, device_name
from anabranch.support.own_code import on_device
from anabranch.workloads.trainer import TrainResult

log = logging.getLogger(__name__)

DEVICES_MAX = 64  # each has a thread and a model
ELSEWHERE = ("batched", "compiled", "ray")  # executors that have no place for a training that goes on


def check_elastic(config: Config) -> None:
    """Raises `ConfigError` for what devices that train on cannot do in a simulation."""
    fleet = config.fleet
    if config.client.push != ELASTIC:
        return
    if fleet.clients > DEVICES_MAX:
        raise ConfigError(
            f"client.push = 'elastic' simulates at most {DEVICES_MAX} devices, since each has a thread and a "
            f"model of its own: fleet.clients is {fleet.clients}"
        )
    if fleet.executor in ELSEWHERE:
        raise ConfigError(
            f"client.push = 'elastic' trains in threads of this process: fleet.executor is "
            f"{fleet.executor!r}, set it to {AUTO!r}"
        )
    if fleet.attackers and ATTACKS.find(fleet.attack).colluders > 1:
        raise ConfigError(
            f"fleet.attack = {fleet.attack!r} is made of the updates that others would make of the same "
            "task: with client.push = 'elastic' there are none, take 'sign_flip' or 'scale'"
        )


class ElasticTraining:
    """One device's, from the model of its first task on. `clock` is the device's own, in seconds.

    `own` is for its training alone, `problem` for what all devices share. Raises `ConfigError` for a task of
    a part of the model.
    """

    def __init__(self, problem: Problem, own: Problem, job: Job, clock: Callable[[], float]) -> None:
        part_of(job.task)
        self._problem, self._app, self._trainer, self._clock = problem, own.app, own.trainer, clock
        self._app.kept = job.kept
        table = problem.config.client
        merge = merge_of(table, DeviceBuffers(problem.spec, problem.config.model.buffers))
        self._between = BetweenSteps(merge, make_policy(table), clock())
        self._exchanges = Exchanges.of(table)
        first = problem.trainings(job)[0]
        plan = replace(first.plan, proximal_mu=0.0)  # the pull towards the server is the merge's

        def train(hand_back: Callable[[], None]) -> None:
            def between_steps(live: LiveWeights) -> None:
                self._between.step(live, clock())
                hand_back()

            OneThread()  # torch counts by thread
            with on_device(device_name(job.device)):
                own.trainer.train_on(
                    first.vector, own.frozen, first.examples, plan, first.seed, between_steps
                )

        self._baton = Baton(train, lambda: log.warning(SILENT, own.app.name), SILENT_S)

    def meet(self, job: Job) -> None:
        """A task begins: the server's model of the moment is merged before the next step."""
        self._app.version = job.task.base_version
        self._trainer.check_part(part := part_of(job.task))
        answer = self._exchanges.meet(job.vector, self._clock(), part)
        if answer is not None:
            self._between.answer(answer)
        self._between.want()

    def step(self) -> TrainingMoment | None:
        """A step is over, or the first one begins: the snapshot, if one is due. Raises as the App does."""
        self._baton.go_on()
        taken = self._between.take()
        if taken is not None:
            self._exchanges.leave(taken, self._clock())
        return taken

    def result(self, job: Job, taken: TrainingMoment, metrics: Mapping[str, float]) -> LocalResult:
        """The update of a task. Raises `InvalidUpdate` where the training has diverged."""
        delta = taken.vector - self._problem.start(job)
        return self._problem.finish(job, [TrainResult(delta, taken.steps, metrics, kept=self._app.kept)])

    def forgo(self) -> None:
        """The task is not wanted any more; the training goes on."""
        self._between.forgo()

    def advise(self) -> None:
        """The server wants what there is."""
        self._between.advise()

    def end(self) -> None:
        """No more steps: the thread ends."""
        self._baton.end()


class ElasticTrainings:
    """Those of a run's devices; `close` ends them."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._begun: WeakSet[ElasticTraining] = WeakSet()

    def begin(self, job: Job, clock: Callable[[], float]) -> ElasticTraining:
        """A device's, from the task of this job on."""
        shared = self._problem
        own = Problem(shared.config, copy.copy(shared.app), shared.initial)
        begun = ElasticTraining(shared, own, job, clock)
        self._begun.add(begun)
        return begun

    def close(self) -> None:
        """End all threads."""
        for training in list(self._begun):
            training.end()
