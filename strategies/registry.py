"""Strategies by name. Others join through the entry point group `anabranch.strategies`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from anabranch.core.config import build
from anabranch.core.errors import ConfigError
from anabranch.core.strategy import Strategy
from anabranch.strategies.asyncdrop import AsyncDrop
from anabranch.strategies.fedasync import FedAsync
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.fedprox import FedProx
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.teasq import Teasq
from anabranch.strategies.teasq_drop import TeasqDrop

GROUP = "anabranch.strategies"
BUILT_IN: dict[str, type[Any]] = {
    c.name: c for c in (AsyncDrop, FedAsync, FedAvg, FedBuff, FedProx, QAFeL, Teasq, TeasqDrop)
}


def strategy_names() -> list[str]:
    """Every name that `make_strategy` knows."""
    return sorted({*BUILT_IN, *entry_points(group=GROUP).names})


def make_strategy(name: str, params: Mapping[str, Any]) -> Strategy:
    """A strategy of its parameters. Raises `ConfigError`, naming the nearest name or key."""
    cls = BUILT_IN.get(name)
    if cls is None:
        found = [e for e in entry_points(group=GROUP) if e.name == name]
        if not found:
            near = difflib.get_close_matches(name, strategy_names(), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(strategy_names())}"
            raise ConfigError(f"unknown strategy: {name!r}; {hint}")
        cls = found[0].load()
    strategy: Strategy = build(cls, params, "strategy")
    return strategy
