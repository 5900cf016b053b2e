"""Torch Apps on the digits, for tests of how devices train: small, and odd in one way each."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.digits import Digits


class HiddenDropout(nn.Module):
    """Draws at random where no layer says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class HiddenNorm(nn.Module):
    """Mixes the examples of a batch where no layer says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class NormOfLarge(nn.Module):
    """The same where values are large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.relu(x.mean(0) - 100.0)


class Paused(nn.Module):
    """Does what `vmap` takes and a compiler does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0)
        return x


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(x)))
        return hidden


LAYERS: dict[str, Any] = {
    "": nn.Identity,
    "norm": lambda: nn.BatchNorm1d(32),
    "dropout": nn.Dropout,
    "hidden dropout": HiddenDropout,
    "hidden norm": HiddenNorm,
    "norm of large": NormOfLarge,
    "paused": Paused,
    "tied": Twice,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()
    ),
    "layer norm": lambda: nn.LayerNorm(32),
    "wide": lambda: nn.Sequential(nn.Linear(32, 500), nn.Linear(500, 32)),
    "wide norm": lambda: nn.Sequential(nn.Linear(32, 500), nn.LayerNorm(500), nn.Linear(500, 32)),
    "widest": lambda: nn.Sequential(nn.Linear(32, 3200), nn.Linear(3200, 32)),
}


class Linear(Digits):
    """64-32-10, with an odd layer between, if one is named."""

    name = "linear"

    def __init__(self, layer: str = "") -> None:
        super().__init__()
        self.layer = layer

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(64, 32), LAYERS[self.layer](), nn.ReLU(), nn.Linear(32, 10))


class OddOne(Linear):
    """One device has the most examples, and its values in another unit."""

    def __init__(self, layer: str = "", device: int = 0, unit: float = float("nan")) -> None:
        super().__init__(layer)
        self.device, self.unit = device, unit

    def data(self, shard: Shard) -> Examples:
        whole = super().data(Shard("test"))
        if shard.role != "train" or shard.index != self.device:
            return Examples(whole.x[:24], whole.y[:24])
        return Examples(whole.x[:40] * np.float32(self.unit), whole.y[:40])


class Loading(Linear):
    """Every device has as many examples. Knows those that the process which made it has loaded."""

    def __init__(self, layer: str = "", unit: float = 1.0) -> None:
        super().__init__(layer)
        self.unit, self.given = unit, list[weakref.ref[Examples]]()

    def data(self, shard: Shard) -> Examples:
        whole = super().data(Shard("test"))
        found = Examples(whole.x[:24] * np.float32(self.unit), whole.y[:24])
        self.given.append(weakref.ref(found))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "given": []}


class Brief(Linear):
    """Trains in a way of its own."""

    name = "brief"

    def train(self, model: Any, examples: Examples, plan: LocalPlan, seed: int) -> dict[str, float]:
        with torch.no_grad():
            model[0].bias += 1.0
        return {}
