"""The stream of a seed, from which both ends of a wire draw alike (`core.rng.random_words`)."""

from __future__ import annotations

from anabranch.compress.stage import Coded, Role, Stream, take
from anabranch.core.rng import SEED_MASK


def write_seed(coded: Coded, seed: int) -> None:
    """The stream of a seed."""
    coded.streams[Role.SEED] = Stream.of((seed & SEED_MASK).to_bytes(8, "little"))


def read_seed(coded: Coded) -> int:
    """The inverse of `write_seed`. Raises `InvalidUpdate`."""
    return int.from_bytes(take(coded, Role.SEED, 8), "little")
