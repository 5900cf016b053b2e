"""What a torch App freezes, by `requires_grad` or by name; the module gets it back before each task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.errors import AppError
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.submodels import tensor_set
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.trainer import Training, trainer_for
from anabranch.workloads.zeroth import Zeroth

PLAN = LocalPlan(steps=4, batch_size=8, learning_rate=0.1, momentum=0.9)


class Net(App):
    """8-6-3 with a norm between; the layers of these places are frozen."""

    name = "net"

    def __init__(self, *frozen: int, norm: bool = True) -> None:
        super().__init__()
        self._frozen, self._norm = frozen, norm

    def model(self) -> Any:
        norm = nn.BatchNorm1d(6) if self._norm else nn.Identity()
        net = nn.Sequential(nn.Flatten(), nn.Linear(8, 6), norm, nn.ReLU(), nn.Linear(6, 3))
        for place in self._frozen:
            net[place].requires_grad_(False)
        return net

    def data(self, shard: Shard) -> Examples:
        draws = np.random.default_rng(0)
        return Examples(draws.standard_normal((32, 8)).astype(np.float32), draws.integers(0, 3, 32))


def frozen_names(app: App) -> set[str]:
    return {t.name for t in trainer_for(app).spec.tensors if t.is_float and not t.trained}


def test_parameters_without_a_gradient_and_their_buffers_are_frozen() -> None:
    statistics = {"2.running_mean", "2.running_var"}
    assert frozen_names(Net()) == set()
    assert frozen_names(Net(1)) == {"1.weight", "1.bias"}
    assert frozen_names(Net(1, 2)) == {"1.weight", "1.bias", "2.weight", "2.bias"} | statistics
    assert trainer_for(Net(1, 2)).spec.buffers == ()
    assert set(trainer_for(Net(1)).spec.buffers) == statistics


def test_a_buffer_goes_with_the_innermost_module_that_has_parameters() -> None:
    class Bare(Net):
        def model(self) -> Any:
            bare = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False))
            bare.requires_grad_(False)
            return nn.Sequential(bare, nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3))

    statistics = {"0.1.running_mean", "0.1.running_var"}
    assert frozen_names(Bare()) == {"0.0.weight", "0.0.bias"} | statistics


def test_an_app_names_what_is_trained() -> None:
    class Named(Net):
        def trained(self, model: Any) -> list[str]:
            return ["4.bias", "4.weight"]

    class All(Net):
        def trained(self, model: Any) -> list[str]:
            return [name for name, t in model.state_dict().items() if t.is_floating_point()]

    assert list(trainer_for(Named()).spec.slices) == ["4.weight", "4.bias"]
    assert trainer_for(All(1)).spec == trainer_for(All()).spec == trainer_for(Net()).spec


class Named(Net):
    """What `Net` freezes by requires_grad, it freezes by leaving its names out."""

    def model(self) -> Any:
        net = super().model()
        net.requires_grad_(True)
        return net

    def trained(self, model: Any) -> list[str]:
        still = tuple(f"{place}." for place in self._frozen)
        return [n for n, t in model.state_dict().items() if t.is_floating_point() and not n.startswith(still)]


class Stopped(Exception):
    """An endless training has gone on for long enough."""


def in_a_task(trainer: Any, vector: Any, frozen: Any, examples: Examples) -> Any:
    return trainer.train(vector, frozen, examples, PLAN, seed=1).delta


def without_gradients(trainer: Any, vector: Any, frozen: Any, examples: Examples) -> Any:
    trainer.app.zeroth = Zeroth(queries=3)
    return in_a_task(trainer, vector, frozen, examples)


def without_an_end(trainer: Any, vector: Any, frozen: Any, examples: Examples) -> Any:
    seen: list[Any] = []

    def hook(live: LiveWeights) -> None:
        seen.append(live.flat())
        if len(seen) == 5:
            raise Stopped

    with pytest.raises(Stopped):
        trainer.train_on(vector, frozen, examples, PLAN, 1, hook)
    return np.stack(seen)


def of_a_part(trainer: Any, vector: Any, frozen: Any, examples: Examples) -> Any:
    spec = trainer.spec
    part = tensor_set(spec, [i for i, tensor in enumerate(spec.tensors) if tensor.name == "4.weight"])
    return trainer.train(vector, frozen, examples, PLAN, 1, None, part).delta


@pytest.mark.parametrize("way", [in_a_task, without_gradients, without_an_end, of_a_part])
def test_what_is_not_named_is_trained_no_more_than_without_a_gradient(way: Any) -> None:
    """The oracle is the same model, in which the parameters themselves say that they require none."""
    found = []
    for app in (Named(1, 2), Net(1, 2)):
        trainer = trainer_for(app)
        given = trainer.initial(3)
        vector, frozen = trainer.spec.flatten(given), trainer.spec.frozen(given)
        found.append(way(trainer, vector, frozen, app.data(Shard("train"))))
        left = trainer.resident(None).module.state_dict()  # type: ignore[attr-defined]
        still = {name for name in frozen if left[name].is_floating_point()}
        assert still == {"1.weight", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var"}
        for name in ("1.weight", "1.bias", "2.weight", "2.bias"):
            assert np.array_equal(left[name].numpy(), frozen[name]), name
    assert found[0].any()
    np.testing.assert_array_equal(found[0], found[1])


class Thawed(Net):
    """Its module comes with no gradients at all, and the App names the last layer."""

    def model(self) -> Any:
        return super().model().requires_grad_(False)

    def trained(self, model: Any) -> list[str]:
        return ["4.weight", "4.bias"]


@pytest.mark.parametrize("way", [in_a_task, without_gradients, without_an_end, of_a_part])
def test_what_is_named_is_trained_though_the_module_comes_with_it_switched_off(way: Any) -> None:
    """The oracle is the same model, in which the parameters themselves say that they are trained."""
    found = []
    for app in (Thawed(), Net(0, 1, 2)):
        trainer = trainer_for(app)
        given = trainer.initial(3)
        vector, frozen = trainer.spec.flatten(given), trainer.spec.frozen(given)
        found.append(way(trainer, vector, frozen, app.data(Shard("train"))))
    assert found[0].any()
    np.testing.assert_array_equal(found[0], found[1])


def test_nothing_trained_and_unknown_names_are_errors() -> None:
    class Unknown(Net):
        def trained(self, model: Any) -> list[str]:
            return ["4.weights"]

    with pytest.raises(AppError, match="nothing of the model is trained: leave requires_grad on"):
        trainer_for(Net(1, 2, 4))
    with pytest.raises(AppError, match=r"trained: '4.weights' is not the name of a float tensor"):
        trainer_for(Unknown())


def test_a_tensor_of_two_names_is_trained_under_both_or_none() -> None:
    """Under a name that is frozen the next task would load what the start had, over what was trained."""

    class Tied(Net):
        def model(self) -> Any:
            module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
            module[1].weight = module[0].weight
            return module

        def __init__(self, *names: str) -> None:
            super().__init__()
            self.names = list(names)

        def trained(self, model: Any) -> list[str]:
            return self.names

    told = "trained says '0.weight' and not '1.weight', which is the same tensor: name both, or neither"
    with pytest.raises(AppError, match=told):
        trainer_for(Tied("0.weight", "2.weight"))
    for whole in (["0.weight", "1.weight"], ["2.weight"]):
        assert list(trainer_for(Tied(*whole)).spec.slices) == whole


def test_an_attribute_of_that_name_is_an_error() -> None:
    app: Any = Net(1)
    app.trained = ["4.weight"]
    with pytest.raises(AppError, match=r"its `trained` is a list: make it a method"):
        trainer_for(app)


def test_units_that_run_through_a_frozen_layer_are_none() -> None:
    assert [g.size for g in trainer_for(Net(norm=False)).spec.groups] == [6]
    trainer = trainer_for(Net(1, norm=False))
    assert trainer.spec.groups == ()
    assert "cut what is trained, or train what is cut" in trainer.whole_because


def test_training_moves_what_is_trained_from_the_tensors_that_are_given() -> None:
    """The oracle is torch's own SGD on a module of these very weights."""
    app = Net(1, norm=False)
    trainer, given = trainer_for(app), trainer_for(app).initial(3)
    spec, examples = trainer.spec, app.data(Shard("train"))
    plan = LocalPlan(steps=1, batch_size=32, learning_rate=0.1)
    vector, frozen = spec.flatten(given), spec.frozen(given)
    for _ in range(2):  # nothing is left of the first in the second
        delta = trainer.train(vector, frozen, examples, plan, seed=0).delta
    net = app.model()
    net.load_state_dict({name: torch.tensor(array) for name, array in given.items()})
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    scores = net(torch.from_numpy(np.asarray(examples.x)))
    nn.functional.cross_entropy(scores, torch.from_numpy(np.asarray(examples.y))).backward()
    optimizer.step()
    moved = np.concatenate([net[4].weight.detach().numpy().reshape(-1), net[4].bias.detach().numpy()])
    np.testing.assert_allclose(vector + delta, moved, atol=1e-6)
    assert delta.size == spec.size == 6 * 3 + 3
    other = {name: array + np.float32(1) for name, array in frozen.items()}
    assert not np.array_equal(trainer.train(vector, other, examples, plan, seed=0).delta, delta)


def test_a_stack_of_trainings_is_as_one_after_the_other() -> None:
    app = Net(1, norm=False)
    trainer: Any = trainer_for(app)
    given = trainer.initial(3)
    spec, examples = trainer.spec, app.data(Shard("train"))
    vector, frozen = spec.flatten(given), spec.frozen(given)
    pair = [Training(vector, examples, PLAN, seed) for seed in (0, 1)]
    stack = BatchedTraining(trainer)
    assert stack.objection(pair[0], frozen) == ""
    for one, stacked in zip(pair, stack.train(pair, frozen), strict=True):
        alone = trainer.train(one.vector, frozen, one.examples, one.plan, one.seed)
        np.testing.assert_allclose(stacked.delta, alone.delta, atol=1e-5)
