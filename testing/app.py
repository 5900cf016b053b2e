"""What every App must do: workloads/app.py. What it learns, and how well, is its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.core.config.tables import FleetTable
from anabranch.core.model.params import digest
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App, Shard
from anabranch.workloads.calls import data_of
from anabranch.workloads.trainer import Trainer, trainer_for

PLAN = LocalPlan(steps=30, batch_size=32, learning_rate=0.1)


def start_of(trainer: Trainer, seed: int = 0) -> Any:
    """The first weights: the vector, and the tensors that nobody changes."""
    tensors = trainer.initial(seed)
    return trainer.spec.flatten(tensors), trainer.spec.frozen(tensors)


class AppConformance:
    """Write the fixture `app`: yours. `plan` is the training that it is tried with, on one of 4 devices."""

    plan: LocalPlan = PLAN

    @pytest.fixture
    def app(self) -> App:
        raise NotImplementedError("write the fixture `app`, which returns yours")

    @pytest.fixture
    def trainer(self, app: App) -> Trainer:
        return trainer_for(app, "cpu")

    def test_the_model_is_the_same_each_time_that_it_is_made(self, app: App, trainer: Trainer) -> None:
        first, again = trainer.initial(1), trainer.initial(1)
        named = {name: (array.shape, array.dtype) for name, array in first.items()}
        assert named == {t.name: (t.shape, np.dtype(t.dtype)) for t in trainer.spec.tensors}
        assert digest(trainer.spec.flatten(first)) == digest(trainer.spec.flatten(again))
        assert trainer_for(app).spec == trainer.spec

    def test_training_is_the_same_bit_for_bit_whatever_came_before(self, app: App, trainer: Trainer) -> None:
        vector, frozen = start_of(trainer)
        given = vector.copy()
        examples = data_of(app, Shard("train", 0, 4))
        first = trainer.train(vector, frozen, examples, self.plan, seed=5)
        trainer.train(vector + first.delta, frozen, data_of(app, Shard("train", 1, 4)), self.plan, seed=6)
        again = trainer.train(vector, frozen, data_of(app, Shard("train", 0, 4)), self.plan, seed=5)
        fresh = trainer_for(app).train(vector, frozen, examples, self.plan, seed=5)
        assert digest(first.delta) == digest(again.delta) == digest(fresh.delta)
        assert dict(first.metrics) == dict(again.metrics)
        np.testing.assert_array_equal(vector, given)

    def test_a_delta_covers_the_vector_in_its_dtype(self, app: App, trainer: Trainer) -> None:
        vector, frozen = start_of(trainer)
        result = trainer.train(vector, frozen, data_of(app, Shard("train", 0, 4)), self.plan, seed=0)
        assert result.delta.shape == (trainer.spec.size,)
        assert result.delta.dtype == trainer.spec.vector_dtype
        assert np.isfinite(result.delta).all()
        assert np.abs(result.delta).max() > 0, "the training has changed nothing"

    def test_an_evaluation_gives_numbers_and_changes_nothing(self, app: App, trainer: Trainer) -> None:
        vector, frozen = start_of(trainer)
        first = trainer.evaluate(vector, frozen, data_of(app, Shard("test")))
        assert first
        assert all(isinstance(value, float | int) for value in first.values())
        assert trainer.evaluate(vector, frozen, data_of(app, Shard("test"))) == first

    def test_a_device_has_the_same_examples_each_time(self, app: App) -> None:
        fleet = FleetTable(clients=4)
        one, again = (data_of(app, Shard("train", 2, 4, fleet, seed=3)) for _ in range(2))
        np.testing.assert_array_equal(one.x, again.x)
        np.testing.assert_array_equal(one.y, again.y)
