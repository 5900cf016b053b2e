"""A trainer runs an App on flat vectors: weights in, delta out.

`trainer_for(app)` gives the one that fits the App's model: torch on a CPU or GPU, or plain numpy.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import field, replace
from typing import Any, Protocol

from anabranch.core.errors import AppError, ConfigError, InvalidUpdate, ManifestMismatch
from anabranch.core.model.arrays import shape_of
from anabranch.core.model.growing import stage_in
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.metrics import TRAINED_MAX
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.submodels import TensorSet, UnitMap, gathered
from anabranch.core.model.units import UnitGroup
from anabranch.core.model.updates import LocalPlan, Task
from anabranch.core.rng import seed_of
from anabranch.core.unwritten import dataclass
from anabranch.support.own_code import own_code
from anabranch.workloads.app import App, Array, Examples, Model, has_own
from anabranch.workloads.batches import planned_steps, watched
from anabranch.workloads.calls import model_of
from anabranch.workloads.metrics import metrics_of, taken_count
from anabranch.workloads.unit_values import WholeWidth

ENDLESS_STEPS = 2**53
NO_ACCELERATOR = ("auto", "cpu", "float32")
ARRAYS_UNMOVED = "%s: its model is arrays of numpy, so %s changes nothing: its own code says where it trains"

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TrainResult:
    """`delta` = trained - given, in the vector's dtype and shape; `steps` taken; the App's metrics.

    `examples`: how many it was trained on, where only the App knows (0: as many as were given). `kept`: what
    the App keeps from now on.
    """

    delta: Vector
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    examples: int = 0
    kept: bytes = b""


@dataclass(frozen=True, eq=False)
class Training:
    """Local training as `Trainer.train` takes it; `vector` is (size,) of the submodel, if there is one.

    `only`: the tensors that alone are trained; None: all.
    """

    vector: Vector
    examples: Examples
    plan: LocalPlan
    seed: int
    submodel: UnitMap | None = None
    only: TensorSet | None = None

    @property
    def steps(self) -> int:
        """Local steps."""
        return planned_steps(self.plan, len(self.examples))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Trainings of one kind can be stacked."""
        plan = self.plan
        rates = plan.learning_rate, plan.momentum, plan.weight_decay, plan.proximal_mu
        small = None if self.submodel is None else self.submodel.small
        return small, self.only, rates, *self.examples.kind


Hook = Callable[[LiveWeights], None]


class Trainer(Protocol):
    """What the client, the simulator and `evaluate` need of a learning problem.

    `vector` is (spec.size,), `frozen` the tensors that are not aggregated; neither is changed. What
    was trained before has no influence. `whole_because`: why the spec has no groups of units, so that
    only the whole model can be trained; empty where it has some. `whole_widths`: the layers that every
    sub-model has whole, as far as they were looked for.
    """

    @property
    def whole_widths(self) -> tuple[WholeWidth, ...]:
        """Of which layers no unit may be left out, and why."""
        ...

    @property
    def whole_because(self) -> str:
        """Why there are no sub-models."""
        ...

    @property
    def spec(self) -> ParamSpec:
        """Every tensor of the model, in the order of the vector, and the groups of its units."""
        ...

    @property
    def frozen(self) -> Tensors:
        """The tensors that are not aggregated, as this App's own model has them."""
        ...

    def initial(self, seed: int) -> dict[str, Array]:
        """The weights a run starts from: the same seed gives the same weights."""
        ...

    def train(
        self,
        vector: Vector,
        frozen: Tensors,
        examples: Examples,
        plan: LocalPlan,
        seed: int,
        submodel: UnitMap | None = None,
        only: TensorSet | None = None,
    ) -> TrainResult:
        """Local training from `vector`. Raises `ManifestMismatch` when it is of another model.

        `only`: the tensors of the whole model that alone are trained. Raises `AppError` where that cannot be.

        With a sub-model the smaller model alone is built and trained: `vector` and the delta are its,
        (submodel.size,), in the order of `submodel.indices`. Raises `AppError` when a layer is not
        known to work in a smaller size.
        """
        ...

    def check_part(self, part: TensorSet | None) -> None:
        """Raises `AppError` where what a task sends cannot change without what it does not send."""
        ...

    def train_on(
        self,
        vector: Vector,
        frozen: Tensors,
        examples: Examples,
        plan: LocalPlan,
        seed: int,
        hook: Callable[[LiveWeights], None],
    ) -> None:
        """Train from `vector` without an end. `hook` is called between steps; what it raises comes out.

        The App is given a plan of endlessly many steps, so that its optimizer lives on. Where its `train`
        returns all the same, it is called again, with the hook in between.
        """
        ...

    def evaluate(
        self, vector: Vector, frozen: Tensors, examples: Examples, stage: int = 0
    ) -> dict[str, float]:
        """The App's metrics of a model, whatever names it gives them, at a `stage`; 0: the last."""
        ...

    def step_cost(self, submodel: UnitMap | TensorSet, examples: Examples) -> float:
        """Floating-point operations of a training step of the smaller model, the whole one's being 1.

        In (0, 1]. Where operations cannot be counted, the ratio of the parameters. The same for all
        sub-models that keep as many units of each group. Of some tensors: of the stage that they are of.
        """
        ...


