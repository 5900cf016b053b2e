"""Stages that choose which values travel: the largest, those over a threshold, a seeded mask.

| stage             | keeps                                         | source                                 |
|-------------------|-----------------------------------------------|----------------------------------------|
| topk(rho)         | the ceil(rho n) largest by magnitude, exactly | top-k; a sample guesses the threshold  |
| threshold(rho,L)  | magnitudes of at least tau                    | DCT-DP, Gupta et al., arXiv 2010.08899 |
| mask(rho)         | coordinates drawn from a seed: no index bytes | random-k with shared randomness        |

Of equal magnitudes `topk` keeps the first ones, and none that are zero. tau of `threshold` is the magnitude
of a device's k-th largest value; it is taken anew after L tasks (32) or when the kept share leaves 0.7 to
1.3 times rho, and follows the share by a square root in between. The paper's L is in thousands of
iterations; the rule in between is ours. `mask` keeps the ceil(rho n) largest of n draws of 32 bits, of
equal ones the first; its values are as they are, not scaled by 1 / rho.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from anabranch.compress.quantisers import check_sendable
from anabranch.compress.stage import BLOCK, Dense, Sparse, StageContext
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.kernels.chosen import loops
from anabranch.core.model.params import Indices, Vector
from anabranch.core.rng import SEED_MASK, random_words
from anabranch.core.shares import ceil_of

Flags = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.integer[Any]]
# Values that the first guess of a threshold is made of: which are kept does not depend on them.
SAMPLE_MIN, SAMPLE_MAX, SAMPLED_SHARE = 1 << 10, 1 << 14, 64
FEW = 4  # one value of so many is kept, or fewer; for more, memory is asked for when they are counted
SIGMAS = 4.0  # the guess lies so far under the sampled quantile that it is too high almost never
SMALLEST = 1  # the bits of the smallest magnitude that is not zero

# Finds about the k largest elsewhere, as `largest` does here; None: not these.
Chooser = Callable[[Dense, int], "Sparse | None"]
_chooser: ContextVar[Chooser | None] = ContextVar("chooser", default=None)


@contextmanager
def choosing(chooser: Chooser) -> Iterator[None]:
    """Inside, `topk` asks this first: a device may have something that is quicker."""
    token = _chooser.set(chooser)
    try:
        yield
    finally:
        _chooser.reset(token)


def number(text: str) -> float:
    """The number that an argument is; NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def fraction(text: str, stage: str) -> float:
    """A kept fraction in (0, 1]. Raises `UnknownCodec`."""
    rho = number(text)
    if not 0.0 < rho <= 1.0:
        raise UnknownCodec(f"{stage}({text}): the kept fraction is a number in (0, 1], such as {stage}(0.1)")
    return rho


def kept_count(rho: float, n: int) -> int:
    """ceil(rho n), at least 1."""
    return min(n, max(1, ceil_of(rho, n)))


def largest(dense: Dense, k: int) -> Sparse:
    """The k values of the largest magnitudes; of equal ones the first, and none that are zero."""
    if 0 < dense.size <= BLOCK:  # it is looked at twice, and need not be gathered as often
        dense = Dense.of(next(dense.blocks()))
    found = over(dense, _guess(dense, k))
    if found.size < k:
        found = over(dense, SMALLEST)
    if found.size <= k:
        return found
    bits = np.abs(found.values).view(np.int32)
    kept = np.flatnonzero(_k_largest(bits, k))
    return Sparse(found.indices[kept], found.values[kept])


def _k_largest(ranks: Ranks, k: int) -> Flags:
    """Which k of the ranks (n,) are the largest; of equal ones the first."""
    tau = np.partition(ranks, ranks.size - k)[ranks.size - k]
    kept: Flags = ranks > tau
    kept[np.flatnonzero(ranks == tau)[: k - int(np.count_nonzero(kept))]] = True
    return kept


