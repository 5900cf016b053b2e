"""The digits of scikit-learn: 1,797 images of 8 x 8, carried by the package, so nothing is downloaded."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import AppError
from anabranch.core.rng import stream
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.splits import take

HIDDEN = 64
TEST_FRACTION = 0.2


class Digits(App):
    """A perceptron of 64-64-10 (4,810 parameters) on the digits; a fifth of them, always the same, tests."""

    name = "digits"

    def model(self) -> Any:
        """A `torch.nn.Sequential`."""
        from torch import nn

        return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))

    def data(self, shard: Shard) -> Examples:
        """`x` float32 (count, 64) from 0 to 1, `y` int64. Raises `AppError` without scikit-learn."""
        pool, test = _load()
        return test if shard.role == "test" else take(pool, shard)


@lru_cache(maxsize=1)
def _load() -> tuple[Examples, Examples]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise AppError(f"digits needs scikit-learn: {how_to_install('sklearn')}") from error
    pixels, labels = load_digits(return_X_y=True)
    x, y = (pixels / 16.0).astype(np.float32), labels.astype(np.int64)
    order = stream(0, "digits", "test").permutation(len(y))
    cut = round(len(y) * TEST_FRACTION)
    return Examples(x[order[cut:]], y[order[cut:]]), Examples(x[order[:cut]], y[order[:cut]])