def trainer_for(app: App, device: str = "cpu", precision: str = "auto") -> Trainer:
    """The trainer of an App. `device` and `precision` are those of `[client]`, for torch models alone.

    Raises `AppError` when torch is needed and absent or `model()` returns something else, and
    `ConfigError` for a device or precision that this machine does not have.
    """
    from anabranch.workloads.numpy_trainer import NumpyTrainer

    if app.any_model:  # arrays by name
        return NumpyTrainer(app)
    model = model_of(app, 0)
    if isinstance(model, dict):
        return NumpyTrainer(app)
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):  # on torch a module, in part
        raise AppError(
            f"{app.name}: model() returned a model of Keras, whose running statistics and training mode "
            "torch does not know: return its weights by name, as a dict of numpy arrays, as "
            "examples/keras_digits.py does"
        )
    torch = sys.modules.get("torch")  # a torch model has imported it
    if torch is None or not isinstance(model, torch.nn.Module):
        raise AppError(
            f"{app.name}: model() returned {type(model).__name__}: "
            "return a torch.nn.Module, or its weights by name as a dict of numpy arrays; what has none, such "
            "as a forest of trees, has no mean, and is no model here"
        )
    from anabranch.workloads.torch_trainer import TorchTrainer

    return TorchTrainer(app, device, precision)


def warn_of_arrays(app: App, device: str, precision: str) -> None:
    """Says in the log that an App of numpy arrays is trained where its own code says, not as was asked.

    For those whose trainer is the numpy one. One with a `join` may have read the settings there.
    """
    asked = {"device": device, "precision": precision}
    said = [f"client.{key} = {value!r}" for key, value in asked.items() if value not in NO_ACCELERATOR]
    if said and not has_own(app, "join"):
        log.warning(ARRAYS_UNMOVED, app.name, " and ".join(said))


def train_endlessly(
    train: Callable[[LocalPlan, int], object], plan: LocalPlan, seed: int, live: LiveWeights, hook: Hook
) -> None:
    """Call `train` (a plan, a seed) again and again, with `hook` between steps, until that raises."""
    endless = replace(plan, steps=ENDLESS_STEPS)
    with watched(lambda: hook(live)):
        for life in itertools.count():
            train(endless, seed_of(seed, "life", life))
            hook(live)


def smaller(task: Task) -> UnitMap | None:
    """The sub-model that is built and trained for a task; None: the whole model."""
    return task.submodel if isinstance(task.submodel, UnitMap) else None


def cut(task: Task, delta: Vector) -> Vector:
    """What a task's update covers of what was trained: all of a smaller model, of a whole one its part."""
    return delta if isinstance(task.submodel, UnitMap) else gathered(delta, task.submodel)


def cheaper(task: Task) -> UnitMap | TensorSet | None:
    """The part of a model whose steps may take less than the whole one's: a smaller model, or a stage's."""
    return smaller(task) or (only(task) if stage_in(task.submodel) else None)


def only(task: Task) -> TensorSet | None:
    """The tensors that alone are trained for a task, in the whole model; None: all."""
    return task.submodel if isinstance(task.submodel, TensorSet) else None


def check_vector(spec: ParamSpec, vector: Vector) -> None:
    """Raises `ManifestMismatch` unless the vector has one value for each coordinate of the spec."""
    if vector.shape != (spec.size,):
        raise ManifestMismatch(f"vector has shape {vector.shape}, this App's model needs ({spec.size},)")


FROZEN_UNITS = "all units run through a frozen tensor: cut what is trained, or train what is cut"
NO_UNITS = "every layer of the model must stay whole: none has units of which it is known what reads them"


def declared_units(app: App, model: Model) -> tuple[UnitGroup, ...] | None:
    """What the App's `units` says; None where it leaves them to be found."""
    with own_code(app, "units"):
        found = app.units(model)
        if found is None:
            return None
        groups = tuple(found)
    if not all(isinstance(group, UnitGroup) for group in groups):
        raise AppError(f"{app.name}: units returned something else than groups: return UnitGroup(...) each")
    return groups


