"""Stacks whose gradients are of programs that torch compiles, beside the same trainings one by one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
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
from anabranch.workloads.compiled_gradients import CompiledGradients, NotCompiledError, filled
from anabranch.workloads.trainer import Training

if TYPE_CHECKING:
    from anabranch.workloads.torch_trainer import TorchTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))),
        reason="no C++ compiler is here",
    ),
    pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning"),  # torch of itself
]
WORDS, CLASSES = 7, 3


class Reader(nn.Module):
    """Three words to a class. A buffer and a weight that is not trained count as well, another does not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)
        self.norm = nn.LayerNorm(12)
        self.scores = nn.Linear(12, CLASSES)
        self.scores.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
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
def test_what_is_filled_up_is_to_the_next_of_the_sizes(size: int) -> None:
    sizes = {2**k for k in range(1, 18)} | {3 * 2**k for k in range(17)}
    assert filled(size) == min(each for each in sizes if each >= size)


def drawn(
    module: Reader, count: int, length: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is trained and what is not, of as many models, examples, classes and what they count."""
    torch.manual_seed(3)
    trained = {n: torch.randn(count, *p.shape) for n, p in module.named_parameters() if p.requires_grad}
    fixed = {"scores.bias": torch.randn(count, CLASSES), "scale": torch.rand(count, 1) + 1}
    x, classes = torch.randint(WORDS, (count, length, 3)), torch.randint(CLASSES, (count, length))
    m = torch.rand(count, length)
    m[1, 2] = 0
    return trained, fixed, x, classes, m


def compiled() -> int:
    """How many programs torch has made."""
    from torch._dynamo.utils import counters  # with its compiler, of which only these tests have need

    return int(counters["stats"]["unique_graphs"])


def test_losses_and_gradients_are_those_of_each_model_alone() -> None:
    """Of five, filled up to six, with batches of five, filled up to six; then of six, by that program."""
    module, gradients_of = Reader(), CompiledGradients()
    trained, fixed, x, classes, m = drawn(module, 5, 5)
    losses, gradients = gradients_of(module, 9, trained, fixed, x, classes, m)
    assert losses.shape == (5,)
    assert {n: g.shape for n, g in gradients.items()} == {
        n: w.shape for n, w in trained.items() if n != "unused"
    }
    for i in range(5):
        own = {n: w[i].clone().requires_grad_() for n, w in trained.items() if n in gradients}
        scores: Any = torch.func.functional_call(module, own | {n: f[i] for n, f in fixed.items()}, (x[i],))
        loss = (nn.functional.cross_entropy(scores, classes[i], reduction="none") * m[i]).sum()
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-5, atol=1e-6)
        for name, due in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
            torch.testing.assert_close(gradients[name][i], due, rtol=1e-4, atol=1e-6)
    made = compiled()
    trained, fixed, x, classes, m = drawn(module, 6, 6)
    as_parts = (torch.stack([each, each], 1)[:, 1] for each in (x, classes, m))  # of examples of two steps
    gradients_of(Reader(), 9, trained, fixed, *as_parts)
    assert compiled() == made
    gradients_of(module, 5, *drawn(module, 5, 5))
    assert compiled() == made + 1, "no batch is longer than five"


def test_trainings_of_unequal_lengths_are_those_alone() -> None:
    """One goes on when the others are over: a stack of one. What counts nothing does not decay."""
    app = Read()
    trainer = cast("TorchTrainer", trainer_for(app))
    plan = LocalPlan(batch_size=4, momentum=0.5, weight_decay=0.1)
    start, stack = trainer.spec.flatten(trainer.initial(0)), BatchedTraining(trainer, compiled=True)
    trainings = [
        Training(start, app.data(Shard("train", i, 3)), replace(plan, steps=steps), i)
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


@pytest.mark.parametrize("before", ["import torch", "import torch._dynamo"])
def test_a_place_that_cannot_be_written_to_is_said(before: str, tmp_path: Path) -> None:
    """Whenever it is asked, in a process of its own: a compiler that came half-way is not imported again."""
    place = tmp_path / "file" / "cache"
    place.parent.touch()
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])
    code = f"{before}; import os, runpy, sys; os.environ['TORCHINDUCTOR_CACHE_DIR'] = sys.argv[2]; "
    code += "runpy.run_path(sys.argv[1])['refused_twice']()"
    command = [sys.executable, "-c", code, __file__, str(place)]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def refused_twice() -> None:
    """What the process of that test does."""
    module = Reader()
    for _ in range(2):
        with pytest.raises(NotCompiledError, match=r"^torch cannot compile it: .*file/cache"):
            CompiledGradients()(module, 9, *drawn(module, 3, 3))
