"""The bytes of indices, as the table of the module says, and what cannot be indices."""

from __future__ import annotations

import numpy as np
import pytest

from anabranch.compress.indices import Bitmap, Gaps, PlainIndices
from anabranch.compress.stage import BLOCK, Coded, Role, StageContext, Stream
from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.kernels.contract import gaps_max
from anabranch.core.model.params import Indices

KINDS = (PlainIndices, Gaps, Bitmap)
Kind = type[PlainIndices | Gaps | Bitmap]


def gap_bytes(indices: Indices) -> bytes:
    """One index after the other."""
    out, before = bytearray(), -1
    for index in indices.tolist():
        gap, before = index - before - 1, index
        out += bytes([255] * (gap // 255) + [gap % 255])
    return bytes(out)


CASES = {
    "one": (np.array([0]), 1),
    "the last": (np.array([299]), 300),
    "gaps of 254, 255 and 256": (np.array([254, 510, 767, 768, 1533, 1534]), 1535),
    "short gaps": (np.arange(3, 500, 7), 500),
    "all": (np.arange(17), 17),
    "long": (np.array([0, 100_000]), 100_001),
    "many blocks": (np.arange(2 * BLOCK + 5) * 3 + 1, 6 * BLOCK + 99),
    "a long gap between blocks": (
        np.concatenate([np.arange(BLOCK), np.arange(BLOCK) + 2 * BLOCK]),
        3 * BLOCK,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("indices", "n"), CASES.values(), ids=CASES)
def test_the_bytes_and_back(kind: Kind, indices: Indices, n: int) -> None:
    bits = np.zeros(-(-n // 8) * 8, np.uint8)
    bits[indices] = 1
    wanted = {
        PlainIndices: indices.astype("<u4").tobytes(),
        Gaps: gap_bytes(indices),
        Bitmap: bytes((bits.reshape(-1, 8) << np.arange(8, dtype=np.uint8)).sum(axis=1).astype(np.uint8)),
    }[kind]
    coded = kind().encode(Coded(indices.size, indices=indices), StageContext(n))
    assert coded.indices is None
    assert bytes(coded.streams[Role.INDEX].data) == wanted
    assert len(wanted) <= kind().raw_max(indices.size, n)
    found = kind().decode(coded, StageContext(n))
    assert found.indices is not None
    assert found.indices.dtype == np.int64
    assert found.indices.tolist() == indices.tolist()
    assert Role.INDEX not in found.streams


@pytest.mark.parametrize("kind", KINDS)
def test_no_indices_are_no_bytes_but_of_a_bitmap(kind: Kind) -> None:
    none = np.empty(0, np.int64)
    coded = kind().encode(Coded(0, indices=none), StageContext(9))
    assert bytes(coded.streams[Role.INDEX].data) == (bytes(2) if kind is Bitmap else b"")
    found = kind().decode(coded, StageContext(9)).indices
    assert found is not None
    assert found.size == 0


@pytest.mark.parametrize(("k", "n", "most"), [(0, 0, 1), (3, 254, 4), (3, 255, 5), (3, 509, 5), (3, 510, 6)])
def test_the_most_bytes_of_gaps(k: int, n: int, most: int) -> None:
    assert gaps_max(k, n) == most
    assert [PlainIndices().raw_max(k, n), Bitmap().raw_max(k, n)] == [4 * k, (n + 7) // 8]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_lacks_is_named(kind: Kind) -> None:
    with pytest.raises(InvalidUpdate, match="payload lacks the stream index"):
        kind().decode(Coded(1), StageContext(9))


def decoded(kind: Kind, data: bytes, k: int, n: int) -> list[int]:
    found = kind().decode(Coded(k, {Role.INDEX: Stream.of(data)}), StageContext(n)).indices
    assert found is not None
    values: list[int] = found.tolist()
    return values


@pytest.mark.parametrize(
    ("kind", "data", "k", "n", "words"),
    [
        (PlainIndices, bytes(4), 2, 9, "stream index has 4 bytes, the manifest needs 8"),
        (PlainIndices, bytes([5, 0, 0, 0, 5, 0, 0, 0]), 2, 9, "strictly increasing"),
        (PlainIndices, bytes([9, 0, 0, 0]), 1, 9, "within 0..8"),
        (Bitmap, bytes(1), 0, 9, "stream index has 1 bytes, the manifest needs 2"),
        (Bitmap, bytes([3, 0]), 1, 9, "has 2 bits set, 1 below 9 are needed"),
        (Bitmap, bytes([0, 2]), 1, 9, "has 1 bits set, 1 below 9 are needed"),
        (Gaps, bytes([0]), 2, 9, "gaps of 1 bytes cannot be 2 indices below 9"),
        (Gaps, bytes([255, 255, 0]), 1, 9, "gaps of 3 bytes cannot be 1 indices"),
        (Gaps, bytes([255]), 1, 900, "the last gap has no end"),
        (Gaps, bytes([1, 255]), 1, 900, "the gaps are of 1 indices, 1 are needed"),
        (Gaps, bytes([1, 255, 1]), 1, 900, "the gaps are of 2 indices, 1 are needed"),
        (Gaps, bytes([0, 8]), 2, 9, "index 9 is over 8"),
        (Gaps, bytes([255, 44]), 1, 299, "index 299 is over 298"),
    ],
)
def test_what_cannot_be_indices(kind: Kind, data: bytes, k: int, n: int, words: str) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        decoded(kind, data, k, n)


@pytest.mark.parametrize(
    ("kind", "data", "k", "n", "indices"),
    [
        (PlainIndices, bytes([0, 0, 0, 0, 8, 0, 0, 0]), 2, 9, [0, 8]),
        (Bitmap, bytes([1, 1]), 2, 9, [0, 8]),
        (Gaps, bytes([0, 7]), 2, 9, [0, 8]),
        (Gaps, bytes([255, 43]), 1, 299, [298]),
        (Gaps, bytes([254]), 1, 255, [254]),
    ],
)
def test_indices_at_their_bounds(kind: Kind, data: bytes, k: int, n: int, indices: list[int]) -> None:
    assert decoded(kind, data, k, n) == indices


def test_gaps_that_an_entropy_coder_has_left_coded_are_refused() -> None:
    coded = Coded(1, {Role.INDEX: Stream(b"\0", 1, coder=30)})
    with pytest.raises(InvalidUpdate, match="payload lacks the stream index"):
        Gaps().decode(coded, StageContext(9))


def test_gaps_by_themselves() -> None:
    assert loops.read_gaps(loops.write_gaps(np.array([1, 300])), 2, 301).tolist() == [1, 300]
