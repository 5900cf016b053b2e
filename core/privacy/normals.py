"""Standard normals of a secret key: the same numbers on every processor, and none to be guessed without it.

    bits   = ChaCha20 with the key, two words of 64 bits for two normals
    u      = (word_1 + 1) 2^-64 in (0, 1],   v = (word_2 >> 11) 2^-53 in [0, 1)
    x, y   = sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v)                                        # Box and Muller

The functions of a library come out in other last bits with other vector units. Here is nothing but +, -, *, /
and the square root, which IEEE 754 rounds alike everywhere, in the order that is written down: the logarithm
by its series in (m - 1) / (m + 1), sine and cosine of a quarter turn by Taylor's.

Source: Box and Muller, "A note on the generation of random normal deviates", 1958. 64 bits in u, so that only
values beyond 9.4, of probability 5e-20, are missing.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

Vector = npt.NDArray[np.float64]

PAIRS = 1 << 14  # at once: what is computed of them stays in a core's own cache
LN_2 = math.log(2.0)
ROOT_HALF = math.sqrt(0.5)
LOG_TERMS = [2.0 / (2 * i + 1) for i in range(13)]
# Rationals, rounded once.
SIN_TERMS = [(-1) ** i / math.factorial(2 * i + 1) for i in range(12)]
COS_TERMS = [(-1) ** i / math.factorial(2 * i) for i in range(13)]


def normals(key: bytes, count: int) -> Vector:
    """So many, (count,), of a key of 32 bytes. A key is for one use: equal keys give equal normals."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    found = np.empty(count + count % 2)
    for start in range(0, found.size, 2 * PAIRS):
        block = found[start : start + 2 * PAIRS]
        words = np.frombuffer(stream.update(bytes(8 * block.size)), "<u8").reshape(-1, 2)
        block[0::2], block[1::2] = _pairs(words)
    return found[:count]


def _pairs(words: npt.NDArray[np.uint64]) -> tuple[Vector, Vector]:
    u = (words[:, 0].astype(np.float64) + 1.0) * 2.0**-64
    v = (words[:, 1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
    length = np.sqrt(-2.0 * logarithm(u))
    cos, sin = turn(v)
    return length * cos, length * sin


def logarithm(u: Vector) -> Vector:
    """Ln u for positive finite u, to a few of its last bits."""
    mantissa, exponent = np.frexp(u)
    low = mantissa < ROOT_HALF
    mantissa = np.where(low, 2.0 * mantissa, mantissa)
    exponent = exponent - low
    f = (mantissa - 1.0) / (mantissa + 1.0)
    return exponent * LN_2 + f * _series(LOG_TERMS, f * f)


def turn(v: Vector) -> tuple[Vector, Vector]:
    """Cosine and sine of v turns, v in [0, 1)."""
    quarters = 4.0 * v
    quarter = np.floor(quarters)
    angle = (quarters - quarter) * (math.pi / 2)
    square = angle * angle
    sin, cos = angle * _series(SIN_TERMS, square), _series(COS_TERMS, square)
    odd, turned = quarter % 2 == 1, quarter >= 2
    x, y = np.where(odd, -sin, cos), np.where(odd, cos, sin)
    return np.where(turned, -x, x), np.where(turned, -y, y)


def _series(terms: list[float], x: Vector) -> Vector:
    """sum_i terms[i] x^i, by Horner's rule."""
    total = np.full_like(x, terms[-1])
    for term in reversed(terms[:-1]):
        total *= x
        total += term
    return total
