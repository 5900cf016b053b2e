"""In what chunks an update goes out: small ones until the link is seen to be quick."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.client.transfer import (
    ANSWERED_BYTES_PER_S,
    MEASURED_BYTES,
    QUICK_BYTES_PER_S,
    USUAL_BYTES_PER_S,
    LinkPace,
    chunks_of,
    pace_after,
)
from anabranch.core.limits import CHUNK_BYTES, KIB, MIB, SLOW_CHUNK_BYTES

PAYLOAD = bytes(MEASURED_BYTES * 3 + 5)


class Link:
    """Takes so many bytes a second, from `slow_from` bytes on a hundredth of that."""

    def __init__(self, bytes_per_s: float, slow_from: float = float("inf")) -> None:
        self.bytes_per_s, self.slow_from = bytes_per_s, slow_from
        self.now = 0.0

    def sizes(self, offset: int = 0, most: int = MIB, pace: LinkPace = LinkPace.USUAL) -> list[int]:
        found, end = [], offset
        for at, data in chunks_of(PAYLOAD, offset, most, lambda: self.now, pace):
            assert (at, len(data) > 0) == (end, True)
            end += len(data)
            slowed = 100 if end > self.slow_from else 1
            self.now += len(data) * slowed / self.bytes_per_s
            found.append(len(data))
        assert end == len(PAYLOAD)
        return found


def test_a_quick_link_gets_large_chunks_once_it_has_shown_so() -> None:
    sizes = Link(QUICK_BYTES_PER_S).sizes()
    small = MEASURED_BYTES // CHUNK_BYTES
    assert sizes == [CHUNK_BYTES] * small + [MIB] * (2 * MEASURED_BYTES // MIB) + [5]


def test_a_slow_link_gets_small_ones_all_the_way() -> None:
    assert set(Link(QUICK_BYTES_PER_S * 0.99).sizes()) == {CHUNK_BYTES, 5}


def test_a_link_that_slows_down_gets_small_ones_again() -> None:
    sizes = Link(QUICK_BYTES_PER_S, slow_from=MEASURED_BYTES).sizes()
    assert sizes[:20] == [CHUNK_BYTES] * 16 + [MIB] * 4
    assert set(sizes[20:]) == {CHUNK_BYTES, 5}


@given(st.integers(0, len(PAYLOAD)), st.sampled_from([64 * KIB, CHUNK_BYTES, MIB]))
def test_no_chunk_is_over_the_cap_and_a_resume_begins_small(offset: int, most: int) -> None:
    sizes = Link(1e9).sizes(offset, most)
    assert all(size <= most for size in sizes)
    assert all(size <= CHUNK_BYTES for size in sizes[: MEASURED_BYTES // CHUNK_BYTES])


def test_a_link_that_was_quick_gets_large_ones_from_the_first_and_small_ones_once_it_is_not() -> None:
    assert Link(QUICK_BYTES_PER_S).sizes(pace=LinkPace.QUICK) == [MIB] * (len(PAYLOAD) // MIB) + [5]
    sizes = Link(QUICK_BYTES_PER_S * 0.99).sizes(pace=LinkPace.QUICK)
    large = MEASURED_BYTES // MIB
    assert sizes[:large] == [MIB] * large
    assert set(sizes[large:]) == {CHUNK_BYTES, 5}
    assert max(Link(QUICK_BYTES_PER_S).sizes(most=64 * KIB, pace=LinkPace.QUICK)) == 64 * KIB


def test_a_slow_one_gets_little_ones_until_it_is_seen_to_be_quick() -> None:
    little = MEASURED_BYTES // SLOW_CHUNK_BYTES
    assert set(Link(QUICK_BYTES_PER_S * 0.99).sizes(pace=LinkPace.SLOW)) == {SLOW_CHUNK_BYTES, 5}
    sizes = Link(QUICK_BYTES_PER_S).sizes(pace=LinkPace.SLOW)
    assert sizes == [SLOW_CHUNK_BYTES] * little + [MIB] * (2 * MEASURED_BYTES // MIB) + [5]


@given(st.integers(0, 64 * MIB), st.floats(0, 1e3), st.sampled_from([LinkPace.USUAL, LinkPace.QUICK]))
def test_a_link_is_quick_if_what_tells_so_took_no_longer_than_a_large_chunk_may(
    size: int, took_s: float, before: LinkPace
) -> None:
    found = pace_after(size, took_s, before)
    if size < CHUNK_BYTES:
        assert found is before
    elif found is LinkPace.QUICK:
        assert MIB / size * took_s <= MIB / ANSWERED_BYTES_PER_S * (1 + 1e-9)  # at its pace
    else:
        assert size / took_s < ANSWERED_BYTES_PER_S


@given(st.integers(0, 64 * MIB), st.floats(0, 1e5))
def test_a_slow_link_is_as_others_where_a_chunk_of_the_usual_size_would_come_in_time(
    size: int, took_s: float
) -> None:
    found = pace_after(size, took_s, LinkPace.SLOW, MEASURED_BYTES)
    told = size >= SLOW_CHUNK_BYTES and CHUNK_BYTES / size * took_s <= CHUNK_BYTES / USUAL_BYTES_PER_S
    assert found is (LinkPace.USUAL if told else LinkPace.SLOW)
