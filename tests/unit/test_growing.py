"""Models that grow: when each stage begins, what its tasks train and need, what becomes of late updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import decision

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.planner import Applicant
from anabranch.core.errors import ConfigError
from anabranch.core.model.growing import needed_for, stage_in, stage_set
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.stages import Growth, ModelStage
from anabranch.core.model.submodels import TensorSet, tensor_set, unit_map
from anabranch.core.model.updates import Ask, Capability, Update, Verdict
from anabranch.host.build import Blueprint, device_tables
from anabranch.strategies.registry import make_strategy, strategy_of
from anabranch.strategies.submodels.progressive import Progressive, grown
from anabranch.strategies.submodels.registry import make_planner
from anabranch.testing.models import SPEC as UNITS

SHAPES = {
    "e1": (2,),
    "g1": (1,),
    "e2.w": (3,),
    "e2.b": (1,),
    "g2": (2,),
    "e3": (2,),
    "g3": (1,),
    "e4": (1,),
    "g4": (3,),
}
ARRAYS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
STAGES = tuple(ModelStage(f"e{s}", f"g{s}") for s in (1, 2, 3, 4))
SPEC = ParamSpec.of(ARRAYS, stages=STAGES)
GOLDEN = (0.125, 0.25, 0.375)


def config(versions: int = 3000, grow_at: Any = GOLDEN, warm_up: int = 25, **tables: Any) -> Config:
    table = {"name": "progressive", "grow_at": list(grow_at), "warm_up_versions": warm_up}
    return merge([("base", {"submodel": table, "run": {"versions_max": versions}}), ("test", tables)])


def planner(settings: Config, spec: ParamSpec = SPEC) -> Progressive:
    found = make_planner(spec, strategy_of(settings), settings)
    assert isinstance(found, Progressive)
    return found


def names_at(of: Progressive, version: int) -> list[str]:
    part = of.plan(of.init(np.zeros(16)), np.zeros(16), Applicant(None, version, 0))[1]
    assert isinstance(part, TensorSet)
    return part.names


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "stage", "warms_up"),
    [
        (0, 1, False), (374, 1, False),
        (375, 2, True), (399, 2, True), (400, 2, False), (749, 2, False),
        (750, 3, True), (774, 3, True), (775, 3, False), (1124, 3, False),
        (1125, 4, True), (1149, 4, True), (1150, 4, False), (9999, 4, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("grow_at", [GOLDEN, ()])
def test_golden(version: int, stage: int, warms_up: bool, grow_at: Any) -> None:
    growth = grown(config(grow_at=grow_at), SPEC)
    assert growth is not None
    assert (growth.stage_of(version), growth.warms_up(version)) == (stage, warms_up)


def test_a_budget_of_updates_counts_as_the_versions_that_they_make() -> None:
    tables: dict[str, Any] = {"run": {"versions_max": 0, "updates_max": 300}}
    of_ten = grown(config(**tables), SPEC)
    assert of_ten == Growth((0, 4, 8, 11), 25)  # .125, .25 and .375 of 30, to the nearest even one
    rounds = {"name": "fedavg", "clients_per_round": 3}
    assert grown(config(strategy=rounds, **tables), SPEC) == Growth((0, 12, 25, 38), 25)
    both = grown(config(run={"versions_max": 80, "updates_max": 300}), SPEC)
    assert both == Growth((0, 10, 20, 30), 25)
    assert grown(config(submodel={"name": "none"}), SPEC) is None


def test_a_stage_that_is_passed_over_comes_with_the_next_one() -> None:
    growth = Growth((0, 5, 5, 9), 2)
    assert [growth.stage_of(v) for v in (4, 5, 8, 9)] == [1, 3, 3, 4]
    assert [growth.before(v) for v in (4, 5, 9)] == [0, 1, 3]
    of = Progressive(SPEC, growth)
    assert names_at(of, 5) == ["e2.w", "e2.b", "e3", "g3"]
    assert names_at(of, 9) == ["e4", "g4"]


# --- what ----------------------------------------------------------------------------------------


def test_a_task_is_of_the_blocks_so_far_and_of_one_head_or_of_what_is_new() -> None:
    of = planner(config(versions=80, warm_up=2))
    assert names_at(of, 0) == names_at(of, 9) == ["e1", "g1"]
    assert names_at(of, 10) == names_at(of, 11) == ["e2.w", "e2.b", "g2"]
    assert names_at(of, 12) == ["e1", "e2.w", "e2.b", "g2"]
    assert names_at(of, 31) == ["e4", "g4"]
    assert names_at(of, 79) == ["e1", "e2.w", "e2.b", "e3", "e4", "g4"]


def test_a_run_that_begins_in_a_later_stage_does_not_warm_up() -> None:
    of = planner(config(versions=80, grow_at=(0, 0.001, 0.002), warm_up=5))
    assert names_at(of, 0) == ["e1", "e2.w", "e2.b", "e3", "e4", "g4"]


def test_what_a_device_needs_is_the_blocks_below_too() -> None:
    for stage in (1, 2, 3, 4):
        whole = stage_set(SPEC, stage)
        for part in (whole, stage_set(SPEC, stage, stage - 1)):
            assert (stage_in(part), needed_for(part)) == (stage, whole)
    assert stage_set(SPEC, 3).names == ["e1", "e2.w", "e2.b", "e3", "g3"]
    plain = ParamSpec.of(ARRAYS)
    assert (stage_in(tensor_set(plain, (0, 1))), needed_for(tensor_set(plain, (0, 1)))) == (0, None)
    assert (stage_in(None), needed_for(None)) == (0, None)
    units = unit_map(UNITS, [(0, 1), (0,)])
    assert (stage_in(units), needed_for(units)) == (0, units)


def test_with_each_version_goes_what_nobody_trains_so_that_all_of_it_is_fetched() -> None:
    counted = ParamSpec.of({**ARRAYS, "count": np.zeros((), np.int64)}, stages=STAGES)
    assert needed_for(stage_set(counted, 2)) is None
    frozen = ParamSpec.of({**ARRAYS, "still": np.zeros(2, np.float32)}, trained=list(ARRAYS), stages=STAGES)
    assert needed_for(stage_set(frozen, 2)) == stage_set(frozen, 2)  # it travels apart


def test_stages_are_in_the_manifest_and_no_part_of_the_layout() -> None:
    again = ParamSpec.from_json(SPEC.to_json())
    assert again == SPEC
    assert again.stages[1] == ModelStage(["e2.w", "e2.b"], ["g2"])  # of the module, its tensors
    assert again.layout_hash == ParamSpec.of(ARRAYS).layout_hash
    assert "stages" not in ParamSpec.of(ARRAYS, buffers=["e1"]).to_json()


def test_a_model_of_one_stage_is_trained_whole() -> None:
    one = ParamSpec.of({"a": np.zeros(2), "b": np.zeros(3)}, stages=[ModelStage("a", "b")])
    of = planner(config(grow_at=()), one)
    assert of.plan(of.init(np.zeros(5)), np.zeros(5), Applicant(None, 7, 0))[1] is None
    assert grown(config(grow_at=()), one) is None


# --- what is wrong -------------------------------------------------------------------------------


def changed(number: int, **names: Any) -> list[ModelStage]:
    """The stages, one of them with other names."""
    found = list(STAGES)
    found[number - 1] = replace_stage(found[number - 1], **names)
    return found


def replace_stage(stage: ModelStage, blocks: Any = None, head: Any = None) -> ModelStage:
    return ModelStage(stage.blocks if blocks is None else blocks, stage.head if head is None else head)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (changed(2, blocks=["e2", "e1"]), "'e1' is in the blocks of stage 1 and in the blocks of stage 2"),
        (changed(3, head="g2"), "'g2' is in the head of stage 2 and in the head of stage 3: name it once"),
        (changed(3, head=["g3", "e4"]), "'e4' is in the head of stage 3 and in the blocks of stage 4"),
        (changed(2, blocks=["e2.w"]), r"'e2\.b' is in no stage: name it among its blocks or in its head"),
        (changed(4, blocks=["e5"]), "stage 4 names 'e5': the model has no such tensor or module"),
        (changed(1, head=[]), "stage 1 needs blocks and a head"),
        (changed(1, blocks=["e1", "count"]), "stage 1 names 'count', which is frozen"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: list[ModelStage], words: str) -> None:
    arrays: dict[str, Any] = {**ARRAYS, "count": np.zeros((), np.int64)}
    with pytest.raises(ConfigError, match=words):
        ParamSpec.of(arrays, stages=stages)


def test_a_frozen_block_and_a_buffer_are_in_no_stage() -> None:
    with pytest.raises(ConfigError, match="stage 3 names 'e3', which is frozen: name what is trained"):
        ParamSpec.of(ARRAYS, trained=[n for n in ARRAYS if n != "e3"], stages=STAGES)
    with pytest.raises(ConfigError, match=r"'e2\.b' is a buffer.*use norms that keep none, such as"):
        ParamSpec.of(ARRAYS, buffers=["e2.b"], stages=STAGES)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"submodel": {"grow_at": [0.1, 0.2]}}, r"grow_at has 2 numbers, but the model has 4 stages: 3 are"),
        ({"submodel": {"grow_at": [0.1, 0.3, 0.2]}}, r"grow_at must be increasing shares of the run"),
        ({"submodel": {"grow_at": [0.1, 0.2, 0.2]}}, r"grow_at must be increasing shares of the run"),
        ({"submodel": {"grow_at": [0.1, 0.2, 1.0]}}, r"grow_at must be increasing shares of the run"),
        ({"submodel": {"grow_at": [-0.1, 0.2, 0.3]}}, r"grow_at must be increasing shares of the run"),
        ({"submodel": {"warm_up_versions": -1}}, r"submodel\.warm_up_versions must not be negative"),
        ({"run": {"versions_max": 0}}, r"set run\.versions_max, or run\.updates_max"),
        (
            {"run": {"versions_max": 0, "updates_max": 9}, "strategy": {"name": "teasq_drop"}},
            r"how many updates of 'teasq_drop' make one is not known before: set run\.versions_max",
        ),
        ({"strategy": {"name": "ca2fl"}}, "'ca2fl' takes whole models only"),
        ({"submodel": {"name": "fragments"}}, "but this one has stages, with heads that the whole does not"),
        ({"client": {"push": "elastic"}}, r"set submodel\.name = 'none', or 'fragments'"),
        ({"privacy": {"noise": 1.0, "clip": 1.0}}, "'progressive' has devices send other parts"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_with_the_fix(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Blueprint.of(config(**tables), SPEC, key=bytes(32)).parts()


def test_a_model_without_stages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no stages: write stages\(self, model\) in the App"):
        make_planner(ParamSpec.of(ARRAYS), make_strategy("fedbuff", {}), config())


def test_a_device_is_told_that_the_model_grows() -> None:
    assert device_tables(config())["submodel"] == {"name": "progressive"}
    assert "submodel" not in device_tables(config(submodel={"name": "none"}))


# --- late updates --------------------------------------------------------------------------------


STRATEGIES: dict[str, dict[str, Any]] = {
    "fedbuff": {"name": "fedbuff", "buffer_size": 1, "staleness": {"name": "polynomial", "a": 0.5}},
    "fedasync": {"name": "fedasync"},
    "qafel": {"name": "qafel", "buffer_size": 1},
    "teasq_drop": {"name": "teasq_drop", "cache_size": 1},
}


def trained(engine: Engine, task_id: str, delta: Any, now: float) -> Any:
    """What comes of a task."""
    task = engine.ledger.tasks[task_id]
    update = Update(
        update_id=task_id, task_id=task_id, client_id=task.client_id, base_version=task.base_version,
        delta=delta, examples=4, local_steps=1, submodel=task.submodel,
    )  # fmt: skip
    return engine.handle(ev.UpdateArrived(now, update, ev.Payload("00" * 32, 4 * update.delta.size)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_late_update_of_an_earlier_stage_changes_its_blocks_and_its_head_alone(name: str) -> None:
    settings = config(versions=8, grow_at=(0.25, 0.5, 0.75), warm_up=1, strategy=STRATEGIES[name])
    engine = Blueprint.of(settings, SPEC).engine(ARRAYS)
    for client in ("a", "b"):
        engine.handle(ev.Enrolled(0.0, client, Capability()))
    engine.handle(ev.TaskAsked(0.0, Ask("b", "late")))
    seen = []
    for number in range(7):
        engine.handle(ev.TaskAsked(float(number), Ask("a", f"task-{number}")))
        part = engine.ledger.tasks[f"task-{number}"].submodel
        assert isinstance(part, TensorSet)
        seen.append(part.names)
        trained(engine, f"task-{number}", np.ones(part.size, np.float32), float(number))
    assert engine.version == 7
    assert seen[:4] == [["e1", "g1"], ["e1", "g1"], ["e2.w", "e2.b", "g2"], ["e1", "e2.w", "e2.b", "g2"]]
    before = engine.vector.copy()
    late = decision(trained(engine, "late", np.ones(3, np.float32), 9.0))
    # Of the seven versions 3, 5 and 7 changed none of its tensors: they warmed up what was new.
    assert (late.verdict, late.staleness) == (Verdict.PUBLISHED, 4)
    moved = engine.vector != before
    assert {name for name, at in SPEC.slices.items() if moved[at].any()} == {"e1", "g1"}
    assert engine.version == 8


def test_fedavg_takes_stages_in_rounds() -> None:
    rounds = {"name": "fedavg", "clients_per_round": 2, "over_selection": 1.0, "deadline_s": 0.0}
    engine = Blueprint.of(config(versions=8, warm_up=0, strategy=rounds), SPEC).engine(ARRAYS)
    for client in ("a", "b"):
        engine.handle(ev.Enrolled(0.0, client, Capability()))
    sizes = []
    for version in range(4):
        for client in ("a", "b"):
            engine.handle(ev.TaskAsked(float(version), Ask(client, f"{client}-{version}")))
        for client in ("a", "b"):
            part = engine.ledger.tasks[f"{client}-{version}"].submodel
            assert isinstance(part, TensorSet)
            sizes.append(part.size)
            trained(engine, f"{client}-{version}", np.ones(part.size, np.float32), float(version))
    assert engine.version == 4
    assert sizes == [3, 3, 8, 8, 9, 9, 12, 12]
    # What one stage has taught goes on in the next: a block is in all rounds since it came.
    values = SPEC.unflatten(engine.vector)
    assert {name: set(value.tolist()) for name, value in values.items()} == {
        "e1": {4.0}, "e2.w": {3.0}, "e2.b": {3.0}, "e3": {2.0}, "e4": {1.0},
        "g1": {1.0}, "g2": {1.0}, "g3": {1.0}, "g4": {1.0},
    }  # fmt: skip
