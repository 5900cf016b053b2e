"""A learning problem as a fleet meets it: the App, its trainer, every device's examples.

A `ProblemSource` is a recipe that travels to worker processes; `open` makes the problem there.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from threadpoolctl import threadpool_limits

from anabranch.compress.codec import Raw
from anabranch.compress.feedback import Memory, Uplink
from anabranch.core.config.ranges import AS_WHOLE
from anabranch.core.config.tables import Config, FleetTable
from anabranch.core.engine.buffers import DeviceBuffers
from anabranch.core.errors import AppError
from anabranch.core.model.chains import RAW
from anabranch.core.model.params import Tensors, Vector
from anabranch.core.model.submodels import gathered
from anabranch.core.model.updates import Task
from anabranch.core.rng import seed_of
from anabranch.host.build import warn_once
from anabranch.host.log import Data
from anabranch.simulation.attacks import Attack
from anabranch.simulation.executors.base import Evaluation, Job, LocalResult
from anabranch.simulation.masking import SimulatedMasker
from anabranch.simulation.parts import PARTS
from anabranch.strategies.submodels.progressive import grown
from anabranch.support.code import let_in
from anabranch.support.own_code import on_device
from anabranch.support.own_parts import own_parts
from anabranch.workloads.app import App, Array, Examples, Shard, has_own, load_app
from anabranch.workloads.arrival import Arrivals
from anabranch.workloads.calls import data_of, join_run
from anabranch.workloads.numpy_trainer import NumpyTrainer
from anabranch.workloads.profiles import speed_profile
from anabranch.workloads.splits import doubting
from anabranch.workloads.streams import Streamed
from anabranch.workloads.trainer import (
    Training,
    TrainResult,
    cheaper,
    cut,
    only,
    smaller,
    trainer_for,
    warn_of_arrays,
)

EXAMPLES_KEPT = 10_000  # devices
SUCCESS = "attack_success"  # a metric beside the App's
SPLITS_ITSELF = (
    "%s.data does not look at shard.fleet, so %s changes nothing: give a device the rows of "
    "anabranch.workloads.splits.partition(labels, shard.count, shard.fleet, shard.seed, "
    "shard.speed_groups)[shard.index]"
)

log = logging.getLogger(__name__)


def device_name(index: int) -> str:
    """What a simulated device is called."""
    return f"device-{index:04d}"


def device_index(name: str) -> int:
    """The inverse."""
    return int(name.removeprefix("device-"))


def _said_of_split(fleet: FleetTable) -> str:
    """The settings of the split that are not as they are by default."""
    keys = ("split", "examples_per_client")
    said = {key: getattr(fleet, key) for key in keys if getattr(fleet, key) != getattr(FleetTable, key)}
    return " and ".join(f"fleet.{key} = {value!r}" for key, value in said.items())


@dataclass(frozen=True)
class ProblemSource:
    """Where the problem comes from. `app` stands for itself; without it `[run] workload` names one.

    `start`: the first weights, in the place of the App's own.
    """

    config: Config
    app: App | None = None
    start: Tensors | None = None

    def open(self) -> Problem:
        """The problem. Raises `AppError` or `DataError`."""
        run = self.config.run
        let_in(self.config, PARTS)  # in a worker process too
        return Problem(self.config, self.app or load_app(run.workload, run.data_path), self.start)


class Problem:
    """What a simulated fleet learns: the App, its trainer, the examples of every device.

    Examples are loaded when they are first needed; `EXAMPLES_KEPT` devices' are kept.
    """

    def __init__(self, config: Config, app: App, start: Tensors | None = None) -> None:
        self.config = config
        self.app = app
        join_run(app, config.to_json())
        # A simulation repeats itself to the bit: a GPU, which may not, has to be asked for by name.
        device = "cpu" if config.client.device == "auto" else config.client.device
        self.trainer = trainer_for(app, device, config.client.precision)
        first = start
        if app.any_model and isinstance(self.trainer, NumpyTrainer):  # asked once: it may cost a lot
            first = self._first() if start is None else start
            self.trainer.adopt(self.trainer.described(dict(first)))
        self.spec = self.trainer.spec
        self._growth = grown(config, self.spec)
        self._uplink = lru_cache(maxsize=64)(Uplink)  # each task names one, and a run has few
        self._buffers = DeviceBuffers(self.spec, config.model.buffers)
        self.initial: dict[str, Array] = dict(self._first() if first is None else first)
        if start is None and (flawed := self.spec.not_finite(self.initial)):
            raise AppError(
                f"{app.name}: the first weights of its model are not finite, in tensor {flawed!r}: mend "
                "model(), or leave that out of trained(self, model)"
            )
        self.frozen = self.spec.frozen(self.initial)
        self._masker = SimulatedMasker.of(config, self.spec)
        self._attack = Attack(config.fleet, config.run.seed, config.robust)
        self.profiles = speed_profile(config.fleet, config.run.seed)
        self._groups = tuple(self.profiles.group.tolist())
        self._arrivals = Arrivals.of(config.fleet, config.run.seed)
        self._split_said = ""
        self._say: Callable[[str], None] | None = None
        self._examples: OrderedDict[int, Examples] = OrderedDict()
        self._held_out: Examples | None = None
        self._goal: Examples | None = None  # an attack's

    def _first(self) -> Tensors:
        return self.trainer.initial(seed_of(self.config.run.seed, "initial"))

    def shard(self, role: str, device: int = 0) -> Shard:
        """The part of the data that plays this role."""
        fleet, seed = self.config.fleet, self.config.run.seed
        return Shard(role, device, fleet.clients, fleet, seed, self._groups)

    def present(self, device: int, now_s: float) -> Examples:
        """What a device trains on that begins at this moment."""
        examples = self.examples(device)
        if self._arrivals is None:
            return examples
        rows = self._arrivals.rows(device, len(examples), now_s)
        return Examples(examples.x[rows], examples.y[rows])

    def _present_count(self, job: Job) -> int:
        """How many examples of its device a job saw, where they arrive; 0: all."""
        return 0 if self._arrivals is None else len(self.present(job.device, job.begun_s))

    def examples(self, device: int) -> Examples:
        """What a device has in the end."""
        found = self._examples.get(device)
        if found is None:
            found = self._examples[device] = self._loaded(device)
            if len(self._examples) > EXAMPLES_KEPT:
                self._examples.popitem(last=False)
        return found

    def count(self, device: int) -> int:
        """How many examples a device has. They are not kept: another process may be the one to train."""
        return len(self._loaded(device))

    @contextmanager
    def keeping_none(self) -> Iterator[None]:
        """Inside, examples that are loaded are not kept either."""
        kept, self._examples = self._examples, self._examples.copy()
        try:
            yield
        finally:
            self._examples = kept

    def _loaded(self, device: int) -> Examples:
        with on_device(device_name(device)):
            shard = self.shard("train", device)
            with doubting(self._say):
                found = data_of(self.app, shard)
            self._warn_of_split(shard, found)
            return found if self._arrivals is None else self._arrivals.in_order(self.app, device, found)

    def watching(self) -> Problem:
        """This one, which warns of crude splits, and of an App that does not go by split or device.

        Others do not.
        """
        if isinstance(self.trainer, NumpyTrainer):
            warn_of_arrays(self.app, self.config.client.device, self.config.client.precision)
        self._split_said = _said_of_split(self.config.fleet)
        self._say = warn_once
        return self

    def _warn_of_split(self, shard: Shard, found: Examples) -> None:
        """Once for each App, by its first device: it may keep the split that it has made for that one."""
        said, self._split_said = self._split_said, ""
        own = isinstance(found, Streamed) or has_own(self.app, "join")  # may look later, or before
        self.app.split_known |= shard.looked_at or own
        if said and not (self.app.split_known or self.app.any_model):
            self.app.split_known = True
            log.warning(SPLITS_ITSELF, self.app.name, said)

    def do(self, work: Job | Evaluation) -> LocalResult | Mapping[str, float]:
        """Whichever it is."""
        with own_parts(PARTS):
            return self.train(work) if isinstance(work, Job) else self.evaluate(work)

    def train(self, job: Job) -> LocalResult:
        """Local training, encoded as it would travel. Raises `InvalidUpdate` where it has diverged."""
        return self.finish(job, [self._train(job, training) for training in self.trainings(job)])

    def trainings(self, job: Job) -> list[Training]:
        """The training that a job is made of; those of its helpers too if the device is hostile."""
        task, submodel = job.task, smaller(job.task)
        vector = self.start(job)
        helpers = self._attack.helpers(job.device)
        examples = [self._poisoned(d, job) for d in helpers] or [self.present(job.device, job.begun_s)]
        return [Training(vector, e, task.local, task.seed, submodel, only(task)) for e in examples]

    def _poisoned(self, helper: int, job: Job) -> Examples:
        """What a helper of a hostile device trains on."""
        there = self.present(helper, job.begun_s)
        return self._attack.examples(helper, there, self._last_label, job.task.seed)

    def finish(self, job: Job, results: Sequence[TrainResult]) -> LocalResult:
        """The update, of the results of the job's trainings. Raises `InvalidUpdate` where it has diverged."""
        task, uplink, result = job.task, self._uplink(job.task.uplink), results[0]
        covered, own = cut(task, result.delta), job.own
        if self._attack.helpers(job.device):
            covered = self._attack.poisoned([cut(task, r.delta) for r in results], seed_of(task.seed, "sent"))
            if not np.isfinite(covered).all():  # no codec would take it
                uplink = self._uplink(RAW)
        trained_on = result.examples or self._present_count(job)
        start = cut(task, self.start(job))
        covered, own = self._buffers.told(start, covered, task.submodel, own)
        if self._masker is not None:
            masked, codec = self._masker.payload(covered, task), self._masker.terms.codec
            found = result.kept, trained_on, own
            return LocalResult(masked, codec, result.steps, {}, None, *found)
        payload, memory = self._encoded(uplink, covered, job)
        return LocalResult(
            payload,
            uplink.codec.text,
            result.steps,
            dict(result.metrics),
            memory,
            result.kept,
            trained_on,
            own,
        )

    def _encoded(self, uplink: Uplink, delta: Vector, job: Job) -> tuple[Data, Memory | None]:
        """The payload of an update, and what its device then remembers.

        A raw one is the values where they lie, unless they are part of more: that would be held for them.
        They are nobody else's: trainers make each delta anew, and of an attack's there is a copy.
        """
        task = job.task
        if uplink.text == RAW and job.memory is None and delta.flags.owndata:
            return Raw.lent(delta), None
        seed = seed_of(task.seed, "codec")
        return uplink.encode(delta, self.spec, task.submodel, job.memory, seed, task.base_version)

    def start(self, job: Job) -> Vector:
        """What a job's training starts from: the version, or the part of its task; its own buffers."""
        submodel = smaller(job.task)
        vector = gathered(job.vector, submodel)
        return self._buffers.start(vector, submodel, job.own)

    def _train(self, job: Job, t: Training) -> TrainResult:
        self.app.version, self.app.kept = job.task.base_version, job.kept
        with on_device(device_name(job.device)):
            result = self.trainer.train(t.vector, self.frozen, t.examples, t.plan, t.seed, t.submodel, t.only)
        return replace(result, kept=self.app.kept) if self.app.kept != result.kept else result

    def _last_label(self) -> int:
        return int(self._held_out_examples().y.max())

    def _held_out_examples(self) -> Examples:
        if self._held_out is None:
            self._held_out = data_of(self.app, self.shard(self.config.run.evaluate_on))
        return self._held_out

    def step_cost(self, task: Task) -> float:
        """Time of a step of the task relative to one of the whole model, as `fleet.submodel_step` says."""
        submodel = cheaper(task)
        if submodel is None or self.config.fleet.submodel_step == AS_WHOLE:
            return 1.0
        return self.trainer.step_cost(submodel, self.examples(0))

    def evaluate(self, evaluation: Evaluation) -> Mapping[str, float]:
        """The App's metrics on the held-out part that `[run] evaluate_on` names, and an attack's success."""
        stage = 0 if self._growth is None else self._growth.stage_of(evaluation.version)
        vector, held_out = evaluation.vector, self._held_out_examples()
        self.app.version = evaluation.version
        found = self.trainer.evaluate(vector, self.frozen, held_out, stage)
        if self._goal is None and (goal := self._attack.goal(held_out)) is not None:
            self._goal = goal
        if self._goal is None:
            return found
        reached = self.trainer.evaluate(vector, self.frozen, self._goal, stage)
        return {**found, SUCCESS: reached["accuracy"]} if "accuracy" in reached else found


class OneThread:
    """Keeps NumPy, and torch, if it is in use, to one thread: their sums depend on how many there are."""

    def __init__(self) -> None:
        self._blas = threadpool_limits(1, "blas")
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            self._threads = self._torch.get_num_threads()
            self._torch.set_num_threads(1)

    def restore(self) -> None:
        """As many threads as before."""
        self._blas.restore_original_limits()
        if self._torch is not None:
            self._torch.set_num_threads(self._threads)
