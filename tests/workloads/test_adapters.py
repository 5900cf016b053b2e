"""Adapters, prompts, biases and heads: the equations, what is trained, what is merged, what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import anabranch as ab
from anabranch.core.errors import AppError, ManifestMismatch
from anabranch.core.model.submodels import unit_map
from anabranch.core.model.updates import LocalPlan
from anabranch.strategies.submodels.alternate import Alternate
from anabranch.testing import AppConformance
from anabranch.workloads.adapters import (
    LowRank,
    bias_only,
    head_only,
    lora,
    merge,
    merged,
    normal_draws,
    prompts,
    take_turn,
)
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.digits import Digits
from anabranch.workloads.subspace import coordinate_words
from anabranch.workloads.trainer import trainer_for
from anabranch.workloads.zeroth import Zeroth

GOLDEN_DRAWS = "88072ec04298a03f893acabe"  # -2.7192097, 1.2546465, -0.39497784
PLAN = LocalPlan(steps=3, batch_size=8, learning_rate=0.1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def convolutions() -> nn.Module:
    layers = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, (1, 2), groups=2)
    return nn.Sequential(nn.Unflatten(1, (1, 3, 4)), *layers, nn.Flatten())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (3, 4)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten()
    )


class Words(nn.Module):
    """Words, and attention of keys and values of another width than the queries'."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.words((x.abs() * 3).long() % 7)
        output: torch.Tensor = self.attention(
            found, x[..., None].expand(-1, -1, 3), x[..., None].expand(-1, -1, 5)
        )[0]
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutions": convolutions,
    "encoder": encoder,
    "words": Words,
}
ALL = ("Linear", "Conv2d", "Embedding", "MultiheadAttention")


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[kind]()


def inputs() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(5, 12)).astype(np.float32))


def output(model: nn.Module) -> torch.Tensor:
    """In evaluation mode, once as torch computes for inference alone."""
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(inputs())
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs()), found, rtol=1e-4, atol=1e-5)
    return found


def moved(model: nn.Module, seed: int = 0) -> nn.Module:
    """What is trained, somewhere else."""
    draws = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.from_numpy(draws.normal(0, 0.3, tuple(parameter.shape)).astype(np.float32)))
    return model


class Adapted(App):
    """One of the models on noise."""

    name = "adapted"

    def __init__(self, kind: str = "perceptron", **options: Any) -> None:
        super().__init__()
        self.kind, self.lora = kind, options

    def model(self) -> nn.Module:
        return lora(MODELS[self.kind](), **self.lora)

    def data(self, shard: Shard) -> Examples:
        draws = np.random.default_rng(shard.index)
        return Examples(draws.normal(size=(16, 12)).astype(np.float32), draws.integers(0, 4, 16))


class Turns(Adapted):
    """Its halves in turns."""

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        take_turn(model, self.version)
        return super().train(model, examples, plan, seed)


class TestAdaptedDigits(AppConformance):
    plan = LocalPlan(steps=30, batch_size=32, learning_rate=0.002)

    @pytest.fixture
    def app(self) -> App:
        class Small(Digits):
            def model(self) -> Any:
                return lora(super().model(), rank=4)

        return Small()


@pytest.mark.parametrize("kind", MODELS)
def test_it_begins_as_the_model_that_it_is_of(kind: str) -> None:
    plain, model = made(kind), made(kind)
    assert lora(model, rank=3, targets=ALL) is model
    for path, layer in plain.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            assert torch.equal(getattr(model.get_submodule(path), name), weight), (path, name)
    torch.testing.assert_close(output(model), output(plain), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["perceptron", "convolutions"])
