"""The models that a run leaves: `final.safetensors`, its last version, and `best.safetensors`.

The tensors have the names that the App's own model gives them, so that without this package

    model.load_state_dict(safetensors.torch.load_file("best.safetensors"))

takes them. The version and what was measured of it are in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from safetensors.numpy import save

from anabranch.core.config.goal import Goal
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.params import Tensors

FINAL, BEST = "final.safetensors", "best.safetensors"

Metrics = Mapping[str, float]
Model = TypeVar("Model")


class Best(Generic[Model]):
    """The best version so far by the run's goal: of equal ones the earliest.

    A run that may lose its newest versions says by `oldest` to which one it would go back at most. Those that
    were the best before are kept as far as one of them would be it again.
    """

    def __init__(self, goal: Goal, oldest: Callable[[], int] | None = None) -> None:
        self._goal, self._oldest = goal, oldest
        self._before: list[tuple[int | None, Metrics, Model | None]] = []
        self.version: int | None = None
        self.metrics: Metrics = {}
        self.model: Model | None = None

    def offer(self, version: int, metrics: Metrics, model: Callable[[], Model]) -> bool:
        """Take a measured version if it is better; `model` is called only then. Whether it was."""
        better = self._goal.is_better(metrics, None if self.version is None else self.metrics)
        if better:
            if self._oldest is not None:
                self._before.append((self.version, self.metrics, self.model))
            self.version, self.metrics, self.model = version, dict(metrics), model()
        self._forget()
        return better

    def taken_back(self, version: int) -> None:
        """The run goes on from this version: what was the best then is it again."""
        while self.version is not None and self.version > version:
            self.version, self.metrics, self.model = self._before.pop()

    def _forget(self) -> None:
        """Let go of those that are followed by another one wherever the run goes back to."""
        if self._oldest is None or not self._before:
            return
        oldest = self._oldest()
        followed_by = [*(version for version, _, _ in self._before[1:]), self.version]
        del self._before[: sum(version is not None and version <= oldest for version in followed_by)]


def write_model(path: Path, tensors: Tensors, version: int, metrics: Metrics | None = None) -> None:
    """Write a version's tensors, whole or not at all; makes the folder."""
    told = {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    metadata = {"format": "pt", "version": str(version), "metrics": json.dumps(told)}
    part.write_bytes(save(plain_tensors(tensors), metadata))
    part.replace(path)
