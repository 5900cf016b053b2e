"""The trainer of Apps whose model is a dict of numpy arrays: no torch, no device."""

from __future__ import annotations

from anabranch.core.errors import AppError
from anabranch.core.params import ParamSpec, Tensors, Vector
from anabranch.core.updates import LocalPlan
from anabranch.workloads.app import App, Array, Examples
from anabranch.workloads.trainer import TrainResult, build_model, check_vector, result_of


class NumpyTrainer:
    """Gives the App a copy of the arrays each time, so nothing is carried from task to task."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.spec = ParamSpec.of(self.initial(0))
        if self.spec.size == 0:
            raise AppError(f"{app.name}: model() has no float array, so there is nothing to learn")

    def initial(self, seed: int) -> dict[str, Array]:
        """The arrays of `app.model(seed)`."""
        return {name: array.copy() for name, array in build_model(self._app, seed).items()}

    def train(
        self, vector: Vector, frozen: Tensors, examples: Examples, plan: LocalPlan, seed: int
    ) -> TrainResult:
        """Local training from `vector`; the App changes the arrays of the dict it gets."""
        arrays = self._arrays(vector, frozen)
        metrics = self._app.train(arrays, examples, plan, seed)
        delta = self.spec.flatten(arrays) - vector.astype(self.spec.vector_dtype, copy=False)
        return result_of(delta, metrics, plan, examples, self._app.name)

    def evaluate(self, vector: Vector, frozen: Tensors, examples: Examples) -> dict[str, float]:
        """The App's own evaluation."""
        return dict(self._app.evaluate(self._arrays(vector, frozen), examples))

    def _arrays(self, vector: Vector, frozen: Tensors) -> dict[str, Array]:
        check_vector(self.spec, vector)
        return {name: array.copy() for name, array in self.spec.unflatten(vector, frozen).items()}