def test_a_layer_computes_the_equation(kind: str) -> None:
    """By hand: W + (alpha / r) B A, of a convolution on the matrix (out, in h w)."""
    plain, model = made(kind), moved(lora(made(kind), rank=3, alpha=6.0))
    state, tensors = model.state_dict(), plain.state_dict()
    with torch.no_grad():
        for name in [n for n in tensors if n not in state]:
            a, b = (state[name.replace("weight", f"parametrizations.weight.0.{half}")] for half in "AB")
            w = tensors[name].numpy()
            assert (a.shape, b.shape) == ((3, w[0].size), (len(w), 3))
            change = 2.0 * (b.double().numpy() @ a.double().numpy())
            tensors[name].copy_(torch.from_numpy(w + change.reshape(w.shape)))
    torch.testing.assert_close(output(model), output(plain), rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(st.sampled_from(sorted(MODELS)), st.integers(1, 9), st.floats(0.5, 32.0), st.integers(0, 2**32))
def test_what_is_merged_computes_the_same(kind: str, rank: int, alpha: float, seed: int) -> None:
    plain, model = made(kind), moved(lora(made(kind), rank, alpha, ALL), seed)
    before = output(model)
    assert merge(model) is model
    torch.testing.assert_close(output(model), before, rtol=1e-5, atol=1e-5)
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    assert [(n, t.shape) for n, t in model.state_dict().items()] == list(shapes.items())
    assert not any(isinstance(part, LowRank) for part in model.modules())
    with pytest.raises(AppError, match=r"has no adapters: .* or they are merged already"):
        merge(model)


def test_a_run_s_tensors_are_merged() -> None:
    trainer = trainer_for(Adapted(rank=2))
    model = moved(lora(made("perceptron"), 2))
    run = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    plain = made("perceptron")
    plain.load_state_dict({n: torch.from_numpy(a) for n, a in merged(Adapted(rank=2).model(), run).items()})
    torch.testing.assert_close(output(plain), output(model), rtol=1e-5, atol=1e-5)
    assert set(run) == {tensor.name for tensor in trainer.spec.tensors}
    with pytest.raises(ManifestMismatch, match=r"weight.0.A' has shape \(2, 12\), in this one \(3, 12\)"):
        merged(Adapted(rank=3).model(), run)


def test_a_weight_of_two_layers_is_merged_into_one_of_them() -> None:
    model: Any = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match=r"lora: 0\.weight is 1\.weight too: .* untie them in model"):
        lora(model, targets=("0",))
    moved(model)
    before, other = output(model), model[1].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"merge: \S+ and \S+ are one tensor, and two from here on"):
        merge(model)
    torch.testing.assert_close(output(model), before, rtol=1e-5, atol=1e-5)
    assert torch.equal(model[1].weight, other)
    assert not torch.equal(model[0].weight, other)


