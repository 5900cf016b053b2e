"""Training by actors of Ray: on this machine, or on a cluster of many, with fractions of GPUs.

Every actor opens the problem for itself. A model travels once to each machine, however many devices train
from it: it is kept in Ray's object store while one of its jobs is in hand. Devices of different speed groups
may need different resources (`[ray] gpus_by_group`): each kind has actors of its own. On CPUs the digests are
those of the serial executor.

An actor whose process dies, or whose machine, costs what it had in hand: Ray starts another, which opens the
problem again, and gives it that work once more. The result of work depends on the work alone, so the digests
stay what they are. Work that has ended `DEATHS_MAX` processes is given up.

Where Ray runs already, in this process or at `[ray] address`, it is used and left running. There anabranch
and the App must be installed on all machines.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from anabranch.core.config.extras import how_to_install
from anabranch.core.config.ray import RayTable
from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.params import Vector
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult, Pending, without_model
from anabranch.simulation.executors.models import Newest
from anabranch.simulation.executors.queued import Queue, Queued
from anabranch.simulation.problem import OneThread, Problem, ProblemSource

CONNECT_S = 5.0
UNWRITTEN = "Timed out waiting for file"  # that one of Ray's processes has not written: of a full disk
MODELS_KEPT = 16  # in the object store, besides those that jobs in hand hold
DEATHS_MAX = 5  # of the process that does a piece of work, before it is the work's own fault


@dataclass(frozen=True)
class Resources:
    """What an actor reserves."""

    cpus: float
    gpus: float


class RayActor:
    """The body of an actor: one problem, opened before its first work.

    It is made of its arguments again where its process has died.
    """

    def __init__(self, source: ProblemSource, folder: str) -> None:
        self._source, self._folder = source, folder
        self._problem: Problem | None = None

    def open(self) -> None:
        """The paths of the configuration begin at `folder`, where there is one. Raises what opening does."""
        if os.path.isdir(self._folder):
            os.chdir(self._folder)
        self._problem = self._source.open()
        OneThread()

    def do(self, work: Job | Evaluation, vector: Vector) -> LocalResult | Mapping[str, float]:
        """The work, from this vector."""
        if self._problem is None:
            self.open()
        assert self._problem is not None
        return self._problem.do(replace(work, vector=vector))


class _Actors(Queue):
    """The actors of one kind, and the work for them."""

    def __init__(
        self, ray: Any, source: ProblemSource, needs: Resources, workers: int, models: Newest[Any]
    ) -> None:
        super().__init__(workers)
        device = source.config.client.device if needs.gpus else "cpu"
        client = replace(source.config.client, device=device)
        mine = replace(source, config=replace(source.config, client=client))
        again = {"max_restarts": -1, "max_task_retries": DEATHS_MAX}
        make = ray.remote(num_cpus=needs.cpus, num_gpus=needs.gpus, **again)(RayActor)
        self._actors = [make.remote(mine, os.getcwd()) for _ in range(workers)]
        self._opened = [actor.open.remote() for actor in self._actors]
        self._in_hand: list[list[Future[Any]]] = [[] for _ in self._actors]
        self._ray, self._models = ray, models

    def wait_until_ready(self) -> None:
        """Raises what opening the problem raised."""
        try:
            self._ray.get(self._opened)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def close(self) -> None:
        """Drops what waits and ends the actors."""
        self.drop()
        for actor in self._actors:
            self._ray.kill(actor)

    def wait_for(self, queued: Queued[Any]) -> None:
        """As `Queue`. Raises `AppError` for work that no process survives."""
        super().wait_for(queued)
        assert queued.future is not None, "work that was waited for has begun"
        if isinstance(error := queued.future.exception(), self._ray.exceptions.RayActorError):
            what = (
                f"training on device {queued.work.device}"
                if isinstance(queued.work, Job)
                else "a measurement"
            )
            raise AppError(
                f"{what} has ended the process that does it {DEATHS_MAX + 1} times: its code does so, or the "
                f"machine has too little memory for it ({error})"
            ) from error

    def _submit(self, work: Job | Evaluation) -> Future[Any]:
        """To the actor that has the least in hand."""
        self._in_hand = [[f for f in futures if not f.done()] for futures in self._in_hand]
        least = min(range(len(self._actors)), key=lambda i: len(self._in_hand[i]))
        reference = self._actors[least].do.remote(without_model(work), self._models.of(work.vector))
        future: Future[Any] = reference.future()
        self._in_hand[least].append(future)
        return future


class RayExecutor:
    """Trains in actors of Ray, on this machine or on a cluster.

    `workers` actors of each kind. Raises `ConfigError` without Ray or its resources.
    """

    exact: ClassVar[bool] = True

    def __init__(self, source: ProblemSource, problem: Problem, workers: int) -> None:
        table = source.config.ray
        self._ray = import_ray("fleet.executor = 'ray'")
        self._started = not self._ray.is_initialized()
        if self._started:
            start_ray(self._ray, table)
        kinds = resources_by_group(source.config)
        self._groups = problem.profiles.group
        try:
            _check_resources(self._ray, set(kinds), workers)
            models = Newest(MODELS_KEPT, self._ray.put)
            made = {k: _Actors(self._ray, source, k, workers, models) for k in dict.fromkeys(kinds)}
        except BaseException:
            self._stop()
            raise
        self._by_group = [made[kind] for kind in kinds]
        self._made = list(made.values())
        try:
            for actors in self._made:
                actors.wait_until_ready()
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, source: ProblemSource, problem: Problem, workers: int) -> RayExecutor:
        """See `Executor`."""
        return cls(source, problem, workers or 1)

    def train(self, job: Job) -> Pending[LocalResult]:
        """Training by an actor with the resources that the device needs."""
        group = min(int(self._groups[job.device]), len(self._by_group) - 1)
        return self._by_group[group].train(job)

    def evaluate(self, evaluation: Evaluation) -> Pending[Mapping[str, float]]:
        """An evaluation, where the fastest devices are trained."""
        return self._by_group[0].evaluate(evaluation)

    def close(self) -> None:
        """Drops what waits, ends the actors, and Ray if it was started here."""
        for actors in self._made:
            actors.close()
        self._stop()

    def _stop(self) -> None:
        if self._started:
            self._ray.shutdown()


def resources_by_group(config: Config) -> list[Resources]:
    """What an actor reserves for devices of each speed group; the last is for all that are slower."""
    table = config.ray
    return [Resources(table.cpus, gpus) for gpus in table.gpus_by_group or [table.gpus]]


def on_this_machine() -> dict[str, Any]:
    """Options of `ray.init`: no other machine, no dashboard, and the modules that this process finds."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {"env_vars": {"PYTHONPATH": path}}
    return {"address": "local", "include_dashboard": False, "runtime_env": environment}


