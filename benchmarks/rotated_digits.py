"""The digits, by a network that was trained before on pictures turned by quarters.

What is turned are the devices' own pictures, so no figure of a run of this App is a promise about them: it
stands for a start on data of other people, of which a small fleet then learns the rest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anabranch.workloads.app import Shard
from anabranch.workloads.digits import Digits

STEPS, BATCH, RATE = 400, 64, 0.3
SIDE = 8


class RotatedDigits(Digits):
    """`Digits` with another start; deterministic by the run's seed, as the first weights are."""

    name = "rotated-digits"

    def model(self) -> Any:
        """A `torch.nn.Sequential` after `STEPS` steps of plain SGD."""
        model = super().model()
        pool = self.data(Shard("train"))
        upright = pool.x.reshape(-1, SIDE, SIDE)
        turned = [np.rot90(upright, quarters, (1, 2)) for quarters in (1, 2, 3)]
        x = torch.from_numpy(np.concatenate(turned).reshape(-1, SIDE * SIDE).copy())
        y = torch.from_numpy(np.tile(pool.y, len(turned)))
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        draws = torch.Generator().manual_seed(1)
        with torch.enable_grad():
            for _ in range(STEPS):
                rows = torch.randint(len(y), (BATCH,), generator=draws)
                optimizer.zero_grad()
                torch.autograd.backward(torch.nn.functional.cross_entropy(model(x[rows]), y[rows]))
                optimizer.step()
        return model
