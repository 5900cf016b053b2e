"""A network that grows while it is trained (docs/submodels.md, "Growing models"): digits, in four stages.

    anabranch simulate examples/growing.py:Growing --versions 40 --set submodel.name=progressive

At stage s a picture goes through the first s blocks and that stage's head, which averages over its places.
The norms keep no statistics: those of one stage would not be another's.
"""

from __future__ import annotations

from typing import Any

import torch

from anabranch.workloads import App, Examples, ModelStage, Shard
from anabranch.workloads.digits import Digits

CHANNELS, GROUPS, CLASSES = (16, 32, 32, 64), 4, 10


class GrowingNet(torch.nn.Module):
    """Four blocks, and a head behind each; `stage` says which one is read."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = len(CHANNELS)
        before = (1, *CHANNELS[:-1])
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Conv2d(a, b, 3, padding=1), torch.nn.GroupNorm(GROUPS, b), torch.nn.ReLU()
            )
            for a, b in zip(before, CHANNELS, strict=True)
        )
        self.heads = torch.nn.ModuleList(torch.nn.Linear(b, CLASSES) for b in CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores (count, 10) of pictures (count, 64)."""
        x = x.view(-1, 1, 8, 8)
        for number, block in enumerate(list(self.blocks)[: self.stage]):
            x = block(x)
            if number == 0:
                x = torch.nn.functional.max_pool2d(x, 2)
        found: torch.Tensor = self.heads[self.stage - 1](x.mean(dim=(2, 3)))
        return found


class Growing(App):
    """The digits, which are carried by the package of scikit-learn."""

    name = "growing"

    def model(self) -> Any:
        """At its last stage."""
        return GrowingNet()

    def stages(self, model: Any) -> list[ModelStage]:
        """By the names of modules, which stand for all of their tensors."""
        return [ModelStage([f"blocks.{s}"], [f"heads.{s}"]) for s in range(len(model.blocks))]

    def data(self, shard: Shard) -> Examples:
        """See `Digits`."""
        return Digits().data(shard)
