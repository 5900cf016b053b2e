"""The layers that take all models of a stack at once, beside `torch.vmap` of the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from local_apps import HiddenDropout, HiddenNorm, Linear
from torch import nn

from anabranch.core.model.live import LiveWeights
from anabranch.core.model.updates import LocalPlan
from anabranch.core.rng import stream
from anabranch.workloads import App, Examples, Shard, trainer_for
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.batches import batches
from anabranch.workloads.digits import Digits
from anabranch.workloads.objective import IGNORED
from anabranch.workloads.stacked_layers import ELEMENTWISE, LayerChain
from anabranch.workloads.stacked_sgd import StackedSgd
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training

COUNT, LENGTH = 5, 7


class Doubling(nn.Linear):
    """Torch's own class under it, and another function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Whole(nn.Module):
    """A chain in the hands of a module that nobody knows."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.chain(x)
        return found


class Unknown(Linear):
    """The same model as `Linear`, which `vmap` has to stack."""

    def model(self) -> Any:
        return Whole(super().model())


def stacked(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of as many models as there are, no two alike."""
    torch.manual_seed(0)
    return {
        name: (torch.randn(COUNT, *p.shape) * 0.3).requires_grad_() for name, p in module.named_parameters()
    }


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["rows", "pictures"])
def test_outputs_and_gradients_are_those_of_vmap(name: str, shape: tuple[int, ...]) -> None:
    first = [nn.Flatten()] if len(shape) > 1 else []
    module = nn.Sequential(
        *first, nn.Sequential(nn.Linear(6, 8), getattr(nn, name)()), nn.Tanh(), nn.Linear(8, 4)
    )
    weights = stacked(module)
    x = torch.randn(COUNT, LENGTH, *shape)
    chain = LayerChain.of(module, weights)
    assert chain is not None
    assert chain.takes(x.shape[1:])

    def alone(w: Any, one: torch.Tensor) -> Any:
        return torch.func.functional_call(module, w, (one,))

    of_chain, of_vmap = chain(weights, x), torch.vmap(alone)(weights, x)
    assert of_chain.shape == (COUNT, LENGTH, 4)
    torch.testing.assert_close(of_chain, of_vmap, rtol=1e-6, atol=1e-6)
    pull = torch.randn_like(of_chain)
    leaves = list(weights.values())
    ours, theirs = (torch.autograd.grad((out * pull).sum(), leaves) for out in (of_chain, of_vmap))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def gradients_of(
    chain: LayerChain,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    classes: torch.Tensor,
    m: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The losses, and the gradients, by a step of length 1 of plain SGD from copies of the weights."""
    moved = {name: w.detach().clone() for name, w in weights.items()}
    losses = chain.descend(StackedSgd.of(LocalPlan(learning_rate=1.0), moved), x, classes, m)
    return losses, {name: w.detach() - moved[name] for name, w in weights.items()}


def assert_torchs(
    chain: LayerChain,
    module: nn.Module,
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    classes: torch.Tensor,
    m: torch.Tensor,
) -> None:
    """Losses and gradients of each model, beside autograd of `cross_entropy` of the module alone."""
    losses, gradients = gradients_of(chain, weights, x, classes, m)
    assert set(gradients) == set(weights)
    assert not losses.requires_grad
    for i in range(COUNT):
        own = {n: w[i].detach().requires_grad_() for n, w in weights.items()}
        scores: Any = torch.func.functional_call(module, own, (x[i].clone(),))
        loss = (nn.functional.cross_entropy(scores, classes[i], reduction="none") * m[i]).sum()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-5, atol=1e-6)
        alone = torch.autograd.grad(loss, list(own.values()))
        for n, g in zip(own, alone, strict=True):
            torch.testing.assert_close(gradients[n][i], g, rtol=1e-4, atol=1e-6)


def activation(name: str, in_place: bool) -> Any:
    """One of the layers, which writes on what it is given where it can and shall."""
    layer: Any = getattr(nn, name)()
    if in_place and hasattr(layer, "inplace"):
        layer.inplace = True
    return layer


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in place"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_written_out_passes_are_torchs(name: str, in_place: bool) -> None:
    first, last = activation(name, in_place), activation(name, in_place)
    module = nn.Sequential(
        nn.Flatten(), nn.Tanh(), nn.Linear(6, 8), first, nn.Linear(8, 5), nn.Linear(5, 3), last
    )
    weights = stacked(module)
    x, classes = torch.randn(COUNT, LENGTH, 2, 3), torch.randint(3, (COUNT, LENGTH))
    m = torch.rand(COUNT, LENGTH) * (torch.rand(COUNT, LENGTH) > 0.3)
    chain = LayerChain.of(module, weights)
    assert chain is not None
    assert_torchs(chain, module, weights, x, classes, m)


IMAGES = {
    "as they come": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.MaxPool2d((2,)),  # which torch takes for both sides
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(36, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ),
        (1, 12, 12),
    ),
    "no square": (
        lambda: nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(0, 1)),
            nn.AvgPool2d((2, 3), stride=1, padding=1),
            nn.Tanh(),
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 2, stride=2)),
            nn.Flatten(),
            nn.ReLU(),
            nn.Linear(16, 3),
        ),
        (2, 9, 7),
    ),
}
each_image = pytest.mark.parametrize("name", IMAGES)


@each_image
def test_the_passes_of_images_are_torchs(name: str) -> None:
    made, shape = IMAGES[name]
    module = made()
    weights, x = stacked(module), torch.randn(COUNT, LENGTH, *shape)
    chain, given = LayerChain.of(module, weights), x.clone()
    assert chain is not None
    assert chain.takes(x.shape[1:])
    classes = torch.randint(3, (COUNT, LENGTH))
    m = torch.rand(COUNT, LENGTH) * (torch.rand(COUNT, LENGTH) > 0.3)
    assert_torchs(chain, module, weights, x, classes, m)
    assert torch.equal(x, given)
    alone = [
        torch.func.functional_call(module, {n: w[i] for n, w in weights.items()}, (x[i].clone(),))
        for i in range(COUNT)
    ]
    torch.testing.assert_close(chain(weights, x), torch.stack(alone), rtol=1e-5, atol=1e-6)


class Pictures(App):
    """One of the models of images, and pictures of its shape."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._made, self._shape = IMAGES[name]

    def model(self) -> Any:
        return self._made()

    def data(self, shard: Shard) -> Examples:
        draws = stream(shard.index, "pictures")
        count = 20 + 13 * shard.index
        x = draws.standard_normal((count, *self._shape)).astype(np.float32)
        return Examples(x, draws.integers(0, 3, count))


@each_image
@pytest.mark.parametrize(
    "plan",
    [LocalPlan(epochs=2, batch_size=16), LocalPlan(steps=9, momentum=0.9, weight_decay=0.1, proximal_mu=0.2)],
    ids=["plain", "velocities"],
)
def test_a_stack_of_images_is_its_trainings(name: str, plan: LocalPlan) -> None:
    trainer = cast("TorchTrainer", trainer_for(Pictures(name)))
    start = trainer.spec.flatten(trainer.initial(0))
    trainings = [
        Training(start, trainer.app.data(Shard("train", i, 3)), plan, seed)
        for i, seed in ((0, 5), (2, 6), (1, 7))
    ]
    for training, found in zip(trainings, BatchedTraining(trainer).train(trainings, {}), strict=True):
        alone = trainer.train(start, {}, training.examples, plan, training.seed)
        assert np.linalg.norm(alone.delta) > 0.01
        np.testing.assert_allclose(found.delta, alone.delta, rtol=1e-4, atol=1e-6)
        assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)


