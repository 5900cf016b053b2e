"""What a device holds of a model, live and simulated."""

from __future__ import annotations

import pytest

from anabranch.host.held import NOTHING, HeldModel

HELD = HeldModel(3, "ab", "the model")


@pytest.mark.parametrize(
    ("head", "stays"), [("ab", True), ("", True), ("cd", False)], ids=["the same", "nobody knows", "another"]
)
def test_a_number_alone_is_no_name(head: str, stays: bool) -> None:
    assert HELD.known_as(head) is (HELD if stays else NOTHING)


def test_a_model_of_an_earlier_release_has_no_name_and_is_fetched_anew() -> None:
    assert HeldModel(3, "", "the model").known_as("ab") is NOTHING


def test_what_came_whole_takes_the_place_and_a_part_does_not() -> None:
    assert HELD.after(4, "cd", "a part", part_only=True) is HELD
    found = HELD.after(4, "cd", "the next", part_only=False)
    assert (found.version, found.head, found.model) == (4, "cd", "the next")
    assert (NOTHING.version, NOTHING.head, NOTHING.model) == (None, "", None)
