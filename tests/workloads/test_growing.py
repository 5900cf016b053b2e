"""Training and measuring a module at one of its stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from growing_app import HEADS, NEEDED, App, names_of

from anabranch.core.errors import AppError
from anabranch.core.model.growing import stage_set
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples, Shard, app_of
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.calls import data_of
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training, trainer_for

PLAN = LocalPlan(steps=4, momentum=0.9, weight_decay=0.1, proximal_mu=0.3)
SHARD = Shard("train", 0, 4)


@pytest.fixture(scope="module")
def trainer() -> TorchTrainer:
    return TorchTrainer(App())


@pytest.fixture(scope="module")
def examples() -> Examples:
    return data_of(App(), SHARD)


def delta(trainer: TorchTrainer, examples: Examples, vector: Any, part: Any) -> Any:
    return trainer.train(vector, {}, examples, PLAN, 1, None, part).delta


def changed(trainer: TorchTrainer, found: Any) -> set[str]:
    return {name for name, at in trainer.spec.slices.items() if found[at].any()}


def test_a_stage_trains_its_blocks_and_its_head_and_reads_no_others(
    trainer: TorchTrainer, examples: Examples
) -> None:
    spec, vector = trainer.spec, trainer.spec.flatten(trainer.initial(0))
    expected = {1: names_of((1,), 1), 2: names_of((1, 2), 2), 3: names_of((1, 2, 3), 3)}
    for stage, names in expected.items():
        part = stage_set(spec, stage)
        assert part.size == NEEDED[stage - 1]
        found = delta(trainer, examples, vector, part)
        assert changed(trainer, found) == names
        # What a device does not fetch may be anything.
        other = np.full_like(vector, np.nan)
        other[part.indices] = vector[part.indices]
        assert np.array_equal(delta(trainer, examples, other, part)[part.indices], found[part.indices])
    assert trainer.resident(None).module.stage == 3


def test_what_is_new_is_trained_on_top_of_what_stays(trainer: TorchTrainer, examples: Examples) -> None:
    spec, vector = trainer.spec, trainer.spec.flatten(trainer.initial(0))
    found = delta(trainer, examples, vector, stage_set(spec, 3, 2))
    assert changed(trainer, found) == names_of((3,), 3)
    # It is read: with another first block the third learns something else.
    other = vector.copy()
    other[spec.slices["blocks.0.weight"]] += 0.1
    assert not np.array_equal(delta(trainer, examples, other, stage_set(spec, 3, 2)), found)


def test_the_last_stage_from_the_start_is_the_whole_model_to_the_bit(
    trainer: TorchTrainer, examples: Examples
) -> None:
    plan = LocalPlan(steps=4, momentum=0.9)  # decay would move heads that nobody reads
    vector = trainer.spec.flatten(trainer.initial(0))
    whole = trainer.train(vector, {}, examples, plan, 1)
    grown = trainer.train(vector, {}, examples, plan, 1, None, stage_set(trainer.spec, 3))
    assert np.array_equal(whole.delta, grown.delta)
    assert whole.metrics == grown.metrics


def test_a_measurement_is_of_the_stage_that_it_names(trainer: TorchTrainer, examples: Examples) -> None:
    arrays = trainer.initial(0)
    vector = trainer.spec.flatten(arrays)
    x = torch.relu(
        torch.from_numpy(examples.x) @ torch.tensor(arrays["blocks.0.weight"]).T
        + torch.tensor(arrays["blocks.0.bias"])
    )
    scores = x @ torch.tensor(arrays["heads.0.weight"]).T + torch.tensor(arrays["heads.0.bias"])
    expected = float(torch.nn.functional.cross_entropy(scores, torch.from_numpy(examples.y)))
    assert trainer.evaluate(vector, {}, examples, 1)["loss"] == pytest.approx(expected, rel=1e-5)
    last = trainer.evaluate(vector, {}, examples)
    assert last == trainer.evaluate(vector, {}, examples, 3)
    assert last["loss"] != trainer.evaluate(vector, {}, examples, 1)["loss"]


def test_an_early_stage_costs_less_and_the_last_one_what_the_whole_costs(
    trainer: TorchTrainer, examples: Examples
) -> None:
    costs = [trainer.step_cost(stage_set(trainer.spec, s), examples) for s in (1, 2, 3)]
    # Forward, gradients of weights, and gradients of what goes into a layer, which the first has no use for.
    counted = [3 * sum(sizes) - 64 * 8 for sizes in ((64 * 8, 80), (64 * 8, 48, 60), (64 * 8, 48, 30, 50))]
    assert costs == [pytest.approx(count / counted[-1]) for count in counted]
    warming = trainer.step_cost(stage_set(trainer.spec, 3, 2), examples)
    assert warming < costs[2]
    assert HEADS == (90, 70, 60)


def test_a_stack_leaves_stages_alone(trainer: TorchTrainer, examples: Examples) -> None:
    vector = trainer.spec.flatten(trainer.initial(0))
    training = Training(vector, examples, PLAN, 1, None, stage_set(trainer.spec, 1))
    why = BatchedTraining(trainer).objection(training, {})
    assert why == "its tasks are of some tensors, and a stack trains all"


class Standing(App):
    """Its module has no stage."""

    def model(self) -> Any:
        return torch.nn.Linear(64, 10)

    def stages(self, model: Any) -> list[ModelStage]:
        return [ModelStage("weight", "bias")]


class Odd(App):
    def stages(self, model: Any) -> Any:
        return [("blocks.0", "heads.0")]


class Short(App):
    def stages(self, model: Any) -> list[ModelStage]:
        return super().stages(model)[:2]


class Lacking(App):
    def stages(self, model: Any) -> list[ModelStage]:
        first, second, third = super().stages(model)
        return [first, second, ModelStage(third.blocks, "heads.2.weight")]


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (Standing, r"says 1, and model\.stage is not there: set self\.stage = 1 in the module"),
        (Short, r"says 2, and model\.stage is 3: set self\.stage = 2 in the module"),
        (Odd, r"something else than stages: return ModelStage\(blocks, head\) each"),
        (Lacking, r"'heads\.2\.bias' is in no stage"),
    ],
)
def test_an_app_whose_stages_do_not_fit_is_told(app: Any, words: str) -> None:
    with pytest.raises(AppError, match=words):
        trainer_for(app())


def test_an_adapted_object_may_say_stages_too() -> None:
    class Plain:
        model, data, stages = App().model, App().data, App().stages

    assert trainer_for(app_of(Plain(), "plain")).spec.stages == trainer_for(App()).spec.stages
