"""Stacks whose gradients are of programs that torch compiles, beside the same trainings one by one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from local_apps import Linear
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads import App, Examples, Shard, trainer_for
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.compiled_gradients import CompiledGradients, filled
from anabranch.workloads.trainer import Training

if TYPE_CHECKING:
    from anabranch.workloads.torch_trainer import TorchTrainer

pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))),
        reason="torch compiles C++, and no compiler is here",
    ),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),  # torch of itself
]
WORDS, CLASSES = 7, 3


class Reader(nn.Module):
    """Three words to a class. A buffer and a weight that is not trained count as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.norm = nn.LayerNorm(12)
        self.scores = nn.Linear(12, CLASSES)
        self.scores.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scores(self.norm(self.words(x).flatten(1)) * self.scale)
        return scores


class Read(App):
    """Examples of `Reader`."""

    def model(self) -> Any:
        return Reader()

    def data(self, shard: Shard) -> Examples:
        draws = np.random.default_rng(shard.index)
        return Examples(draws.integers(0, WORDS, (9, 3)), draws.integers(0, CLASSES, 9))


@given(st.integers(0, 100_000))
def test_what_is_filled_up_is_less_than_half_as_long_again(size: int) -> None:
    found = filled(size)
    assert max(2, size) <= found < max(3, 1.5 * size)
    odd = found
    while odd % 2 == 0:
        odd //= 2
    assert odd in (1, 3)


def test_losses_and_gradients_are_those_of_each_model_alone() -> None:
    """Of five models, filled up to six, with batches of five, filled up to the six that are asked for."""
    torch.manual_seed(3)
    module = Reader()
    trained = {n: torch.randn(5, *p.shape) for n, p in module.named_parameters() if p.requires_grad}
    fixed = {"scores.bias": torch.randn(5, CLASSES), "scale": torch.rand(5, 1) + 1}
    x, classes = torch.randint(WORDS, (5, 5, 3)), torch.randint(CLASSES, (5, 5))
    m = torch.rand(5, 5)
    m[1, 2] = 0
    losses, gradients = CompiledGradients(module, 6)(trained, fixed, x, classes, m)
    assert losses.shape == (5,)
    assert {n: g.shape for n, g in gradients.items()} == {n: w.shape for n, w in trained.items()}
    for i in range(5):
        own = {n: w[i].clone().requires_grad_() for n, w in trained.items()}
        scores: Any = torch.func.functional_call(module, own | {n: f[i] for n, f in fixed.items()}, (x[i],))
        loss = (nn.functional.cross_entropy(scores, classes[i], reduction="none") * m[i]).sum()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-5, atol=1e-6)
        for name, due in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(gradients[name][i], due, rtol=1e-4, atol=1e-6)


def test_trainings_of_unequal_lengths_are_those_alone() -> None:
    """One goes on when the others are over: a stack of one."""
    app = Read()
    trainer = cast("TorchTrainer", trainer_for(app))
    start, stack = trainer.spec.flatten(trainer.initial(0)), BatchedTraining(trainer, compiled=True)
    trainings = [
        Training(start, app.data(Shard("train", i, 3)), LocalPlan(steps=steps, batch_size=4, momentum=0.5), i)
        for i, steps in enumerate((2, 4, 2))
    ]
    assert stack.objection(trainings[1], trainer.frozen) == ""
    for training, found in zip(trainings, stack.train(trainings, trainer.frozen), strict=True):
        alone = trainer.train(start, trainer.frozen, training.examples, training.plan, training.seed)
        np.testing.assert_allclose(found.delta, alone.delta, rtol=1e-4, atol=1e-6)
        assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
        assert found.steps == training.steps


def test_a_model_that_torch_cannot_compile_is_trained_one_by_one() -> None:
    app = Linear("paused")
    trainer = cast("TorchTrainer", trainer_for(app))
    training = Training(
        trainer.spec.flatten(trainer.initial(0)),
        app.data(Shard("train", 0, 1)),
        LocalPlan(steps=1, batch_size=4),
        0,
    )
    assert BatchedTraining(trainer).objection(training, trainer.frozen) == ""
    why = BatchedTraining(trainer, compiled=True).objection(training, trainer.frozen)
    assert why.startswith("torch cannot compile it: ")
