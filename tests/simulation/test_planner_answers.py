"""What a planner answers: no model is changed by it, and what is no part of the model is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from own_parts import forgotten

import anabranch as ab
from anabranch.core.errors import AppError
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import TensorSet, UnitMap, tensor_set, unit_map
from anabranch.strategies.submodels.registry import PLANNERS


@dataclass(frozen=True)
class Tasks:
    """How many there were."""

    count: int = 0
    seen: Any = 0


class Told:
    """A planner of halves that is no `GroupPlanner`; what is wrong comes in a subclass."""

    name: ClassVar[str] = "told"
    state_type: ClassVar[type[Any]] = Tasks

    def __init__(self, spec: ParamSpec) -> None:
        self.spec = spec

    @classmethod
    def of(cls, spec: ParamSpec, table: Any, seed: int) -> Any:
        return cls(spec)

    def halves(self, first: int) -> list[Any]:
        return [np.arange(first % 2, group.size, 2) for group in self.spec.groups]

    def init(self, vector: Any) -> Any:
        return Tasks()

    def plan(self, state: Any, vector: Any, applicant: Any) -> Any:
        return Tasks(state.count + 1), unit_map(self.spec, self.halves(state.count))

    def applied(self, state: Any, submodel: Any, version: int) -> Any:
        return state

    def released(self, state: Any, submodel: Any) -> Any:
        return state


ONE: Any = np.int64(1)
PART = r"plan must give a part that unit_map\(spec, \.\.\.\) has made, or None for the whole model, not a "
STATE = r"must return its own state, a Tasks, not a? ?"
Answer = Callable[..., Any]
CASES: dict[str, tuple[str, Answer, str]] = {
    "nothing": ("plan", lambda *_: None, "plan must return its state and a part of the model, not None"),
    "a part alone": (
        "plan",
        lambda of, *_: unit_map(of.spec, of.halves(0)),
        "plan must return its state and a part of the model, not a UnitMap",
    ),
    "units alone": ("plan", lambda of, state, *_: (state, of.halves(0)), f"{PART}list"),
    "by hand": ("plan", lambda of, state, *_: (state, UnitMap(of.spec, of.halves(0))), f"{PART}UnitMap"),
    "by hand, decreasing": (
        "plan",
        lambda of, state, *_: (state, UnitMap(of.spec, tuple((1, 0) for _ in of.spec.groups))),
        f"{PART}UnitMap",
    ),
    "by hand, beyond the model": (
        "plan",
        lambda of, state, *_: (state, UnitMap(of.spec, tuple((g.size,) for g in of.spec.groups))),
        f"{PART}UnitMap",
    ),
    "by hand, no groups": ("plan", lambda of, state, *_: (state, UnitMap(of.spec, ONE)), f"{PART}UnitMap"),
    "tensors": (
        "plan",
        lambda of, state, *_: (state, tensor_set(of.spec, [0])),
        f"{PART}TensorSet, or say of_tensors = True",
    ),
    "another model": (
        "plan",
        lambda of, state, *_: (state, UnitMap(ParamSpec.of({"w": np.zeros(3)}), ((0,),))),
        f"{PART}UnitMap",
    ),
    "no state": ("plan", lambda *_: (None, None), f"plan {STATE}None"),
    "none at first": ("init", lambda *_: None, f"init {STATE}None"),
    "none after an update": ("applied", lambda *_: None, f"applied {STATE}None"),
    "none after a loss": ("released", lambda *_: {}, f"released {STATE}dict"),
    "a set": (
        "plan",
        lambda of, state, *_: (Tasks(1, {"a"}), None),
        "the state would not outlive a restart: .*seen is of type set",
    ),
    "a number of numpy": (
        "plan",
        lambda of, state, *_: (Tasks(ONE), None),
        "the state would not outlive a restart: .*count is of type numpy.int64",
    ),
}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with forgotten():
        yield


def simulated(planner: type[Any]) -> ab.Run:
    settings = {"submodel.name": PLANNERS.named(planner), "server.lease_s": 1.0, "server.lease_min_s": 1.0}
    fleet, until = ab.Fleet(clients=4, dropout=0.5), ab.Until(updates=8)
    return ab.simulate("synthetic", strategy="fedasync", fleet=fleet, until=until, settings=settings)


@pytest.mark.parametrize("how", CASES)
def test_what_a_planner_answers_is_looked_at(how: str) -> None:
    """It was a traceback, a run without parts, or one that could not start again after a snapshot."""
    method, answer, words = CASES[how]
    with pytest.raises(AppError, match=f"^planner 'told': {words}"):
        simulated(type("Amiss", (Told,), {method: answer}))


@pytest.mark.parametrize(
    "of_whom",
    [lambda spec: tensor_set(ParamSpec.of({"w": np.zeros(3)}), [0]), lambda spec: TensorSet(spec, (99,))],
)
def test_one_of_tensors_is_not_told_to_be_so(of_whom: Answer) -> None:
    def plan(self: Told, state: Any, *_: Any) -> Any:
        return state, of_whom(self.spec)

    with pytest.raises(AppError, match=r"plan must give a part that tensor_set\(.* not a TensorSet$"):
        simulated(type("Amiss", (Told,), {"plan": plan, "of_tensors": True}))


@pytest.mark.parametrize("method", ["init", "plan"])
def test_no_planner_changes_the_model(method: str) -> None:
    """Each task halved it, and the run went on."""

    def scribbles(self: Any, *given: Any) -> Any:
        next(one for one in given if isinstance(one, np.ndarray))[:] *= 0.5
        return getattr(Told, method)(self, *given)

    with pytest.raises(AppError, match=r"^planner .*ValueError: .*read-only"):
        simulated(type("Scribbles", (Told,), {method: scribbles}))


def test_one_that_answers_as_it_should_comes_to_its_end() -> None:
    assert simulated(Told).result.updates_applied == 8