def test_images_that_have_no_room_are_left_to_vmap() -> None:
    """Too large for their patches, or for a kernel too small; or no images at all."""
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Conv2d(3, 4, 5), nn.Flatten(), nn.LazyLinear(3)
    )
    module(torch.zeros(1, 2, 20, 20))
    chain = LayerChain.of(module, stacked(module))
    assert chain is not None
    sides = {side: chain.takes((LENGTH, 2, side, side)) for side in (11, 12, 20, 44, 45)}
    assert sides == {11: False, 12: True, 20: True, 44: True, 45: False}  # 18 (side - 2)^2 <= 2^15
    assert not chain.takes((LENGTH, 20, 20))
    assert not chain.takes((LENGTH, 800))


def test_scores_of_any_size_have_a_loss() -> None:
    """As `cross_entropy` has it: exp of them alone would be infinite, or all zero."""
    module = nn.Sequential(nn.Linear(1, 2))
    weights = {"0.weight": torch.tensor([[[900.0], [0.0]]]), "0.bias": torch.tensor([[0.0, -900.0]])}
    chain = LayerChain.of(module, weights)
    assert chain is not None
    x, classes = torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1, 0]])
    losses, gradients = gradients_of(chain, weights, x, classes, torch.ones(1, 2))
    assert losses.item() == pytest.approx(1800 + np.log(2))
    assert gradients["0.bias"].tolist() == [[0.5, -0.5]]


