"""A private engine under test: that of `machines.py` with sums of a key that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from machines import SPEC, Bench

from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.engine import Engine
from anabranch.core.snapshot import Snapshot
from anabranch.host.build import Blueprint

KEY = bytes(range(32))
PRIVACY: dict[str, Any] = {"clip": 2.0, "noise": 0.5, "participations": 3}


def private_config(
    strategy: dict[str, Any] | None = None, privacy: dict[str, Any] | None = None, **tables: Any
) -> Config:
    """FedBuff of two updates and six devices, and what a test wants else."""
    base = {
        "strategy": {"name": "fedbuff", "buffer_size": 2} if strategy is None else strategy,
        "privacy": {**PRIVACY, **(privacy or {})},
        "fleet": {"clients": 6},
    }
    return merge([("private", base), ("test", tables)])


class PrivateBench(Bench):
    """A `Bench` of a private run's blueprint."""

    def __init__(self, config: Config | None = None, key: bytes = KEY) -> None:
        self.blueprint = Blueprint.of(config or private_config(), SPEC, key=key)
        super().__init__()
        self.engine = self.restored(None)

    def restored(self, snapshot: Snapshot | None) -> Engine:
        """An engine of the same run, from a snapshot or from its beginning."""
        return self.blueprint.engine({"w": np.zeros(4, np.float32)}, snapshot)