def over(dense: Dense, bits_min: int) -> Sparse:
    """The values of magnitudes of at least these bits. Raises `InvalidUpdate` if any is not finite."""
    indices: list[Indices] = []
    values: list[Vector] = []
    room = min(BLOCK, dense.size) // FEW
    places, kept = np.empty(room, np.int64), np.empty(room, np.float32)
    for start, block in zip(range(0, dense.size, BLOCK), dense.blocks(), strict=True):
        if (count := loops.over(block, bits_min, places, kept)) > places.size:
            room = min(block.size, count + count // 4)
            places, kept = np.empty(room, np.int64), np.empty(room, np.float32)
            loops.over(block, bits_min, places, kept)
        indices.append(places[:count] + start)
        values.append(kept[:count].copy())
    found = Sparse(_joined(indices, np.int64), _joined(values, np.float32))
    # What is not finite has the largest bits of all, so it is among what was found.
    check_sendable(loops.top(found.values))
    return found


def _joined(parts: list[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
    """What was found in blocks, one behind the other; of no block none."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _guess(dense: Dense, k: int) -> int:
    """The bits of a threshold that hopefully a few more than k values reach."""
    stride = _stride(dense.size)
    if stride < 2:
        return SMALLEST
    sample = np.abs(np.concatenate([_sampled(block, stride) for block in dense.blocks()])).view(np.int32)
    share = k / dense.size
    expected = share * sample.size
    rank = int(expected + SIGMAS * np.sqrt(expected * (1 - share)) + SIGMAS)
    if rank >= sample.size:
        return SMALLEST
    at = sample.size - 1 - rank
    return max(SMALLEST, int(np.partition(sample, at)[at]))


def _stride(n: int) -> int:
    """One of how many of n values is looked at for a guess."""
    return n // min(SAMPLE_MAX, max(SAMPLE_MIN, n // SAMPLED_SHARE))


def _sampled(block: Vector, stride: int) -> Vector:
    """One value of every `stride`, not always the same one: tensors have periods of their own."""
    return block[_sampled_places(block.size, stride)]


@lru_cache(maxsize=16)  # nearly all blocks are of one size
def _sampled_places(n: int, stride: int) -> Indices:
    i = np.arange(n // stride, dtype=np.uint64)
    jitter = (i * np.uint64(2654435761) % np.uint64(1 << 32) * np.uint64(stride)) >> np.uint64(32)
    places = (i * np.uint64(stride) + jitter).astype(np.int64)
    places.flags.writeable = False
    return places


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

    def decode(self, value: Sparse, context: StageContext) -> Sparse:
        return value

    def values_max(self, n: int) -> int:
        return kept_count(self.rho, n)

    def raw_max(self, k: int, n: int) -> int:
        return 0


class TopK(_Selector):
    """The ceil(rho n) values that are largest by magnitude, exactly; or as `choosing` says."""

    name: ClassVar[str] = "topk"
    number: ClassVar[int] = 1

    def encode(self, value: Dense, context: StageContext) -> Sparse:
        k, elsewhere = kept_count(self.rho, context.n), _chooser.get()
        found = None if elsewhere is None else elsewhere(value, k)
        return largest(value, k) if found is None else found


class Threshold(_Selector):
    """The values over a threshold, which is taken anew now and then so that about rho n are over it.

    Remembers `tau` and `tasks`.
    """

    name: ClassVar[str] = "threshold"
    number: ClassVar[int] = 2

    def __init__(self, rho: float, every: int = 32) -> None:
        super().__init__(rho)
        self.every = every

    def encode(self, value: Dense, context: StageContext) -> Sparse:
        notes, wanted = context.notes, kept_count(self.rho, context.n)
        tau, tasks = notes.get("tau", 0.0), int(notes.get("tasks", 0))
        bits = int(np.array(tau, np.float32).view(np.int32))
        found = over(value, bits) if bits >= SMALLEST and tasks < self.every else None
        if found is None or not 0.7 * wanted <= found.size <= 1.3 * wanted:
            found = largest(value, wanted)
            tau, tasks = float(np.abs(found.values).min(initial=np.inf)), 0
        else:
            tau *= float(np.clip(np.sqrt(found.size / wanted), 0.5, 2.0))
        notes.update(tau=tau if found.size else 0.0, tasks=tasks + 1)
        return found

    def values_max(self, n: int) -> int:
        return min(n, int(1.3 * kept_count(self.rho, n)) + 1)


class Mask(_Selector):
    """The ceil(rho n) values that a seed draws: it travels in the place of their indices."""

    name: ClassVar[str] = "mask"
    number: ClassVar[int] = 3

    def raw_max(self, k: int, n: int) -> int:
        return 8  # the seed

    def encode(self, value: Dense, context: StageContext) -> Sparse:
        seed = context.seed & SEED_MASK
        indices = self._indices(seed, context.n)
        chosen = np.empty(indices.size, np.float32)
        for start, block in zip(range(0, value.size, BLOCK), value.blocks(), strict=True):
            check_sendable(loops.top(block))
            first, last = np.searchsorted(indices, (start, start + block.size))
            chosen[first:last] = block[indices[first:last] - start]
        return Sparse(indices, chosen, seed)

    def decode(self, value: Dense | Sparse, context: StageContext) -> Sparse:
        """The indices come of the seed, which the quantiser before could not know."""
        if not isinstance(value, Sparse) or value.seed is None:
            raise InvalidUpdate("payload lacks the stream seed")
        indices = self._indices(value.seed, context.n)
        if indices.size != value.size:
            raise InvalidUpdate(f"payload has {value.size} values, its mask has {indices.size}")
        return Sparse(indices, value.values, value.seed)

    def _indices(self, seed: int, n: int) -> Indices:
        """The places (k,) of the largest draws, increasing."""
        k = kept_count(self.rho, n)
        words = random_words(seed, self.number).random_raw(-(-n // 2))
        draws = words.astype("<u8", copy=False).view("<u4")[:n]
        return np.flatnonzero(_k_largest(draws, k))
