"""Which executor trains the devices of a run: `[fleet] executor`."""

from __future__ import annotations

from dataclasses import replace

from anabranch.core.config.ranges import ELASTIC
from anabranch.core.config.ray import RayTable
from anabranch.core.config.tables import Config
from anabranch.core.model.chains import AUTO
from anabranch.simulation.executors.base import Executor
from anabranch.simulation.executors.names import BATCHED, EXECUTORS, PROCESSES, SERIAL
from anabranch.simulation.problem import Problem, ProblemSource
from anabranch.workloads.numpy_trainer import NumpyTrainer

TOGETHER_MIN = 16  # devices in training at a time; in a stack are those that began since the last, or fewer


def chosen(config: Config, problem: Problem, workers: int) -> str:
    """The executor's name: `auto` is batched where that pays, by a rule that looks at the run alone.

    Not by the clock, nor by `workers`: the same configuration shall give the same digest on a busy machine,
    and on one with more cores. Serial training with `workers` > 0 is that of processes, to the bit.
    """
    name = config.fleet.executor
    if name == AUTO and config.client.push == ELASTIC:
        name = SERIAL  # only models are measured by it: these devices train by themselves
    if name == AUTO:
        name = BATCHED if _batch_pays(config, problem) else SERIAL
    return PROCESSES if name == SERIAL and workers else name


def settled(config: Config, name: str) -> Config:
    """The configuration for the record: who trains batched gets other digests, exact ones the serial ones.

    Where the work is done is no part of it. `name` may be `auto`, where nobody is chosen yet.
    """
    executor = SERIAL if name != AUTO and EXECUTORS.find(name).exact else name
    return replace(config, fleet=replace(config.fleet, executor=executor), ray=RayTable())


def make_executor(name: str, source: ProblemSource, problem: Problem, workers: int) -> Executor:
    """The executor of that name. Raises `ConfigError` where it cannot train this App."""
    executor: Executor = EXECUTORS.find(name).of(source, problem, workers)
    return executor


def _batch_pays(config: Config, problem: Problem) -> bool:
    together = min(config.fleet.clients, config.server.concurrency or config.fleet.clients)
    if together < TOGETHER_MIN or isinstance(problem.trainer, NumpyTrainer):
        return False
    from anabranch.workloads.batched import BatchedTraining
    from anabranch.workloads.torch_trainer import TorchTrainer

    return isinstance(problem.trainer, TorchTrainer) and BatchedTraining(problem.trainer).pays()
