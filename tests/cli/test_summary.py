"""The lines at the end of a run."""

from __future__ import annotations

import pytest

import anabranch as ab
from anabranch.cli.summary import summary


@pytest.mark.parametrize(("updates", "told"), [(3, True), (4, False)])
def test_a_run_without_a_version_says_that_nothing_was_learned(updates: int, told: bool) -> None:
    run = ab.simulate(
        "synthetic",
        strategy=ab.strategies.FedBuff(buffer_size=4),
        fleet=ab.Fleet(clients=4),
        until=ab.Until(updates=updates),
    )
    assert ("nothing was learned" in summary(run.result, None)) == told
