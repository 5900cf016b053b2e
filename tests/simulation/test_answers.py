"""What a strategy answers: what no device, log or report could have ends the run with its name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from own_parts import forgotten

import anabranch as ab
from anabranch.core.config.tables import FleetTable
from anabranch.core.engine.strategy import Refusal, Step, rejected
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.updates import Reason
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.registry import STRATEGIES
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.synthetic import Synthetic


@dataclass(frozen=True)
class Fired:
    """Whether the timer has."""

    fired: bool = False


def scribbles(state: Any, vector: Any) -> Step:
    """Who fetched this version before has another model than who fetches it after."""
    vector += 1
    return Step(Fired(True))


WHOLE, RATE, NOW = "give a whole number, an int from", "give a finite number, a float from 0 on", 0.25
COME = "after on_timer the timer is 0.25, which has come: it was 0.25; give a state of which it is"
DEVICES = "values that are not finite, the first in tensor 'hidden.weight': devices refuse such a model"
MINE: Any = "mine"
NOTHING: Any = None
# What is answered where, and what is said of it.
CASES: dict[str, tuple[str, Any, str]] = {
    "half a step": ("local", {"steps": 2.5}, f"plan gives steps = 2.5: {WHOLE} 0 to 4294967295"),
    "a step of numpy": ("local", {"steps": np.int64(3)}, f"plan gives steps = np.int64(3): {WHOLE} 0 to "),
    "no number of steps": ("local", {"steps": None}, "plan gives steps = None: "),
    "more than a task has": ("local", {"steps": 2**32}, "plan gives steps = 4294967296: "),
    "nothing to train": ("local", {"steps": 0, "epochs": 0}, "plan gives neither epochs nor steps: a device"),
    "empty batches": ("local", {"batch_size": 0}, f"plan gives batch_size = 0: {WHOLE} 1 to "),
    "no rate": ("local", {"learning_rate": float("nan")}, f"plan gives learning_rate = nan: {RATE}"),
    "a rate in letters": ("local", {"momentum": "0.9"}, f"plan gives momentum = '0.9': {RATE}"),
    "no training": ("plan", {"local": None}, "plan gives None for its local training: give a LocalPlan"),
    "no uplink": ("plan", {"uplink": None}, "plan gives None for its uplink: give a codec, such as 'raw'"),
    "half an uplink": (
        "plan",
        {"uplink": "topk("},
        "plan gives an uplink that is none: codec 'topk(': write",
    ),
    "its own reason": ("admit", Refusal(MINE, "so"), "admit refuses with the reason 'mine': give one of"),
    "no reason": (
        "admit",
        Refusal(Reason.NONE, "so"),
        "admit refuses with the reason <Reason.NONE: ''>: give",
    ),
    "no words": (
        "admit",
        Refusal(Reason.PAUSED, NOTHING),
        "admit refuses with None for its detail: say why in a",
    ),
    "a verdict's text": (
        "decision",
        {"verdict": "published"},
        "step decides 'published': give one of Verdict",
    ),
    "a short weight": (
        "decision",
        {"weight": np.float32(1)},
        "step decides with a weight of np.float32(1.0): ",
    ),
    "a delay of numpy": (
        "decision",
        {"staleness": np.int64(0)},
        "step decides with a staleness of np.int64(0)",
    ),
    "heard in letters": (
        "step",
        {"heard": ("a",)},
        "step gives ('a',) for how much of each update was heard",
    ),
    "heard as no number": (
        "step",
        {"heard": (float("nan"),)},
        "step gives (nan,) for how much of each update was heard: give finite floats",
    ),
    "heard by nobody": ("step", {"heard": None}, "step gives None for how much of each update was heard"),
    "not a number": ("model", np.nan, f"version 1 has {DEVICES}"),
    "infinite": ("model", np.inf, f"version 1 has {DEVICES}"),
    "no state": ("init", None, "init must return its own state, a "),
    "none is left": ("on_lost", None, "on_lost must return its own state, a "),
    "a word": ("on_timer", lambda state, vector: "tick", "on_timer must return None or a Step, not a str"),
    "a step of none": (
        "on_timer",
        lambda state, vector: Step(None),
        "on_timer must return its own state, a ",
    ),
    "a short model": (
        "on_timer",
        lambda state, vector: Step(state, vector[:-1].copy()),
        "on_timer must give a vector of 1002 values of float32, as its argument is, not an array",
    ),
    "a timer that stays": ("on_timer", lambda state, vector: None, COME),
    "a timer of versions": ("on_timer", Step, COME),
    "a timer that scribbles": (
        "on_timer",
        scribbles,
        "on_timer changed `vector` and gave no version: devices that fetch version",
    ),
    "soon": ("timer", "soon", "timer must return None or a time in seconds, not 'soon'"),
    "never": ("timer", float("nan"), "timer must return None or a time in seconds, not nan"),
}


@dataclass(frozen=True)
class Told(MixingStrategy):
    """Answers amiss in one method: see `CASES`."""

    name: ClassVar[str] = "told"
    state_type: ClassVar[type[Any]] = Fired
    needs_base: ClassVar[bool] = False  # else a timer gets a copy of the model
    how: str = ""

    def _in(self, method: str, else_: Any) -> Any:
        of, answer, _ = CASES.get(self.how, (self.how, None, ""))
        return answer if of == method else else_

    def weight(self, update: Any, context: Any) -> float:
        return 0.5

    def init(self, vector: Any) -> Any:
        return self._in("init", Fired())

    def admit(self, *given: Any) -> Any:
        return self._in("admit", None)

    def plan(self, *given: Any) -> Any:
        plan = super().plan(*given)
        plan = replace(plan, local=replace(plan.local, **self._in("local", {})))
        return replace(plan, **self._in("plan", {}))

    def step(self, state: Any, vector: Any, update: Any, context: Any) -> Any:
        step = super().step(state, vector, update, replace(context, base=vector.copy()))
        step = replace(step, **self._in("step", {}))
        assert step.vector is not None
        assert step.decision is not None
        step.vector[5] += self._in("model", 0.0)
        return replace(step, decision=replace(step.decision, **self._in("decision", {})))

    def on_lost(self, state: Any, *given: Any) -> Any:
        return self._in("on_lost", state)

    def timer(self, state: Any) -> Any:
        return self._in("timer", NOW if self._in("on_timer", None) and not state.fired else None)

    def on_timer(self, state: Any, vector: Any, context: Any) -> Any:
        return self._in("on_timer", None)(state, vector)

    def downlink(self, version: int) -> Any:
        return self._in("downlink", "raw")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with forgotten():
        yield


def simulated(how: str, **settings: Any) -> ab.Run:
    settings |= {"server.lease_s": 1.0, "server.lease_min_s": 1.0}
    fleet, until = ab.Fleet(clients=4, dropout=0.5), ab.Until(updates=8)
    return ab.simulate("synthetic", strategy=Told(how=how), fleet=fleet, until=until, settings=settings)


@pytest.mark.parametrize("scheduler", [{}, {"strategy.scheduler": {"name": "capped"}}], ids=["", "scheduled"])
@pytest.mark.parametrize("how", CASES)
def test_what_a_strategy_answers_is_looked_at(how: str, scheduler: dict[str, Any]) -> None:
    """Devices would refuse it and come again for ever, or the run would end with a traceback later on."""
    with pytest.raises(AppError) as raised:
        simulated(how, **scheduler)
    assert str(raised.value).startswith(f"strategy 'told': {CASES[how][2]}")


@pytest.mark.parametrize("how", ["no state", "none is left", "a word", "a step of none"])
def test_what_it_answers_in_a_phase_is_looked_at(how: str) -> None:
    """What the phases remember of it is their own, and would pass for a state."""
    phases = [
        {"strategy": STRATEGIES.named(Told), "until_updates": 30, "how": how},
        {"strategy": "fedasync"},
    ]
    settings = {"server.lease_s": 1.0, "server.lease_min_s": 1.0, "strategy.phases": phases}
    fleet, until = ab.Fleet(clients=4, dropout=0.5), ab.Until(updates=40)
    with pytest.raises(AppError) as raised:
        ab.simulate("synthetic", strategy="phased", fleet=fleet, until=until, settings=settings)
    assert str(raised.value).startswith(f"strategy 'told': {CASES[how][2]}")


def test_one_that_answers_as_it_should_comes_to_its_end() -> None:
    assert simulated("").result.updates_applied == 8


def test_a_downlink_that_is_none_is_told_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"^strategy 'told': downlink must return a codec, such as 'raw'"):
        simulated("downlink", **{"downlink.codec": "auto"})


def test_whose_updates_are_invalid_and_why_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A device whose file has a value that is no number is one of many, and its updates were a number."""

    class Flawed(Synthetic):
        def data(self, shard: Shard) -> Examples:
            found = super().data(shard)
            x = found.x.copy()
            x[:, 0] = np.nan if (shard.role, shard.index) == ("train", 2) else x[:, 0]
            return Examples(x, found.y)

    def said() -> list[str]:
        return [r.message for r in caplog.records if "rejected as invalid" in r.message]

    fleet, until = ab.Fleet(clients=4), ab.Until(updates=12)
    ab.simulate("synthetic", fleet=fleet, until=until)
    assert said() == []
    run = ab.simulate(Flawed(), fleet=fleet, until=until)
    count = run.result.rejections["invalid"]
    (told,) = said()
    rows, columns = Flawed().data(Shard("train", 2, 4, FleetTable(clients=4))).x.shape
    assert told.startswith(f"{count} updates rejected as invalid. device-0002: update ")
    assert "values that are not finite, the first in tensor" in told
    flaw = f"; its x has {rows} of {rows * columns} values that are not finite: mend its data"
    assert told.endswith(flaw)
    assert "device-0001" not in told


def test_a_strategy_that_takes_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where only updates end a run it would go on for ever, and it did so without a word."""

    class TakesNothing(Told):
        def step(self, state: Any, vector: Any, update: Any, context: Any) -> Any:
            return Step(state, None, rejected(context.staleness, Reason.NOT_SELECTED, "none is wanted"))

    fleet, until = ab.Fleet(clients=2), ab.Until(updates=8)
    settings = {"run.virtual_s_max": 9000.0, "fleet.step_time_s": 1.0}
    ab.simulate("synthetic", strategy=TakesNothing(), fleet=fleet, until=until, settings=settings)
    said = [r.message for r in caplog.records if r.message.startswith("no update was taken for ")]
    assert len(said) == 2  # after an hour, and two
    assert all("is told not_selected: none is wanted" in line for line in said)