def test_a_layer_in_two_places_is_two_steps() -> None:
    again = nn.ReLU6()
    module = nn.Sequential(again, nn.Linear(6, 4), again)
    weights, x = stacked(module), 9 * torch.randn(COUNT, LENGTH, 6)
    chain = LayerChain.of(module, weights)
    assert chain is not None
    alone = [
        torch.func.functional_call(module, {n: w[i] for n, w in weights.items()}, (x[i],))
        for i in range(COUNT)
    ]
    torch.testing.assert_close(chain(weights, x), torch.stack(alone))


def test_a_layer_that_writes_on_what_it_is_given_leaves_the_examples_alone() -> None:
    module = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))
    weights, x = stacked(module), torch.randn(COUNT, LENGTH, 6)
    chain, given = LayerChain.of(module, weights), x.clone()
    assert chain is not None
    gradients_of(chain, weights, x, torch.randint(3, (COUNT, LENGTH)), torch.ones(COUNT, LENGTH))
    assert torch.equal(x, given)


class Shifted(nn.Module):
    """Adds a buffer, which training leaves as it is."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("shift", torch.tensor([first, *range(1, 10)]), persistent=np.isfinite(first))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) + self.shift
        return found


class WithBuffer(Digits):
    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.first = first

    def model(self) -> Any:
        return Shifted(self.first)


def test_what_is_not_trained_does_not_change() -> None:
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(WithBuffer()))
    start, plan = np.ones(trainer.spec.size, np.float32), LocalPlan(steps=3, batch_size=16)
    training = Training(start, Examples(data.x[:40], data.y[:40]), plan, 1)
    stack = BatchedTraining(trainer)
    assert not stack.objection(training, trainer.frozen)
    found, _ = (result.delta for result in stack.train([training, training], trainer.frozen))
    changed = {name: bool(found[at].any()) for name, at in trainer.spec.slices.items()}
    assert changed == {"layer.weight": True, "layer.bias": True, "shift": False}


def test_padding_and_what_is_passed_over_have_no_loss_whatever_the_scores() -> None:
    """One class is masked: its score is -inf, and so would be the loss of an example that was given it."""
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(WithBuffer(-np.inf)))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(epochs=2, batch_size=16)
    rows = np.flatnonzero(data.y)[:45]
    labels = np.where(np.arange(45) % 3, data.y[rows], IGNORED)
    stack = BatchedTraining(trainer)
    for y in (data.y[rows], labels):
        pair = [
            Training(start, Examples(data.x[rows][:n], y[:n]), plan, seed) for seed, n in enumerate((45, 37))
        ]
        assert not stack.objection(pair[0], trainer.frozen)
        for training, found in zip(pair, stack.train(pair, trainer.frozen), strict=True):
            alone = trainer.train(start, trainer.frozen, training.examples, plan, training.seed)
            assert np.isfinite(alone.metrics["loss"])
            assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)


@pytest.mark.parametrize("app", [Linear(), Unknown()], ids=["by layers", "by vmap"])
def test_trainings_of_one_version_are_those_of_as_many_copies_of_it(app: Linear) -> None:
    """With other batches, of other lengths and numbers, to the bit; and who keeps a delta keeps no others."""
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(app))
    start = trainer.spec.flatten(trainer.initial(0))
    before, stack = start.copy(), BatchedTraining(trainer)
    plans = [LocalPlan(steps=3, batch_size=8), LocalPlan(epochs=2, batch_size=16), LocalPlan(steps=20)]
    one = [
        Training(start, Examples(data.x[:count], data.y[:count]), plan, seed)
        for seed, (plan, count) in enumerate((plan, count) for plan in plans for count in (40, 33, 40))
    ]
    copies = [replace(training, vector=start.copy()) for training in one]
    pairs = zip(stack.train(one, trainer.frozen), stack.train(copies, trainer.frozen), strict=True)
    for mine, other in pairs:
        np.testing.assert_array_equal(mine.delta, other.delta)
        assert mine.metrics == other.metrics
        assert mine.delta.flags.owndata
        assert np.linalg.norm(mine.delta) > 0.01
    np.testing.assert_array_equal(start, before)


class Half(Linear):
    """In float16, which rounds the weights that it is given."""

    def model(self) -> Any:
        return super().model().half()


@pytest.mark.parametrize("made", [nn.Sequential, Whole], ids=["by layers", "by vmap"])
@pytest.mark.parametrize("versions", [1, 2])
def test_what_a_stack_of_fewer_digits_rounds_is_not_sent_as_training(made: Any, versions: int) -> None:
    app = Half()
    app.model = lambda: made(Half().model())  # type: ignore[method-assign]
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(app))
    starts = [np.full(trainer.spec.size, 1.0001 + i / 7, np.float32) for i in range(versions)]
    examples, plan = Examples(data.x[:40], data.y[:40]), LocalPlan(steps=3, learning_rate=1e-12)
    trainings = [Training(starts[i % versions], examples, plan, i) for i in range(3)]
    for found in BatchedTraining(trainer).train(trainings, trainer.frozen):
        assert not found.delta.any()  # no step is as long as a digit of float16


class Enough(Exception):
    """Ends a training that goes on."""


@pytest.mark.parametrize("change", [0.0, 1e-4, 0.3], ids=["no answer", "less than a digit", "many digits"])
def test_what_fewer_digits_round_is_not_sent_by_a_training_that_goes_on(change: float) -> None:
    data, trainer, seen = Digits().data(Shard("test")), trainer_for(Half()), list[Any]()
    start = np.full(trainer.spec.size, 1.0001, np.float32)

    def between(live: LiveWeights) -> None:
        seen.append(live.flat())
        if len(seen) > 20:
            raise Enough
        live.add(np.full_like(start, change))

    examples, plan = Examples(data.x[:40], data.y[:40]), LocalPlan(learning_rate=1e-12)
    with pytest.raises(Enough):
        trainer.train_on(start, trainer.frozen, examples, plan, 1, between)
    for step, found in enumerate(seen):
        np.testing.assert_allclose(found, start + step * change, rtol=1e-6)  # a digit of float16 is 1e-3


@pytest.mark.parametrize("order", ["F", "swapped"])
def test_examples_lie_as_they_like(order: str) -> None:
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(Linear()))
    x = np.asfortranarray(data.x[:40]) if order == "F" else data.x[:40].astype(">f4")
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(steps=3, batch_size=16)
    stack = BatchedTraining(trainer)
    lying, plain = (
        stack.train([Training(start, Examples(some, data.y[:40]), plan, 1)] * 2, trainer.frozen)[1].delta
        for some in (x, data.x[:40])
    )
    np.testing.assert_array_equal(lying, plain)


class Named(Linear):
    """Says what is trained, of parameters that all require a gradient."""

    def trained(self, model: Any) -> Any:
        return ["3.weight", "3.bias"]


class Adorned(Linear):
    """Has a parameter that no layer uses."""

    def model(self) -> Any:
        found = super().model()
        found.register_parameter("own", nn.Parameter(torch.ones(3)))
        return found


def test_what_no_layer_uses_stays_as_it_is() -> None:
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(Adorned()))
    start = trainer.spec.flatten(trainer.initial(0))
    plan = LocalPlan(steps=3, batch_size=16, momentum=0.9, weight_decay=0.1)
    training = Training(start, Examples(data.x[:40], data.y[:40]), plan, 1)
    stack = BatchedTraining(trainer)
    assert not stack.objection(training, trainer.frozen)
    found, _ = (result.delta for result in stack.train([training, training], trainer.frozen))
    assert {n for n, at in trainer.spec.slices.items() if not found[at].any()} == {"own"}


def test_an_app_that_names_what_is_trained_trains_that_alone_in_a_stack_too() -> None:
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(Named()))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(steps=3, batch_size=16)
    training = Training(start, Examples(data.x[:40], data.y[:40]), plan, 1)
    stack = BatchedTraining(trainer)
    assert stack.objection(training, trainer.frozen) == ""
    alone = trainer.train(start, trainer.frozen, training.examples, plan, 1).delta
    assert alone.any()
    np.testing.assert_allclose(stack.train([training] * 2, trainer.frozen)[1].delta, alone, atol=1e-6)


class Attentive(nn.Module):
    """One layer of attention over the rows of a digit."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self.inner, self.hidden = nn.Linear(8, 16), hidden
        self.layer = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.hidden(self.inner(x.unflatten(1, (8, 8))))
        found: torch.Tensor = self.out(self.layer(rows, rows, rows, need_weights=False)[0].mean(1))
        return found


