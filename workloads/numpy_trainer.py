"""The trainer of Apps whose model is a dict of numpy arrays: no torch, no device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.core.model.params import ParamSpec, Tensors, Vector
from anabranch.core.model.submodels import TensorSet, UnitMap
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads import calls
from anabranch.workloads.app import App, Array, Examples
from anabranch.workloads.trainer import (
    Hook,
    TrainResult,
    check_again,
    check_submodel,
    check_vector,
    declared_buffers,
    declared_trained,
    declared_units,
    result_of,
    spec_of,
    train_endlessly,
)
from anabranch.workloads.unit_values import WholeWidth

NAMES_SAID = 6


class NumpyTrainer:
    """Gives the App a copy of the arrays each time, so nothing is carried from task to task.

    For a sub-model they are smaller arrays. Which units there are, the App must declare; one of `any_model`
    declares none.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._spec: ParamSpec | None = None
        if not app.any_model:
            self._spec = self._own()

    @property
    def spec(self) -> ParamSpec:
        """See `Trainer`. An App of `any_model` is asked for its own only where none was adopted."""
        self._spec = self._spec or self._own()
        return self._spec

    @property
    def frozen(self) -> Tensors:
        """See `Trainer`; none of an App of `any_model`, whose own the run's need not be."""
        return {} if self._app.any_model else self.spec.frozen(self.initial(0))

    @property
    def whole_widths(self) -> tuple[WholeWidth, ...]:
        """See `Trainer`: none is looked for."""
        return ()

    @property
    def whole_because(self) -> str:
        """See `Trainer`."""
        if self.spec.groups:
            return ""
        if self._app.any_model:
            return f"{self._app.name} trains whole models only"
        return f"{self._app.name}: a model of numpy arrays needs units(self, model), which declares them"

    def adopt(self, spec: ParamSpec) -> None:
        """Train models of this spec from now on."""
        self._spec = spec

    def described(self, tensors: dict[str, Array]) -> ParamSpec:
        """The spec of a model of these arrays, with the units and buffers that the App names."""
        app = self._app
        units, buffers = declared_units(app, tensors) or (), declared_buffers(app, tensors) or ()
        return spec_of(app, tensors, units, buffers, declared_trained(app, tensors))

    def _own(self) -> ParamSpec:
        return self.described(self.initial(0))

    def initial(self, seed: int) -> dict[str, Array]:
        """The arrays of `app.model(seed)`.

        Raises `AppError` where they have other names or shapes than the first that were built.
        """
        found = calls.model_of(self._app, seed)
        if nested := [name for name, array in found.items() if isinstance(array, Mapping)]:
            names = list(_paths(found))
            more = f" and {len(names) - NAMES_SAID} more" if len(names) > NAMES_SAID else ""
            raise AppError(
                f"{self._app.name}: model() has a dict at {nested[0]!r}: give one dict of all arrays, by the "
                f"names {', '.join(map(repr, names[:NAMES_SAID]))}{more}"
                ' (of Flax: flax.traverse_util.flatten_dict(params, sep="."))'
            )
        arrays = {name: self._array(name, array) for name, array in found.items()}
        if self._spec and not self._app.any_model:
            check_again(self._app, self._spec, arrays)
        return arrays

    def _array(self, name: str, given: Any) -> Array:
        """A copy. Raises `AppError` for what is no array of numbers, such as a parameter of torch's."""
        if getattr(given, "requires_grad", False):
            raise AppError(
                f"{self._app.name}: model() has at {name!r} a {type(given).__name__} of torch's that "
                "requires a gradient, and a dict is of numpy arrays: return the module itself, or, for a "
                "train without torch, {n: p.detach().numpy() for n, p in module.named_parameters()}"
            )
        try:
            return np.array(given, order="C")
        except (TypeError, ValueError, RuntimeError) as error:
            raise AppError(
                f"{self._app.name}: model() has at {name!r} a {type(given).__name__} that is no array: "
                f"{error}; give numpy arrays of numbers"
            ) from error

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
        """Local training from `vector`; the App changes the arrays of the dict it gets, all of them."""
        if only is not None:
            raise AppError(
                f"{self._app.name}: a task is of some tensors, and nobody can keep an App from changing the "
                "other arrays of its model: set client.push = 'elastic', which trains them all"
            )
        spec = self.spec
        if submodel is not None:
            check_submodel(self.spec, submodel)
            spec = submodel.small
        arrays = _arrays(spec, vector, frozen)
        lent = dict(arrays)
        # Rounded, where the model has fewer digits: else every device sends the way there as training.
        start = _flat(spec, arrays) if spec.rounds else vector.astype(spec.vector_dtype, copy=False)
        metrics = calls.train(self._app, arrays, examples, plan, seed)
        left, is_own = self._left(spec, lent, arrays)
        delta = np.subtract(left, start, out=left if is_own else None)
        return result_of(delta, metrics, plan, examples, self._app.name)

    def _left(self, spec: ParamSpec, lent: dict[str, Array], arrays: dict[str, Array]) -> tuple[Vector, bool]:
        """See the function. Raises `AppError` where the App has left another model."""
        try:
            return _left(spec, lent, arrays)
        except (ManifestMismatch, TypeError, ValueError) as error:
            said = f"what it has left of the model is another model: {error}"
            raise calls.broken(self._app, "train", said) from error

    def check_part(self, part: TensorSet | None) -> None:
        """See `Trainer`: every array has one name."""

    def train_on(
        self,
        vector: Vector,
        frozen: Tensors,
        examples: Examples,
        plan: LocalPlan,
        seed: int,
        hook: Hook,
    ) -> None:
        """See `Trainer`: the App's `train` on arrays that stay."""
        arrays = _arrays(self.spec, vector, frozen)
        train_endlessly(
            lambda endless, life: calls.train(self._app, arrays, examples, endless, life),
            plan,
            seed,
            _LiveArrays(self.spec, arrays),
            hook,
        )

    def evaluate(
        self,
        vector: Vector,
        frozen: Tensors,
        examples: Examples,
        stage: int = 0,  # noqa: ARG002 - of modules
    ) -> dict[str, float]:
        """The App's own evaluation."""
        return calls.evaluate(self._app, _arrays(self.spec, vector, frozen), examples)

    def step_cost(
        self,
        submodel: UnitMap | TensorSet,
        examples: Examples,  # noqa: ARG002 - the contract's
    ) -> float:
        """The share of the parameters: numpy's operations are not counted."""
        check_submodel(self.spec, submodel)
        return submodel.size / self.spec.size


