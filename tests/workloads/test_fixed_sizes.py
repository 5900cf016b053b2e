"""Numbers that a model's code makes of how many units there are keep those units whole.

That what is still cut is right, the test of the zoo shows.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from counting_models import COUNTING

from anabranch.workloads.fixed_sizes import SIZES
from anabranch.workloads.model_graph import find_units, units_and_widths

UNCOUNTED = {
    "heads beside a scale",
    "dropout by a function",
    "a random factor",
    "a buffer that counts calls",
}


@pytest.mark.parametrize("name", COUNTING)
def test_units_that_the_code_counts_are_whole_and_others_are_not(name: str) -> None:
    make, cut = COUNTING[name]
    groups, whole = units_and_widths(make()[0].eval())
    assert {group.name for group in groups} == cut
    counted = {width.name for width in whole if width.because == SIZES}
    assert not counted & cut
    assert bool(counted) == (name not in UNCOUNTED)


def test_looking_for_units_leaves_what_is_drawn_next_as_it_was() -> None:
    model = COUNTING["a random factor"][0]()[0]

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = drawn()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert find_units(model)
    assert drawn() == expected