class Attending(Digits):
    """A model of it."""

    def __init__(self, hidden: nn.Module) -> None:
        super().__init__()
        self._hidden = hidden

    def model(self) -> Any:
        return Attentive(self._hidden)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("hidden", "why"),
    [
        (nn.Identity(), ""),
        (HiddenNorm(), "a trial in a stack came to another result"),
        (HiddenDropout(), "torch cannot stack it"),
    ],
    ids=["attention", "hidden norm", "hidden dropout"],
)
def test_a_trial_tells_another_training_from_the_rounding_of_a_precision(
    hidden: nn.Module, why: str, precision: str
) -> None:
    data = Digits().data(Shard("test"))
    trainer = cast("TorchTrainer", trainer_for(Attending(hidden), "cpu", precision))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(steps=3, batch_size=16, momentum=0.9)
    training = Training(start, Examples(data.x[:40], data.y[:40]), plan, 1)
    said = BatchedTraining(trainer).objection(training, trainer.frozen)
    assert said.startswith(why) if why else not said


@pytest.mark.parametrize(("count", "batch_size"), [(60, 20), (40, 1), (4, 3), (3, 16), (2, 16)])
def test_the_batches_of_a_trial_are_padded_whatever_the_first_training_is(
    count: int, batch_size: int
) -> None:
    """Whoever mixes the examples of a batch shows it there alone."""
    data = Digits().data(Shard("test"))
    trainer = cast("TorchTrainer", trainer_for(Attending(HiddenNorm())))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(epochs=1, batch_size=batch_size)
    training = Training(start, Examples(data.x[:count], data.y[:count]), plan, 1)
    assert "another result" in BatchedTraining(trainer).objection(training, trainer.frozen)