class Tied(nn.Module):
    """A head that is the embedding, as language models have it."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.words.weight if tied else nn.Parameter(self.words.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.words(x))
        return scores


def test_no_plain_model_is_made_of_an_adapter_at_a_tied_weight() -> None:
    with pytest.warns(UserWarning, match=r"lora: head\.weight is words\.weight too"):
        model = moved(lora(Tied(True), 2))
    run = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    with pytest.raises(AppError, match=r"words\.weight and head\.\S+ are one tensor: .* untie them"):
        merged(model, run)
    plain = Tied(False)  # as the error says, and the run's tensors fit it
    plain.load_state_dict({n: torch.tensor(a) for n, a in merged(lora(Tied(False), 2), run).items()})
    x = torch.arange(9)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_layer_in_several_places_has_one_adapter_and_one_plain_weight(
    recwarn: pytest.WarningsRecorder,
) -> None:
    def places(layer: nn.Linear) -> nn.Sequential:
        return nn.Sequential(layer, nn.Tanh(), layer)

    model, x = moved(lora(places(nn.Linear(4, 4)), 2)), torch.eye(4)
    assert not [w for w in recwarn if "lora" in str(w.message)]
    before = model(x).detach()
    found = merged(model, {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()})
    assert sorted(found) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    plain = places(nn.Linear(4, 4))
    plain.load_state_dict({name: torch.tensor(array) for name, array in found.items()})
    torch.testing.assert_close(plain(x), before, rtol=1e-5, atol=1e-5)


def test_the_draws_are_quantiles_of_the_counter_s_words() -> None:
    found = normal_draws(9, 4000)
    uniform = ((coordinate_words(9, 4000) >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    quantiles = [NormalDist().inv_cdf(word) for word in uniform]
    np.testing.assert_allclose(found, quantiles, rtol=2e-6, atol=1e-7)
    assert found[:3].tobytes().hex() == GOLDEN_DRAWS
    assert abs(float(found.mean())) < 0.06
    assert abs(float(found.std()) - 1.0) < 0.04


def test_a_is_of_the_seed_and_the_layer_s_path() -> None:
    """Two builds have the same A whatever torch's generators did; another layer changes no other's."""

    def drawn(**options: Any) -> dict[str, bytes]:
        model = lora(MODELS["perceptron"](), rank=64, **options)
        return {n: p.detach().numpy().tobytes() for n, p in model.named_parameters() if n.endswith(".A")}

    first, last = drawn()
    assert first != last
    assert drawn() == drawn()
    assert drawn(targets=("2",))[last] == drawn()[last]
    assert drawn(seed=1)[last] != drawn()[last]
    a = np.frombuffer(drawn()[first], np.float32)
    assert abs(float(a.var()) * 64 - 1.0) < 0.15, "N(0, 1 / r)"


def trained(app: App) -> dict[str, int]:
    spec = trainer_for(app).spec
    return {t.name: t.size for t in spec.tensors if t.aggregated}


def test_what_is_trained() -> None:
    a, b = "0.parametrizations.weight.0.A", "0.parametrizations.weight.0.B"
    assert trained(Adapted(rank=2, targets=("0",))) == {a: 2 * 12, b: 9 * 2}
    assert trained(Adapted(rank=2, targets=("0",), train="b")) == {b: 9 * 2}
    assert trained(Turns(rank=2, targets=("0",), train="alternate")) == {a: 2 * 12, b: 9 * 2}
    both = trained(Adapted("convolutions", rank=2))
    assert sum(both.values()) == 2 * (6 + 9) + 2 * (4 + 3 * 2), "r (d + k) of each matrix"


def test_units_of_adapted_layers_are_no_units() -> None:
    class Half(Adapted):
        def model(self) -> nn.Module:
            layers = nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 4)
            model = nn.Sequential(*layers)
            if self.lora:
                lora(model, **self.lora)
                model[2].requires_grad_(True)
                model[4].requires_grad_(True)
            return model

    assert [group.name for group in trainer_for(Half()).spec.groups] == ["0", "2"]
    assert [group.name for group in trainer_for(Half(targets=("0",))).spec.groups] == ["2"]
    app = Half(targets=("0",), train="alternate")  # whose turn it is, nobody says before it trains
    trainer = trainer_for(app)
    chosen = unit_map(trainer.spec, [np.arange(4)])
    cost = trainer.step_cost(chosen, app.data(Shard("train")))
    assert cost == chosen.size / trainer.spec.size, "by the parameters, as no step can be counted"


def train(app: App, version: int) -> set[str]:
    """The tensors that a task of this version changes."""
    trainer = trainer_for(app)
    tensors = trainer.initial(0)
    start = trainer.spec.flatten(tensors)
    start += np.random.default_rng(0).normal(0, 0.1, start.shape).astype(np.float32)
    app.version = version
    frozen = trainer.spec.frozen(tensors)
    delta = trainer.train(start, frozen, app.data(Shard("train", 0, 1)), PLAN, seed=1).delta
    return {name[-1] for name, part in trainer.spec.slices.items() if delta[part].any()}


def test_halves_alternate_by_version() -> None:
    app = Turns(train="alternate", period=2, rank=3)
    assert [train(app, version) for version in range(6)] == [{"B"}, {"B"}, {"A"}, {"A"}, {"B"}, {"B"}]
    assert train(Adapted(rank=3), 0) == {"A", "B"}
    with pytest.raises(AppError, match=r'"alternate", or call take_turn\(model, self.version\) in train'):
        train(Adapted(train="alternate"), 0)
    with pytest.raises(AppError, match="no adapter of the model takes turns"):
        train(Turns(), 0)


class Alternating(Adapted):
    """Its halves in turns, of which it says nothing."""

    def __init__(self) -> None:
        super().__init__(train="alternate", period=2, rank=3)


def test_without_gradients_too_somebody_says_whose_turn_it_is() -> None:
    class Says(Alternating):
        def train_zeroth(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
            take_turn(model, self.version)
            return super().train_zeroth(model, examples, plan, seed)

    silent, says = Alternating(), Says()
    silent.zeroth = says.zeroth = Zeroth()
    with pytest.raises(AppError, match=r'submodel.name = "alternate", or call .* train_zeroth\), before'):
        train(silent, 0)
    assert [train(says, version) for version in (1, 2)] == [{"B"}, {"A"}]


def test_where_the_run_has_turns_those_of_the_app_change_nothing() -> None:
    """Each version trains what its task sends, whatever the App says of other periods."""
    app = Turns(train="alternate", period=2, rank=3)
    trainer = trainer_for(app)
    planner = Alternate(trainer.spec, period=1)
    start = trainer.initial(0)
    vector, frozen = trainer.spec.flatten(start), trainer.spec.frozen(start)
    vector += np.random.default_rng(0).normal(0, 0.1, vector.shape).astype(np.float32)
    for app.version in range(5):  # the App's turns: B, B, A, A, B
        part = planner.parts[app.version % 2]
        data = app.data(Shard("train"))
        delta = trainer.train(vector, frozen, data, PLAN, 1, None, part).delta
        moved = {name for name, at in trainer.spec.slices.items() if delta[at].any()}
        assert moved == {*part.names}
    assert train(app, 2) == {"A"}, "afterwards it has its say again"


def fedbuff(model: dict[str, Any], deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """One version of a buffer of them all, as the strategy makes it."""
    zeros = {name: np.zeros_like(array) for name, array in model.items()}
    updates = [
        ab.Update(client=f"c{i}", task=f"t{i}", base_version=0, examples=1, delta={**zeros, **delta})
        for i, delta in enumerate(deltas)
    ]
    done = ab.aggregate("fedbuff", {"buffer_size": len(updates), "server_lr": 1.0}, model, updates)
    return dict(done.model)


def test_the_specification_s_golden_values() -> None:
    """Two devices, k = d = 2, r = 1: the products' mean change, that of the means, what is between."""
    model: Any = lora(nn.Linear(2, 2, bias=False), rank=1, alpha=1.0)
    a, b = (f"parametrizations.weight.0.{half}" for half in "AB")
    start = {a: np.array([[1, 2]], np.float32), b: np.array([[1], [1]], np.float32)}
    deltas: list[dict[str, Any]] = [
        {a: np.array([[0.1, 0]], np.float32), b: np.array([[0.2], [0]], np.float32)},
        {a: np.array([[0, -0.1]], np.float32), b: np.array([[0], [0.4]], np.float32)},
    ]

    def product(tensors: dict[str, Any]) -> Any:
        own = {name: torch.from_numpy(array) for name, array in tensors.items()}
        model.load_state_dict({**model.state_dict(), **own})
        return (model.weight - model.get_parameter("parametrizations.weight.original")).detach().numpy()

    before = product(start)
    changes = [product({n: start[n] + delta[n] for n in start}) - before for delta in deltas]
    mean, realised = np.mean(changes, axis=0), product(fedbuff(start, deltas)) - before
    np.testing.assert_allclose(mean, [[0.16, 0.15], [0.25, 0.33]], atol=1e-6)
    np.testing.assert_allclose(realised, [[0.155, 0.145], [0.26, 0.34]], atol=1e-6)
    np.testing.assert_allclose(mean - realised, [[0.005, 0.005], [-0.01, -0.01]], atol=1e-6)


