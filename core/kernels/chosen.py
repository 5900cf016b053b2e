"""Which loops run: the compiled ones where they were built and are wanted, else numpy's."""

from __future__ import annotations

from anabranch.core.kernels import plain, plain_tables
from anabranch.core.kernels.contract import Loops
from anabranch.core.kernels.table import TableLoops


def _chosen() -> tuple[Loops, TableLoops]:
    try:
        from anabranch.core.kernels import compiled, compiled_tables
    except (ImportError, AttributeError):  # no compiler, ANABRANCH_KERNELS=numpy, or made of older sources
        return plain, plain_tables
    return compiled, compiled_tables


loops, table_loops = _chosen()