class NormOfMany(HiddenNorm):
    """One that leaves small batches alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if len(x) > 12 else x


def test_a_batch_of_a_trial_is_as_large_as_they_are_in_a_stack() -> None:
    """Of seventeen examples a training has batches of nine and eight; another in its stack has sixteen."""
    data = Digits().data(Shard("test"))
    trainer = cast("TorchTrainer", trainer_for(Attending(NormOfMany())))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(epochs=1, batch_size=16)
    training = Training(start, Examples(data.x[:17], data.y[:17]), plan, 1)
    assert "another result" in BatchedTraining(trainer).objection(training, trainer.frozen)


class Sentences(App):
    """Three scores of a word."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._settings = settings

    def model(self) -> Any:
        return nn.Sequential(nn.Embedding(21, 3, **self._settings), nn.Flatten())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"padding_idx": 0}, "0 has a padding_idx, whose row torch trains in a stack"),
        ({"scale_grad_by_freq": True}, "0 mixes the examples of a batch by scale_grad_by_freq"),
        ({}, ""),
    ],
    ids=["padding", "frequency", "plain"],
)
def test_embeddings_are_stacked_where_torch_stacks_them_right(settings: dict[str, Any], why: str) -> None:
    """Also where the examples of the first training have no padding, and no word twice."""
    trainer = cast("TorchTrainer", trainer_for(Sentences(settings)))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(steps=4, batch_size=8)
    x = np.arange(1, 21).reshape(-1, 1)
    stack = BatchedTraining(trainer)
    trainings = [Training(start, Examples(x % n, x.ravel() % 3), plan, n) for n in (21, 5, 3)]
    assert stack.objection(trainings[0], trainer.frozen) == why
    for training, found in zip(trainings, [] if why else stack.train(trainings, {}), strict=not why):
        alone = trainer.train(start, {}, training.examples, plan, training.seed)
        np.testing.assert_allclose(found.delta, alone.delta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("app", [Linear(), Unknown()], ids=["by layers", "by vmap"])
def test_an_example_that_is_not_drawn_has_no_part_in_a_training(app: Linear) -> None:
    """Padding is of the batch: the first example of all is no number, and the first steps do without it."""
    data, trainer = Digits().data(Shard("test")), cast("TorchTrainer", trainer_for(app))
    start, plan = trainer.spec.flatten(trainer.initial(0)), LocalPlan(steps=2, batch_size=8)
    x = data.x[:80].copy()
    x[0] = np.nan
    without = next(seed for seed in range(9) if all(0 not in rows for rows in batches(79, plan, seed)))
    trainings = [
        Training(start, Examples(x[:79], data.y[:79]), plan, without),
        Training(start, Examples(x[1:41], data.y[1:41]), replace(plan, batch_size=16), 1),
    ]
    for training, found in zip(trainings, BatchedTraining(trainer).train(trainings, {}), strict=True):
        alone = trainer.train(start, {}, training.examples, training.plan, training.seed)
        assert np.isfinite(alone.delta).all()
        np.testing.assert_allclose(found.delta, alone.delta, rtol=1e-4, atol=1e-6)


def hooked() -> nn.Module:
    """A layer to which somebody has added something."""
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda module, given, output: 2 * output)
    return nn.Sequential(layer)


