"""A device of one's own: three functions in one file. Run it with examples/wine.toml.

anabranch simulate examples/wine.toml
"""

import numpy as np
import torch
from sklearn.datasets import load_wine

import anabranch
from anabranch.workloads.splits import partition


class App(anabranch.App):
    """Which of three growers made a wine, from 13 measurements (178 bottles, scikit-learn's copy)."""

    def model(self) -> torch.nn.Module:
        """13 measurements in, 3 scores out."""
        return torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))

    def data(self, shard: anabranch.Shard) -> anabranch.Examples:
        """Every fifth bottle is for testing; the devices share the others."""
        wine = load_wine()
        x = ((wine.data - wine.data.mean(0)) / wine.data.std(0)).astype(np.float32)
        y = wine.target.astype(np.int64)
        held_out = np.arange(len(y)) % 5 == 0
        if shard.role != "train":
            return anabranch.Examples(x[held_out], y[held_out])
        mine = partition(y[~held_out], shard.count, shard.fleet, shard.seed)[shard.index]
        return anabranch.Examples(x[~held_out][mine], y[~held_out][mine])
