"""The strategy of Flower's that a ServerApp plays, as its frames show it, and how that judges a version.

A ServerApp makes its strategy by itself and shows it to nobody. What the strategy is given as `evaluate_fn`
judges each round's model where the ServerApp runs; with `fraction_evaluate = 0` nobody else does. What it has
found, and the model that the last round has made, are in the frames as well, and in no message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from anabranch.core.errors import AppError
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version
from anabranch.flower.messages import EXAMPLES_KEYS, numbers_of, own_part
from anabranch.flower.records import Arrays, array_record, arrays_of

if TYPE_CHECKING:
    from flwr.server.history import History
    from flwr.server.strategy import Strategy as LegacyStrategy
    from flwr.serverapp.strategy import Result

# The metrics of a version, which is a round, and its arrays; none where it is none that is judged.
Judge = Callable[[int, Arrays], dict[str, float]]

EVALUATE_FN = "the ServerApp's evaluate_fn"


@dataclass(frozen=True)
class Played:
    """A strategy: its class, its `evaluate_fn` if any, whether it has ClientApps evaluate, what it weighs by.

    Of a ServerApp with a loop of its own there is no strategy: its name is "".
    """

    name: str = ""
    judge: Judge | None = None
    asks_nodes: bool = True
    weighted_by: str = EXAMPLES_KEYS[0]

    @property
    def is_central(self) -> bool:
        """Whether nobody but the ServerApp judges."""
        return self.judge is not None and not self.asks_nodes


def played_in(thread: int) -> Played:
    """What a thread plays now; of strategies that wrap others, it bears the outermost one's name."""
    flwr_version()
    from flwr.server.strategy import Strategy as LegacyStrategy
    from flwr.serverapp.strategy import Strategy

    kinds = (Strategy, LegacyStrategy)
    found = Played()
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if chain := _wrapped(frame.f_locals.get("self"), kinds):
            judge = found.judge
            if isinstance(chain[0], LegacyStrategy):
                legacy = any(getattr(strategy, "evaluate_fn", None) for strategy in chain)
                judge = partial(_by_legacy_strategy, chain[0]) if legacy else judge
            elif callable(given := frame.f_locals.get("evaluate_fn")):
                judge = partial(_by_function, given)
            asks = all(getattr(strategy, "fraction_evaluate", 1.0) != 0.0 for strategy in chain)
            keys = (s.weighted_by_key for s in chain if hasattr(s, "weighted_by_key"))
            weighted_by = next(keys, found.weighted_by)
            found = Played(type(chain[0]).__name__, judge, found.asks_nodes and asks, weighted_by)
        frame = frame.f_back
    return found


@dataclass(frozen=True, eq=False)
class StrategyOutcome:
    """What a strategy has come to so far, as its frames have it: `judged`, metrics by round; its model.

    It is looked at again and again: both are what they are by then. `of` is what the strategy keeps them in.
    """

    of: Result | History
    judged: Callable[[], Mapping[int, Mapping[str, float]]]
    model: Callable[[], list[npt.NDArray[Any]]]  # the arrays in their order; none before the first round


def outcome_in(thread: int) -> StrategyOutcome | None:
    """That of the strategy which a thread plays now; None where there is none, as in a loop of one's own."""
    flwr_version()
    from flwr.server.history import History
    from flwr.serverapp.strategy import Result

    frame = sys._current_frames().get(thread)
    while frame is not None:
        for found in frame.f_locals.values():
            if isinstance(found, Result):
                return StrategyOutcome(found, partial(_judged, found), partial(_model, found))
            if isinstance(found, History):
                server = frame.f_locals.get("self")
                return StrategyOutcome(found, partial(_judged_before, found), partial(_model_before, server))
        frame = frame.f_back
    return None


def _judged(result: Result) -> Mapping[int, Mapping[str, float]]:
    return {round_: numbers_of(found) for round_, found in result.evaluate_metrics_serverapp.items()}


def _model(result: Result) -> list[npt.NDArray[Any]]:
    return list(arrays_of(result.arrays).values())


def _judged_before(history: History) -> Mapping[int, Mapping[str, float]]:
    """By the legacy API, which keeps metrics by name."""
    found = {round_: {"loss": float(loss)} for round_, loss in history.losses_centralized}
    for name, values in history.metrics_centralized.items():
        for round_, value in values:
            found.setdefault(round_, {}).update(numbers_of({name: value}))
    return found


def _model_before(server: Any) -> list[npt.NDArray[Any]]:
    from flwr.common import parameters_to_ndarrays

    parameters = getattr(server, "parameters", None)
    return [] if parameters is None else parameters_to_ndarrays(parameters)


def _wrapped(own: Any, kinds: tuple[type, ...]) -> list[Any]:
    """A frame's strategy, and those that it wraps; of the legacy API the Server has it."""
    strategy = own if isinstance(own, kinds) else getattr(own, "strategy", None)
    found = []
    while isinstance(strategy, kinds) and strategy not in found:
        found.append(strategy)
        strategy = getattr(strategy, "strategy", None)
    return found


def judge_of(played: Played, who: str) -> Judge:
    """What judges centrally. Raises `AppError` where nothing does."""
    if played.judge is None:
        raise AppError(
            f"flower.central: the ServerApp of {who} gives its strategy no evaluate_fn, which would judge"
        )
    return played.judge


def _by_function(evaluate_fn: Callable[[int, Any], Any], version: int, arrays: Arrays) -> dict[str, float]:
    with own_part(EVALUATE_FN, seed_of(0, "flower", "central")):
        found = evaluate_fn(version, array_record(arrays))
    return {} if found is None else numbers_of(found)


def _by_legacy_strategy(strategy: LegacyStrategy, version: int, arrays: Arrays) -> dict[str, float]:
    from flwr.common import ndarrays_to_parameters

    with own_part(EVALUATE_FN, seed_of(0, "flower", "central")):
        found = strategy.evaluate(version, ndarrays_to_parameters(list(arrays.values())))
    if found is None:
        return {}
    loss, metrics = found
    return {"loss": float(loss), **numbers_of(metrics)}
