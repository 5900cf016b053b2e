"""Local training on this device: the App's trainer, its data, and the work of one task.

Which device and precision, the resident model and the pinned memory are the trainer's own
(`workloads/trainer.py`); here is what one process decides, such as how many threads. Which data a device has:
`shards.py`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from anabranch.client.base_model import BaseModel
from anabranch.client.kept import Keepsake
from anabranch.client.messages import FetchedModel
from anabranch.client.neighbours import Neighbours
from anabranch.client.outbox import UpdateEntry
from anabranch.client.select_cuda import selecting
from anabranch.compress.downloads import apply_download
from anabranch.compress.feedback import Memory, Uplink
from anabranch.compress.registry import stages
from anabranch.core.config.ranges import SERVED
from anabranch.core.config.tables import ClientTable
from anabranch.core.content import SHA256, chosen, usable
from anabranch.core.engine.buffers import AVERAGE, DeviceBuffers, policy_of
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import InvalidUpdate, ManifestMismatch
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import HeldPart
from anabranch.core.model.metrics import finite
from anabranch.core.model.params import ParamSpec, Tensors, TensorSpec, Vector, digest
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.submodels import Submodel, TensorSet
from anabranch.core.model.updates import Capability, LocalPlan, Task
from anabranch.core.rng import seed_of
from anabranch.host.build import warn_once
from anabranch.host.first import FirstModel
from anabranch.protos.convert import submodel_to_proto
from anabranch.strategies.submodels.progressive import Progressive
from anabranch.support.allowance import cores, memory_bytes
from anabranch.support.own_code import on_device
from anabranch.support.tracing import part
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import watched
from anabranch.workloads.calls import arrived_of, data_of, join_run
from anabranch.workloads.numpy_trainer import NumpyTrainer
from anabranch.workloads.splits import counting, doubting
from anabranch.workloads.trainer import Hook, cheaper, cut, only, smaller, trainer_for, warn_of_arrays

if TYPE_CHECKING:
    from anabranch.client.masking import Masker  # the extra [secagg] alone has what it needs

log = logging.getLogger(__name__)

MEND = "unless the App's training leaves them out, no update of them can be used; mend the data"

SMALL_MODEL_VALUES = 1_000_000
WRAPPERS = ("_orig_mod.", "module.")  # what torch's wrappers of modules put into the names of tensors


class LocalTrainer:
    """Trains and judges an App.

    `threads`: for torch on a CPU; 0 leaves torch's own choice, at most the cores that it may use, of which
    `neighbours` share: they come and go, and for a model of less than `SMALL_MODEL_VALUES` each takes one.
    What the App raises names the client. Raises `AppError` and `ConfigError` as `trainer_for` does.
    """

    def __init__(
        self,
        app: App,
        settings: ClientTable,
        threads: int = 0,
        client_id: str = "",
        neighbours: Neighbours | None = None,
    ) -> None:
        self._app, self._client_id = app, client_id
        self._trainer = trainer_for(app, settings.device, settings.precision)
        if isinstance(self._trainer, NumpyTrainer):
            warn_of_arrays(app, settings.device, settings.precision)
        self._served: ParamSpec | None = None
        self._built: Tensors | None = None  # the frozen tensors of version 0, where that was built here
        self._policy, self._own = AVERAGE, b""
        # The frozen tensors that travel apart from the versions, once they are here.
        self.apart: Tensors | None = None
        self.frozen_served = True  # else this device must have them
        self.payload_digest = SHA256  # the algorithm that updates are named by
        self.examples: Examples | None = None
        self.pool_examples = 0  # of which `examples` are a part, as far as the App tells
        self._seen: Examples | None = None  # what had arrived when the last training began
        self._left_out: set[str] = set()  # metrics of which it was said that they are not sent
        # What masks the updates, in a run with masked sums.
        self.masker: Masker | None = None
        self._torch = sys.modules.get("torch")
        self._neighbours = neighbours
        if self._torch is not None:
            # torch counts the machine's cores, and not those that its container leaves it.
            self._threads = threads or min(int(self._torch.get_num_threads()), cores())
            self._torch.set_num_threads(self._threads)

    @property
    def spec(self) -> ParamSpec:
        """The run's model, once it was adopted; the App's before."""
        return self._served or self._trainer.spec

    @property
    def own_frozen(self) -> Tensors:
        """The frozen tensors as the App builds them: of weights that it loads, they may be the run's."""
        return self._trainer.frozen if self._built is None else self._built

    @property
    def kept(self) -> Keepsake:
        """What this device keeps from task to task; to be set before a training."""
        return Keepsake(self._app.kept, self._own)

    @kept.setter
    def kept(self, kept: Keepsake) -> None:
        self._app.kept, self._own = kept.app, kept.buffers

    @property
    def buffers(self) -> DeviceBuffers:
        """What becomes of the model's buffers on this device."""
        return DeviceBuffers(self.spec, self._policy)

    @property
    def name(self) -> str:
        """The App's."""
        return self._app.name

    @property
    def accelerator(self) -> str:
        """`cuda`, `mps` or `cpu`."""
        runtime = getattr(self._trainer, "runtime", None)
        return str(runtime.device.type) if runtime is not None else "cpu"

    def join(self, served: ParamSpec, config: Mapping[str, Any]) -> None:
        """Take part in a run: the App hears of its configuration. Raises as `adopt` does."""
        join_run(self._app, config)
        grows = config.get("submodel", {}).get("name") == Progressive.name
        if grows:
            self._check_stages(served)
        self._policy = policy_of(config)
        self.payload_digest = offered(config)
        self.frozen_served = config.get("run", {}).get("frozen", SERVED) == SERVED
        self.adopt(served)

    def _check_stages(self, served: ParamSpec) -> None:
        ours = self._trainer.spec.stages
        theirs = served.stages or ours  # servers did not always tell them
        if differ := _other_stage(ours, theirs) if ours else "has no stages":
            raise ManifestMismatch(
                f"the model of the server's run grows, and {self._app.name} {differ}: train it by the "
                "App that the run began with, which says them in stages(self, model)"
            )

    def load(self, shard: Shard) -> Examples:
        """The App's data of the shard, from now on trained on. Raises `DataError`."""
        with on_device(self._client_id), doubting(warn_once), counting() as pools:
            self.examples = data_of(self._app, shard)
        self.pool_examples = max(pools, default=0)
        for flaw in self.examples.not_finite():
            log.warning("this device's data: %s: %s", flaw, MEND)
        return self.examples

    @property
    def waits_for_data(self) -> bool:
        """Whether none of its examples is there yet. Raises `AppError` and `DataError`."""
        with on_device(self._client_id):
            return self.examples is not None and arrived_of(self._app, self.examples, time.time()) is None

    def _look(self) -> Examples:
        """What there is to train on now; where that is nothing any more, what there was."""
        assert self.examples is not None, "load a shard first"
        self._seen = arrived_of(self._app, self.examples, time.time()) or self._seen or self.examples
        return self._seen

    def capability(self) -> Capability:
        """What this device says of itself."""
        count = 0 if self.examples is None else len(self.examples)
        return Capability(count, memory_bytes(), accelerator=self.accelerator, codecs=stages())

    def check_uplink(self, task: Task) -> None:
        """What can be known before the training. Raises `UnknownCodec`, and as `Masker.check` does."""
        Uplink(task.uplink)
        if self.masker is not None:
            self.masker.check(task)

    def step_cost(self, task: Task) -> float:
        """Operations of a step of the task relative to one of the whole model, in (0, 1]."""
        assert self.examples is not None, "load a shard first"
        submodel = cheaper(task)
        return 1.0 if submodel is None else self._trainer.step_cost(submodel, self.examples)

    def adopt(self, served: ParamSpec) -> None:
        """Take the run's model as ours: its units are those that the server speaks of.

        Raises `ManifestMismatch`, naming the first difference, unless the run is of this App's model.
        """
        if self._app.any_model and isinstance(self._trainer, NumpyTrainer):
            self._trainer.adopt(served)
        if served.layout_hash == self.spec.layout_hash:
            self._served = replace(served, stages=self._trainer.spec.stages)
            return
        ours, theirs = self.spec.tensors, served.tensors
        differ = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
        detail = f"the App has {len(ours)} tensors, the server {len(theirs)}"
        if differ:
            detail = f"the App has {_described(differ[0][0])}, the server {_described(differ[0][1])}"
        if wrapper := _wrapper(ours, theirs):
            detail += (
                f"; torch.compile and parallel training put {wrapper!r} into names: give the module that was "
                "wrapped, which has the same weights"
            )
        else:
            detail += "; a run keeps its model: build that one, or begin another run, by `anabranch init`"
        raise ManifestMismatch(f"the server's run is of another model than {self._app.name}: {detail}")

    def decode(
        self,
        fetched: FetchedModel,
        held: BaseModel | None = None,
        submodel: Submodel | None = None,
        parts: tuple[HeldPart, ...] = (),
    ) -> BaseModel:
        """A fetched version as weights; `held` is what the device has, `submodel` its task's.

        `parts` are those that what it has is of, where that is no version.

        Raises `InvalidUpdate`, `TooLarge` and `UnknownCodec`.
        """
        part = needed_for(submodel) if fetched.part_only else None
        if fetched.part_only and part is None:
            raise InvalidUpdate(f"a part of version {fetched.version} came, the whole was asked for")
        known = None if held is None else held.base(fetched.from_version, part, parts)
        data = memoryview(fetched.data)
        vector, frozen = apply_download(self.spec, fetched.codec, data, fetched.from_version, known, part)
        if fetched.vector_sha256 and digest(vector) != fetched.vector_sha256:
            raise InvalidUpdate(f"version {fetched.version} does not decode to what the server has")
        if frozen is not None:
            return BaseModel(fetched.version, vector, frozen, part, fetched.head)
        assert held is not None, "what leads from a version needs it"
        return BaseModel(fetched.version, vector, held.frozen, part, fetched.head)

    def build(self, first: FirstModel) -> BaseModel:
        """Version 0, as the App makes it. Raises `InvalidUpdate` where that is another, and `AppError`."""
        with on_device(self._client_id):
            tensors = self._trainer.initial(first.seed)
        model = BaseModel(0, first.read(self.spec, tensors), self.spec.frozen(tensors), head=first.head)
        self._built = model.frozen
        return replace(model, frozen={}) if self.spec.apart else model

    def train(
        self,
        task: Task,
        update_id: str,
        base: BaseModel,
        memory: Memory | None,
        each_step: Callable[[], None],
    ) -> tuple[UpdateEntry, Memory | None]:
        """Do a task from `base`: the update, and what its uplink then remembers.

        `memory` is what the uplink remembers of earlier updates; `each_step` may raise to end the task
        before its time. Raises `InvalidUpdate` where the training has diverged.
        """
        assert self.examples is not None, "load a shard first"
        self._share_cores()
        self._app.version = task.base_version
        start = self.buffers.start(base.part(task.submodel), smaller(task), self._own)
        masker, model_sha256 = self.masker, ""
        if masker is not None:
            model_sha256 = masker.model_sha256(self.spec, base.vector, base.frozen)
        with watched(each_step), on_device(self._client_id):
            examples = self._look()
            result = self._trainer.train(
                start, self._frozen(base), examples, task.local, task.seed, smaller(task), only(task)
            )
        entry, pending = self.pack(
            task,
            update_id,
            cut(task, start),
            cut(task, result.delta),
            result.steps,
            result.metrics,
            memory,
            base.head,
            model_sha256,
        )
        return replace(entry, examples=result.examples or entry.examples), pending

    def reached(self, version: int) -> None:
        """The App hears of the newest version that is in its model, while it trains on."""
        self._app.version = version

    def check_part(self, part: TensorSet | None) -> None:
        """Raises `AppError` where what a task sends cannot change without what it does not send."""
        self._trainer.check_part(part)

    def train_on(self, base: BaseModel, plan: LocalPlan, seed: int, hook: Hook) -> None:
        """Train from `base` until `hook` raises: see `Trainer.train_on`."""
        assert self.examples is not None, "load a shard first"
        self._share_cores()
        start = self.buffers.start(base.vector, None, self._own)
        with on_device(self._client_id):
            self._trainer.train_on(start, self._frozen(base), self._look(), plan, seed, hook)

    def pack(
        self,
        task: Task,
        update_id: str,
        start: Vector,
        delta: Vector,
        steps: int,
        metrics: Mapping[str, float],
        memory: Memory | None,
        base_head: str,
        model_sha256: str = "",
    ) -> tuple[UpdateEntry, Memory | None]:
        """The update of a task: `start` and `delta` are on its coordinates. Raises as `train` does.

        `base_head`, and `model_sha256` of a masked one: of what it was trained from. Of the metrics of
        a masked update only the time goes out.
        """
        assert self.examples is not None, "load a shard first"
        covered, self._own = self.buffers.told(start, delta, task.submodel, self._own)
        uplink, pending, seals = Uplink(task.uplink), None, None
        with part("encode"), selecting(self.accelerator):
            if self.masker is None:
                seed, base = seed_of(task.seed, "codec"), task.base_version
                payload, pending = uplink.encode(covered, self.spec, task.submodel, memory, seed, base)
            else:
                payload, seals = self.masker.masked(
                    covered, update_id, task.base_version, base_head, model_sha256
                )
                metrics = {name: value for name, value in metrics.items() if name == TRAIN_S}
        entry = UpdateEntry(
            update_id=update_id,
            task_id=task.task_id,
            manifest_sha256=self.spec.layout_hash,
            base_version=task.base_version,
            examples=len(self._seen or self.examples),
            local_steps=steps,
            codec=uplink.codec.text,
            payload=payload,
            values=covered.size,
            submodel=submodel_to_proto(task.submodel),
            metrics=self._sendable(metrics),
            base_head=base_head,
            seals=seals or {},
            # A masked update's boxes are bound to what keepers of all releases know.
            algorithm=SHA256 if seals else chosen(self.payload_digest, len(payload)),
        )
        return entry, pending

    def _sendable(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The finite ones; which are left out is said once of each."""
        found = finite(metrics)
        if unsaid := {*metrics} - {*found} - self._left_out:
            self._left_out |= unsaid
            names = ", ".join(map(repr, sorted(unsaid)))
            log.warning("not finite, so not sent with an update (this is said once): metrics %s", names)
        return found

    def evaluate(self, model: BaseModel, examples: Examples, stage: int = 0) -> dict[str, float]:
        """The App's metrics of a version on these examples, with the device's own buffers if it has some.

        `stage`: of a model that grows; 0: the last.
        """
        self._share_cores()
        self._app.version = model.version
        vector = self.buffers.start(model.vector, None, self._own)
        return self._trainer.evaluate(vector, self._frozen(model), examples, stage)

    def _frozen(self, base: BaseModel) -> Tensors:
        """What is not trained, of this version or of all."""
        if not self.spec.apart:
            return base.frozen
        assert self.apart is not None, "what travels apart is here before the first version"
        return self.apart

    def _share_cores(self) -> None:
        """Threads that wait for a core which others use take longer than one thread alone.

        A small model never has work for more than one.
        """
        if self._torch is None or self._neighbours is None:
            return
        share = self._threads // self._neighbours.count() if self.spec.size >= SMALL_MODEL_VALUES else 1
        if max(1, share) != self._torch.get_num_threads():
            self._torch.set_num_threads(max(1, share))


def _described(tensor: TensorSpec) -> str:
    state = " frozen" if tensor.is_float and not tensor.trained else ""
    return f"{tensor.name} {tensor.shape} {tensor.dtype}{state}"


def _wrapper(ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]) -> str:
    """What alone makes our names other than theirs, where it is of torch's wrappers of modules."""
    wrapped, plain = ([tensor.name for tensor in tensors] for tensors in (ours, theirs))
    return next(
        (w for w in WRAPPERS if wrapped != plain and [name.replace(w, "") for name in wrapped] == plain), ""
    )


def _other_stage(ours: Sequence[ModelStage], theirs: Sequence[ModelStage]) -> str:
    """The first stage that is another one, in words; empty where all are the same."""
    for number, (mine, other) in enumerate(zip_longest(ours, theirs), 1):
        if mine != other:
            return f"has other stages: stage {number} is {_told(mine)}, in the run {_told(other)}"
    return ""


def _told(stage: ModelStage | None) -> str:
    return "none" if stage is None else f"{' '.join(stage.blocks)} with the head {' '.join(stage.head)}"


def offered(config: Mapping[str, Any]) -> str:
    """The algorithm of payload digests that a run offers to its devices, where this one has it."""
    said = config.get("run", {}).get("payload_digest", SHA256)
    return said if usable(said) else SHA256
