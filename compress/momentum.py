"""Momentum on the uplink: a device sends a mean over its tasks, of which the newest is a part.

| symbol | name    | meaning                                  |
|--------|---------|------------------------------------------|
| Delta  | delta   | the result of the task                   |
| m      | sent    | what the device sends; `before`: last    |
| beta   | share   | how much of what it sent last is in it   |

    m <- beta m + (1 - beta) Delta       where it has sent something before, else m <- Delta

A device that sent nothing of a coordinate has a 0 there, and so has one that sent a 0: its next value goes
whole. That is a departure: by the recurrence it would be (1 - beta) Delta.

The noise of the batches averages out, so honest updates lie nearer to each other and a hostile one has less
room to hide in. What each device sends lags behind its training in turn. The wire has the chain behind it.

Source: Karimireddy, He and Jaggi, "Learning from history for Byzantine robust optimization", ICML 2021,
recalled; their rule is `strategies/robust/centred_clipping.py`. Theirs is of gradients, one of each device at
each step; here it is of what a task has come to, and devices train now and then.
"""

from __future__ import annotations

import numpy as np

from anabranch.core.model.params import Vector


def momentum(delta: Vector, before: Vector, share: float) -> Vector:
    """What a device sends; all of shape (n,), of `delta`'s dtype. Where `before` is 0 nothing was sent."""
    kept = delta.dtype.type(share)
    mean = kept * before.astype(delta.dtype, copy=False) + (delta.dtype.type(1) - kept) * delta
    found: Vector = np.where(before == 0, delta, mean)
    return found
