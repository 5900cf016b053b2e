"""Tensors in turns: whose turn it is, what is sent, what late updates of the other turn come to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import decision

from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.planner import Applicant
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import TensorSet
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.alternate import Alternate
from anabranch.strategies.submodels.registry import make_planner

NAMES = ("enc.parametrizations.weight.0.A", "enc.parametrizations.weight.0.B", "head.bias", "enc.count")
SPEC = ParamSpec.of({n: np.zeros(2, np.int64 if n.endswith("count") else np.float32) for n in NAMES})
PEFT = ("q.lora_A.default.weight", "q.lora_B.default.weight", "q.base_layer.weight", "score.weight")
A, B, HEAD = NAMES[:3]


def at(planner: Any, version: int) -> list[str]:
    part = planner.plan(planner.init(np.zeros(6)), np.zeros(6), Applicant(None, version, 0))[1]
    assert isinstance(part, TensorSet)
    return part.names


def of_table(spec: ParamSpec, strategy: str = "fedbuff", **table: Any) -> Any:
    config = merge([("test", {"submodel": {"name": "alternate", **table}})])
    return make_planner(spec, make_strategy(strategy, {}), config)


def test_halves_of_adapters_take_turns_and_the_rest_is_in_each() -> None:
    planner = of_table(SPEC)
    assert [at(planner, v) for v in (0, 3, 4, 7, 8)] == [
        [B, HEAD],
        [B, HEAD],
        [A, HEAD],
        [A, HEAD],
        [B, HEAD],
    ]
    assert [at(of_table(SPEC, period=1), v) for v in (0, 1, 2)] == [[B, HEAD], [A, HEAD], [B, HEAD]]


def test_adapters_of_peft_are_known_and_what_is_frozen_is_in_no_turn() -> None:
    spec = ParamSpec.of({n: np.zeros(2, np.float32) for n in PEFT}, trained=[*PEFT[:2], PEFT[3]])
    assert [at(of_table(spec), v) for v in (0, 4)] == [[PEFT[1], PEFT[3]], [PEFT[0], PEFT[3]]]


def test_turns_may_be_of_any_names_and_more_than_two() -> None:
    planner = of_table(SPEC, turns=["head.*", "*.A", "*.B"], period=2)
    assert [at(planner, v) for v in (0, 2, 4, 6)] == [[HEAD], [A], [B], [HEAD]]


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (["*.A"], r"submodel\.turns has 1 pattern: two turns are needed, or none at all"),
        (["*.A", "body.*"], r"no trained tensor is named body\.\*: name in submodel\.turns a pattern"),
        (["*.A", "*.count"], r"no trained tensor is named \*\.count"),
        (["enc.*", "*.A"], rf"submodel\.turns: '{A}' is in two turns: let one pattern name it"),
    ],
)
def test_turns_that_do_not_fit_are_refused_with_the_fix(turns: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of_table(SPEC, turns=turns)


def test_a_model_without_adapters_and_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no trained tensor is named \*\.parametrizations\.\*\.B or"):
        of_table(ParamSpec.of({"w": np.zeros(2, np.float32)}))
    with pytest.raises(ConfigError, match=r"submodel\.period must be greater than 0"):
        of_table(SPEC, period=0)
    with pytest.raises(ConfigError, match="'fadas' takes whole models only"):
        of_table(SPEC, "fadas")
    with pytest.raises(ConfigError, match=r"client\.push = 'elastic' trains the whole model"):
        merge([("test", {"submodel": {"name": "alternate"}, "client": {"push": "elastic"}})])


class Turns:
    """An engine of them, whose devices are asked by hand."""

    def __init__(self, **params: Any) -> None:
        planner = Alternate(SPEC, period=2)
        strategy = make_strategy("fedbuff", params)
        self.engine = Engine(SPEC, strategy, EngineSettings(), np.zeros(6, np.float32), planner=planner)

    def ask(self, name: str) -> None:
        self.engine.handle(ev.Enrolled(0.0, name, Capability()))
        self.engine.handle(ev.TaskAsked(0.0, Ask(name, f"task-{name}")))

    def push(self, name: str, value: float) -> Any:
        task = self.engine.ledger.tasks[f"task-{name}"]
        delta = np.full(4, value, np.float32)
        update = Update(f"u-{name}", task.task_id, name, task.base_version, 1, delta, task.submodel)
        return decision(self.engine.handle(ev.UpdateArrived(1.0, update, ev.Payload("00" * 32, 16))))


def test_a_late_update_of_the_other_turn_counts_what_changed_its_tensors() -> None:
    """B and head twice, then A and head: a late one has missed two versions of B, three of the head."""
    run = Turns(buffer_size=1, staleness={"name": "polynomial", "a": 0.5})
    run.ask("late")
    for name in ("a", "b", "c"):
        run.ask(name)
        assert run.push(name, 1.0).staleness == 0
    assert run.engine.vector.tolist() == [1, 1, 2, 2, 3, 3]  # A, B, head
    found = run.push("late", 2.0)
    assert (found.staleness, found.weight) == (3, pytest.approx(0.5))
    assert run.engine.vector.tolist() == [1, 1, 3, 3, 4, 4]


def test_a_buffer_of_both_turns_is_divided_on_each_half_by_its_own_updates() -> None:
    run = Turns(buffer_size=2, staleness={"name": "constant"})
    for name in "abcde":
        run.ask(name)
    for name in "abcd":
        run.push(name, 1.0)
    assert run.engine.version == 2
    run.ask("f")  # of the turn of A
    run.push("e", 4.0)
    run.push("f", 8.0)
    assert run.engine.vector.tolist() == [8, 8, 6, 6, 8, 8]
