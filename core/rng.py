"""One seed a run, a named stream for each device and purpose.

A stream depends on its own name alone, so adding a device changes no other device's draws.
Only numpy generators that were seeded here are used anywhere in the package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random.bit_generator import ISpawnableSeedSequence

from anabranch.core.kernels.chosen import loops
from anabranch.core.model.arrays import Indices

Name = str | int
SEED_MASK = (1 << 64) - 1


def _hash(seed: int, text: str) -> hashlib.blake2b:
    return hashlib.blake2b(f"{seed}{text}".encode(), digest_size=16)


def _text(names: tuple[Name, ...]) -> str:
    text = ""
    for name in names:
        text += f"\x1f{type(name).__name__}:{name}"
    return text


class _Seed(ISpawnableSeedSequence):
    """numpy's sequence of 16 bytes: to make that and ask it for its words takes ten times as long."""

    def __init__(self, entropy: bytes) -> None:
        self._entropy = entropy

    def generate_state(self, *_: object) -> npt.NDArray[np.uint64]:
        """The words: a PCG64 asks for 4 of 64 bits."""
        return loops.seed_words(self._entropy)

    def spawn(self, n_children: int) -> list[Any]:
        """Those of numpy's, for `Generator.spawn`."""
        return [*self._numpys.spawn(n_children)]

    @cached_property
    def _numpys(self) -> np.random.SeedSequence:
        return np.random.SeedSequence(int.from_bytes(self._entropy, "little"))


def seed_of(seed: int, *names: Name) -> int:
    """A 63-bit seed of its own for the named purpose."""
    return int.from_bytes(_hash(seed, _text(names)).digest()[:8], "little") >> 1


def stream(seed: int, *names: Name) -> np.random.Generator:
    """A generator of its own for the named purpose."""
    words: Any = _Seed(_hash(seed, _text(names)).digest())  # numpy takes any such, and does not say so
    return np.random.Generator(np.random.PCG64(words))


def permutations(seeds: Sequence[int], *names: Name, count: int) -> Indices:
    """What `stream(seed, *names).permutation(count)` gives first, of each seed: (seeds, count).

    In a third of the time, and the names are written once.
    """
    text = _text(names)
    orders = np.empty((len(seeds), count), np.int64)
    for order, seed in zip(orders, seeds, strict=True):
        order[:] = loops.permuted(_hash(seed, text).digest(), count)
    return orders


def rank(seed: int, *names: Name) -> float:
    """A uniform number in [0, 1) of its own for the named purpose: the cheapest draw there is."""
    return (int.from_bytes(_hash(seed, _text(names)).digest()[:7], "little") >> 3) / 2.0**53


def lowest(seed: int, *names: Name, of: Sequence[str], count: int) -> list[str]:
    """The `count` of these texts whose `rank(seed, *names, text)` is the lowest, in any order; all if fewer.

    For many at a time: what their names have in common is hashed once.
    """
    if count >= len(of):
        return list(of)
    begun, found = _hash(seed, _text((*names, ""))), []
    for text in of:
        hashed = begun.copy()
        hashed.update(text.encode())
        found.append(hashed.digest())
    bits = np.frombuffer(b"".join(found), "<u8")[::2] & np.uint64((1 << 56) - 8)  # those that a rank is of
    return [of[i] for i in np.argpartition(bits, count)[:count]]


def random_words(seed: int, number: int, counter: int = 0) -> np.random.Philox:
    """Words of 64 bits that both ends of a wire draw alike: `random_raw(count)` gives the next ones.

    The generator is Philox 4x64-10 (Salmon et al. 2011) with the key (seed, number), counted from `counter`.
    numpy promises never to change that sequence, unlike those of the distributions it makes of it. `number`
    is of the use: each stage of a codec has its own, and so have subspaces and training without gradients.
    """
    return np.random.Philox(counter=counter, key=(seed & SEED_MASK) | number << 64)


def unique_id(seed: int, *names: Name) -> str:
    """A UUID (version 8, RFC 9562) that depends on the seed and the names alone."""
    text = _hash(seed, _text(names)).hexdigest()
    variant = "89ab"[int(text[16], 16) & 3]  # two bits of 16 hexadecimal digits, as the version is four
    return f"{text[:8]}-{text[8:12]}-8{text[13:16]}-{variant}{text[17:20]}-{text[20:]}"
