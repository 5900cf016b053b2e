"""A small torch App whose model grows, in three stages, and what is in each of them, counted by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from anabranch.core.model.stages import ModelStage
from anabranch.workloads.digits import Digits

WIDTHS = (64, 8, 6, 5)
BLOCKS, HEADS = (64 * 8 + 8, 8 * 6 + 6, 6 * 5 + 5), (8 * 10 + 10, 6 * 10 + 10, 5 * 10 + 10)
# What stage s trains, and a device needs for it: its values.
NEEDED = tuple(sum(BLOCKS[:s]) + HEADS[s - 1] for s in (1, 2, 3))
WARMED = tuple(BLOCKS[s - 1] + HEADS[s - 1] for s in (1, 2, 3))


class Grower(nn.Module):
    """Three layers, and a head behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = 3
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(WIDTHS))
        self.heads = nn.ModuleList(nn.Linear(b, 10) for b in WIDTHS[1:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[: self.stage]:
            x = torch.relu(block(x))
        found: torch.Tensor = self.heads[self.stage - 1](x)
        return found


class App(Digits):
    """The digits."""

    name = "grower"

    def model(self) -> Any:
        return Grower()

    def stages(self, model: Any) -> list[ModelStage]:
        return [ModelStage(f"blocks.{s}", [f"heads.{s}.weight", f"heads.{s}.bias"]) for s in range(3)]


def names_of(blocks: tuple[int, ...], head: int) -> set[str]:
    """The tensors of some blocks and a head, all counted from 1."""
    modules = [*(f"blocks.{s - 1}" for s in blocks), f"heads.{head - 1}"]
    return {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
