"""Which cases of a matrix `make test` leaves to `make slow` and `make prove`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def in_slices(
    names: Iterable[str], with_prove: Collection[str], with_slow: Collection[str] = ()
) -> list[Any]:
    """All of them as parameters of a test; those of `with_prove` and `with_slow` are marked so."""
    marked = [(pytest.mark.prove, with_prove), (pytest.mark.slow, with_slow)]
    return [pytest.param(name, marks=[mark for mark, of in marked if name in of]) for name in names]
