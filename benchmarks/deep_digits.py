"""The digits, by a perceptron of five layers: four of them are of one size, so that fragments may be."""

from __future__ import annotations

from typing import Any

from anabranch.workloads.digits import Digits

WIDTH, LAYERS = 64, 4


class DeepDigits(Digits):
    """17,290 parameters: a digit has as many pixels as a layer has units."""

    name = "deep-digits"

    def model(self) -> Any:
        """A `torch.nn.Sequential`."""
        from torch import nn

        hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
