"""What every built-in App promises, checked on each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.config.tables import FleetTable
from anabranch.core.model.params import digest
from anabranch.testing import AppConformance
from anabranch.testing.app import PLAN, start_of
from anabranch.workloads import App, Shard, Trainer, load_app, trainer_for
from anabranch.workloads.registry import BUILT_IN

SHORT = replace(
    PLAN, steps=6
)  # as good as a longer one where results are told apart, or found to be the same


@pytest.fixture(params=sorted(BUILT_IN))
def app(request: pytest.FixtureRequest, fashion_folder: Path) -> App:
    return load_app(request.param, str(fashion_folder))


@pytest.fixture
def trainer(app: App) -> Trainer:
    return trainer_for(app, "cpu")


class TestApps(AppConformance):
    plan = SHORT

    @pytest.fixture
    def app(self, app: App) -> App:
        return app


def test_initial_weights_depend_on_the_seed(trainer: Trainer) -> None:
    first, other = (digest(trainer.spec.flatten(trainer.initial(seed))) for seed in (1, 2))
    assert first != other


def test_another_seed_is_another_training(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    examples = app.data(Shard("train", 0, 4))
    one, other = (trainer.train(vector, frozen, examples, SHORT, seed=seed).delta for seed in (5, 7))
    assert digest(one) != digest(other)


def test_the_planned_steps_are_done(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    assert trainer.train(vector, frozen, app.data(Shard("train")), PLAN, seed=0).steps == PLAN.steps
    assert trainer.spec.vector_dtype == np.float32


def test_training_lowers_the_loss_on_held_out_data(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    held_out = app.data(Shard("validation"))
    before = trainer.evaluate(vector, frozen, held_out)
    delta = trainer.train(vector, frozen, app.data(Shard("train")), PLAN, seed=0).delta
    after = trainer.evaluate(vector + delta, frozen, held_out)
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > before["accuracy"]


def test_evaluation_gives_figures_in_range_and_changes_nothing(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    first = trainer.evaluate(vector, frozen, app.data(Shard("test")))
    assert 0.0 <= first["accuracy"] <= 1.0
    assert first["loss"] > 0.0
    assert trainer.evaluate(vector, frozen, app.data(Shard("test"))) == first


def test_the_proximal_term_holds_the_weights_back(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    examples = app.data(Shard("train"))
    parts = trainer.spec.slices.items()
    weights = np.concatenate([np.r_[where] for name, where in parts if "running" not in name])
    free, a_little, much = (
        np.linalg.norm(
            trainer.train(vector, frozen, examples, replace(PLAN, proximal_mu=mu), seed=0).delta[weights]
        )
        for mu in (0.0, 0.1, 5.0)
    )
    assert a_little < 0.99 * free
    assert much < 0.6 * free


def test_momentum_and_weight_decay_reach_the_optimiser(app: App, trainer: Trainer) -> None:
    vector, frozen = start_of(trainer)
    examples = app.data(Shard("train", 0, 4))
    plans = [SHORT, replace(SHORT, momentum=0.9), replace(SHORT, weight_decay=0.1)]
    results = {digest(trainer.train(vector, frozen, examples, plan, seed=0).delta) for plan in plans}
    assert len(results) == 3


def test_the_roles_have_different_examples_and_the_split_is_kept(app: App) -> None:
    fleet = FleetTable(clients=5, split="dirichlet")
    parts = [app.data(Shard("train", i, 5, fleet, seed=3)) for i in range(5)]
    validation, test = app.data(Shard("validation", seed=3)), app.data(Shard("test"))
    rows = [{x.tobytes() for x in part.x} for part in (*parts, validation, test)]
    assert sum(map(len, rows)) - len(set.union(*rows)) < 0.01 * sum(map(len, rows))  # a few true duplicates
    assert len(validation) == round((sum(map(len, parts)) + len(validation)) / 10)


def test_data_is_as_the_model_takes_it(app: App) -> None:
    examples = app.data(Shard("train", 0, 4))
    assert examples.x.dtype == np.float32
    assert examples.y.dtype == np.int64
    assert abs(float(examples.x.mean())) < 2.0
