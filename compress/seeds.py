"""Random numbers that both ends of a wire draw alike, and the stream that a seed takes.

The generator is Philox 4x64-10 (Salmon et al. 2011) with the key (seed, number of the stage), counted from
zero, its 64-bit words in order. numpy promises never to change that sequence, unlike those of the
distributions it makes of it.
"""

from __future__ import annotations

import numpy as np

from anabranch.compress.stage import Coded, Role, Stream, take

SEED_MASK = (1 << 64) - 1


def random_words(seed: int, number: int) -> np.random.Philox:
    """The generator of a stage: `random_raw(count)` gives its next words."""
    return np.random.Philox(key=(seed & SEED_MASK) | number << 64)


def write_seed(coded: Coded, seed: int) -> None:
    """The stream of a seed."""
    coded.streams[Role.SEED] = Stream.of((seed & SEED_MASK).to_bytes(8, "little"))


def read_seed(coded: Coded) -> int:
    """The inverse of `write_seed`. Raises `InvalidUpdate`."""
    return int.from_bytes(take(coded, Role.SEED, 8), "little")