def declared_buffers(app: App, model: Model) -> tuple[str, ...] | None:
    """What the App's `buffers` says; None where it leaves them to be found."""
    with own_code(app, "buffers"):
        found = app.buffers(model)
        if found is None:
            return None
        names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(str(name) for name in names)


def declared_trained(app: App, model: Model) -> tuple[str, ...] | None:
    """What the App's `trained` says; None where it leaves that to be found."""
    said: object = app.trained
    if not callable(said):
        raise AppError(
            f"{app.name}: its `trained` is a {type(said).__name__}: make it a method, trained(self, model), "
            "which names what is trained; an attribute of your own needs another name"
        )
    with own_code(app, "trained"):
        found = app.trained(model)
        if found is None:
            return None
        names = (found,) if isinstance(found, str) else tuple(found)
    return tuple(str(name) for name in names)


def declared_stages(app: App, model: Model) -> tuple[ModelStage, ...]:
    """What the App's `stages` says; none where its model does not grow. Raises `AppError`."""
    with own_code(app, "stages"):
        found = app.stages(model)
        stages = () if found is None else tuple(found)
    if not all(isinstance(stage, ModelStage) for stage in stages):
        raise AppError(
            f"{app.name}: stages returned something else than stages: return ModelStage(blocks, head) each"
        )
    if stages and getattr(model, "stage", None) != len(stages):
        raise AppError(
            f"{app.name}: stages(model) says {len(stages)}, and model.stage is "
            f"{getattr(model, 'stage', 'not there')}: set self.stage = {len(stages)} in the module, whose "
            "forward stops at that stage"
        )
    return stages


def check_again(app: App, spec: ParamSpec, found: Tensors) -> None:
    """Raises `AppError` where the model that an App has built again is another than the first, of `spec`."""
    shapes = {t.name: t.shape for t in spec.tensors}
    if changed := sorted(found.keys() ^ shapes):
        raise AppError(
            f"{app.name}: model() must name its tensors the same each time, and has not: "
            f"{', '.join(changed[:4])}; give each layer a name of your own"
        )
    for name, shape in shapes.items():
        if shape_of(found, name) != shape:
            raise AppError(
                f"{app.name}: model() must build the same model each time, and has not: {name} has shape "
                f"{shape_of(found, name)}, and had {shape}; let no size of it hang on a draw or a seed"
            )


def spec_of(
    app: App,
    tensors: Tensors,
    groups: tuple[UnitGroup, ...],
    buffers: tuple[str, ...],
    trained: Collection[str] | None = None,
    stages: tuple[ModelStage, ...] = (),
) -> ParamSpec:
    """The spec of the App's model, in which what is frozen is no buffer.

    Raises `AppError` where nothing is trained, for odd kinds, and for wrong units, buffers, stages or names.
    """
    kept = trained is None or set(trained)
    buffers = tuple(name for name in buffers if kept is True or name in kept or name not in tensors)
    try:
        found = ParamSpec.of(tensors, groups, buffers, trained, stages)
    except (ConfigError, InvalidUpdate) as error:
        raise AppError(f"{app.name}: {error}") from error
    if found.size == 0 and found.apart:
        raise AppError(
            f"{app.name}: nothing of the model is trained: leave requires_grad on where it shall learn, or "
            "name those tensors in trained(self, model)"
        )
    if found.size == 0:
        kinds = ", ".join(sorted({str(array.dtype) for array in tensors.values()})) or "no tensors"
        raise AppError(
            f"{app.name}: the model has no float parameters ({kinds}), so there is nothing to learn: give "
            "what it shall learn as floats"
        )
    return found


def check_submodel(spec: ParamSpec, submodel: UnitMap | TensorSet) -> None:
    """Raises `ManifestMismatch` unless the sub-model is of a model with these tensors."""
    if submodel.spec.layout_hash != spec.layout_hash:
        raise ManifestMismatch("the sub-model is of a model with other tensors than this App's")


def result_of(delta: Vector, metrics: Any, plan: LocalPlan, examples: Examples, name: str) -> TrainResult:
    """The result with the App's metrics; steps as the App reports them, or else as planned.

    Raises `AppError` for metrics that are none.
    """
    where = f"{name}.train"
    found = metrics_of({} if metrics is None else metrics, where, TRAINED_MAX - 1)  # and `train_s`
    steps = taken_count(found, "steps", planned_steps(plan, len(examples)), where)
    count = taken_count(found, "examples", 0, where)
    return TrainResult(delta, steps, found, count)
