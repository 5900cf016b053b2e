"""Models with units, for tests: what a small perceptron, a convolution and an LSTM cell look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.model.params import ParamSpec
from anabranch.core.model.units import Member, UnitGroup

HIDDEN, CELLS = 8, 3


def tensors(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """A layer of 8 hidden units behind which a picture of 2 pixels a unit is flattened; 3 LSTM cells."""
    shapes = {
        "hidden.weight": (HIDDEN, 3),
        "hidden.bias": (HIDDEN,),
        "out.weight": (2, 2 * HIDDEN),
        "lstm.weight_hh": (4 * CELLS, CELLS),
        "lstm.bias": (4 * CELLS,),
        "out.bias": (2,),
    }
    rng = np.random.default_rng(seed)
    found: dict[str, npt.NDArray[Any]] = {n: rng.standard_normal(s).astype("f4") for n, s in shapes.items()}
    return {**found, "count": np.zeros((), np.int64)}


GROUPS = (
    UnitGroup(
        "hidden",
        HIDDEN,
        (Member("hidden.weight", 0), Member("hidden.bias", 0), Member("out.weight", 1, inner=2)),
    ),
    UnitGroup(
        "lstm",
        CELLS,
        (
            Member("lstm.weight_hh", 0, outer=4),
            Member("lstm.weight_hh", 1),
            Member("lstm.bias", 0, outer=4),
        ),
    ),
)
SPEC = ParamSpec.of(tensors(), GROUPS)


def line(size: int) -> ParamSpec:
    """One tensor whose every coordinate is a unit."""
    return ParamSpec.of({"w": np.zeros(size, np.float32)}, [UnitGroup("w", size, (Member("w", 0),))])
