"""Chains of linear layers that a compiled loop trains, beside the trainer of one device."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.kernels import descent
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.workloads import App, Examples, Shard, trainer_for
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.batches import watched
from anabranch.workloads.linear_descent import STEPS_AT_ONCE, LinearDescent
from anabranch.workloads.objective import IGNORED
from anabranch.workloads.stacked_layers import LayerChain
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training

PLAN = LocalPlan(steps=7, batch_size=8, learning_rate=0.1)
PICTURE = (2, 3)
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether the loop is for it
    "one layer": (lambda: nn.Linear(6, 4), True),
    "two": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)), True),
    "within": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 9), nn.ReLU()), nn.Linear(9, 4)), True),
    "of pictures": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4)), True),
    "another function": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), False),
    "no function": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)), False),
    "two functions": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.ReLU(), nn.Linear(9, 4)),
        False,
    ),
    "a function first": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 4)), False),
    "a function last": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), False),
    "of float64": (lambda: nn.Linear(6, 4).double(), False),
    "of float16": (lambda: nn.Linear(6, 4).half(), False),
}


class Drawn(App):
    """A model, and devices with 3, 6, 9 ... examples of it."""

    def __init__(self, made: Callable[[], nn.Module], shape: tuple[int, ...] = (6,)) -> None:
        super().__init__()
        self._made, self._shape = made, shape

    def model(self) -> Any:
        return self._made()

    def data(self, shard: Shard) -> Examples:
        draws, count = stream(shard.index, "descent"), 3 * (shard.index + 1)
        return Examples(draws.standard_normal((count, *self._shape), np.float32), draws.integers(0, 4, count))


def problem(name: str = "two", plan: LocalPlan = PLAN) -> tuple[TorchTrainer, list[Training]]:
    shape = PICTURE if name == "of pictures" else (6,)
    app = Drawn(MODELS[name][0], shape)
    trainer = cast("TorchTrainer", trainer_for(app))
    vector = trainer.spec.flatten(trainer.initial(0))
    return trainer, [Training(vector, app.data(Shard("train", i, 5)), plan, i) for i in range(5)]


def descended(trainer: TorchTrainer, trainings: list[Training]) -> list[tuple[Any, float]] | None:
    """By the loop, if that is for them."""
    resident = trainer.resident(None)
    chain = LayerChain.of(resident.module, {name for name, _ in resident.module.named_parameters()})
    assert chain is not None
    found = LinearDescent.of(resident, chain)
    return None if found is None else found.train(trainings)


def check_near(found: Any, trainer: TorchTrainer, t: Training) -> None:
    """The delta and the mean loss of a training by itself."""
    alone = trainer.train(t.vector, {}, t.examples, t.plan, t.seed)
    assert np.linalg.norm(found.delta - alone.delta) <= 1e-4 * np.linalg.norm(alone.delta)
    assert found.steps == alone.steps
    assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-4)


@pytest.fixture
def compiled() -> None:
    if descent._descend is None:
        pytest.skip("the compiled loops were not built, or of older sources")
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("it is for processors with AVX2")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("compiled")
def test_which_models_it_is_for(name: str) -> None:
    trainer, trainings = problem(name)
    found = descended(trainer, trainings)
    assert (found is not None) == MODELS[name][1]


@pytest.mark.parametrize("name", [name for name, (_, is_for_it) in MODELS.items() if is_for_it])
@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, steps=0, epochs=3), replace(PLAN, steps=150)])
def test_trainings_are_those_of_each_device_alone(name: str, plan: LocalPlan) -> None:
    assert plan.steps != 150 or plan.steps > STEPS_AT_ONCE
    trainer, trainings = problem(name, plan)
    for t, found in zip(trainings, BatchedTraining(trainer).train(trainings, {}), strict=True):
        check_near(found, trainer, t)


@pytest.mark.usefixtures("compiled")
def test_who_is_trained_beside_does_not_matter() -> None:
    trainer, trainings = problem()
    together = BatchedTraining(trainer).train(trainings, {})
    for t, found in zip(trainings, together, strict=True):
        (alone,) = BatchedTraining(trainer).train([t], {})
        assert alone.delta.tobytes() == found.delta.tobytes()
        assert alone.metrics == found.metrics


@pytest.mark.parametrize(
    "plan",
    [replace(PLAN, momentum=0.9), replace(PLAN, weight_decay=0.1), replace(PLAN, proximal_mu=0.5)],
    ids=["momentum", "decay", "proximal"],
)
def test_more_than_the_gradient_is_left_to_the_stack(plan: LocalPlan) -> None:
    trainer, trainings = problem(plan=plan)
    assert descended(trainer, trainings) is None
    for t, found in zip(trainings, BatchedTraining(trainer).train(trainings, {}), strict=True):
        check_near(found, trainer, t)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("count", "is_for_it"), [(1000, True), (1001, False)])
def test_batches_with_many_products_are_left_to_the_stack(count: int, is_for_it: bool) -> None:
    app = Drawn(lambda: nn.Linear(1000, 10), (1000,))
    trainer = cast("TorchTrainer", trainer_for(app))
    x = stream(0, "descent").standard_normal((count, 1000), np.float32)
    plan = replace(PLAN, steps=1, batch_size=5000)
    given = Training(trainer.spec.flatten(trainer.initial(0)), Examples(x, np.arange(count) % 10), plan, 0)
    assert (descended(trainer, [given]) is not None) == is_for_it
    (found,) = BatchedTraining(trainer).train([given], {})
    check_near(found, trainer, given)


def test_examples_that_are_not_for_it_are_left_to_the_stack() -> None:
    trainer, trainings = problem()
    x, y = trainings[2].examples.x, trainings[2].examples.y
    for examples in (Examples(x, np.where(np.arange(len(y)) == 4, IGNORED, y)), Examples(x.astype(float), y)):
        given = [*trainings[:2], replace(trainings[2], examples=examples)]
        assert descended(trainer, given) is None
        for t, found in zip(given, BatchedTraining(trainer).train(given, {}), strict=True):
            check_near(found, trainer, t)


@pytest.mark.parametrize("order", ["F", "C"])
def test_examples_in_any_order_and_of_any_whole_numbers(order: Any) -> None:
    trainer, trainings = problem()
    x, y = trainings[4].examples.x, trainings[4].examples.y
    given = replace(trainings[4], examples=Examples(np.asarray(x, order=order), y.astype(np.int32)))
    (wanted,), (found,) = (BatchedTraining(trainer).train([t], {}) for t in (trainings[4], given))
    assert found.delta.tobytes() == wanted.delta.tobytes()


@pytest.mark.usefixtures("compiled")
def test_of_many_examples_in_another_order_those_that_are_wanted_are_copied() -> None:
    trainer, trainings = problem(plan=replace(PLAN, steps=2))
    x = stream(0, "descent").standard_normal((20_000, 6), np.float32)
    y = np.arange(len(x)) % 4
    of_rows, of_columns = (
        replace(trainings[0], examples=Examples(np.asarray(x, order=order), y)) for order in ("C", "F")
    )
    ((wanted, _),) = descended(trainer, [of_rows]) or []
    tracemalloc.start()
    try:
        ((found, _),) = descended(trainer, [of_columns]) or []
        assert tracemalloc.get_traced_memory()[1] < x.nbytes
    finally:
        tracemalloc.stop()
    assert found.tobytes() == wanted.tobytes()


def test_deltas_are_memory_of_their_own_and_what_was_given_stays() -> None:
    trainer, trainings = problem()
    before = trainings[0].vector.copy()
    for found in BatchedTraining(trainer).train(trainings, {}):
        assert found.delta.flags.owndata
        assert not np.shares_memory(found.delta, trainings[0].vector)
    assert trainings[0].vector.tobytes() == before.tobytes()


def test_a_hook_hears_of_each_step_and_may_end_it() -> None:
    trainer, trainings = problem()
    heard: list[int] = []

    def hook() -> None:
        heard.append(0)
        if len(heard) == 4:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), watched(hook):
        BatchedTraining(trainer).train(trainings[:1], {})
    assert len(heard) == 4


def test_weights_that_leave_all_bounds_are_not_finite() -> None:
    trainer, trainings = problem(plan=replace(PLAN, learning_rate=1e30))
    assert not all(np.isfinite(r.delta).all() for r in BatchedTraining(trainer).train(trainings, {}))


@pytest.mark.usefixtures("compiled")
def test_it_is_for_float32_alone() -> None:
    trainer, trainings = problem()
    wanted = descended(trainer, trainings)
    assert wanted is not None
    for (delta, _), found in zip(wanted, BatchedTraining(trainer).train(trainings, {}), strict=True):
        assert found.delta.tobytes() == delta.tobytes()
    mixed = cast("TorchTrainer", trainer_for(Drawn(MODELS["two"][0]), "cpu", "bfloat16"))
    for (delta, _), found in zip(wanted, BatchedTraining(mixed).train(trainings, {}), strict=True):
        off = np.linalg.norm(found.delta - delta) / np.linalg.norm(delta)
        assert 1e-4 < off < 0.2  # products of three digits
