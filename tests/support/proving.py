"""Which cases of a matrix `make test` leaves to `make prove`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_slices(names: Iterable[str], with_prove: Collection[str]) -> list[Any]:
    """All of them as parameters of a test; those of `with_prove` are marked so."""
    return [pytest.param(name, marks=[pytest.mark.prove] if name in with_prove else []) for name in names]
