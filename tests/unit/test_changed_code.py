"""Whose code is another than a run was made with."""

from __future__ import annotations

import pytest

from anabranch.support.code import changed_code


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ({"a:X": "1", "b.py:Y": "2"}, []),
        ({"a:X": "1", "b.py:Y": "3"}, ["b.py:Y"]),
        ({"moved:X": "1", "b.py:Y": "2"}, ["a:X"]),
        ({"a:X": "1", "b.py:Y": "2", "c:Z": "4"}, []),  # of which an older release said nothing
    ],
)
def test_what_has_changed_or_moved_is_told(now: dict[str, str], changed: list[str]) -> None:
    assert changed_code({"a:X": "1", "b.py:Y": "2"}, now) == changed
