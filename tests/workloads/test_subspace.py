"""K numbers in the place of a model's weights: the map, what is trained, what travels, who must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import nn

import anabranch as ab
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.core.model.updates import LocalPlan
from anabranch.testing import AppConformance
from anabranch.workloads.app import App, Array, Examples, Shard
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import BASE, Hashing, Subspace, coordinate_words, dealt
from anabranch.workloads.synthetic import Synthetic
from anabranch.workloads.trainer import trainer_for
from tests.support.app_contract import ATTRIBUTES, GIVEN, METHODS, Asked, arguments

H, S = np.array([0, 1, 0, 1, 1, 0]), np.array([1, -1, -1, 1, 1, 1])
ONE_STEP = LocalPlan(steps=1, batch_size=16, learning_rate=0.5)


class Pair(App):
    """Two linear layers on noise; the second one's bias may be frozen."""

    frozen = False

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        if self.frozen:
            model[2].bias.requires_grad_(False)
        return model

    def data(self, shard: Shard) -> Examples:
        draw = np.random.default_rng(shard.index)
        return Examples(draw.normal(size=(16, 5)).astype(np.float32), draw.integers(0, 3, 16))


class OfKind(Pair):
    """With weights of another kind; None: of no shape yet."""

    def __init__(self, kind: torch.dtype | None) -> None:
        super().__init__()
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Sequential(nn.LazyLinear(3)) if self.kind is None else super().model().to(self.kind)


class Frozen(Pair):
    frozen = True


class Named(Pair):
    """Says what is trained, and leaves out what `Frozen` freezes."""

    names: tuple[str, ...] = ("0.weight", "0.bias", "2.weight")

    def trained(self, model: Any) -> tuple[str, ...]:
        return self.names


class Unknown(Named):
    names = ("0.weights",)


class Own(Pair):
    own_data = True


def test_whose_data_they_are_is_as_the_wrapped_app_says() -> None:
    assert [Subspace(app, 4).own_data for app in (Pair(), Own())] == [False, True]


# What follows from the numbers, not from the wrapped App's tensors.
OF_NUMBERS = {"model", "units", "buffers", "trained", "stages", "merged"}


@pytest.mark.parametrize("name", sorted(METHODS.keys() - OF_NUMBERS))
def test_whatever_an_app_is_asked_the_wrapped_one_is_asked(name: str) -> None:
    """With all that it is given; what it keeps then, the device keeps."""
    asked = Asked()
    app = type("Told", (Pair,), {name: asked.method(name)})()
    small = Subspace(app, 4)
    given = {"options": {"folder": "/data"}, "runtime": object(), "version": 3, "kept": b"1", "zeroth": None}
    assert given.keys() == GIVEN
    for own, value in given.items():
        setattr(small, own, value)
    args = arguments(name, model=small.model())
    assert getattr(small, name)(*args) == asked.calls[0]
    assert asked.calls == [(name, args, given)]
    app.kept = b"2"
    assert small.kept == b"2"


def test_no_attribute_of_an_app_is_forgotten() -> None:
    copied = {"data_path": "there", "own_data": True, "measures": False}
    app = type("Said", (Pair,), dict(copied))("there")
    assert {name: getattr(Subspace(app, 4), name) for name in copied} == copied
    of_training = {"loss", "optimizer", "metrics", "batch_loss"}  # which is the wrapped App's
    assert copied.keys() | of_training | GIVEN | {"name", "any_model", "split_known"} == ATTRIBUTES


class Joined(Pair):
    """May go by the fleet's settings: it hears of them."""

    def join(self, config: Any) -> None:
        """As of any App."""


