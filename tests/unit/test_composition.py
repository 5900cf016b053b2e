"""The parts that strategies are composed of, each by itself: what is not declared, and what is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest

from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Context, Refusal, Step, Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Coordinates
from anabranch.core.model.updates import Reason, Update, Verdict
from anabranch.strategies.buffer import BufferState, BufferStrategy
from anabranch.strategies.cache import CacheStrategy
from anabranch.strategies.fedavg import FedAvg, FedAvgState
from anabranch.strategies.mixing import MixingStrategy
from anabranch.strategies.optimisers import Adam, Momentum, Nesterov, Optimiser, Sgd
from anabranch.strategies.parameters import NOT_NEGATIVE, POSITIVE, Range, check_parameters, one_of
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.robust.coordinatewise import Median
from anabranch.strategies.robust.rule import Rule
from anabranch.testing import StrategyConformance

SPEC = ParamSpec.of({"w": np.zeros(2)})


@dataclass(frozen=True)
class Plain(BufferStrategy):
    """Says nothing but its name."""

    name: ClassVar[str] = "plain"


@dataclass(frozen=True)
class ByExamples(BufferStrategy):
    """Other weights, another optimiser, a bound."""

    name: ClassVar[str] = "by_examples"

    buffer_size: int = 2
    flush_s: float = 5.0
    bound: int = 3
    rule: Rule | None = None

    @property
    def optimiser(self) -> Optimiser:
        return Sgd(0.5)

    def refuse(self, update: Update, context: Context) -> Refusal | None:
        return Refusal(Reason.STALE, "too old") if context.staleness > self.bound else None

    def weight(self, update: Update, context: Context) -> float:
        return float(update.examples)


@dataclass(frozen=True)
class Halves(MixingStrategy):
    """Half of every model."""

    name: ClassVar[str] = "halves"

    staleness_max: int = 2

    def weight(self, update: Update, context: Context) -> float:
        return 0.5


@dataclass(frozen=True)
class Pairs(CacheStrategy):
    """Two updates, by their ages when they are applied; mixed or added."""

    name: ClassVar[str] = "pairs"

    mixes: bool = False
    staleness: dict[str, Any] = field(default_factory=lambda: {"name": "hinge", "a": 1.0, "b": 0.0})

    @property
    def needs_base(self) -> bool:
        return self.mixes

    def size(self, context: Context) -> int:
        return 2

    def pull(self, tau_mean: float) -> float:
        return 0.5


@dataclass(frozen=True)
class MomentState(FedAvgState):
    """A round's, and a direction."""

    moment: Vector = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """Rounds with momentum at the server."""

    name: ClassVar[str] = "fedavgm"
    state_type: ClassVar[type[Any]] = MomentState

    @property
    def optimiser(self) -> Optimiser:
        return Momentum(1.0, 0.5)


