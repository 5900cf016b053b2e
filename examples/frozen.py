"""A frozen layer and a trained one, on the digits: see docs/frozen.md."""

from typing import Any

from anabranch.workloads.digits import Digits


class Head(Digits):
    """A thousand fixed features, and a linear layer over them: of 75,010 weights 10,010 are trained."""

    def model(self) -> Any:
        """What requires no gradient is in no update, and reaches each device once."""
        from torch import nn

        net = nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))
        net[0].requires_grad_(False)
        return net
