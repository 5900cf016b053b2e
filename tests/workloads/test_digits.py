"""The digits: as scikit-learn gives them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from anabranch.core.config.tables import FleetTable
from anabranch.workloads import digits
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.digits import Digits


@pytest.fixture(autouse=True)
def loaded_anew() -> Iterator[None]:
    digits._load.cache_clear()
    yield
    digits._load.cache_clear()


def test_the_table_is_that_of_the_package() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    table = digits._table()
    assert table.dtype == pixels.dtype
    np.testing.assert_array_equal(table[:, :-1], pixels)
    np.testing.assert_array_equal(table[:, -1], labels)


def test_where_the_file_is_elsewhere_the_package_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts() -> list[Examples]:
        digits._load.cache_clear()
        return [Digits().data(Shard(role, 0, 2, FleetTable(), 0)) for role in ("train", "test")]

    expected = parts()
    monkeypatch.setattr(digits, "FILE", "data/elsewhere.csv.gz")
    for found, wanted in zip(parts(), expected, strict=True):
        assert (found.x.dtype.name, found.y.dtype.name) == ("float32", "int64")
        np.testing.assert_array_equal(found.x, wanted.x)
        np.testing.assert_array_equal(found.y, wanted.y)
