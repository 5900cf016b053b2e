"""Five models as people bring them, on the digits: none was written with a federation in mind."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from anabranch.core.model.updates import LocalPlan
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.batches import batches
from anabranch.workloads.digits import Digits


class Block(nn.Module):
    """Two convolutions with norms, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.first(x)))
        out: torch.Tensor = torch.relu(self.norm2(self.second(hidden)) + x)
        return out


class ResNet(Digits):
    """A small residual network; its norms keep running statistics and count batches."""

    name = "resnet"

    def model(self) -> Any:
        stem = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        return nn.Sequential(
            *stem,
            Block(8),
            nn.MaxPool2d(2),
            Block(8),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )


class RowsTransformer(nn.Module):
    """The rows of a picture as words; where each is, is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.places = nn.Parameter(torch.zeros(8, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.embed(x.view(-1, 8, 8)) + self.places
        out: torch.Tensor = self.head(self.encoder(words).mean(1))
        return out


class Transformer(Digits):
    """A small transformer, trained by AdamW as its people do."""

    name = "transformer"
    optimizer = torch.optim.AdamW

    def model(self) -> Any:
        return RowsTransformer()


class RowsGRU(nn.Module):
    """The rows of a picture one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, last = self.gru(x.view(-1, 8, 8))
        out: torch.Tensor = self.head(last[-1])
        return out


class Recurrent(Digits):
    """A recurrent network."""

    name = "gru"

    def model(self) -> Any:
        return RowsGRU()


class Autoencoder(Digits):
    """Pictures from pictures: no classes, the mean squared error."""

    name = "autoencoder"

    def model(self) -> Any:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 12), nn.Linear(12, 64), nn.Sigmoid())

    def data(self, shard: Shard) -> Examples:
        x = super().data(shard).x
        return Examples(x, x)

    @staticmethod
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, y)


class Logistic(App):
    """Logistic regression in numpy, on pixels that it centres by what it has seen."""

    name = "logistic"

    def model(self) -> dict[str, Any]:
        start = {"w": np.zeros((64, 10)), "b": np.zeros(10)}
        return {**start, "mean": np.zeros(64), "scale": np.array(1.0), "epochs": np.array(0)}

    def buffers(self, model: dict[str, Any]) -> list[str]:
        return ["mean", "scale"]

    def data(self, shard: Shard) -> Examples:
        return Digits().data(shard)

    def train(
        self, model: dict[str, Any], examples: Examples, plan: LocalPlan, seed: int
    ) -> dict[str, float]:
        model["mean"] += 0.2 * (examples.x.mean(0) - model["mean"])
        model["scale"] += 0.2 * (examples.x.std() - model["scale"])
        for rows in batches(len(examples), plan, seed):
            x, y = (examples.x[rows] - model["mean"]) / model["scale"], examples.y[rows]
            wrong = self._shares(model, x)
            wrong[np.arange(len(y)), y] -= 1.0
            model["w"] -= plan.learning_rate * x.T @ wrong / len(y)
            model["b"] -= plan.learning_rate * wrong.mean(0)
        return {}

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        found = self._shares(model, (examples.x - model["mean"]) / model["scale"])
        right = found[np.arange(len(examples)), examples.y]
        hits = found.argmax(1) == examples.y
        return {"accuracy": float(hits.mean()), "loss": float(-np.log(right + 1e-12).mean())}

    @staticmethod
    def _shares(model: dict[str, Any], x: Any) -> Any:
        scores = x @ model["w"] + model["b"]
        grown = np.exp(scores - scores.max(1, keepdims=True))
        return grown / grown.sum(1, keepdims=True)


APPS: dict[str, type[App]] = {
    app.name: app for app in (ResNet, Transformer, Recurrent, Autoencoder, Logistic)
}
