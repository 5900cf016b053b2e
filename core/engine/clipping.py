"""Updates that are much longer than the others, cut to a bounded length, for every strategy.

| symbol | name     | meaning                                                                     |
|--------|----------|-----------------------------------------------------------------------------|
| c      | clip     | the longest update that is taken as it is, in median lengths                |
| l_i    | length   | Euclidean, of the values that an update covers, scaled as if it covered all |
| W      | KEPT     | newest updates that the median is of, as they came                          |

    Delta_i <- Delta_i min(1, c median(l_{i-W}, ..., l_{i-1}) / l_i)

So one device whose training has exploded, or one that multiplies its update by a hundred, moves the model no
further than c honest ones. The median is of lengths before they are cut, of which fewer than half are assumed
to be hostile. Nothing is cut before `NEEDED` updates have come. Ours; the idea is common.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.core.model.arrays import inner
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.core.model.updates import Update

KEPT, NEEDED = 51, 10


@dataclass(frozen=True)
class Clipped:
    """The update to take, what it was multiplied by, and its length as it came."""

    update: Update
    scale: float
    length: float

    @property
    def detail(self) -> str:
        """What its device is told; empty if nothing was cut."""
        return f"shortened to {self.scale:.3g} of its length" if self.scale < 1.0 else ""


def clipped(update: Update, spec: ParamSpec, lengths: Sequence[float], clip: float) -> Clipped:
    """Cut an update to `clip` times the median of `lengths`, those of the updates before it, oldest first."""
    length = length_of(update, spec)
    if not clip or len(lengths) < NEEDED:
        return Clipped(update, 1.0, length)
    longest = clip * statistics.median(lengths)
    if length <= longest:
        return Clipped(update, 1.0, length)
    scale, delta = longest / length, update.delta
    if isinstance(delta, SparseVector):
        delta = replace(delta, values=delta.values * delta.values.dtype.type(scale))
    else:
        delta = delta * delta.dtype.type(scale)
    return Clipped(replace(update, delta=delta), scale, length)


def length_of(update: Update, spec: ParamSpec) -> float:
    """The Euclidean length of an update; that of a part is scaled by the square root of size over covered."""
    x = update.delta.values if isinstance(update.delta, SparseVector) else update.delta
    length = math.sqrt(inner(x, x))
    if update.submodel is None or not update.submodel.size:
        return length
    return length * math.sqrt(spec.size / update.submodel.size)
