"""The search for compression by a metric of which less is better, and by values that are not finite."""

from __future__ import annotations

from anabranch.core.config.goal import Goal
from anabranch.strategies.compression_schedule import Strength
from anabranch.strategies.compression_search import Trial, search_compression


def test_of_a_metric_that_shall_be_small_more_is_a_loss() -> None:
    def measure(s: Strength) -> Trial:
        mse = 4.0 + 0.1 * (s.kept < 0.5) + 3.0 * (s.bits < 16) - 1.0 * (s.bits == 16)
        return Trial(s, None if s.bits == 4 else mse, 1000 * s.kept * s.bits)

    found = search_compression(measure, 0.5, Goal("mse", "min"), (1.0, 0.5, 0.1), (32, 16, 8, 4))
    assert found.found == Strength(0.1, 16)
    told = {d.trial.strength: d.why for d in found.decisions}
    assert told[Strength(1.0, 16)] == "gains 1, saves less", "halving what is kept saves as much"
    assert told[Strength(0.1, 8)] == "loses 3.1, more than 0.5"
    assert found.decisions[0].to_json("mse")["mse"] == 4.0


def test_a_pair_that_is_not_finite_is_never_taken() -> None:
    found = search_compression(
        lambda s: Trial(s, None if s.bits < 32 else 1.0, s.kept), 0.5, Goal("mse", "min"), (1.0,), (32, 16)
    )
    assert (found.found, found.decisions[-1].why) == (Strength(1.0, 32), "is not finite")


def test_a_pair_that_changes_nothing_gains_no_minus_zero() -> None:
    found = search_compression(
        lambda s: Trial(s, 0.98, s.kept), 0.01, Goal("accuracy", "max"), (1.0, 0.5), (32,)
    )
    assert found.decisions[-1].why == "gains 0.00 points, saves most"