def patched() -> nn.Module:
    """A layer of which somebody has put another function in the place of its own."""
    layer: Any = nn.Linear(6, 4)
    layer.forward = torch.relu
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        patched,
        lambda: nn.Sequential(Doubling(6, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4, bias=False)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1)),
        lambda: nn.Sequential(nn.Flatten(2), nn.Linear(6, 4)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Flatten(), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.0)),
        lambda: Whole(nn.Sequential(nn.Linear(6, 4))),
        lambda: nn.Sequential(nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(4, 2)),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Conv2d(1, 2, 3), nn.Flatten()),
        lambda: nn.Sequential(nn.Flatten(), nn.Conv2d(1, 2, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.MaxPool2d(2), nn.Linear(4, 2)),
        *(
            lambda first=first: nn.Sequential(first, nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(8, 2))
            for first in (
                nn.Conv2d(2, 2, 3, bias=False),
                nn.Conv2d(2, 2, 3, groups=2),
                nn.Conv2d(2, 2, 3, dilation=2),
                nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
                nn.Conv2d(2, 2, 3, padding="same"),
                nn.MaxPool2d(2, ceil_mode=True),
                nn.MaxPool2d(2, dilation=2),
                nn.MaxPool2d(2, return_indices=True),
                nn.AvgPool2d(2, ceil_mode=True),
                nn.AdaptiveAvgPool2d(2),
                nn.Conv1d(2, 2, 1),
            )
        ),
    ],
)
def test_what_is_no_chain_of_known_layers_is_left_to_vmap(make: Callable[[], nn.Module]) -> None:
    module = make()
    assert LayerChain.of(module, stacked(module)) is None


