"""Data that is no array, and tasks that are no classification: an App's own loss, optimizer and metrics."""

from __future__ import annotations

import logging
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError, DataError
from anabranch.core.model.updates import LocalPlan
from anabranch.reports.result import Result
from anabranch.simulation.run import simulate
from anabranch.workloads.app import App, Examples, Shard, app_of
from anabranch.workloads.calls import data_of
from anabranch.workloads.objective import Objective
from anabranch.workloads.trainer import TrainResult, trainer_for

PLAN = LocalPlan(epochs=2, batch_size=8, learning_rate=0.1, momentum=0.9)
DRAWS = np.random.default_rng(7)
X = DRAWS.normal(size=(40, 3)).astype(np.float32)
WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)
Y = X @ WEIGHTS
CLASSES = (Y > 0).astype(np.int64)


class Line(App):
    """A regression, by nothing but three attributes."""

    loss: Any = functional.mse_loss
    optimizer: Any = torch.optim.Adam
    metrics: Any = {"mae": functional.l1_loss}  # noqa: RUF012 - as a user writes it

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))

    def data(self, shard: Shard) -> Any:
        return X, Y.astype(np.float64)


class NextToken(App):
    """Counts modulo five: the model's output is (batch, length, words)."""

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Embedding(5, 8), torch.nn.Linear(8, 5))

    def data(self, shard: Shard) -> Any:
        rows = torch.tensor([[(start + i) % 5 for i in range(7)] for start in range(15)])
        return TensorDataset(rows[:, :-1], rows[:, 1:])

    def loss(self, output: Any, y: Any) -> Any:
        return functional.cross_entropy(output.flatten(0, 1), y.flatten())

    def optimizer(self, params: Any, plan: LocalPlan) -> Any:
        return torch.optim.AdamW(params, lr=plan.learning_rate)

    def metrics(self, output: Any, y: Any) -> dict[str, Any]:
        return {"right": (output.argmax(-1) == y).float().mean()}


def run(app: App, **fleet: Any) -> Result:
    return simulate(config(**fleet), app=app)


def config(**fleet: Any) -> Config:
    tables = {
        "run": {"updates_max": 40, "evaluate_every_versions": 20, "target_accuracy": 0.5},
        "fleet": {"clients": 4, **fleet},
        "client": {"steps": 10, "batch_size": 8, "learning_rate": 0.05},
    }
    return merge([("test", tables)])


def test_a_regression_learns_without_a_train_of_its_own() -> None:
    result = run(Line())
    first, last = result.history[0], result.history[-1]
    assert last.loss is not None
    assert first.loss is not None
    assert last.loss < 0.05 * first.loss
    assert (last.accuracy, result.final_accuracy, result.time_to_target_s) == (None, None, None)
    before, after = first.metrics["mae"], last.metrics["mae"]
    assert before is not None
    assert after is not None
    assert after < 0.2 * before


def test_a_next_token_model_learns_without_a_train_of_its_own() -> None:
    last = run(NextToken()).history[-1]
    assert (last.metrics["right"] or 0.0) > 0.9
    assert last.accuracy is None


def test_a_batched_fleet_trains_them_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batched = run(Line(), executor="batched")
    assert "devices are trained one by one: Line has a loss of its own" in caplog.text
    assert batched.model_sha256 == run(Line(), executor="serial").model_sha256


# --- a Dataset, a DataLoader ---------------------------------------------------------------------


class Classes(App):
    """Two classes; the data comes in whatever form the test wants."""

    def __init__(self, found: Any = (X, CLASSES)) -> None:
        super().__init__()
        self.found = found

    def model(self) -> Any:
        return torch.nn.Linear(3, 2)

    def data(self, shard: Shard) -> Any:
        return self.found


