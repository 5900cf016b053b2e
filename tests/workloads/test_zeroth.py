"""Training without gradients: the equations by hand, torch and numpy, and what has a loss to call."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError, ConfigError, ManifestMismatch
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.adapters import lora, take_turn
from anabranch.workloads.app import App, Examples, Shard, app_of
from anabranch.workloads.batches import batches
from anabranch.workloads.calls import join_run
from anabranch.workloads.subspace import Subspace
from anabranch.workloads.synthetic import Synthetic, loss_and_gradient
from anabranch.workloads.trainer import trainer_for
from anabranch.workloads.zeroth import Zeroth, signs, slope

Array = npt.NDArray[Any]
PLAN = LocalPlan(steps=3, batch_size=8, learning_rate=0.01, momentum=0.5, weight_decay=0.02, proximal_mu=0.1)
GOLDEN_SIGNS = "01ff010101ffff01"  # +1 -1 +1 +1 +1 -1 -1 +1


def settings(**more: Any) -> dict[str, Any]:
    return merge([("test", {"client": {"gradient": "zeroth", **more}})]).to_json()


def trained(app: App, plan: LocalPlan = PLAN, seed: int = 7, scale: float = 0.1, **more: Any) -> Array:
    """The delta of a task of a run without gradients, from a start that is somewhere."""
    join_run(app, settings(**more))
    trainer = trainer_for(app)
    tensors = trainer.initial(1)
    start = trainer.spec.flatten(tensors)
    start = start + scale * np.random.default_rng(2).normal(size=start.shape).astype(np.float32)
    frozen = trainer.spec.frozen(tensors)
    return trainer.train(start, frozen, app.data(Shard("train")), plan, seed).delta


class Pair(App):
    """Two linear layers on noise."""

    name = "pair"

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def data(self, shard: Shard) -> Examples:
        draws = np.random.default_rng(shard.index)
        return Examples(draws.normal(size=(24, 5)).astype(np.float32), draws.integers(0, 3, 24))


class Own(Pair):
    """With a training of its own: of what, nobody knows."""

    def train(self, *given: Any) -> Any:
        raise AssertionError("it is not called")


class Said(Own):
    """It says what it lowers."""

    def batch_loss(self, model: Any, x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y)


class Dropping(Pair):
    """Half of the inputs are left out, by torch's generator."""

    def model(self) -> Any:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))


class ByAdam(Pair):
    optimizer = torch.optim.Adam


class Arrays(App):
    """Of numpy arrays: |a - x|^2 / 2, with a tensor that is not trained, and one of whole numbers."""

    name = "arrays"

    def model(self) -> dict[str, Array]:
        return {"a": np.array([1.0, 2.0]), "still": np.array([3.0]), "count": np.array(1), "b": np.array(0.5)}

    def trained(self, model: Any) -> list[str]:
        return ["a", "b"]

    def data(self, shard: Shard) -> Examples:
        return Examples(np.zeros((4, 1)), np.zeros(4, np.int64))

    def train(self, *given: Any) -> Any:
        raise AssertionError("it is not called")

    def batch_loss(self, model: Any, x: Any, y: Any) -> float:
        return float((model["a"] ** 2).sum() / 2 + model["b"] ** 2 / 2)


@pytest.mark.parametrize("eps", [1e-3, 0.1, 3.0])
def test_the_specification_s_golden_values(eps: float) -> None:
    """L = |a|^2 / 2 at (1, 2), z = (1, -1): the slope is -1 for every eps; a step of .1 is to (1.1, 1.9)."""
    a, z = np.array([1.0, 2.0]), np.array([1.0, -1.0])
    g, loss = slope(lambda v: float(v @ v) / 2, a, z, eps)
    assert g == pytest.approx(-1.0, abs=1e-9)
    assert loss == pytest.approx(2.5 + eps**2)
    np.testing.assert_allclose(a - 0.1 * g * z, [1.1, 1.9])