class TestCompositions(StrategyConformance):
    @pytest.fixture(
        params=[Plain(), ByExamples(), ByExamples(rule=Median()), Halves(), Pairs(), Pairs(True), FedAvgM(2)],
        ids=lambda s: s.name,
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy:
        found: Strategy = request.param
        return found


def arrive(
    strategy: Any,
    vector: Vector,
    *deltas: tuple[float, ...],
    state: Any = None,
    taus: Sequence[int] = (0, 0, 0),
    examples: Sequence[int] = (1, 1, 1),
    clients: str = "abc",
    base: Sequence[float] | None = None,
    part: Coordinates | None = None,
) -> list[Step]:
    """Updates one after the other, at the moments 1, 2, ... of version 10; the steps."""
    steps = []
    state = strategy.init(vector) if state is None else state
    for i, delta in enumerate(deltas):
        w_base = None if base is None else np.array(base)
        context = Context(1.0 + i, 10, 0, ("a",), 0, taus[i], w_base, SPEC)
        ids = (f"u{i}", f"t{i}", clients[i])
        update = Update(*ids, 10 - taus[i], examples[i], np.array(delta, np.float64), part)
        steps.append(strategy.step(state, vector, update, context))
        state = steps[-1].state
    return steps


def test_without_parameters_each_update_is_applied_at_once_whatever_its_age() -> None:
    strategy, vector = Plain(), np.array([1.0, 2.0])
    (step,) = arrive(strategy, vector, (2.0, -1.0), taus=[7])
    assert step.vector is not None
    assert step.vector.tolist() == [3.0, 1.0]
    assert step.decision is not None
    assert (step.decision.verdict, step.decision.weight, step.decision.staleness) == (
        Verdict.PUBLISHED,
        1.0,
        7,
    )
    assert strategy.timer(step.state) is None
    assert (strategy.rule, strategy.flush_s, strategy.buffer_size) == (None, 0.0, 1)


def test_a_buffer_is_the_mean_of_weighted_updates_through_the_optimiser() -> None:
    """Half of (10 x 2 + 30 x 4) / 2."""
    strategy, vector = ByExamples(), np.zeros(2)
    first, second = arrive(strategy, vector, (2, 0), (4, 0), examples=[10, 30])
    assert first.vector is None
    assert first.decision is not None
    assert (first.decision.verdict, first.decision.weight) == (Verdict.HELD, 10.0)
    assert second.vector is not None
    assert second.vector.tolist() == [35.0, 0.0]
    assert (second.state.count, second.state.since, second.state.buffer.tolist()) == (0, None, [0.0, 0.0])


def test_a_buffer_that_has_waited_is_divided_by_what_it_has() -> None:
    strategy, vector = ByExamples(), np.zeros(2)
    (step,) = arrive(strategy, vector, (2, 0), examples=[3])
    assert strategy.timer(step.state) == 6.0
    flushed = strategy.on_timer(step.state, vector, Context(6.0, 10, 0))
    assert flushed.vector is not None
    assert flushed.vector.tolist() == [3.0, 0.0]
    assert strategy.timer(flushed.state) is None


def test_what_is_refused_is_not_gathered() -> None:
    strategy, vector = ByExamples(), np.zeros(2)
    state = strategy.init(vector)
    (step,) = arrive(strategy, vector, (2, 0), state=state, taus=[4])
    assert step.decision is not None
    assert (step.decision.verdict, step.decision.reason, step.decision.detail) == (
        Verdict.REJECTED,
        Reason.STALE,
        "too old",
    )
    assert step.state is state
    (taken,) = arrive(strategy, vector, (2, 0), state=state, taus=[3])
    assert taken.state.count == 1


def test_a_rule_takes_the_place_of_the_mean() -> None:
    """Half of the median of 2, 20 and 9000."""
    strategy, vector = ByExamples(buffer_size=3, rule=Median()), np.zeros(2)
    deltas, examples = [(2, 0), (2, 0), (9, 0)], [1, 10, 1000]
    *_, step = arrive(strategy, vector, *deltas, examples=examples)
    assert step.vector is not None
    assert step.vector.tolist() == [10.0, 0.0]
    assert (step.state.count, step.state.rows) == (0, [])


@pytest.mark.parametrize("strategy", [ByExamples(rule=Median()), FedAvg(rule=Median())], ids=lambda s: s.name)
def test_with_a_rule_there_is_no_sum_but_in_the_models_dtype(strategy: Any) -> None:
    """Digests are of the dtypes too."""
    state = strategy.init(np.zeros(3, np.float32))
    total = state.total if isinstance(state, FedAvgState) else state.buffer
    assert (total.shape, total.dtype.name) == ((0,), "float32")


def test_mixing_goes_towards_the_devices_model_where_it_covers() -> None:
    """Half of 10, half of 4 + 2; the other coordinate stays."""
    strategy, vector = Halves(), np.array([10.0, 7.0])
    part = Coordinates(np.array([0]))
    (step,) = arrive(strategy, vector, (2.0,), base=[4.0, 5.0], part=part)
    assert step.vector is not None
    assert step.vector.tolist() == [8.0, 7.0]


@pytest.mark.parametrize(("tau", "verdict"), [(2, Verdict.PUBLISHED), (3, Verdict.REJECTED)])
def test_the_bound_of_staleness_is_a_parameter_of_any(tau: int, verdict: Verdict) -> None:
    vector = np.zeros(2)
    (step,) = arrive(Halves(), vector, (2.0, 0.0), taus=[tau], base=[0.0, 0.0])
    assert step.decision is not None
    assert step.decision.verdict is verdict
    assert (step.decision.reason is Reason.STALE) == (verdict is Verdict.REJECTED)


@pytest.mark.parametrize(("mixes", "expected"), [(False, 10 + 3 / 4), (True, 5 + 0.5 * 5.5)])
def test_a_cache_is_weighed_by_the_ages_at_the_end(mixes: bool, expected: float) -> None:
    """Deltas 1 and 3 of ages 0 and 2: S is 1 and 1/3, so their mean is 1.5; of models from 4 it is 5.5."""
    strategy, vector = Pairs(mixes), np.array([10.0, 0.0])
    steps = arrive(strategy, vector, (1, 0), (3, 0), taus=[0, 2], base=[4.0, 0.0])
    assert [s.decision and s.decision.weight for s in steps] == [1.0, pytest.approx(1 / 3)]
    assert steps[1].vector is not None
    assert steps[1].vector[0] == pytest.approx(expected)
    assert (steps[1].state.cache, steps[1].state.bases, steps[1].state.since) == ([], {}, None)


NOTHING = {"name": "polynomial", "a": 2000.0}  # of an update that is one version late


BUFFER = {"buffer_size": 2, "staleness": NOTHING}
CACHE = {"cache_size": 2, "a": 2000.0}


@pytest.mark.parametrize("at", [None, Coordinates(np.array([1]))])
@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("annealed", BUFFER, "none"),
        ("annealed", {**BUFFER, "outer": {"name": "nesterov"}}, "none"),
        ("fedbuff", BUFFER, "none"),
        ("fedbuff", BUFFER, "median"),
        ("teasq_drop", CACHE, "none"),
        ("teasq_drop", CACHE, "median"),
        ("teasq_drop", {**CACHE, "mode": "paper"}, "none"),
        ("teasq_drop", {**CACHE, "mode": "paper"}, "median"),
    ],
)
def test_updates_that_count_nothing_move_nothing(
    name: str, options: dict[str, Any], rule: str, at: Coordinates | None
) -> None:
    strategy, vector = make_strategy(name, options, RobustTable(rule=rule)), np.array([1.0, 2.0])
    delta = (5.0, 7.0) if at is None else (5.0,)
    *_, step = arrive(strategy, vector, delta, delta, taus=(1, 1), base=(0.0, 9.0), part=at)
    assert step.vector is not None
    assert step.vector.tolist() == [1.0, 2.0]


