"""Tensors of every shape, kind and order in memory that a model may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def odd_tensors() -> dict[str, Array]:
    """Numbers, nothing at all, counters, flags, halves; rows that lie in columns, or with gaps between."""
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {
        "weight": np.asfortranarray(grid),
        "turned": grid.T,
        "gaps": np.arange(12, dtype=np.float32)[::3],
        "half": np.array([[0.5, -2.0]], np.float16),
        "number": np.array(1.5, np.float32),
        "nothing": np.empty((0, 4), np.float32),
        "count": np.array(7),
        "flag": np.array(True),
        "flags": np.array([True, False, True, True])[::2],
        "table": np.asfortranarray(np.arange(6, dtype=np.int32).reshape(3, 2)),
        "bytes": np.arange(9, dtype=np.uint8).reshape(3, 3).T,
        "large": np.array(2**63 + 1, np.uint64),
        "no counts": np.empty((2, 0), np.int16),
        "foreign": np.array([1, -2], ">i4"),
    }


def assert_same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    """The same names, shapes, kinds and values."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert isinstance(found[name], np.ndarray), name
        assert found[name].shape == array.shape, name
        assert found[name].dtype.name == array.dtype.name, name
        np.testing.assert_array_equal(found[name], array, name)
