"""Secret normals: against the cipher of RFC 8439 in a few lines, scalar functions, their distribution."""

from __future__ import annotations

import hashlib
import hmac
import math
import struct

import numpy as np
import pytest

from anabranch.core.privacy.mechanism import version_key
from anabranch.core.privacy.normals import logarithm, normals, turn

KEY = bytes(range(32))


def chacha20(key: bytes, words: int) -> list[int]:
    """The key stream of RFC 8439 with a nonce of zeros, from counter 0, as numbers of 32 bits."""
    found: list[int] = []
    for counter in range(-(-words // 16)):
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
        x = list(start)
        for _ in range(10):
            for quarter in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
                _quarter_round(x, *quarter)
            for quarter in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
                _quarter_round(x, *quarter)
        found += [(a + b) % 2**32 for a, b in zip(x, start, strict=True)]
    return found[:words]


def _quarter_round(x: list[int], a: int, b: int, c: int, d: int) -> None:
    for first, second, third, turned in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[first] = (x[first] + x[second]) % 2**32
        mixed = x[third] ^ x[first]
        x[third] = (mixed << turned | mixed >> (32 - turned)) % 2**32


def by_scalars(key: bytes, count: int) -> list[float]:
    """Box and Muller's formula on the words of the stream, two of 32 bits for each of 64."""
    words = chacha20(key, 2 * count)
    whole = [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]
    found = []
    for first, second in zip(whole[::2], whole[1::2], strict=True):
        length = math.sqrt(-2 * math.log((first + 1) / 2**64))
        angle = 2 * math.pi * ((second >> 11) / 2**53)
        found += [length * math.cos(angle), length * math.sin(angle)]
    return found


def test_the_cipher_of_this_test_is_the_one_of_the_rfc() -> None:
    # RFC 8439 has another nonce; this stream of the key 00..1f was made by OpenSSL.
    assert [f"{word:08x}" for word in chacha20(KEY, 4)] == ["7d2bfd39", "6a19c5d9", "7703bd8d", "494adcb8"]


def test_they_are_box_and_mullers_of_the_key_stream() -> None:
    key = hashlib.sha256(b"another").digest()
    for of in (KEY, key):
        assert normals(of, 400) == pytest.approx(by_scalars(of, 400), rel=1e-13, abs=1e-14)


def test_they_are_the_same_on_every_machine() -> None:
    digest = hashlib.sha256(normals(KEY, 100_001).tobytes()).hexdigest()
    assert digest == ("dfd14abfd512e6ad6cbb756ca17c0c8b6f40c483bb8de9b15fed4e37a5318c96")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 2**15 - 1, 2**15, 2**15 + 3])
def test_a_stream_begins_the_same_however_many_are_drawn(count: int) -> None:
    assert np.array_equal(normals(KEY, count), normals(KEY, 2**16)[:count])
    assert normals(KEY, count).shape == (count,)


def test_logarithm_and_turn_are_right_to_the_last_bits_at_the_edges_too() -> None:
    u = np.array([2.0**-64, 2.0**-53, 1e-9, 0.25, 0.5, math.sqrt(0.5), 0.70710678, 0.7072, 0.999999, 1.0])
    assert logarithm(u) == pytest.approx([math.log(x) for x in u], rel=4e-16, abs=1e-17)
    v = np.concatenate([np.arange(0, 1, 1 / 997), [0.25, 0.5, 0.75, 1 - 2.0**-53, 2.0**-53]])
    cos, sin = turn(v)
    assert cos == pytest.approx([math.cos(2 * math.pi * x) for x in v], rel=0, abs=2e-15)
    assert sin == pytest.approx([math.sin(2 * math.pi * x) for x in v], rel=0, abs=2e-15)
    assert np.all(cos * cos + sin * sin == pytest.approx(1.0, abs=4e-15))


def test_they_are_normal() -> None:
    x = np.sort(normals(KEY, 1_000_000))
    # Their distribution lies nowhere further from the normal one than chance does in one of a thousand draws.
    normal = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x[::100]])
    assert np.abs(normal - np.arange(x.size)[::100] / x.size).max() < 1.95 / math.sqrt(x.size)
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) / x.size)
        assert abs(np.mean(x**power) - moment) < 4 * spread, power


def test_normals_of_two_keys_and_neighbours_of_one_have_nothing_in_common() -> None:
    x, y = (normals(version_key(KEY, version), 1_000_000) for version in (7, 8))
    for one, other in ((x, y), (x[:-1], x[1:]), (x[:-2], x[2:]), (x * x - 1, y * y - 1)):
        assert abs(np.mean(one * other)) < 4 * one.std() * other.std() / math.sqrt(one.size)


@pytest.mark.parametrize("version", [1, 2, 1 << 40])
def test_the_key_of_a_version_is_hkdfs(version: int) -> None:
    # RFC 5869: extract with a salt of zeros, then one block of expanding.
    extracted = hmac.digest(bytes(32), KEY, "sha256")
    info = b"anabranch/1 noise " + version.to_bytes(8, "big")
    assert version_key(KEY, version) == hmac.digest(extracted, info + b"\x01", "sha256")
