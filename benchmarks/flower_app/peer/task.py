"""The models, and local training on digits: 64 images a device, batches of 32."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from sklearn.datasets import load_digits
from torch import nn

PARAMETERS = 100_000
EXAMPLES, BATCH = 64, 32


def net() -> nn.Module:
    """4,810 parameters."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def first_model(steps: int) -> Any:
    """What a run begins with: of digits, or zeros where nothing is trained."""
    if steps:
        return ArrayRecord(net().state_dict())
    return ArrayRecord([np.zeros(PARAMETERS // 4, np.float32) for _ in range(4)])


def trained(arrays: Any, steps: int, device: int) -> Any:
    """The model after so many steps on the device's images."""
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = _images()
    mine = torch.from_numpy(np.random.default_rng(device).choice(len(y), EXAMPLES, replace=False))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        rows = mine[BATCH * step % EXAMPLES :][:BATCH]
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimiser.step()
    return ArrayRecord(model.state_dict())


@lru_cache(maxsize=1)
def _images() -> tuple[torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy((pixels / 16.0).astype(np.float32)), torch.from_numpy(labels.astype(np.int64))