class _LiveArrays:
    """The arrays that the App is training."""

    def __init__(self, spec: ParamSpec, arrays: dict[str, Array]) -> None:
        self._spec, self._arrays = spec, arrays

    def flat(self) -> Vector:
        """See `LiveWeights`."""
        return _flat(self._spec, self._arrays)

    def add(self, change: Vector) -> None:
        """See `LiveWeights`."""
        for name, at in self._spec.slices.items():
            array = self._arrays[name] = np.asarray(self._arrays[name])
            array += change[at].reshape(array.shape).astype(array.dtype, copy=False)


def _left(spec: ParamSpec, lent: dict[str, Array], arrays: dict[str, Array]) -> tuple[Vector, bool]:
    """What the App has left of what it was lent: as it lies, where all is still views of one vector.

    And whether it was gathered anew, so that nobody else has it: an App may keep what it was lent.
    """
    owners = {id(lent[name].base) for name in spec.slices}
    if len(owners) == 1 and all(arrays.get(name) is array for name, array in lent.items()):
        spec.check(arrays)
        whole = lent[next(iter(spec.slices))].base
        if whole is not None and whole.shape == (spec.size,):
            return whole, False
    return _flat(spec, arrays), True


def _flat(spec: ParamSpec, arrays: dict[str, Array]) -> Vector:
    """What the App has left: numpy makes plain numbers of arrays of shape () at every sum."""
    return spec.flatten({name: np.asarray(array) for name, array in arrays.items()})


def _arrays(spec: ParamSpec, vector: Vector, frozen: Tensors) -> dict[str, Array]:
    """Copies: views of one vector, where a tensor has its dtype."""
    check_vector(spec, vector)
    found = spec.unflatten(np.array(vector, spec.vector_dtype), frozen, copy=False)
    return {n: a if n in spec.slices else a.copy() for n, a in found.items()}


def _paths(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The leaves of dicts in dicts, by the names on the way to them: `params.Dense_0.kernel`."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _paths(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"
