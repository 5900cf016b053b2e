"""The mechanism of a private run: what an update adds to a sum, and the noise that every sum gets.

| symbol | name           | meaning                                                                     |
|--------|----------------|-----------------------------------------------------------------------------|
| C      | clip           | the longest that one update's part of a sum is, Euclidean                   |
| z      | noise          | standard deviation of the noise of a coordinate, in clips                   |
| g      | grid           | a power of two: all sums and all noise are multiples of it                  |
| d      |                | coordinates of the model                                                    |
| c, m   | bands          | as in `accountant.py`                                                       |

    part_i = g round(weight_i Delta_i min(1, C' / |Delta_i|) / g),  C' = C (1 - 2^-40) - g sqrt(d) / 2
    Z_t    = z C (normals of the key of version t),  N_t = g round((Z_t - sum_{i=1}^{m-1} c_i N_{t-i}) / g)
    sum_t  = sum_i part_i + N_t

To round moves a coordinate by g / 2 at most, so |part_i| <= C holds for the rounded part, exactly; and whole
multiples of g are added in float64 without a rounding, in any order. So the sum moves by no more than C if
one update is taken away: not nearly, but in the arithmetic of the machine. The last bits of a sum tell
nothing of what was added: noise and parts have the same grid (Mironov, "On significance of the least
significant bits for differential privacy", 2012). C' counts with the rounding of the lengths.

N_t with m > 1 is the noise of Denisov et al. and of Choquette-Choo et al. (arXiv 2306.08153): what a version
gets too much, the next ones get too little, so that the model, which is their sum, stays nearer to where it
would be. The key of version t is HKDF-SHA256 of the run's key and of t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from anabranch.core.model.params import Delta, Vector, dense
from anabranch.core.privacy.accountant import coefficients
from anabranch.core.privacy.normals import normals

KEY_BYTES = SALT_BYTES = 32
GRID_BITS = 20  # of the grid below the smaller one of clip and noise
SLACK = 2.0**-40  # of the clip: more than all roundings of a length


@dataclass(frozen=True)
class Mechanism:
    """C, z and m of a run."""

    clip: float
    noise: float
    bands: int = 1

    @property
    def grid(self) -> float:
        """g: 2^-20 of the power of two under min(1, z) C."""
        return math.ldexp(1.0, math.frexp(min(1.0, self.noise) * self.clip)[1] - 1 - GRID_BITS)

    def part(self, delta: Delta, weight: float, size: int) -> Vector:
        """What an update adds to a sum: (size,) float64, on the grid, never longer than the clip.

        `weight` counts as at most 1 and at least 0. What has no length, because a value is not finite or
        there are none, adds nothing.
        """
        values = dense(delta).astype(np.float64)
        length = length_of(values) if values.size == size else math.inf
        if not math.isfinite(length):
            return np.zeros(size)
        longest = self.clip * (1.0 - SLACK) - self.grid * math.sqrt(size) / 2
        scale = min(max(weight, 0.0), 1.0) * (min(1.0, longest / length) if length else 1.0)
        return self.on_grid(values * scale)

    def on_grid(self, values: Vector) -> Vector:
        """Rounded to multiples of the grid, halves to even ones."""
        rounded: Vector = np.rint(values / self.grid) * self.grid
        return rounded


def length_of(values: Vector) -> float:
    """The Euclidean length, with one order of adding on every machine: halves upon halves."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = values * values
        while squares.size > 1:
            half = squares.size // 2
            folded = squares[:half] + squares[half : 2 * half]
            if squares.size % 2:
                folded[0] += squares[-1]
            squares = folded
    return math.sqrt(squares[0]) if squares.size else 0.0


@dataclass
class PrivateSums:
    """The sums of one run under its key: changed by the engine alone, with each version.

    `history`: the noise of the newest bands - 1 versions, (size,) float64 each, oldest first.
    `updates_needed`: how many further updates make a version sooner or later, at least.
    """

    mechanism: Mechanism
    size: int
    key: bytes = field(repr=False)
    updates_needed: int = 1
    history: list[Vector] = field(default_factory=list)
    # The noise that was made last, of which version and after which history.
    _made: tuple[int, list[Vector], Vector] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def part(self, delta: Delta, weight: float) -> Vector:
        """See `Mechanism.part`."""
        return self.mechanism.part(delta, weight, self.size)

    def noised(self, total: Vector, version: int) -> Vector:
        """A sum of parts with the noise of the version that it makes."""
        return total + self.noise(version)

    def noise(self, version: int) -> Vector:
        """N_t: a function of the key, the version and the noise of the releases before it."""
        if self._made is not None and self._made[0] == version and self._made[1] is self.history:
            return self._made[2]
        own = normals(version_key(self.key, version), self.size)
        own *= self.mechanism.noise * self.mechanism.clip
        for c, before in zip(coefficients(self.mechanism.bands)[1:], reversed(self.history), strict=False):
            own -= c * before
        noise = self.mechanism.on_grid(own)
        self._made = version, self.history, noise
        return noise

    def published(self, version: int) -> None:
        """A version was made of a sum: its noise counts for the next ones."""
        kept = self.mechanism.bands - 1
        if kept:
            self.history = [*self.history, self.noise(version)][-kept:]
        self._made = None


def version_key(key: bytes, version: int) -> bytes:
    """The key of a version's normals."""
    info = b"anabranch/1 noise " + version.to_bytes(8, "big")
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(key)


def record_salt(key: bytes, update_id: str) -> str:
    """What the record of an update carries in a private simulation, hex: secret, and the same in a replay.

    A version's place in the chain of hashes is of the records that led to it, and who knows the rest of them
    could try out what the values of an update were. A live server draws as many bytes instead.
    """
    info = b"anabranch/1 record salt " + update_id.encode()
    return HKDF(SHA256(), SALT_BYTES, salt=None, info=info).derive(key).hex()
