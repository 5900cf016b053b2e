"""Which loops run: the compiled ones where they were built and are wanted, else numpy's."""

from __future__ import annotations

from anabranch.core.kernels import plain
from anabranch.core.kernels.contract import Loops


def _chosen() -> Loops:
    try:
        from anabranch.core.kernels import compiled
    except ImportError:  # there was no compiler, or ANABRANCH_KERNELS=numpy
        return plain
    return compiled


loops: Loops = _chosen()