def test_weights_that_are_not_trained_are_left_to_vmap() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    weights = stacked(module)
    del weights["0.bias"]
    assert LayerChain.of(module, weights) is None


def test_rows_of_rows_are_left_to_vmap() -> None:
    module = nn.Sequential(nn.Linear(6, 4))
    chain = LayerChain.of(module, stacked(module))
    assert chain is not None
    taken = [chain.takes((LENGTH, *rows, 6)) for rows in ((), (3,), (2, 3))]
    assert taken == [True, False, False]


@pytest.mark.parametrize(
    "plan",
    [LocalPlan(epochs=2, batch_size=16), LocalPlan(steps=9, momentum=0.9, weight_decay=0.1, proximal_mu=0.2)],
)
def test_a_stack_by_layers_is_the_stack_by_vmap(plan: LocalPlan) -> None:
    """Of devices with unequal parts: batches are padded, and trainings end at other times."""
    data = Digits().data(Shard("test"))
    deltas = []
    for app in (Linear(), Unknown()):
        trainer: Any = trainer_for(app)
        start = np.linspace(-0.2, 0.2, trainer.spec.size, dtype=np.float32)
        parts = [type(data)(data.x[: 20 + 13 * i], data.y[: 20 + 13 * i]) for i in range(4)]
        trainings = [Training(start, part, plan, seed) for seed, part in enumerate(parts)]
        assert not BatchedTraining(trainer).objection(trainings[0], trainer.frozen)
        deltas.append([r.delta for r in BatchedTraining(trainer).train(trainings, trainer.frozen)])
    for mine, other in zip(*deltas, strict=True):
        assert np.linalg.norm(mine) > 0.01
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("every", "batch_size"), [(3, 16), (2, 1)], ids=["some", "whole batches"])
@pytest.mark.parametrize("app", [Linear(), Unknown()], ids=["by layers", "by vmap"])
def test_examples_whose_label_is_passed_over_count_for_nothing(
    app: Linear, every: int, batch_size: int
) -> None:
    """As in a training alone, where the mean is of those that count: none of no examples, and no step."""
    data, trainer = Digits().data(Shard("test")), trainer_for(app)
    start = np.linspace(-0.2, 0.2, trainer.spec.size, dtype=np.float32)
    labels = np.where(np.arange(45) % every, data.y[:45], IGNORED)
    plan = LocalPlan(epochs=2, batch_size=batch_size)
    pair = [
        Training(start, Examples(data.x[:count], labels[:count]), plan, seed)
        for seed, count in enumerate((45, 30))
    ]
    trained = BatchedTraining(cast("TorchTrainer", trainer)).train(pair, trainer.frozen)
    for training, found in zip(pair, trained, strict=True):
        alone = trainer.train(start, trainer.frozen, training.examples, plan, training.seed)
        np.testing.assert_allclose(found.delta, alone.delta, rtol=1e-4, atol=1e-6)
        assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5, nan_ok=True)
