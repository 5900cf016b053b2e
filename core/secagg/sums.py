"""What a keeper answers: the sum of a cohort's masks, with noise where the run is private.

M = sum_i W_i m_i + rint(sigma Z) mod 2^r,   sigma = z max(W) (s C + sqrt(d)),   Z: normals of a secret key
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from anabranch.core.privacy.normals import normals
from anabranch.core.secagg.ring import Numbers, add_mask
from anabranch.core.secagg.terms import Terms


def mask_sum(terms: Terms, seeds: Iterable[tuple[bytes, int]], noise_key: bytes) -> Numbers:
    """M of seeds with their weights. The key, of 32 bytes, is for this one sum."""
    total = terms.ring.empty()
    for seed, weight in seeds:
        add_mask(total, seed, weight)
    if terms.noise:
        noise = np.rint(normals(noise_key, terms.size) * terms.deviation).astype(np.int64)
        total += terms.ring.numbers(noise)
    return total
