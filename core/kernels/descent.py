"""Plain SGD of a chain of linear layers by a compiled loop (`descent.c`), where there is one.

It has no twin: numpy would take longer than torch, which trains where this does not.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.core.model.arrays import Indices, Vector

_descend: Callable[..., float | None] | None
try:
    from anabranch.core.kernels import _loops

    _descend = _loops.descend
except (ImportError, AttributeError):  # as in `chosen.py`
    _descend = None


def descend(
    weights: Vector, widths: Indices, x: Vector, y: Indices, rows: Indices, lengths: Indices, rate: float
) -> float | None:
    """Train `weights` (size,) in place; the sum of the mean losses of the steps, or None: nothing was done.

    `widths` are those of the chain, from a row of x (count, ...) to the scores of the classes; between layers
    is max(x, 0). `weights` has each layer's, (out, in), and then its biases. `rows` (any,) has those of every
    step, of so many `lengths` (steps,) each, y (count,) the classes. All are contiguous, `weights` and x
    float32, the others int64. None too where a label is no class.
    """
    return None if _descend is None else _descend(weights, widths, x, y, rows, lengths, rate)
