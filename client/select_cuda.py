"""The selection of `topk` on a GPU: a few passes over the values in the place of a partition.

    a = |x|,  lo = mean(a),  hi = max(a)
    N times: t = (lo + hi) / 2, and lo <- t where more than k of a are >= t, else hi <- t
    kept: all of a >= hi, and of lo <= a < hi the first

| symbol | meaning                                      | here                    |
|--------|----------------------------------------------|-------------------------|
| x      | all values of a group, (n,)                  | `values`                |
| k      | how many are kept, exactly                   | `k`                     |
| N      | halvings of what lies between the thresholds | `HALVINGS`              |

MSTopK, Shi et al. 2021 (arXiv 2010.10458), recalled. Where fewer than k values are over the mean, the k-th
largest is found as it is. Of magnitudes that N halvings do not tell apart the first are kept: nearly the
choice of `compress/selectors.py`, and the same form on the wire. A device of a run takes it for large models
and few kept values; the simulator never does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from anabranch.compress.selectors import choosing
from anabranch.compress.stage import Dense, Sparse
from anabranch.workloads.torch_loop import import_torch

if TYPE_CHECKING:
    import torch

HALVINGS = 25
KEPT_MAX = 0.25  # of the values: with more the mean is no lower bound
VALUES_MIN = 1 << 20  # fewer are chosen sooner where they are than on a GPU


def selecting(device: str) -> AbstractContextManager[None]:
    """Inside, `topk` chooses on a device of this kind if that is `cuda`."""
    return choosing(chooser(device)) if device == "cuda" else nullcontext()


def chooser(device: str, values_min: int = VALUES_MIN) -> Callable[[Dense, int], Sparse | None]:
    """What finds the k largest on a device of torch's, or None where the exact way is the better one.

    That is so for few values, for more kept ones than `KEPT_MAX`, for values that are not finite (they are
    refused there), and where the device has no memory left.
    """
    torch = import_torch()

    def largest(dense: Dense, k: int) -> Sparse | None:
        if dense.size < values_min or k > KEPT_MAX * dense.size:
            return None
        try:
            values = torch.from_numpy(dense.gather()).to(device)
            if not bool(torch.isfinite(values).all()):
                return None
            places = largest_places(values, k)
            indices, chosen = places.cpu().numpy(), values[places].cpu().numpy()
        except torch.cuda.OutOfMemoryError:
            return None
        sent = np.flatnonzero(chosen)  # none that are zero
        return Sparse(indices[sent], chosen[sent])

    return largest


def largest_places(values: torch.Tensor, k: int) -> torch.Tensor:
    """Which k of the values (n,) are the largest by magnitude: increasing indices, int64 (k,)."""
    torch_ = import_torch()
    a = values.abs()
    low, high = a.mean(), a.max()
    if int((a >= low).sum()) < k:
        low = a.kthvalue(a.numel() - k + 1).values
        high = torch_.nextafter(low, torch_.full_like(low, float("inf")))
    for _ in range(HALVINGS):  # nothing of it waits for the GPU
        middle = low + (high - low) / 2
        over = (a >= middle).sum() > k
        low, high = torch_.where(over, middle, low), torch_.where(over, high, middle)
    sure = (a >= high).nonzero()[:k, 0]
    open_ = ((a >= low) & (a < high)).nonzero()[: k - len(sure), 0]
    found: torch.Tensor = torch_.cat([sure, open_]).sort().values
    return found
