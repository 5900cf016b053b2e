"""`[flower]`: what the ServerApp of a Flower app would tell its ClientApps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from anabranch.core.later import LATER_KEY

SCHEME = "flower:"  # of `run.workload` where that is a Flower app's folder


@dataclass(frozen=True)
class FlowerTable:
    """`run_config` overrides keys of the app's own. `train` and `evaluate`: the messages that devices make.

    Both are `{arrays = NAME, records = {NAME = {...}}}`; empty, they are what the ServerApp was heard to say
    when the run was prepared. Evaluations are of `evaluate_partitions` of the partitions (0: all); `accuracy`
    and `loss` name the ClientApp's metrics that are reported as such (empty: those that sound like it).
    `central`: versions are judged by the `evaluate_fn` of the ServerApp's strategy, not by the ClientApp.
    """

    run_config: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Mapping[str, Any] = field(default_factory=dict)
    central: bool = field(default=False, metadata=LATER_KEY)
    evaluate_partitions: int = 0
    accuracy: str = ""
    loss: str = ""