@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 2**32))
def test_with_a_frozen_the_mean_of_the_products_is_exact(rank: int, devices: int, seed: int) -> None:
    draws = np.random.default_rng(seed)
    a, b = draws.normal(size=(rank, 5)), draws.normal(0, 0.1, (7, rank)).astype(np.float32)
    deltas = [draws.normal(0, 0.1, b.shape).astype(np.float32) for _ in range(devices)]
    realised = (fedbuff({"B": b}, [{"B": delta} for delta in deltas])["B"] - b) @ a
    np.testing.assert_allclose(realised, np.mean([delta @ a for delta in deltas], axis=0), atol=1e-6)


def test_prompts_stand_before_the_sequence_and_are_all_that_is_trained() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    inner = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model, x = prompts(inner, width=4, tokens=3), torch.from_numpy(np.ones((2, 5, 4), np.float32))
    joined = torch.cat([model.prompts[None].expand(2, 3, 4), x], 1)
    torch.testing.assert_close(model(x), inner(joined)[:, 3:])
    assert [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad] == [("prompts", (3, 4))]
    model(x)[..., 0].square().sum().backward()
    assert model.prompts.grad is not None
    assert model.prompts.grad.abs().sum() > 0
    with pytest.raises(AppError, match=r"shape \(2, 4, 5\), not \(batch, length, 4\)"):
        model(x.transpose(1, 2))
    again = prompts(nn.Identity(), width=4, tokens=3)
    assert torch.equal(again.prompts, model.prompts)