def import_ray(asked: str) -> Any:
    """Ray, which says nothing to its makers. Raises `ConfigError` where what was asked for lacks it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ConfigError(f"{asked} needs Ray: {how_to_install('ray')}") from error
    return ray


def start_ray(ray: Any, table: RayTable) -> None:
    """Use the cluster of a table, or start one here. Raises `ConfigError` where none can be of use."""
    _check_folders()
    start = partial(ray.init, log_to_driver=False, logging_level="error")
    if not table.address:
        try:
            start(**on_this_machine())
        except Exception as error:
            # The first as Ray raises it where its own processes do not come up in time.
            if type(error) is not Exception and UNWRITTEN not in str(error):
                raise
            place = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
            raise ConfigError(
                f"Ray does not start on this machine: {str(error).rstrip('.')}. Wait until it is less busy, "
                f"make room where Ray has its files ({place}), or take 'processes' in the place of 'ray'"
            ) from error
        return
    try:
        _knock(table.address)
        start(address=table.address)
    except OSError as error:  # Ray raises ConnectionError
        raise ConfigError(f"ray.address: no cluster answers at {table.address!r}: {error}") from error


def _check_folders() -> None:
    """Ray tells its workers where Python looks for modules: where a name is not UTF-8 each of them dies."""
    for folder in sys.path:
        try:
            folder.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"Ray cannot have modules in a folder whose name is not UTF-8, {folder!r}: rename it, or "
                "take 'processes' in the place of 'ray'"
            ) from error


def _knock(address: str) -> None:
    """Raises `OSError` where nobody listens at HOST:PORT, which Ray finds out in some minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _check_resources(ray: Any, kinds: set[Resources], workers: int) -> None:
    """Actors that there is no room for would be waited for without end."""
    there = ray.cluster_resources()
    for name, needed in (("CPU", sum(k.cpus for k in kinds)), ("GPU", sum(k.gpus for k in kinds))):
        if needed * workers > there.get(name, 0.0) + 1e-9:
            raise ConfigError(
                f"{workers} workers of each kind need {needed * workers:g} {name}s, and Ray has "
                f"{there.get(name, 0.0):g}: lower --workers, ray.cpus or ray.gpus"
            )
