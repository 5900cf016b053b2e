"""The trainer of torch Apps: a module stays on the device, and each task loads its weights into it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.growing import stage_in
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.submodels import TensorSet, UnitMap
from anabranch.core.model.units import UnitGroup, check_groups
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads import calls
from anabranch.workloads.app import App, Array, Examples, has_own
from anabranch.workloads.frozen_tensors import at_stage, freeze_others, still_names, training_only
from anabranch.workloads.loadable import check_loadable, check_no_copies
from anabranch.workloads.resident import LiveModule, Resident
from anabranch.workloads.torch_loop import TorchRuntime, import_torch
from anabranch.workloads.trainer import (
    FROZEN_UNITS,
    NO_UNITS,
    Hook,
    TrainResult,
    check_again,
    check_submodel,
    declared_buffers,
    declared_stages,
    declared_units,
    result_of,
    spec_of,
    train_endlessly,
)
from anabranch.workloads.unit_values import WholeWidth

if TYPE_CHECKING:
    import torch

SMALLER_MAX = 2  # modules of sub-models that are kept beside the whole one


class TorchTrainer:
    """Trains on `device`; on a CPU the same inputs give the same delta, bit for bit.

    Weights cross to the device as one flat vector and come back as one. Buffers that are not in the
    state dict are set back before each task, so nothing is carried from task to task. A sub-model is
    trained in a smaller module, which serves all tasks that keep as many units.
    """

    def __init__(self, app: App, device: str = "cpu", precision: str = "auto") -> None:
        self._torch = import_torch()
        self.runtime = TorchRuntime(device, precision)
        self.app = app
        module = self._built(0)
        check_loadable(module, app.name)
        if has_own(app, "data"):  # else scripts train it, which load it as it wants to be loaded
            check_no_copies(module, app.name)
        module = module.to(self.runtime.device)
        built = self._arrays(module)
        trained = self._trained(module, built)
        self.whole_widths: tuple[WholeWidth, ...] = ()
        groups, self.whole_because = self._units(module, trained)
        stages = declared_stages(app, module)
        self.spec = spec_of(app, built, groups, self._buffers(module, built), trained, stages)
        scratch = {n: b.clone() for n, b in module.named_buffers() if n not in built}
        self._whole = Resident(app, module, self.spec, self.spec.frozen(built), scratch)
        self._smaller: OrderedDict[ParamSpec, Resident] = OrderedDict()
        self._costs: dict[ParamSpec, float] = {}

    @property
    def frozen(self) -> Tensors:
        """See `Trainer`."""
        return self._whole.frozen

    def initial(self, seed: int) -> dict[str, Array]:
        """The state dict of a new model, built with torch's generators seeded.

        Raises `AppError` where it has other names or shapes than the first that was built.
        """
        found = self._arrays(self._built(seed))
        check_again(self.app, self.spec, found)
        return found

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
        """Local training from `vector` by the App's `train`, under torch's generators seeded."""
        resident = self.resident(submodel)
        self.check_part(only)
        given = self._load(resident, vector, frozen)
        resident.module.train()
        with self.runtime.seeded(seed), self._only(resident, only):
            metrics = calls.train(self.app, resident.module, examples, plan, seed)
        resident.module.zero_grad(set_to_none=True)
        delta = resident.flat().sub_(given).cpu().numpy()
        return result_of(delta, metrics, plan, examples, self.app.name)

    def check_part(self, part: TensorSet | None) -> None:
        """See `Trainer`."""
        if part is not None:
            self._whole.check_part(part)

    def train_on(
        self,
        vector: Vector,
        frozen: Tensors,
        examples: Examples,
        plan: LocalPlan,
        seed: int,
        hook: Hook,
    ) -> None:
        """See `Trainer`: the App's `train` on the module of the whole model."""
        self._load(self._whole, vector, frozen)
        live = LiveModule(self._whole, vector)
        self._whole.module.train()

        def train(endless: LocalPlan, life: int) -> None:
            with self.runtime.seeded(life):
                calls.train(self.app, self._whole.module, examples, endless, life)

        train_endlessly(train, plan, seed, live, hook)

    def evaluate(
        self, vector: Vector, frozen: Tensors, examples: Examples, stage: int = 0
    ) -> dict[str, float]:
        """The App's evaluation of the module in evaluation mode."""
        self._load(self._whole, vector, frozen)
        self._whole.module.eval()
        with at_stage(self._whole.module, stage):
            return calls.evaluate(self.app, self._whole.module, examples)

    def step_cost(self, submodel: UnitMap | TensorSet, examples: Examples) -> float:
        """Operations of a training step, counted by torch; of parameters where it cannot count them."""
        from anabranch.workloads.step_cost import operations

        check_submodel(self.spec, submodel)
        if submodel.small not in self._costs:
            units, tensors = (submodel, None) if isinstance(submodel, UnitMap) else (None, submodel)
            resident, backward = self.resident(units), self.app.zeroth is None
            for each in (self._whole, resident):  # a training may have left them in another form
                each.reset()
            with self._only(resident, tensors):
                part = operations(resident.module, examples, self.runtime, backward)
            whole = operations(self._whole.module, examples, self.runtime, backward)
            ratio = part / whole if part and whole else submodel.size / self.spec.size
            self._costs[submodel.small] = min(1.0, ratio)
        return self._costs[submodel.small]

    @contextmanager
    def _only(self, resident: Resident, part: TensorSet | None) -> Iterator[None]:
        """Inside, these tensors alone are trained, at the stage that they are of; None: all, at the last."""
        names = None if part is None else frozenset(part.names)
        with training_only(resident.module, names), at_stage(resident.module, stage_in(part)):
            yield

    def _load(self, resident: Resident, vector: Vector, frozen: Tensors) -> torch.Tensor:
        self.app.runtime = self.runtime
        return resident.load(vector, frozen)

    def resident(self, submodel: UnitMap | None) -> Resident:
        """The module of this size: the whole one, one that is kept, or a new one."""
        from anabranch.workloads.submodule import smaller

        if submodel is None:
            return self._whole
        check_submodel(self.spec, submodel)
        small = submodel.small
        if small.tensors == self.spec.tensors:
            return self._whole
        if small not in self._smaller:
            while len(self._smaller) >= SMALLER_MAX:
                self._smaller.popitem(last=False)
            self._whole.reset()
            module = smaller(self._whole.module, submodel)
            self._smaller[small] = Resident(self.app, module, small, self._whole.frozen, self._whole.scratch)
        self._smaller.move_to_end(small)
        return self._smaller[small]

    def _units(
        self, module: torch.nn.Module, trained: Collection[str] | None
    ) -> tuple[tuple[UnitGroup, ...], str]:
        """The groups of units, declared or found; without any, why.

        Of those found only such as are trained wherever they lie.
        """
        from anabranch.workloads.model_graph import copied, units_and_widths

        groups = declared_units(self.app, module)
        try:
            if groups:
                copied(module)  # as every smaller module is
            elif groups is None:
                with self.runtime.seeded(0):
                    groups, self.whole_widths = units_and_widths(module)
                check_groups(groups, {name: tuple(t.shape) for name, t in module.state_dict().items()})
                if trained is not None and groups:
                    groups = tuple(g for g in groups if all(m.tensor in trained for m in g.members))
                    return groups, "" if groups else FROZEN_UNITS
        except ConfigError as error:
            return (), str(error)
        return groups, "" if groups else NO_UNITS

    def _buffers(self, module: torch.nn.Module, built: Mapping[str, Array]) -> tuple[str, ...]:
        """The names of the buffers, declared or found; those of the state dict, without counters."""
        declared = declared_buffers(self.app, module)
        if declared is not None:
            return declared
        known = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        return tuple(name for name, array in built.items() if name in known and array.dtype.kind == "f")

    def _trained(self, module: torch.nn.Module, built: Mapping[str, Array]) -> Collection[str] | None:
        """The names of the tensors that are trained, declared or found; None: all floats are.

        Those that are declared require a gradient from here on, and no others: the module's form, which
        each task finds it in.
        """
        declared = freeze_others(self.app, module)
        if declared is not None:
            return declared
        found = frozenset(still_names(module))
        floats = {name for name, array in built.items() if array.dtype.kind == "f"}
        return floats - found if floats & found else None

    def _built(self, seed: int) -> torch.nn.Module:
        with self.runtime.seeded(seed):
            module: torch.nn.Module = calls.model_of(self.app, seed)
        return module

    def _arrays(self, module: torch.nn.Module) -> dict[str, Array]:
        return {name: self._array(name, tensor) for name, tensor in module.state_dict().items()}

    def _array(self, name: str, tensor: Any) -> Array:
        """A copy. Raises `AppError` for what numpy has no kind of."""
        if not isinstance(tensor, self._torch.Tensor):
            raise AppError(
                f"{self.app.name}: {name!r} in the model's state dict is {type(tensor).__name__}, no tensor: "
                "register it as a buffer"
            )
        try:
            return np.array(tensor.detach().cpu().numpy(), order="C")
        except TypeError as error:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise AppError(
                f"{self.app.name}: tensor {name!r} is {kind}: keep weights in float32, "
                "client.precision = 'bfloat16' computes in that"
            ) from error