@given(st.integers(1, 8), st.integers(0, 2**32))
def test_of_a_quadratic_loss_the_mean_over_all_signs_is_the_gradient(count: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    a, b, root = draws.normal(size=count), draws.normal(size=count), draws.normal(size=(count, count))
    gradient = root.T @ (root @ a) + b
    found = []
    for drawn in itertools.product((-1.0, 1.0), repeat=count):
        z = np.array(drawn)
        g, _ = slope(lambda v: float((root @ v) @ (root @ v) / 2 + b @ v), a, z, 0.3)
        assert g == pytest.approx(gradient @ z, abs=1e-8)
        found.append(g * z)
    np.testing.assert_allclose(np.mean(found, axis=0), gradient, atol=1e-8)


def test_signs_are_of_the_seed_the_step_and_the_query() -> None:
    first = signs(9, 0, 0, 1000)
    assert set(first.tolist()) == {-1, 1}
    assert abs(int(first.sum())) < 120
    assert signs(9, 0, 0, 70).tolist() == first[:70].tolist()
    for other in (signs(8, 0, 0, 1000), signs(9, 1, 0, 1000), signs(9, 0, 1, 1000)):
        assert abs(int((first * other).sum())) < 120, "independent"
    word = int(np.random.Philox(key=9 | 5 << 64, counter=(2 << 128) + (3 << 64)).random_raw())
    assert signs(9, 3, 2, 64).tolist() == [1 - 2 * (word >> bit & 1) for bit in range(64)]
    assert signs(9, 3, 2, 8).tobytes().hex() == GOLDEN_SIGNS


def test_queries_are_averaged_and_slopes_are_cut() -> None:
    a = np.array([1.0, 2.0, -3.0])

    def loss(values: Array) -> float:
        return float(values @ values) / 2

    z = [signs(4, 1, query, 3).astype(float) for query in range(5)]
    found, mean = Zeroth(queries=5).estimate(loss, a, 4, 1)
    np.testing.assert_allclose(found, np.mean([(a @ one) * one for one in z], axis=0), atol=1e-9)
    assert mean == pytest.approx(7.0, abs=1e-5)
    found, _ = Zeroth(queries=5, most=0.5).estimate(loss, a, 4, 1)
    np.testing.assert_allclose(found, np.mean([np.sign(a @ one) * 0.5 * one for one in z], axis=0), atol=1e-9)
    assert np.isnan(Zeroth(most=0.5).estimate(lambda _: float("nan"), a, 4, 1)[0]).all()


def by_hand(loss: Any, a: Array, rows: list[Array], seed: int, queries: int = 1) -> Array:
    """The steps of `PLAN` from a, in float64: SGD with momentum, weight decay and the proximal term."""
    start, v = a.copy(), np.zeros_like(a)
    for step, batch in enumerate(rows):
        found = np.zeros_like(a)
        for query in range(queries):
            z = signs(seed, step, query, a.size)
            g = (loss(a + 1e-3 * z, batch) - loss(a - 1e-3 * z, batch)) / 2e-3
            found += g * z / queries
        v = PLAN.momentum * v + found + PLAN.weight_decay * a + PLAN.proximal_mu * (a - start)
        a = a - PLAN.learning_rate * v
    return a - start


def start_of(app: App) -> Array:
    spec, tensors = trainer_for(app).spec, trainer_for(app).initial(1)
    flat = spec.flatten(tensors)
    return (flat + 0.1 * np.random.default_rng(2).normal(size=flat.shape).astype(np.float32)).astype(float)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_torch_model_takes_these_steps(queries: int) -> None:
    """The oracle is the perceptron in float64, by numpy alone."""
    app = Pair()
    examples = app.data(Shard("train"))

    def loss(a: Array, rows: Array) -> float:
        w1, b1, w2, b2 = np.split(a, [20, 24, 36])
        hidden = np.tanh(examples.x[rows].astype(float) @ w1.reshape(4, 5).T + b1)
        scores = hidden @ w2.reshape(3, 4).T + b2
        log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        return float(-log_p[np.arange(len(rows)), examples.y[rows]].mean())

    rows = list(batches(24, PLAN, 7))
    expected = by_hand(loss, start_of(app), rows, 7, queries)
    np.testing.assert_allclose(trained(app, gradient_queries=queries), expected, atol=2e-4)
    assert np.abs(expected).max() > 2e-3
    assert trained(app).tobytes() == trained(Pair()).tobytes(), "the same to the bit"
    assert trained(app, seed=8).tobytes() != trained(app).tobytes()


def test_a_model_of_arrays_takes_these_steps() -> None:
    app = Arrays()
    expected = by_hand(lambda a, _: float(a @ a) / 2, start_of(app), [np.arange(4)] * 3, 7)
    np.testing.assert_allclose(trained(app), expected, atol=1e-6)


def test_synthetic_goes_downhill_along_its_gradient() -> None:
    """Many directions come near to what its own gradient says."""
    app, seed = Synthetic(), 3
    join_run(app, settings(gradient_queries=4000))
    examples = app.data(Shard("train"))
    some = Examples(examples.x[:40], examples.y[:40])
    trainer = trainer_for(app)
    tensors = trainer.initial(1)
    plan = LocalPlan(steps=1, batch_size=40, learning_rate=1.0)
    delta = trainer.train(trainer.spec.flatten(tensors), {}, some, plan, seed).delta
    gradient = trainer.spec.flatten(loss_and_gradient(tensors, some.x, some.y)[1])
    cosine = -float(delta @ gradient) / float(np.linalg.norm(delta) * np.linalg.norm(gradient))
    assert cosine > 0.8  # of so many directions among 1,002: sqrt(q / (q + K))
    assert float(np.linalg.norm(delta)) < 1.5 * float(np.linalg.norm(gradient))


def test_a_subspace_trains_its_numbers() -> None:
    """By the wrapped App's loss at w_0 + U a, and only where the run is of the same start."""
    app = Subspace(Pair(), 6)
    delta = trained(app)
    assert delta.shape == (6,)
    assert delta.any()
    module: Any = app.model()
    examples = app.data(Shard("train"))

    def loss(a: Array, rows: Array) -> float:
        with torch.no_grad():
            module.numbers.copy_(torch.from_numpy(a.astype(np.float32)))
            found = module(torch.from_numpy(examples.x[rows]))
        return float(nn.functional.cross_entropy(found.double(), torch.from_numpy(examples.y[rows])))

    rows = list(batches(24, PLAN, 7))
    np.testing.assert_allclose(delta, by_hand(loss, start_of(app), rows, 7), atol=3e-4)
    other = trainer_for(Subspace(Pair(), 6, seed=5))
    trainer = trainer_for(app)
    with pytest.raises(ManifestMismatch):
        trainer.train(np.zeros(6, np.float32), other.frozen, examples, PLAN, 1)


def test_adapters_in_a_subspace_learn_too() -> None:
    class Adapted(Pair):
        def model(self) -> Any:
            return lora(super().model(), rank=2)

    delta = trained(Subspace(Adapted(), 5))
    assert delta.shape == (5,)
    assert delta.any()
    frozen = trained(Adapted())
    assert frozen.size == 2 * (5 + 4) + 2 * (4 + 3), "what is frozen is in no direction"


def test_dropout_is_the_same_on_both_sides() -> None:
    """With other draws for the two losses a slope would be a thousand times too steep."""
    app = Dropping()
    plan = LocalPlan(steps=20, batch_size=24, learning_rate=0.001)
    slopes = np.abs(trained(app, plan)).max()
    assert slopes < 20 * 0.001 * 5


def test_an_optimizer_of_the_app_s_is_used() -> None:
    plan = LocalPlan(steps=1, batch_size=8, learning_rate=0.25)
    z = signs(7, 0, 0, 39)
    assert np.abs(np.abs(trained(ByAdam(), plan, scale=0.5)) - 0.25).max() < 0.01, "Adam's first step"
    delta = trained(ByAdam(), plan, scale=0.5)
    assert abs(int((np.sign(delta) * z).sum())) == 39, "along z, or against it"


def test_what_has_no_loss_to_call_is_refused() -> None:
    class Bare(Arrays):
        batch_loss: Any = None

    for app, what in ((Own(), "a train of its own"), (Bare(), "a model of numpy arrays")):
        with pytest.raises(AppError, match=rf"has no loss to call: {app.name} has {what}.*batch_loss"):
            trained(app)
    with pytest.raises(AppError, match="has a train of its own"):
        trained(Subspace(Own(), 6))
    np.testing.assert_array_equal(trained(Said()), trained(Pair()))


def test_a_module_of_functions_may_have_a_batch_loss() -> None:
    class Plain:
        model, data, train = Pair.model, Pair.data, Own.train
        name = "plain"

        def batch_loss(self, model: Any, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(model(x), y)

    np.testing.assert_array_equal(trained(app_of(Plain(), "plain")), trained(Pair()))


def test_who_overrides_it_trains_as_they_like() -> None:
    """Adapters in turns say whose turn it is, then train as ever."""

    class Turns(Pair):
        def model(self) -> Any:
            return lora(super().model(), rank=1, train="alternate", period=1)

        def train(self, model: Any, *given: Any) -> Any:
            raise AssertionError("it is not called")

        def batch_loss(self, model: Any, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(model(x), y)

        def train_zeroth(self, model: Any, *given: Any) -> Any:
            take_turn(model, self.version)
            return super().train_zeroth(model, *given)

    app = Turns()
    app.version = 0
    delta = trained(app)
    slices = trainer_for(app).spec.slices
    assert {name[-1] for name, part in slices.items() if delta[part].any()} == {"B"}


def test_a_run_says_it_and_an_app_is_set_back() -> None:
    app = Pair()
    join_run(app, settings(gradient_eps=0.01, gradient_max=2.0, gradient_queries=3))
    assert app.zeroth == Zeroth(0.01, 2.0, 3)
    join_run(app, Config().to_json())
    assert app.zeroth is None
    assert "gradient" not in Config().to_json()["client"], "records of other runs are as they were"
    join_run(app, {"client": {"gradient": "zeroth"}})
    assert app.zeroth == Zeroth()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gradient", "none", "client.gradient must be one of exact, zeroth, not 'none'"),
        ("gradient_eps", 0.0, "client.gradient_eps must be greater than 0"),
        ("gradient_queries", 0, "client.gradient_queries must be greater than 0"),
        ("gradient_max", -1.0, "client.gradient_max must not be negative"),
    ],
)
def test_bad_settings(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        merge([("test", {"client": {key: value}})])