class Noisy(Dataset[Any]):
    """Augments by the global generators of Python, numpy and torch."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.normal() + float(torch.randn(()))
        return X[index] + np.float32(noise), int(CLASSES[index])


def trained(app: App, seed: int = 1, plan: LocalPlan = PLAN) -> TrainResult:
    trainer = trainer_for(app)
    start = trainer.spec.flatten(trainer.initial(0))
    return trainer.train(start, {}, data_of(app, Shard("train")), plan, seed)


def evaluated(app: App) -> dict[str, float]:
    trainer = trainer_for(app)
    start = trainer.spec.flatten(trainer.initial(0))
    return trainer.evaluate(start, {}, data_of(app, Shard("test")))


def test_a_dataset_of_the_same_examples_trains_the_same_bits() -> None:
    dataset = TensorDataset(torch.from_numpy(X), torch.from_numpy(CLASSES))
    arrays, streamed = trained(Classes()), trained(Classes(dataset))
    np.testing.assert_array_equal(streamed.delta, arrays.delta)
    assert (streamed.steps, streamed.metrics) == (arrays.steps, arrays.metrics)
    assert len(data_of(Classes(dataset), Shard("train"))) == len(X)
    for found in (dataset, DataLoader(dataset, batch_size=7)):
        assert evaluated(Classes(found)) == pytest.approx(evaluated(Classes()))


@pytest.mark.parametrize(
    "found",
    [
        Noisy(),
        DataLoader(Noisy(), batch_size=16, shuffle=True),
        DataLoader(Noisy(), batch_size=16, shuffle=True, generator=torch.Generator()),
    ],
    ids=["dataset", "loader", "loader with a generator"],
)
def test_augmentation_repeats_by_the_seed_alone(found: Any) -> None:
    app = Classes(found)
    first, again, other = trained(app), trained(app), trained(app, seed=2)
    np.testing.assert_array_equal(first.delta, again.delta)
    assert not np.array_equal(first.delta, other.delta)


class Kept(Sampler[Any]):
    """Another sampler's draws; that one is kept under a name of its own, and it under theirs."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.others = inner, [inner]
        inner.outer = self

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Unusual:
    """A sampler of batches that is none of torch's."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return iter([[row] for row in self.sampler])

    def __len__(self) -> int:
        return len(self.sampler)


@pytest.mark.parametrize(
    "given",
    [
        lambda draws: {"batch_sampler": BatchSampler(draws, 8, False)},
        lambda draws: {"sampler": Kept(draws), "batch_size": 8},
        lambda draws: {"batch_sampler": Kept(BatchSampler(Kept(draws), 8, False))},
        lambda draws: {"batch_sampler": Unusual(draws)},
    ],
    ids=["batches", "wrapped", "twice", "not torch's"],
)
def test_a_generator_behind_samplers_is_of_the_task(given: Any) -> None:
    """An app's second training is as another app's first: what was drawn before is no matter."""
    dataset = TensorDataset(torch.from_numpy(X), torch.from_numpy(CLASSES))

    def app() -> App:
        draws = RandomSampler(dataset, generator=torch.Generator().manual_seed(0))
        return Classes(DataLoader(dataset, **given(draws)))

    kept = app()
    first, again, other = trained(kept), trained(kept), trained(kept, seed=2)
    np.testing.assert_array_equal(first.delta, again.delta)
    assert not np.array_equal(first.delta, other.delta)
    np.testing.assert_array_equal(other.delta, trained(app(), seed=2).delta)
    assert evaluated(kept) == evaluated(kept)


def test_a_loader_has_batches_of_its_own() -> None:
    loader = DataLoader(Noisy(), batch_size=16, drop_last=True)
    assert trained(Classes(loader)).steps == 2 * 2
    assert trained(Classes(loader), plan=LocalPlan(steps=3)).steps == 3


def test_a_train_of_ones_own_gets_what_data_has_returned() -> None:
    loader: Any = DataLoader(Noisy(), batch_size=16)

    class Own(Classes):
        def train(self, model: Any, examples: Any, plan: LocalPlan, seed: int) -> dict[str, float]:
            assert examples is loader
            found: dict[str, float] = super().train(model, examples, plan, seed)
            return found

    assert trained(Own(loader)).steps == 2 * 3


def test_a_dict_and_a_tuple_are_the_models_arguments() -> None:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, a: Any, b: Any) -> Any:
            return self.linear(a + b)

    class Two(Classes):
        def model(self) -> Any:
            return Sum()

    rows = [(X[i], X[i]) for i in range(8)]
    for items in (rows, [{"a": a, "b": b} for a, b in rows]):
        pairs: Any = [(x, 1) for x in items]
        loader: Any = DataLoader(pairs, batch_size=4)
        assert trained(Two(loader)).steps == 4


class Unpaired(Noisy):
    def __getitem__(self, index: int) -> Any:
        return X[index]


class Endless(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(Noisy())


class Counted(Endless):
    """Has one."""

    def __len__(self) -> int:
        return 40


class Once(Counted):
    """Its iterator is of all epochs together."""

    def __init__(self) -> None:
        self.rows = iter([(x, int(y)) for x, y in zip(X, CLASSES, strict=True)])

    def __iter__(self) -> Any:
        return self.rows


def test_an_epoch_without_a_batch_is_an_error() -> None:
    words = "gave no batch: its iterator, or its sampler's, is used up; make a new one in `__iter__`"
    app = Classes(DataLoader(Once(), batch_size=16))
    assert trained(app, plan=LocalPlan(epochs=1)).steps == 3
    with pytest.raises(DataError, match=words):
        trained(app)
    with pytest.raises(DataError, match=words):
        trained(Classes(DataLoader(Once(), batch_size=16)), plan=LocalPlan(epochs=2))
    with pytest.raises(DataError, match=words):
        evaluated(app)
    with pytest.raises(DataError, match="gives no batch: with drop_last it needs a whole one"):
        evaluated(Classes(DataLoader(Noisy(), batch_size=64, drop_last=True)))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Unpaired(), r"an example of the Dataset is a Tensor: give pairs \(x, y\); without labels, \(x, x\)"),
        (Endless(), "a Endless, an IterableDataset, which has no rows to draw: give a DataLoader of it"),
        (Counted(), "a Counted, an IterableDataset, which has no rows to draw: give a DataLoader of it"),
        (DataLoader(Endless()), "does not say how many examples it has: give Endless a __len__"),
        (TensorDataset(torch.zeros(0, 3), torch.zeros(0)), "there are none"),
        (DataLoader(Noisy(), batch_size=64, drop_last=True), "gives no batch"),
    ],
)
def test_datasets_of_no_use_are_named(found: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        trained(Classes(found))


def test_an_attack_on_labels_needs_labels() -> None:
    with pytest.raises(DataError, match="examples of a Noisy are no arrays: there is no y"):
        data_of(Classes(Noisy()), Shard("train")).y.max()


# --- loss, optimizer, metrics --------------------------------------------------------------------


class Vector(Line):
    loss: Any = staticmethod(partial(functional.mse_loss, reduction="none"))


class NoOptimizer(Line):
    def optimizer(self, params: Any, plan: LocalPlan) -> Any:
        return "adam"


class Searching(Line):
    optimizer = torch.optim.LBFGS


class NotCalled(Line):
    loss: Any = "mse"


class ClassOfLosses(Line):
    loss: Any = torch.nn.MSELoss


class NoLoss(Line):
    loss: Any = None


class Column(Classes):
    """One number for each example, and the default loss."""

    def model(self) -> Any:
        return torch.nn.Linear(3, 1)


class Silent(torch.nn.Linear):
    """Its forward has no return."""

    def forward(self, x: torch.Tensor) -> Any:
        super().forward(x)


class Forgetful(Classes):
    def model(self) -> Any:
        return Silent(3, 2)


class Several(torch.nn.Linear):
    """Its forward gives more than the scores."""

    def __init__(self, made: Any) -> None:
        super().__init__(3, 2)
        self.made = made

    def forward(self, x: torch.Tensor) -> Any:
        return self.made(super().forward(x))


class Pairs(Classes):
    def model(self) -> Any:
        return Several(lambda scores: (scores, scores))


class Named(Classes):
    def model(self) -> Any:
        return Several(lambda scores: {"scores": scores})


class Words(Classes):
    """Scores of two classes for each of four words."""

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Unflatten(1, (4, 2)))


def pair(y: Any) -> Any:
    return TensorDataset(torch.tensor(X), torch.tensor(y))


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (Vector(), r"Vector\.loss returned shape \(8,\): return one number as a tensor, the mean"),
        (NoOptimizer(), r"NoOptimizer\.optimizer returned str: return a torch\.optim\.Optimizer"),
        (
            Searching(),
            r"Searching\.optimizer returned LBFGS, whose step\(\) wants a closure .*torch\.optim\.Adam",
        ),
        (NotCalled(), r"NotCalled\.loss is a str: give something to be called"),
        (ClassOfLosses(), r"\.loss is the class MSELoss: give an object of it, such as MSELoss\(\)"),
        (NoLoss(), r"y is float64, and the default loss, the cross entropy, wants class numbers"),
        (Column(pair(Y[:, None])), r"Column: .* one number for each example, \(8, 1\).* give it two outputs"),
        (Column(pair(CLASSES)), r"Column: .* one number for each example, \(8, 1\)"),
        (Column(pair(0 * CLASSES)), r"Column: .* one number for each example, \(8, 1\)"),
        (Classes(pair(np.eye(2, dtype=int)[CLASSES])), r"Classes: y has the shape .* y\.argmax\(1\)"),
        (
            Pairs(),
            "Pairs: the model's forward returned a tuple of 2, .* wants one tensor, the scores: return",
        ),
        (
            Named(),
            r"Named: the model's forward returned a dict of 1, .* or give the App a loss\(self, output",
        ),
        (Forgetful(), "Forgetful: the model's forward returned nothing: return its output"),
        (
            Classes(pair(CLASSES + 1)),
            r"Classes\.train: IndexError: y has class numbers from 1 to 2, .* gives 2 scores, .* 0 to 1",
        ),
        (
            Classes(pair(CLASSES - 1)),
            r": y has class numbers from -1 to 0, .* number classes from 0 on",
        ),
        (Words(pair(np.ones((40, 4), int))), r"scores are \(8, 4, 2\) and y is \(8, 4\): classes come last"),
    ],
)
def test_what_cannot_be_learned_by_is_named(app: App, words: str) -> None:
    with pytest.raises(AppError, match=words):
        trained(app)


@pytest.mark.parametrize("app", [Pairs(), Named()])
def test_what_cannot_be_measured_is_named(app: App) -> None:
    with pytest.raises(AppError, match=r"the model's forward returned a .*, wants one tensor, the scores"):
        evaluated(app)


def test_an_evaluation_passes_over_the_labels_that_training_passes_over() -> None:
    labelled = np.arange(40) % 3 == 0
    app = Classes(Examples(X, np.where(labelled, CLASSES, -100)))
    found, expected = evaluated(app), evaluated(Classes(Examples(X[labelled], CLASSES[labelled])))
    assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match="no example has a label that counts: all of y are -100"):
        evaluated(Classes(Examples(X, np.full(40, -100))))


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        staticmethod(partial(torch.optim.SGD, momentum=0.0)),
        staticmethod(lambda params, plan: torch.optim.SGD(params, lr=plan.learning_rate)),
    ],
)
def test_the_learning_rate_is_the_plans(optimizer: Any) -> None:
    app = type("Own", (Classes,), {"optimizer": optimizer})()
    plan = LocalPlan(steps=5, learning_rate=0.3)
    np.testing.assert_array_equal(trained(app, plan=plan).delta, trained(Classes(), plan=plan).delta)


def test_functions_and_methods_are_told_apart() -> None:
    class Plain(Line):
        loss = lambda output, y: (output - y).pow(2).mean()  # noqa: E731
        metrics = lambda output, y: 3.0  # noqa: E731

    np.testing.assert_allclose(trained(Plain()).delta, trained(Line()).delta, rtol=1e-5)
    assert evaluated(Plain())["metric"] == 3.0
    assert Objective.of(Plain()).trains_otherwise == "loss"
    bare: Any = type("Bare", (), {name: vars(Plain)[name] for name in ("loss", "metrics")})
    bare.model, bare.data, bare.optimizer = Plain.model, Plain.data, Plain.optimizer
    without_base = app_of(bare, "bare")
    np.testing.assert_array_equal(trained(without_base).delta, trained(Plain()).delta)
    assert evaluated(without_base)["metric"] == 3.0
    assert not Objective.of(Classes()).trains_otherwise


def passed_on(function: Any) -> Any:
    """A decorator as people write it, without `functools.wraps`."""

    def wrapper(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return wrapper


def logged(function: Any) -> Any:
    """A decorator that holds more than it wraps: of these nobody knows which that is."""

    def log(self: Any, m: Any) -> None:
        raise AssertionError

    def wrapper(*args: Any) -> Any:
        return function(*args) if len(args) == 2 else log(*args)

    return wrapper


class Optional(Line):
    """Methods that need no more than two arguments, or say no number."""

    def loss(self, output: Any, y: Any = None) -> Any:
        return functional.mse_loss(output, y)

    def optimizer(self, params: Any, plan: Any = None) -> Any:
        return torch.optim.Adam(params, lr=plan.learning_rate)

    def metrics(self, *args: Any) -> dict[str, Any]:
        output, y = args
        return {"mae": (output - y).abs().mean()}


class Decorated(Line):
    """By wrappers of any arguments: of methods, and of a function that is none."""

    loss = passed_on(passed_on(Optional.loss))
    optimizer = passed_on(Optional.optimizer)
    metrics = passed_on(Optional.metrics)


class Bare(Line):
    """Functions that know of no App."""

    loss = passed_on(functional.mse_loss)

    def optimizer(params: Any, plan: Any, *, more: Any = None) -> Any:  # noqa: N805
        return torch.optim.Adam(params, lr=plan.learning_rate)

    def metrics(*args: Any) -> dict[str, Any]:
        return {"mae": (args[0] - args[1]).abs().mean()}


class Logged(Line):
    """A function in a wrapper that holds a helper with a `self`, too."""

    loss = logged(functional.mse_loss)


@pytest.mark.parametrize("app", [Optional(), Decorated(), Bare(), Logged()])
def test_whoever_takes_the_app_gets_it_however_many_arguments_it_needs(app: App) -> None:
    np.testing.assert_array_equal(trained(app).delta, trained(Line()).delta)
    assert evaluated(app) == pytest.approx(evaluated(Line()))


def test_classes_keep_their_accuracy_with_another_loss() -> None:
    class Smooth(Classes):
        loss = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    assert evaluated(Smooth())["accuracy"] == evaluated(Classes())["accuracy"]


def test_a_sequence_has_an_accuracy_of_at_most_one() -> None:
    class Sequence(Classes):
        def model(self) -> Any:
            return torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Unflatten(1, (6, 1)), Last())

    class Last(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.squeeze(2).transpose(1, 2)  # (batch, classes, length)

    x = np.tile(CLASSES[:, None], (1, 6))
    found = evaluated(Sequence(Examples(x, x)))
    assert 0.0 <= found["accuracy"] <= 1.0
    model = trainer_for(Sequence((x, x)))
    table = model.initial(0)["0.weight"]
    right = (table.argmax(1)[x] == x).mean()
    assert found["accuracy"] == pytest.approx(right)
