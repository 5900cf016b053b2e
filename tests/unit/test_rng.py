"""Named draws: each is that of its name alone, and the same in every release, or no journal would replay."""

from __future__ import annotations

import hashlib
import uuid

import numpy as np
import pytest

from anabranch.core.rng import lowest, permutations, rank, seed_of, stream, unique_id

NAMES: list[tuple[str | int, ...]] = [
    ("task", "a", 0),
    ("task", "a", 1),
    ("task", "b", 0),
    ("cohort", "a", 0),
    ("task", "a", "0"),
    ("task",),
]


def digest(seed: int, *names: str | int) -> bytes:
    """The seed and the names with their types, 16 bytes of BLAKE2b."""
    text = chr(31).join([str(seed), *(f"{'int' if isinstance(n, int) else 'str'}:{n}" for n in names)])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@pytest.mark.parametrize("names", NAMES)
def test_draws_are_the_bits_of_their_names_digest(names: tuple[str | int, ...]) -> None:
    bits = int.from_bytes(digest(7, *names), "little")
    assert seed_of(7, *names) == bits % 2**64 // 2
    assert rank(7, *names) == bits % 2**56 // 8 / 2**53
    drawn = np.random.Generator(np.random.PCG64(bits)).integers(0, 2**63, 4)
    assert stream(7, *names).integers(0, 2**63, 4).tolist() == drawn.tolist()


def test_what_they_were_in_the_first_release() -> None:
    assert seed_of(1, "a", 2) == 1534384598080568192
    assert rank(1, "a", 2) == 0.5877277354815895
    assert unique_id(1, "a", 2) == "0177d82a-5375-862a-aebb-4fdaae153dfd"
    assert stream(1, "a", 2).integers(0, 1000, 3).tolist() == [446, 696, 302]


def test_other_names_have_other_draws() -> None:
    for draw in (seed_of, rank, unique_id):
        assert len({draw(seed, *names) for seed in (1, 2) for names in NAMES}) == 2 * len(NAMES)


def test_a_rank_is_uniform_and_a_seed_has_63_bits() -> None:
    ranks = np.array([rank(3, n) for n in range(4000)])
    counts = np.histogram(ranks, 8, (0.0, 1.0))[0]
    assert counts.sum() == 4000
    assert abs(counts - 500).max() < 120
    seeds = [seed_of(3, n) for n in range(400)]
    assert 2**62 < max(seeds) < 2**63
    assert {bit for bit in range(63) if any(seed >> bit & 1 for seed in seeds)} == set(range(63))


@pytest.mark.parametrize("count", [0, 1, 13, 299, 300, 301])
def test_the_lowest_are_those_of_the_lowest_ranks(count: int) -> None:
    texts = [f"device-{n}" for n in range(298)] + ["", "ünï\x1fstr:x"]
    ranks = {text: rank(7, "cohort", 5, 0, text) for text in texts}
    expected = sorted(texts, key=ranks.__getitem__)[:count]
    assert sorted(lowest(7, "cohort", 5, 0, of=texts, count=count)) == sorted(expected)
    assert sorted(lowest(8, "cohort", 5, 0, of=texts, count=2)) != sorted(expected[:2])


def test_an_id_is_a_uuid_of_version_8() -> None:
    for n in range(100):
        text = unique_id(5, "update", n)
        found = uuid.UUID(text)
        assert (found.version, found.variant, str(found)) == (8, uuid.RFC_4122, text)
        free = [i for i in range(16) if i not in (6, 8)]
        assert [found.bytes[i] for i in free] == [digest(5, "update", n)[i] for i in free]
        assert [found.bytes[i] % 16 for i in (6, 8)] == [digest(5, "update", n)[i] % 16 for i in (6, 8)]
        assert found.bytes[8] % 64 == digest(5, "update", n)[8] % 64


def test_a_stream_has_children_as_numpys_has() -> None:
    drawn = stream(7, "a")
    digest = hashlib.blake2b(b"7\x1fstr:a", digest_size=16).digest()
    numpys = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    for _ in range(2):
        ours, theirs = drawn.spawn(2), numpys.spawn(2)
        assert [g.random() for g in ours] == [g.random() for g in theirs]
    assert drawn.random() == numpys.random()


@pytest.mark.parametrize("count", [0, 1, 64, 1000])
def test_permutations_are_the_first_of_their_streams(count: int) -> None:
    seeds = [7, 8, 7, 2**63 - 1]
    found = permutations(seeds, "shuffle", 3, count=count)
    assert found.shape == (4, count)
    assert found.tolist() == [stream(seed, "shuffle", 3).permutation(count).tolist() for seed in seeds]
