"""Lists for properties, long ones as often as short ones.

`st.lists` alone makes them of six or eight, however many `max_size` lets in: a script of six events comes to
no second version, no bound of a device and no switch of phases.
"""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


def lists_up_to(most: int, elements: st.SearchStrategy[T], least: int = 0) -> st.SearchStrategy[list[T]]:
    """Of any length from `least` to `most`, each as likely."""
    return st.integers(least, most).flatmap(lambda n: st.lists(elements, min_size=n, max_size=n))
