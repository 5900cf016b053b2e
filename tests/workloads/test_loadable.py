"""Modules into which no weights can be loaded are named before a training; the others take them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from anabranch.core.config.tables import merge
from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan
from anabranch.simulation.run import simulate
from anabranch.workloads import App, Examples, Shard, trainer_for
from anabranch.workloads.app import app_of

X = np.random.default_rng(3).normal(size=(24, 4)).astype(np.float32)


class Around(App):
    """An App around any module."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self._made = made

    def model(self) -> Any:
        return self._made()

    def data(self, shard: Shard) -> Examples:
        return Examples(X, (X[:, 0] > 0).astype(np.int64))


class Copies(torch.nn.Linear):
    """Gives copies, as a module does that keeps its weights in another form."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: t.clone() for name, t in super().state_dict(*args, **kwargs).items()}


class Extra(torch.nn.Linear):
    """A state beside its tensors."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(3)

    def set_extra_state(self, state: Any) -> None:
        """It is of no use here."""


class WithBuffer(torch.nn.Linear):
    """A linear layer with one more buffer."""

    def __init__(self, buffer: torch.Tensor, persistent: bool = True) -> None:
        super().__init__(4, 2)
        self.register_buffer("more", buffer, persistent)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Copies(4, 2), r"state_dict\(\) gives a copy of 'weight'.*give the tensors themselves"),
        (lambda: Extra(4, 2), r"state_dict\(\) gives a copy of '_extra_state'"),
        (lambda: WithBuffer(torch.ones(1).expand(3)), r"'more' .* is expanded.* register \.clone\(\) of it"),
        (lambda: WithBuffer(torch.ones(1).expand(3), False), r"'more' .* is expanded"),
        (lambda: WithBuffer(torch.eye(3).to_sparse()), r"'more' .* is sparse_coo: keep it dense"),
        (lambda: torch.nn.Linear(4, 2, device="meta"), "'weight' .* meta device.* make the model on the CPU"),
    ],
)
def test_what_cannot_be_loaded_is_named(made: Any, words: str) -> None:
    with pytest.raises(AppError, match=words):
        trainer_for(Around(made))


def test_data_that_an_instance_has_of_its_own_are_an_apps_as_well() -> None:
    class Made(App):
        def __init__(self) -> None:
            super().__init__()
            self.data = Around(None).data  # type: ignore[method-assign]

        def model(self) -> Any:
            return Copies(4, 2)

    with pytest.raises(AppError, match="gives a copy of 'weight'"):
        trainer_for(app_of(Made(), "script.py:made"))


def test_a_model_alone_is_loaded_by_the_scripts_that_train_it() -> None:
    model = Copies(4, 2)
    start = trainer_for(app_of(model, "script.py:model")).initial(0)
    np.testing.assert_array_equal(start["weight"], model.weight.detach().numpy())


@pytest.mark.parametrize(
    "made",
    [
        lambda: WithBuffer(torch.zeros(0)),
        lambda: WithBuffer(torch.arange(3).expand(1, -1)),
        lambda: WithBuffer(torch.ones(3, 2).t()),
        lambda: WithBuffer(torch.tensor(1.0)),
        lambda: torch.nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    ],
)
def test_every_number_gets_where_it_belongs(made: Any) -> None:
    trainer: Any = trainer_for(Around(made))
    start = trainer.initial(0)
    given = {name: np.arange(a.size, dtype=np.float64).reshape(a.shape) + 0.5 for name, a in start.items()}
    trainer.resident(None).load(trainer.spec.flatten(given), trainer.spec.frozen(start))
    for name, tensor in trainer.resident(None).module.state_dict().items():
        expected = given[name] if name in trainer.spec.slices else start[name]
        np.testing.assert_array_equal(tensor.numpy(), expected.astype(start[name].dtype))


def test_first_weights_that_are_not_finite_are_named() -> None:
    config = merge([("test", {"run": {"updates_max": 2}, "fleet": {"clients": 1}})])
    app = Around(lambda: WithBuffer(torch.tensor([1.0, float("inf")])))
    with pytest.raises(AppError, match=r"Around: the first weights .* in tensor 'more': mend model\(\)"):
        simulate(config, app=app)


class Indexed(torch.nn.Module):
    """Frozen tables of other kinds come first."""

    def __init__(self, kind: torch.dtype, of: torch.dtype) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(4).to(kind), requires_grad=False)
        self.out = torch.nn.Linear(4, 2, dtype=of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(x[:, self.table.long()].to(self.out.weight.dtype))
        return scores


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.uint8, torch.float16])
@pytest.mark.parametrize("of", [torch.float32, torch.float64])
def test_an_evaluation_is_of_the_examples_as_they_are(kind: torch.dtype, of: torch.dtype) -> None:
    app = Around(lambda: Indexed(kind, of))
    trainer = trainer_for(app)
    start = trainer.initial(1)
    found = trainer.evaluate(trainer.spec.flatten(start), trainer.spec.frozen(start), app.data(Shard("test")))
    rows = X[:, start["table"].astype(np.int64)].astype(np.float64)
    scores = rows @ start["out.weight"].astype(np.float64).T + start["out.bias"]
    labels = (X[:, 0] > 0).astype(np.int64)
    assert found["accuracy"] == (scores.argmax(1) == labels).mean()
    loss = np.log(np.exp(scores).sum(1)) - scores[np.arange(24), labels]
    assert found["loss"] == pytest.approx(loss.mean(), rel=1e-5)


class Centres(torch.nn.Module):
    """Nothing but buffers: their App moves them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.centres: torch.Tensor
        self.register_buffer("centres", torch.tensor([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(x, self.centres)


def test_a_model_of_buffers_alone_is_measured_and_not_trained_by_sgd() -> None:
    trainer, examples = trainer_for(Around(Centres)), Around(Centres).data(Shard("train"))
    start = trainer.initial(0)
    vector = trainer.spec.flatten(start)
    assert trainer.evaluate(vector, {}, examples)["accuracy"] == 1.0
    with pytest.raises(AppError, match=r"no parameter of the model requires a gradient.*write train"):
        trainer.train(vector, {}, examples, LocalPlan(steps=1), 0)