@pytest.mark.parametrize(("app", "said"), [(Pair(), 1), (Joined(), 0)])
def test_a_split_that_the_wrapped_app_does_not_go_by_is_warned_of(
    app: App, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = ab.Fleet(clients=4, split=ab.Dirichlet(0.3))
    ab.simulate(Subspace(app, 4), strategy="fedasync", fleet=fleet, until=ab.Until(updates=4))
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert ["fleet.split = 'dirichlet' changes nothing" in text for text in found] == [True] * said


class Merging(Pair):
    """Has a plain model of its own making."""

    def merged(self, tensors: Any) -> dict[str, Any]:
        return {name: np.sign(array) for name, array in tensors.items()}


def test_the_wrapped_app_makes_its_plain_model_by_itself() -> None:
    run = trainer_for(Subspace(Pair(), 6)).initial(0)
    plain = {name: np.sign(array) for name, array in Subspace(Pair(), 6).merged(run).items()}
    found = Subspace(Merging(), 6).merged(run)
    assert found.keys() == plain.keys()
    assert all((found[name] == plain[name]).all() for name in plain)


class Normed(Pair):
    """With running statistics."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


class Tied(Pair):
    """One matrix under two names."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        return model


class TestAll(AppConformance):
    @pytest.fixture
    def app(self) -> App:
        return Subspace(Digits(), 64)


class TestEach(AppConformance):
    @pytest.fixture
    def app(self) -> App:
        return Subspace(Digits(), 64, layers="each")


def test_the_map_is_the_specifications() -> None:
    hashing = Hashing.of(H, S, 2)
    expected = [1.732051, -3.464102, -1.732051, 3.464102, 3.464102, 1.732051]
    np.testing.assert_allclose(hashing.expand(np.array([3.0, 6.0])), expected, rtol=1e-6)
    np.testing.assert_allclose(hashing.project(np.ones(6)), [0.577350, 0.577350], rtol=1e-5)


@given(st.integers(0, 2**64 - 1), st.integers(1, 300), st.integers(1, 64))
def test_its_columns_are_orthonormal_but_for_numbers_that_nobody_reads(
    seed: int, size: int, dimension: int
) -> None:
    hashing = Hashing.drawn(coordinate_words(seed, size), dimension)
    matrix = np.stack([hashing.expand(row) for row in np.eye(dimension)], axis=1).astype(np.float64)
    read = np.isin(np.arange(dimension), hashing.index)
    np.testing.assert_allclose(matrix.T @ matrix, np.diag(read.astype(float)), atol=1e-6)
    gradient = np.linspace(-1, 1, size)
    np.testing.assert_allclose(hashing.project(gradient), matrix.T @ gradient, atol=1e-5)


def test_numbers_and_signs_are_drawn_evenly() -> None:
    hashing = Hashing.drawn(coordinate_words(3, 100_000), 10)
    assert np.abs(np.bincount(hashing.index) - 10_000).max() < 500
    assert abs(int(np.sign(hashing.scale).sum())) < 1_500
    assert (
        coordinate_words(3, 4).tolist()
        == coordinate_words(3, 9)[:4].tolist()
        != coordinate_words(4, 4).tolist()
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.data())
def test_numbers_are_dealt_by_the_roots_of_sizes(sizes: list[int], data: st.DataObject) -> None:
    dimension = data.draw(st.integers(len(sizes), sum(sizes)))
    found = dealt(dimension, sizes)
    assert sum(found) == dimension
    assert all(1 <= k <= size for k, size in zip(found, sizes, strict=True))
    order = np.argsort(sizes, kind="stable")
    assert (np.diff(np.array(found)[order]) >= -1).all()
    roots = np.sqrt(sizes)
    wanted = dimension * roots / roots.sum()
    if (wanted >= 1).all() and (wanted <= sizes).all():
        assert (np.abs(found - wanted) < 1).all()


def test_a_tensor_has_no_more_numbers_than_weights_and_one_at_least() -> None:
    assert dealt(17, [100, 25, 4]) == [10, 5, 2]
    assert dealt(20, [4, 100]) == [3, 17], "of 3.33 and 16.67"
    assert dealt(20, [1, 1, 100]) == [1, 1, 18], "no tensor has more than its size"
    assert dealt(3, [1, 1, 400]) == [1, 1, 1]
    assert dealt(4, [1, 400, 400]) == [1, 2, 1], "nor fewer than one, of 0.10 and 1.95 each"


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
def test_a_step_is_the_projected_gradient(kind: torch.dtype) -> None:
    """The oracle is the gradient of the wrapped model, by torch without any of this."""
    app = Subspace(OfKind(kind), 6, seed=9)
    trainer = trainer_for(app)
    zeros = np.zeros(6, trainer.spec.vector_dtype)
    examples = app.data(Shard("train", 0, 1))
    delta = trainer.train(zeros, {}, examples, ONE_STEP, seed=0).delta
    with torch.random.fork_rng():
        torch.manual_seed(9)
        base = OfKind(kind).model()
    output = base(torch.from_numpy(examples.x).to(kind))
    loss = nn.functional.cross_entropy(output, torch.from_numpy(examples.y))
    loss.backward()
    gradient = np.concatenate([np.asarray(p.grad).ravel() for p in base.parameters()])
    hashing = Hashing.drawn(coordinate_words(9, gradient.size), 6)
    np.testing.assert_allclose(delta, -0.5 * hashing.project(gradient), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("layers", ["all", "each"])
def test_merged_weights_are_the_model_that_was_evaluated(layers: str) -> None:
    app = Subspace(Pair(), 20, layers=layers)
    trainer = trainer_for(app)
    tensors = trainer.initial(0)
    vector = trainer.spec.flatten(tensors) + 0.3
    examples = app.data(Shard("test"))
    measured = trainer.evaluate(vector, trainer.spec.frozen(tensors), examples)
    merged = app.merged({**trainer.spec.unflatten(vector), BASE: tensors[BASE]})
    plain = trainer_for(Pair())
    assert set(merged) == set(plain.initial(0))
    weights = plain.spec.flatten(merged)
    assert plain.evaluate(weights, {}, examples) == pytest.approx(measured, rel=1e-5)


def test_each_tensor_has_its_own_numbers_and_biases_are_trained_as_they_are() -> None:
    spec = trainer_for(Subspace(Pair(), 10, layers="each")).spec
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    a, b = shapes.pop("numbers/0/weight"), shapes.pop("numbers/2/weight")
    assert a[1] + b[1] == 10
    assert shapes == {"0/bias": (7,), "2/bias": (3,), BASE: (32,)}
    assert spec.size == 20


def test_what_the_app_freezes_stays_and_shared_weights_stay_shared() -> None:
    for app, names in ((Frozen(), ["2.bias"]), (Named(), ["2.bias"]), (Tied(), [])):
        small = Subspace(app, 8)
        trainer = trainer_for(small)
        start, moved = small.merged(trainer.initial(0)), np.ones(8, np.float32)
        merged = small.merged({"numbers": moved[None], BASE: trainer.initial(0)[BASE]})
        assert [n for n in start if (start[n] == merged[n]).all()] == names
        if isinstance(app, Tied):
            np.testing.assert_array_equal(merged["0.weight"], merged["2.weight"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Subspace(Pair(), 0), "dimension must be a whole number, at least 1, not 0"),
        (lambda: Subspace(Pair(), True), "dimension must be a whole number, at least 1, not True"),
        (lambda: Subspace(Pair(), 5, seed=True), "seed must be a whole number, not True"),
        (lambda: Subspace(Pair(), 5, layers="some"), "layers must be one of all, each, not 'some'"),
        (lambda: trainer_for(Subspace(Pair(), 67)), "dimension must be from 1 to 66 for this model, not 67"),
        (lambda: trainer_for(Subspace(Pair(), 1, layers="each")), "dimension must be from 2 to 56"),
        (lambda: trainer_for(Subspace(Normed(), 5)), r"buffers, which .*GroupNorm.*persistent=False"),
        (lambda: trainer_for(Subspace(OfKind(torch.bfloat16), 5)), "tensor '0.weight' is bfloat16: keep"),
        (lambda: trainer_for(Subspace(OfKind(None), 5)), "tensor '0.weight' of its model has no shape yet"),
        (lambda: trainer_for(Subspace(Unknown(), 5)), "trained names '0.weights', which is no tensor of"),
        (lambda: trainer_for(Subspace(Synthetic(), 5)), "numpy arrays.*Hashing.expand"),
    ],
)
def test_what_cannot_be_is_named(make: Any, said: str) -> None:
    with pytest.raises(AppError, match=said):
        make()


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"dimension": 8, "layers": "each"}, {"app": Frozen()}],
    ids=["seed", "layers", "what is frozen"],
)
def test_a_run_of_another_start_is_refused(other: dict[str, Any]) -> None:
    kwargs: dict[str, Any] = {"app": Pair(), "dimension": 8}
    run, mine = Subspace(**kwargs), Subspace(**{**kwargs, **other})
    theirs = trainer_for(run).initial(0)
    trainer = trainer_for(mine)
    examples = mine.data(Shard("train", 0, 1))
    vector = np.zeros(trainer.spec.size, np.float32)
    with pytest.raises(ManifestMismatch, match="another start, dimension, seed or layers"):
        trainer.train(vector, {BASE: theirs[BASE]}, examples, ONE_STEP, seed=0)
    with pytest.raises(ManifestMismatch):
        mine.merged(theirs)


