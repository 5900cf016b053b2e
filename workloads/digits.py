"""The digits of scikit-learn: 1,797 images of 8 x 8, carried by the package, so nothing is downloaded."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.config.extras import how_to_install
from anabranch.core.errors import AppError
from anabranch.core.rng import stream
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.splits import take

HIDDEN = 64
TEST_FRACTION = 0.2
FILE = "data/digits.csv.gz"  # beside the code of sklearn.datasets


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
        table = _table()
    except ModuleNotFoundError as error:
        raise AppError(f"digits needs scikit-learn: {how_to_install('sklearn')}") from error
    x, y = (table[:, :-1] / 16.0).astype(np.float32), table[:, -1].astype(np.int64)
    order = stream(0, "digits", "test").permutation(len(y))
    cut = round(len(y) * TEST_FRACTION)
    return Examples(x[order[cut:]], y[order[cut:]]), Examples(x[order[:cut]], y[order[:cut]])


def _table() -> npt.NDArray[np.float64]:
    """Pixels and label of each image, (1797, 65): the file that `load_digits` reads, read without it.

    To import it takes more than a second and scipy, on every device.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("scikit-learn is not installed")
    try:
        return np.loadtxt(Path(package.origin).with_name("datasets") / FILE, delimiter=",")
    except OSError:  # a release that has it elsewhere
        from sklearn.datasets import load_digits

        return np.column_stack(load_digits(return_X_y=True))
