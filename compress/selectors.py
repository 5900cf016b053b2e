"""Stages that choose which values travel: the largest, those over a threshold, a seeded mask.

| stage             | keeps                                         | source                                 |
|-------------------|-----------------------------------------------|----------------------------------------|
| topk(rho)         | exactly the ceil(rho n) largest by magnitude  | top-k; a sample guesses the threshold  |
| threshold(rho,L)  | magnitudes of at least tau                    | DCT-DP, Gupta et al., arXiv 2010.08899 |
| mask(rho)         | coordinates drawn from a seed: no index bytes | random-k with shared randomness        |

tau of `threshold` is the (1 - rho) quantile of a device's first update and stays: it is taken anew after L
tasks (32) or when the kept share leaves 0.7 to 1.3 times rho, and follows it by a square root in between.
The paper's L is in thousands of iterations; the rule in between is ours.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from anabranch.compress.stage import Coded, Context, Dense, Role, Sparse, Stream, take
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.params import Indices, Vector

SAMPLE = 1 << 14  # values that the first guess of a threshold is made of, at most 1 % of a large vector
SIGMAS = 4.0  # the guess lies so far under the sampled quantile that it is too high almost never


def fraction(text: str, stage: str) -> float:
    """A kept fraction in (0, 1]. Raises `UnknownCodec`."""
    try:
        rho = float(text)
    except ValueError:
        rho = 0.0
    if not 0.0 < rho <= 1.0:
        raise UnknownCodec(f"{stage}({text}): the kept fraction is a number in (0, 1], such as {stage}(0.1)")
    return rho


def kept_count(rho: float, n: int) -> int:
    """ceil(rho n), at least 1."""
    return min(n, max(1, int(np.ceil(rho * n - 1e-9))))


def largest(x: Vector, k: int) -> Indices:
    """The indices (k,), increasing, of the k largest magnitudes; of equal ones the first."""
    n = x.size
    if k >= n:
        return np.arange(n, dtype=np.int64)
    magnitudes = np.abs(x)
    candidates = _candidates(magnitudes, k)
    found = magnitudes[candidates]
    tau = np.partition(found, found.size - k)[found.size - k]
    above = found > tau
    spare = k - int(np.count_nonzero(above))
    ties = np.flatnonzero(found == tau)[:spare]
    above[ties] = True
    chosen: Indices = candidates[above]
    return chosen


def _candidates(magnitudes: Vector, k: int) -> Indices:
    """At least k indices, hopefully few more: all over a threshold that a sample gives."""
    n = magnitudes.size
    stride = max(1, n // SAMPLE)
    if stride > 1:
        sample = magnitudes[::stride]
        share = k / n
        expected = share * sample.size
        rank = int(expected + SIGMAS * np.sqrt(expected * (1 - share)) + SIGMAS)
        if rank < sample.size:
            guess = np.partition(sample, sample.size - 1 - rank)[sample.size - 1 - rank]
            found = np.flatnonzero(magnitudes >= guess)
            if found.size >= k:
                return found
    return np.arange(n, dtype=np.int64)


class _Selector:
    """Dense in, sparse out; nothing to undo."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int] = 1
    accepts: ClassVar[tuple[type[Any], ...]] = (Dense,)

    def __init__(self, rho: float) -> None:
        self.rho = rho

    def emits(self, accepted: type[Any]) -> type[Any]:
        return Sparse

    def decode(self, value: Sparse, context: Context) -> Sparse:
        return value

    def values_max(self, n: int) -> int:
        return kept_count(self.rho, n)

    def raw_max(self, k: int, n: int) -> int:
        return 0


class TopK(_Selector):
    """See the module."""

    name: ClassVar[str] = "topk"
    number: ClassVar[int] = 1

    def encode(self, value: Dense, context: Context) -> Sparse:
        indices = largest(value.values, kept_count(self.rho, context.n))
        return Sparse(indices, value.values[indices])


class Threshold(_Selector):
    """See the module. Remembers `tau` and `tasks`."""

    name: ClassVar[str] = "threshold"
    number: ClassVar[int] = 2

    def __init__(self, rho: float, every: int = 32) -> None:
        super().__init__(rho)
        self.every = every

    def encode(self, value: Dense, context: Context) -> Sparse:
        x, notes, wanted = value.values, context.notes, kept_count(self.rho, context.n)
        tau, tasks = notes.get("tau", 0.0), int(notes.get("tasks", 0))
        indices = np.flatnonzero(np.abs(x) >= tau) if tau > 0.0 and tasks < self.every else None
        if indices is None or not 0.7 * wanted <= indices.size <= 1.3 * wanted:
            indices = largest(x, wanted)
            tau, tasks = float(np.abs(x[indices]).min()), 0
        else:
            tau *= float(np.clip(np.sqrt(indices.size / wanted), 0.5, 2.0))
        notes.update(tau=tau, tasks=tasks + 1)
        return Sparse(indices, x[indices])

    def values_max(self, n: int) -> int:
        return min(n, int(1.3 * kept_count(self.rho, n)) + 1)


class Mask(_Selector):
    """See the module. The generator is Philox 4x64 of numpy, keyed with the seed: the same everywhere."""

    name: ClassVar[str] = "mask"
    number: ClassVar[int] = 3

    def raw_max(self, k: int, n: int) -> int:
        return 8  # the seed

    def encode(self, value: Dense, context: Context) -> Sparse:
        seed = context.seed & 0xFFFFFFFFFFFFFFFF
        indices = self._indices(seed, context.n)
        return Sparse(indices, value.values[indices], seed)

    def decode(self, value: Sparse, context: Context) -> Sparse:
        """The indices come of the seed, which the quantiser before could not know."""
        assert value.seed is not None
        indices = self._indices(value.seed, context.n)
        if indices.size != value.values.size:
            raise InvalidUpdate(f"payload has {value.values.size} values, its mask has {indices.size}")
        return Sparse(indices, value.values, value.seed)

    def _indices(self, seed: int, n: int) -> Indices:
        draw = np.random.Generator(np.random.Philox(key=seed)).random(n, np.float32)
        return largest(draw, kept_count(self.rho, n))


def write_seed(coded: Coded, seed: int) -> None:
    """The stream of a seed."""
    coded.streams[Role.SEED] = Stream.of(seed.to_bytes(8, "little"))


def read_seed(coded: Coded) -> int:
    """The inverse of `write_seed`. Raises `InvalidUpdate`."""
    return int.from_bytes(take(coded, Role.SEED, 8), "little")