def test_biases_or_a_head_alone() -> None:
    def left(model: nn.Module) -> list[str]:
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    assert left(bias_only(perceptron())) == ["0.bias", "2.bias"]
    assert len(left(bias_only(encoder()))) == 2 * (2 + 2 + 2), "of attention, of the layers, of the norms"
    assert left(head_only(perceptron())) == ["2.weight", "2.bias"]
    assert left(head_only(perceptron(), "0")) == ["0.weight", "0.bias"]
    assert all(name.startswith("1.layers.1.") for name in left(head_only(encoder(), "1.layers.1")))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: lora(m, rank=0), "lora: rank must be a whole number, at least 1, not 0"),
        (lambda m: lora(m, train="a"), "train must be one of both, b, alternate, not 'a'"),
        (lambda m: lora(m, targets="Linear"), r"give a list of names, \['Linear'\]"),
        (
            lambda m: lora(m, targets=("Conv2d",)),
            r"no layer is named .* there are 0 \(Linear\), 2 \(Linear\)",
        ),
        (lambda m: lora(m, targets=("Linear", "4")), "no layer is named by the target '4'"),
        (lambda m: lora(nn.ReLU()), "the model has none of Linear"),
        (lambda m: lora(lora(m)), r"0.weight is computed already, by an adapter, a norm or pruning"),
        (merge, "the model has no adapters"),
        (lambda m: prompts(nn.TransformerEncoderLayer(4, 2), 4), "self_attn .*batch_first=True"),
        (lambda m: bias_only(nn.Linear(2, 2, bias=False)), "the model has no biases"),
        (lambda m: head_only(m, "head"), r"'head' is no part .* its layers are \['0', '2'\]"),
        (lambda m: head_only(m, "1"), "'1' is no part of the model with parameters"),
        (lambda m: head_only(nn.ReLU()), "the model has no parameters"),
    ],
)
def test_what_cannot_be_is_named(make: Callable[[nn.Module], Any], said: str) -> None:
    with pytest.raises(AppError, match=said):
        make(perceptron())


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (lora, {"rank": True}, "lora: rank must be a whole number, at least 1, not True"),
        (lora, {"rank": "8"}, "lora: rank must be a whole number, at least 1, not '8'"),
        (lora, {"rank": 2.5}, "lora: rank must be a whole number, at least 1, not 2.5"),
        (lora, {"period": 1.5}, "lora: period must be a whole number, at least 1, not 1.5"),
        (lora, {"seed": 1.5}, "lora: seed must be a whole number, not 1.5"),
        (lora, {"alpha": 0}, "lora: alpha must be a number above 0, not 0"),
        (lora, {"alpha": float("nan")}, "lora: alpha must be a number above 0, not nan"),
        (lora, {"alpha": float("inf")}, "lora: alpha must be a number above 0, not inf"),
        (lora, {"alpha": "16"}, "lora: alpha must be a number above 0, not '16'"),
        (lora, {"targets": None}, r"targets is None: give a list of names, such as \['Linear'\]"),
        (lora, {"targets": [nn.Conv2d]}, "which is no name: write it as text, 'Conv2d'"),
        (prompts, {"width": 0}, "prompts: width must be a whole number, at least 1, not 0"),
        (prompts, {"width": 4.5}, "prompts: width must be a whole number, at least 1, not 4.5"),
        (prompts, {"width": 4, "tokens": True}, "tokens must be a whole number, at least 1, not True"),
        (prompts, {"width": 4, "seed": 0.5}, "prompts: seed must be a whole number, not 0.5"),
    ],
)
def test_an_argument_of_another_kind_is_named(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(AppError, match=said):
        make(perceptron(), **options)


def whole_numbers(layer: nn.Linear) -> nn.Linear:
    """As layers of eight bits have them."""
    layer.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            nn.utils.parametrizations.weight_norm,
            "1.weight is computed already, by .* or pruning: leave",
        ),
        (nn.utils.weight_norm, "1.weight is computed already"),
        (nn.utils.spectral_norm, "1.weight is computed already"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "1.weight is computed already"),
        (lambda layer: nn.LazyLinear(4), "1.weight has no shape yet: call the model once"),
        (whole_numbers, "1.weight is int8, no floats"),
    ],
)
def test_a_weight_that_takes_no_adapter_is_named_before_anything_changes(made: Any, said: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), made(nn.Linear(4, 4)))
    before = [(name, p.requires_grad) for name, p in model.named_parameters()]
    with pytest.raises(AppError, match=f"lora: {said}"):
        lora(model)
    assert [(name, p.requires_grad) for name, p in model.named_parameters()] == before
    assert not any(isinstance(part, LowRank) for part in model.modules())


@pytest.mark.parametrize(
    ("rank", "alpha"), [(np.int64(2), np.float32(4)), (torch.tensor(2), torch.tensor(4.0))]
)
def test_numbers_of_numpy_and_of_torch_are_numbers(rank: Any, alpha: Any) -> None:
    options: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": np.array(["0"])}
    model: Any = lora(perceptron(), **options)
    assert model[0].parametrizations.weight[0].A.shape == (2, 12)
    assert model[0].parametrizations.weight[0].scale == 2.0


def test_weights_of_half_precision_have_adapters_of_float32() -> None:
    model: Any = lora(nn.Linear(4, 4).half(), rank=2)
    kinds = {name.rpartition(".")[2]: t.dtype for name, t in model.state_dict().items()}
    assert kinds == {"bias": torch.float16, "original": torch.float16, "A": torch.float32, "B": torch.float32}
    x = torch.ones(1, 4, dtype=torch.float16)
    assert functional.linear(x, model.weight, model.bias).dtype == model(x).dtype == torch.float16
