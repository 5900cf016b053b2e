"""What an App of NumPy may do with the arrays that it gets for a task: they are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads import App, Examples, Shard, trainer_for

PLAN = LocalPlan(steps=1, batch_size=1, learning_rate=0.1)
EXAMPLES = Examples(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
Arrays = dict[str, Any]
Act = Callable[[Arrays], object]


class Acting(App):
    """Three arrays, and one that is not aggregated; `act` is done with them."""

    name = "acting"

    def __init__(self, act: Act, wide: bool = False) -> None:
        super().__init__()
        self._act, self._wide = act, wide
        self.mine: list[Any] = []

    def model(self) -> Arrays:
        dtype = np.float64 if self._wide else np.float32
        return {
            "w": np.ones((2, 3), np.float32),
            "b": np.full(3, 2.0, dtype),
            "s": np.array(3.0, np.float32),
            "n": np.array([7]),
        }

    def data(self, shard: Shard) -> Examples:
        del shard
        return EXAMPLES

    def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> Any:
        del examples, plan, seed
        self.mine.append(model["w"])
        self._act(model)
        return {}


def in_place(arrays: Arrays) -> None:
    """Every array where it lies."""
    for name in arrays:
        arrays[name] += 1


def anew(arrays: Arrays) -> None:
    """Every array by another one."""
    for name in list(arrays):
        arrays[name] = arrays[name] + 1


def one_anew(arrays: Arrays) -> None:
    """One by another, the rest where it lies."""
    arrays["w"] = arrays["w"] + 1
    for name in ("b", "s", "n"):
        arrays[name] += 1


@pytest.mark.parametrize("wide", [False, True], ids=["one dtype", "two dtypes"])
@pytest.mark.parametrize("act", [in_place, anew, one_anew])
def test_the_delta_is_what_the_app_has_changed_however_it_does_it(act: Act, wide: bool) -> None:
    trainer = trainer_for(Acting(act, wide))
    vector = trainer.spec.flatten(trainer.initial(0))
    before = vector.copy()
    for _ in range(2):  # nothing is carried over
        result = trainer.train(vector, trainer.frozen, EXAMPLES, PLAN, 0)
        assert result.delta.dtype == trainer.spec.vector_dtype
        assert result.delta.tolist() == [1.0] * 10
        assert vector.tolist() == before.tolist()


def test_arrays_that_an_app_has_kept_stay_as_it_left_them() -> None:
    app = Acting(in_place)
    trainer = trainer_for(app)
    vector = trainer.spec.flatten(trainer.initial(0))
    results = [trainer.train(vector, trainer.frozen, EXAMPLES, PLAN, 0) for _ in range(2)]
    for result in results:
        result.delta[:] = -1.0
    assert [mine.tolist() for mine in app.mine] == [[[2.0] * 3] * 2] * 2


def test_arrays_that_change_places_are_told_apart() -> None:
    def swap(arrays: Arrays) -> None:
        arrays["b"], arrays["w"] = arrays["w"][0], np.stack([arrays["b"]] * 2)

    trainer = trainer_for(Acting(swap))
    vector = trainer.spec.flatten(trainer.initial(0))
    result = trainer.train(vector, trainer.frozen, EXAMPLES, PLAN, 0)
    assert result.delta.tolist() == [1.0] * 6 + [-1.0] * 3 + [0.0]


@pytest.mark.parametrize(
    "act",
    [
        lambda arrays: arrays.pop("w"),
        lambda arrays: arrays["w"].resize((3, 2), refcheck=False),
        lambda arrays: arrays.update(extra=np.zeros(2)),
        lambda arrays: arrays.update(w=None),
    ],
    ids=["gone", "of another shape", "one more", "no array"],
)
def test_a_model_of_other_arrays_is_the_apps_error(act: Act) -> None:
    trainer = trainer_for(Acting(act))
    with pytest.raises(AppError, match=r"^Acting\.train: what it has left .*: tensor '(w|extra)'"):
        trainer.train(trainer.spec.flatten(trainer.initial(0)), trainer.frozen, EXAMPLES, PLAN, 0)


def test_what_is_kept_is_bytes() -> None:
    app = Acting(lambda _: setattr(app, "kept", {"rounds": 1}))
    trainer = trainer_for(app)
    with pytest.raises(AppError, match=r"^Acting\.train: kept is a dict: keep bytes"):
        trainer.train(trainer.spec.flatten(trainer.initial(0)), trainer.frozen, EXAMPLES, PLAN, 0)


def test_arrays_in_dicts_of_dicts_are_told_to_be_flat() -> None:
    class Nested(Acting):
        def model(self) -> Arrays:
            return {"dense": {"kernel": np.zeros(2)}}

    with pytest.raises(AppError, match=r"a dict at 'dense': .* by the names 'dense\.kernel'"):
        trainer_for(Nested(in_place))