def test_a_device_replaces_its_own_update_of_a_version_in_a_cache() -> None:
    strategy, vector = Pairs(), np.zeros(2)
    steps = arrive(strategy, vector, (8, 0), (2, 0), (4, 0), clients="aab")
    assert [s.dropped for s in steps] == [(), ("u0",), ()]
    assert [s.vector is None for s in steps] == [True, True, False]
    assert steps[2].vector is not None
    assert steps[2].vector.tolist() == [1.5, 0.0]


def test_rounds_take_an_optimiser_too() -> None:
    """Means of 2 and 2: the direction is 2, then 3."""
    strategy = FedAvgM(clients_per_round=1)
    vector: Vector = np.zeros(2)
    state: Any = strategy.init(vector)
    for expected in (2.0, 5.0):
        (step,) = arrive(strategy, vector, (2, 0), state=state, examples=[4])
        assert step.vector is not None
        assert step.vector.tolist() == [expected, 0.0]
        state, vector = step.state, step.vector
        assert (state.examples, state.answered, state.total.tolist()) == (0, [], [0.0, 0.0])


@pytest.mark.parametrize(
    ("optimiser", "expected"),
    [
        (Sgd(), [11.0, 9.0, 13.0]),
        (Sgd(0.5), [10.5, 9.5, 11.5]),
        (Momentum(1.0, 0.0), [11.0, 9.0, 13.0]),
        (Momentum(0.7, 0.9), [10.7, 9.93, 12.037]),
        (Nesterov(0.7, 0.9), [11.33, 9.237, 13.9333]),
        (Nesterov(1.0, 0.0), [11.0, 9.0, 13.0]),
        (Adam(0.1), [10.1, 10.063439, 10.105270]),
    ],
)
def test_the_steps_of_an_optimiser(optimiser: Optimiser, expected: list[float]) -> None:
    """For means of 1, -2 and 4, as totals of 3."""
    vector = np.array([10.0])
    state: Any = replace(BufferState(np.zeros(1)), **optimiser.init(vector))
    reached = []
    for mean in (1.0, -2.0, 4.0):
        state = optimiser.step(state, vector, np.array([3 * mean]), 3)
        reached.append(float(vector[0]))
    assert reached == pytest.approx(expected)


def test_momentum_has_no_direction_where_it_is_none() -> None:
    vector = np.zeros(3, np.float32)
    assert Sgd().init(vector) == {}
    (none, some) = (Momentum(1.0, momentum).init(vector)["moment"] for momentum in (0.0, 0.5))
    assert (none.shape, none.dtype.name, some.shape, some.dtype.name) == ((0,), "float32", (3,), "float32")


@dataclass(frozen=True)
class Ranged:
    """Parameters of every way to say a range."""

    free: int = -7
    rate: Annotated[float, POSITIVE] = 1.0
    word: Annotated[str, "of no matter", one_of(("one", "two"))] = "one"
    even: Annotated[int, NOT_NEGATIVE, Range("be even", lambda x: x % 2 == 0)] = 2


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rate": 0}, "strategy.rate must be greater than 0, not 0"),
        ({"word": "three"}, "strategy.word must be one of one, two, not 'three'"),
        ({"even": 3}, "strategy.even must be even, not 3"),
        ({"even": -1}, "strategy.even must not be negative, not -1"),
    ],
)
def test_a_range_names_the_parameter(values: dict[str, Any], words: str) -> None:
    check_parameters(Ranged())
    with pytest.raises(ConfigError) as caught:
        check_parameters(Ranged(**values))
    assert str(caught.value) == words


def test_a_composed_strategy_checks_its_parameters_and_its_staleness() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.staleness\.name must be one of"):
        Pairs(staleness={"name": "never"})
