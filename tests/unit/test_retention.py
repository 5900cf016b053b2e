"""How far back a log is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_lists import lists_up_to

from anabranch.core.errors import ConfigError
from anabranch.core.retention import DAY_S, SNAPSHOTS_KEPT, Keep, SnapshotPoint, kept


@pytest.mark.parametrize(
    ("text", "keep"),
    [("all", Keep()), ("versions:1", Keep(versions=1)), ("days:30", Keep(days=30))],
)
def test_settings(text: str, keep: Keep) -> None:
    assert Keep.of(text) == keep
    assert Keep.of(text).is_all is (text == "all")


def test_all_is_neither_versions_nor_days() -> None:
    assert Keep.of("all") == Keep(versions=0, days=0)
    assert Keep.of("days:30") == Keep(versions=0, days=30)
    assert Keep.of("versions:30") == Keep(versions=30, days=0)


@pytest.mark.parametrize("text", ["", "none", "versions", "versions:0", "days:0", "days:1.5", "versions:-1"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.keep must be 'all'"):
        Keep.of(text)


def marks(*versions: int) -> list[SnapshotPoint]:
    return [SnapshotPoint(10 * v + 1, v, v * DAY_S) for v in versions]


def versions_of(found: list[SnapshotPoint] | tuple[SnapshotPoint, ...]) -> list[int]:
    return [mark.version for mark in found]


def test_the_newest_three_where_all_is_kept() -> None:
    found = kept(marks(1, 2, 3, 4, 5), Keep(), has_base=False)
    assert (versions_of(found.marks), found.base) == ([3, 4, 5], None)
    based = kept(marks(1, 2, 3, 4, 5), Keep(), has_base=True)
    assert (versions_of(based.marks), based.base) == ([1, 3, 4, 5], marks(1)[0])


@pytest.mark.parametrize("keep", [Keep(versions=10), Keep(days=10)])
def test_the_base_moves_when_the_next_one_is_old_enough(keep: Keep) -> None:
    held: list[SnapshotPoint] = []
    base, seen = None, {}
    for version in range(1, 30):
        found = kept([*held, *marks(version)], keep, has_base=base is not None)
        held, base = list(found.marks), found.base
        seen[version] = (None if base is None else base.version, versions_of(held))
    assert seen[10] == (None, [1, 8, 9, 10])
    assert seen[11] == (1, [1, 8, 9, 10, 11])
    assert seen[17] == (1, [1, 8, 15, 16, 17])
    assert seen[18] == (8, [8, 15, 16, 17, 18])
    assert seen[24] == (8, [8, 15, 22, 23, 24])
    assert seen[25] == (15, [15, 22, 23, 24, 25])


def test_the_newest_two_are_never_the_base() -> None:
    assert kept(marks(1, 9), Keep(versions=1), has_base=False).base is None
    assert kept(marks(1, 5, 9), Keep(versions=1), has_base=False).base == marks(1)[0]


def test_version_0_is_no_base() -> None:
    assert kept(marks(0, 5, 9), Keep(versions=1), has_base=False).base is None


def test_no_base_between_what_a_rollback_was_folded_from_and_its_end() -> None:
    """The rollback is event 52: it can be replayed from the base it had, or is folded into one after it."""
    all_marks = [*marks(1, 3, 4, 5), SnapshotPoint(52, 6, 6 * DAY_S), *marks(7, 8, 9)]
    found = kept(all_marks[:5], Keep(versions=1), has_base=True, rolled_back=52)
    assert found.base == all_marks[0]
    found = kept(all_marks, Keep(versions=2), has_base=True, rolled_back=52)
    assert found.base is not None
    assert found.base.seq >= 52


def test_the_snapshot_of_a_rollback_is_kept_until_it_can_be_the_base() -> None:
    all_marks = [*marks(1), SnapshotPoint(52, 6, 6 * DAY_S), *marks(7, 8, 9, 10)]
    found = kept(all_marks, Keep(versions=5), has_base=True, rolled_back=52)
    assert (found.base, versions_of(found.marks)) == (all_marks[0], [1, 6, 8, 9, 10])


@given(
    steps=lists_up_to(60, st.integers(0, 4), least=1),
    keep=st.builds(Keep, versions=st.integers(1, 12)),
)
def test_at_least_what_is_asked_for_and_at_most_twice_as_much(steps: list[int], keep: Keep) -> None:
    """Whatever the snapshots are: few of them, the log no shorter than asked for, the base only moves on."""
    held: list[SnapshotPoint] = []
    base: SnapshotPoint | None = None
    version = widest = 0
    for number, step in enumerate(steps, 1):
        version, widest = version + step, max(widest, step)
        before = base
        found = kept([*held, SnapshotPoint(number, version, 0.0)], keep, has_base=base is not None)
        held, base = list(found.marks), found.base
        assert len(held) <= SNAPSHOTS_KEPT + 2
        assert held[-1].seq == number
        if base is not None:
            assert base == held[0]
            assert before is None or before.seq <= base.seq
            assert version - base.version >= keep.versions
            assert version - base.version <= 2 * keep.versions + 3 * widest
            assert base not in held[-2:]