def test_a_run_learns_from_a_nineteenth_of_the_bytes_and_replays(tmp_path: Path) -> None:
    run = ab.simulate(
        Subspace(Digits(), 256),
        settings={"client.learning_rate": 6.0, "uplink.codec": "int8(256)"},
        until=ab.Until(updates=80),
        out=tmp_path / "run",
    )
    last = run.result.history[-1]
    assert last.accuracy is not None
    assert last.accuracy > 0.6
    assert run.result.uplink_bytes <= 80 * (256 + 76)
    assert run.replay().matches
    merged = Subspace(Digits(), 256).merged(load_file(tmp_path / "run" / "final.safetensors"))
    plain = trainer_for(Digits())
    found = plain.evaluate(plain.spec.flatten(merged), {}, Digits().data(Shard("test")))
    assert found["accuracy"] == pytest.approx(last.accuracy, abs=0.003)


@given(st.integers(2, 40), st.integers(0, 2**32))
def test_with_a_number_for_each_weight_nothing_is_lost(size: int, seed: int) -> None:
    """A hash without collisions: U is orthogonal, and steps in a are the whole model's, w_0 + U a = w."""
    draws = np.random.default_rng(seed)
    hashing = Hashing.of(draws.permutation(size), draws.choice((-1, 1), size), size)
    root, w, a = draws.normal(size=(size, size)) / size, draws.normal(size=size), np.zeros(size, np.float32)
    start = w.copy()
    for _ in range(5):
        w = w - 0.1 * (root.T @ root @ w)
        a = a - 0.1 * hashing.project(root.T @ root @ (start + hashing.expand(a)))
    np.testing.assert_allclose(start + hashing.expand(a), w, atol=1e-5)


@given(st.integers(1, 6), st.integers(0, 2**32))
def test_the_mean_of_numbers_is_that_of_the_weights_that_they_make(devices: int, seed: int) -> None:
    draws, hashing = np.random.default_rng(seed), Hashing.drawn(coordinate_words(seed, 30), 7)
    deltas = draws.normal(size=(devices, 7)).astype(np.float32)

    def mean(each: Array) -> Array:
        sent = [ab.Update(f"c{i}", f"t{i}", 0, 1, {"w": delta}) for i, delta in enumerate(each)]
        start = {"w": np.zeros_like(each[0])}
        return ab.aggregate("fedbuff", {"buffer_size": devices}, start, sent).model["w"]

    weights = np.stack([hashing.expand(delta) for delta in deltas])
    np.testing.assert_allclose(hashing.expand(mean(deltas)), mean(weights), atol=1e-5)


def test_an_update_of_a_thousand_numbers_has_a_byte_for_each() -> None:
    numbers = np.random.default_rng(0).normal(size=1024).astype(np.float32)
    layout = Layout.of(trainer_for(Subspace(Digits(), 1024)).spec)
    assert len(make_codec("int8(256)").encode(numbers, layout)) <= 1100
