"""The strategy of Flower's that a ServerApp plays, as its frames show it, and how that judges a version.

A ServerApp makes its strategy by itself and shows it to nobody. What the strategy is given as `evaluate_fn`
judges each round's model where the ServerApp runs; with `fraction_evaluate = 0` nobody else does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.core.errors import AppError
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version
from anabranch.flower.messages import EXAMPLES_KEYS, numbers_of, own_part
from anabranch.flower.records import Arrays, array_record

if TYPE_CHECKING:
    from flwr.server.strategy import Strategy as LegacyStrategy

Judge = Callable[[int, Arrays], dict[str, float]]  # metrics of a version, which is a round, and its arrays

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

    found = Played()
    frame = sys._current_frames().get(thread)
    while frame is not None:
        own = frame.f_locals.get("self")
        for strategy in (own, getattr(own, "strategy", None)):  # of the legacy API the Server has it
            if not isinstance(strategy, Strategy | LegacyStrategy):
                continue
            judge = found.judge
            if isinstance(strategy, LegacyStrategy):
                legacy = getattr(strategy, "evaluate_fn", None)
                judge = partial(_by_legacy_strategy, strategy) if legacy else judge
            elif callable(given := frame.f_locals.get("evaluate_fn")):
                judge = partial(_by_function, given)
            asks_nodes = found.asks_nodes and getattr(strategy, "fraction_evaluate", 1.0) != 0.0
            weighted_by = getattr(strategy, "weighted_by_key", found.weighted_by)
            found = Played(type(strategy).__name__, judge, asks_nodes, weighted_by)
            break
        frame = frame.f_back
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
    if found is None:
        raise AppError(_nothing(version))
    return numbers_of(found)


def _by_legacy_strategy(strategy: LegacyStrategy, version: int, arrays: Arrays) -> dict[str, float]:
    from flwr.common import ndarrays_to_parameters

    with own_part(EVALUATE_FN, seed_of(0, "flower", "central")):
        found = strategy.evaluate(version, ndarrays_to_parameters(list(arrays.values())))
    if found is None:
        raise AppError(_nothing(version))
    loss, metrics = found
    return {"loss": float(loss), **numbers_of(metrics)}


def _nothing(version: int) -> str:
    return (
        f"{EVALUATE_FN} returned nothing for version {version}: it judges whatever "
        "run.evaluate_every_versions asks for, and the last version"
    )
