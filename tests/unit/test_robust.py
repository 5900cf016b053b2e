"""The robust rules: values computed by hand, every strategy that may have one, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, part

import anabranch
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.kernels.table import BLOCK
from anabranch.core.model.arrays import lasting
from anabranch.core.model.params import SparseVector
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.robust.centred_clipping import CentredClipping
from anabranch.strategies.robust.coordinatewise import Median, TrimmedMean
from anabranch.strategies.robust.geometric_median import GeometricMedian
from anabranch.strategies.robust.krum import Krum, MultiKrum
from anabranch.strategies.robust.neighbour_mixing import NeighbourMixing
from anabranch.strategies.robust.registry import BUILT_IN as RULES
from anabranch.strategies.robust.rows import Row, Rows
from anabranch.strategies.robust.rule import Rule

BUFFERED: dict[str, dict[str, Any]] = {
    "fedavg": {"clients_per_round": 5},
    "fedprox": {"clients_per_round": 5},
    "fedbuff": {"buffer_size": 5},
    "qafel": {"buffer_size": 5},
    "teasq": {"cache_size": 5},
    "teasq_drop": {"cache_size": 5},
}


def rows(*values: Any) -> Rows:
    """Whole rows."""
    return Rows([Row(np.asarray(v, np.float32)) for v in values], len(values[0]))


def result(rule: Rule, of: Rows, before: Any = None) -> list[float]:
    start = np.zeros(of.size) if before is None else np.asarray(before, np.float64)
    found: list[float] = rule.combine(of, start).tolist()
    return found


# --- by hand -------------------------------------------------------------------------------------


def test_the_trimmed_mean_leaves_out_the_ends_of_every_coordinate() -> None:
    five = rows([1, 50], [2, 10], [3, 20], [4, 30], [1000, -9])
    assert result(TrimmedMean(0.2), five) == [3.0, 20.0]
    assert result(TrimmedMean(0.4), five) == [3.0, 20.0]
    assert result(TrimmedMean(0.1), five) == [202.0, 20.2], "less than one row is trimmed: the mean"


FOUR_AND_ONE = ([0, 0], [1, 1], [2, 2], [3, 3], [100, 2])  # the last is far off on one coordinate of two


@pytest.mark.parametrize(
    ("rule", "heard"),
    [
        (TrimmedMean(0.2), [0, 1, 1, 0.5, 0.5]),  # 1 to 3 and 1 to 2 count: 3 of the fourth, 2 of the fifth
        (Median(), [0, 0, 1, 0, 0.5]),
        (Krum(0.2), [0, 1, 0, 0, 0]),  # its two nearest are as near as those of [2, 2], which comes later
        (MultiKrum(0.2), [1, 1, 1, 1, 0]),
        (CentredClipping(2.0, 1), [1, 1, 2 / math.sqrt(8), 2 / math.sqrt(18), 2 / math.hypot(100, 2)]),
    ],
    ids=lambda found: getattr(found, "name", ""),
)
def test_how_much_a_rule_has_heard_of_each_row(rule: Rule, heard: list[float]) -> None:
    of = rows(*FOUR_AND_ONE)
    rule.combine(of, np.zeros(2))
    assert of.heard is not None
    assert of.heard.tolist() == pytest.approx(heard)


def test_the_geometric_median_hears_less_of_a_row_the_farther_it_is_from_the_middle() -> None:
    of = rows([0, 1], [0, -1], [1, 0], [-1, 0], [40, 0])
    centre = np.array(result(GeometricMedian(60), of))
    assert of.heard is not None
    away = np.linalg.norm(np.array([[0, 1], [0, -1], [1, 0], [-1, 0], [40, 0]]) - centre, axis=1)
    assert of.heard.tolist() == pytest.approx(np.minimum(1, np.median(away) / away).tolist(), rel=1e-3)
    assert of.heard[4] < 0.05 < 0.7 < of.heard[:4].min()


def test_of_a_part_a_rule_hears_what_it_covers() -> None:
    of = Rows([Row(np.array([v]), np.array([0])) for v in (1.0, 2.0, 3.0)] + [Row(np.array([9.0, 9.0]))], 2)
    TrimmedMean(0.3).combine(of, np.zeros(2))
    assert of.heard is not None
    assert of.heard.tolist() == [0, 1, 1, 0.5], "the last one alone has the second coordinate"


def test_a_fraction_that_is_not_exact_in_binary_trims_what_it_says() -> None:
    ten = rows(*[[float(i)] for i in range(9)], [1e6])
    assert result(TrimmedMean(0.3), ten) == [4.5]  # 3, 4, 5, 6


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert result(Median(), rows([1, 0], [9, 0], [3, 7], [1000, 9])) == [6.0, 3.5]
    assert result(Median(), rows([5.0])) == [5.0]


def test_the_geometric_median_of_three_on_a_line_is_the_middle_one() -> None:
    found = result(GeometricMedian(50), rows([0, 0], [1, 0], [100, 0]))
    assert found == pytest.approx([1.0, 0.0], abs=1e-3)


def test_the_geometric_median_of_a_triangle_sees_every_side_under_120_degrees() -> None:
    """Of (0,0), (1,0), (0,1): (t, t) with t = (3 - sqrt 3) / 6."""
    t = (3 - math.sqrt(3)) / 6
    assert result(GeometricMedian(100), rows([0, 0], [1, 0], [0, 1])) == pytest.approx([t, t], abs=1e-6)


def test_krum_takes_the_row_with_the_nearest_neighbours() -> None:
    """N = 5, f = 1, two neighbours count: scores 1 + 4, 1 + 1, 1 + 4, and those far away."""
    five = rows([0], [1], [2], [50], [90])
    assert result(Krum(0.2), five) == [1.0]
    assert result(MultiKrum(0.2, selected=2), five) == [0.5], "of the equal scores the first"
    assert result(MultiKrum(0.2), rows([0], [1], [2], [3], [90])) == [1.5], "all but f"


def test_krum_of_few_rows_takes_fewer_attackers() -> None:
    assert result(Krum(0.4), rows([3.0])) == [3.0]
    assert result(Krum(0.4), rows([3.0], [5.0])) == [3.0]
    assert result(Krum(0.4), rows([3.0], [5.0], [5.5])) == [5.0]


def test_centred_clipping_pulls_no_row_further_than_the_radius() -> None:
    """From 0 with tau = 1: (0.5 + 1 + 1) / 3; from 1: 1 + (-0.5 + 1 + 1) / 3."""
    three = rows([0.5], [2], [1000])
    assert result(CentredClipping(1.0, 1), three) == pytest.approx([2.5 / 3])
    assert result(CentredClipping(1.0, 1), three, [1.0]) == pytest.approx([1.5])


def test_without_a_radius_it_is_the_median_distance() -> None:
    """Distances 1, 2, 1000: tau = 2, so (1 + 2 + 2) / 3."""
    assert result(CentredClipping(0.0, 1), rows([1], [2], [1000])) == pytest.approx([5 / 3])


def test_a_row_is_mixed_with_its_nearest_and_the_median_is_of_those() -> None:
    """N = 5, f = 2: the rows' three nearest are {0, 1, 3}, {0, 1, 3}, {0, 1, 3}, {3, 90, 91} twice.

    So the mixed rows are 4/3 three times and 184/3 twice, and the median of five on a line is the middle one.
    """
    five = rows([0], [1], [3], [90], [91])
    assert result(NeighbourMixing(0.4, 60), five) == pytest.approx([4 / 3], abs=1e-3)
    assert five.heard is not None
    assert five.heard.tolist() == pytest.approx([1, 1, 1, 0, 0], abs=1e-3), "none is heard more than wholly"
    assert result(NeighbourMixing(0.4), rows([3.0])) == [3.0]
    assert result(NeighbourMixing(0.1), rows([1.0], [5.0])) == pytest.approx([3.0]), (
        "nobody is hostile: the mean"
    )


def mixed_by_hand(matrix: Any, f: int, passes: int) -> Any:
    """The same of vectors: each the mean of its nearest, then Weiszfeld's steps from the middle half."""
    near = [
        np.argsort(np.linalg.norm(matrix - row, axis=1), kind="stable")[: len(matrix) - f] for row in matrix
    ]
    mixed = np.array([matrix[which].mean(axis=0) for which in near])
    sums = np.array([np.linalg.norm(mixed - row, axis=1).sum() for row in mixed])
    v = mixed[sums <= np.median(sums) * (1 + 1e-9)].mean(axis=0)
    for _ in range(passes):
        away = np.linalg.norm(mixed - v, axis=1)
        beta = 1 / np.maximum(away, max(1e-6 * np.median(away), 1e-100))
        v = beta @ mixed / beta.sum()
    return v


@pytest.mark.parametrize("seed", range(5))
def test_mixing_by_weights_is_mixing_of_vectors(seed: int) -> None:
    matrix = np.random.default_rng(seed).standard_normal((10, 40)).astype(np.float32)
    matrix[:2] *= 30
    found = result(NeighbourMixing(0.3, 5), rows(*matrix))
    assert found == pytest.approx(mixed_by_hand(matrix.astype(np.float64), 3, 5).tolist(), abs=1e-6)


def test_who_hides_in_the_variance_has_less_to_hide_in() -> None:
    """Sixteen honest rows about 1, four that are the mean less 1.5 deviations: the result is nearer to 1."""
    rng = np.random.default_rng(5)
    honest = 1 + rng.standard_normal((16, 400))
    hostile = np.tile(honest[:4].mean(axis=0) - 1.5 * honest[:4].std(axis=0), (4, 1))
    of = np.concatenate([honest, hostile]).astype(np.float32)
    away = {
        rule.name: abs(np.mean(result(rule, rows(*of))) - honest.mean())
        for rule in (NeighbourMixing(0.3), GeometricMedian(), MultiKrum(0.3), TrimmedMean(0.3))
    }
    assert away["neighbour_mixing"] < 0.5 * min(away[name] for name in away if name != "neighbour_mixing"), (
        away
    )


def test_a_coordinate_goes_by_the_rows_that_cover_it() -> None:
    """Coordinate 0 has three rows, 1 has one, 2 none."""
    only = np.array([0])
    of = Rows(
        [
            Row(np.array([1.0, 8.0]), np.array([0, 1])),
            Row(np.array([2.0]), only),
            Row(np.array([500.0]), only),
        ],
        3,
    )
    for rule in (Median(), TrimmedMean(0.4)):
        assert result(rule, of) == [2.0, 8.0, 0.0]
    assert of.mean(np.ones(3)).tolist() == pytest.approx([503 / 3, 8.0, 0.0])
    assert of.distances(np.array([1.0, 7.0, 9.0])).tolist() == pytest.approx(
        [math.sqrt(3 / 2), math.sqrt(3), 499 * math.sqrt(3)]
    )
    assert of.square_distances()[0].tolist() == pytest.approx([0.0, 3.0, 3 * 499.0**2])
    assert result(CentredClipping(1.0, 1), of, [0.0, 0.0, 9.0])[2] == 0.0, "what nobody covers stays"


def test_rows_that_share_nothing_are_as_far_apart_as_any() -> None:
    of = Rows(
        [Row(np.array([x]), np.array([i])) for x, i in ((1.0, 0), (4.0, 0), (7.0, 1))],
        2,
    )
    assert of.square_distances().tolist() == [[0, 18, 18], [18, 0, 18], [18, 18, 0]]


def test_a_sparse_row_is_its_dense_one_over_many_blocks() -> None:
    rng = np.random.default_rng(1)
    size = 2 * BLOCK + 77
    at = [rng.permutation(size)[:500] for _ in range(4)]
    values = [rng.standard_normal(500).astype(np.float32) for _ in at]
    sparse = [SparseVector(i, v, size) for i, v in zip(at, values, strict=True)]
    thin = Rows([Row(x, scale=0.5) for x in sparse], size)
    thick = Rows([Row(x.dense(), scale=0.5) for x in sparse], size)
    for rule in (Median(), GeometricMedian(3), Krum(0.2), CentredClipping(0.0, 2)):
        assert np.array_equal(rule.combine(thin, np.zeros(size)), rule.combine(thick, np.zeros(size))), (
            rule.name
        )


def test_a_sparse_row_of_a_part_lies_where_the_part_lies() -> None:
    delta = SparseVector(np.array([2, 0]), np.array([30.0, 10.0]), 3)
    (block,) = Rows([Row(delta, np.array([1, 4, 5]))], 7).blocks()
    assert block.values.tolist() == [[0, 10, 0, 0, 0, 30, 0]]
    assert block.counts.tolist() == [0, 1, 0, 0, 1, 1, 0]


# --- in the strategies ---------------------------------------------------------------------------


def five(strategy: str, robust: dict[str, Any], poison: float, examples: int = 1) -> Any:
    """Four honest updates near 1, and one."""
    deltas = [1.0, 1.25, 0.75, 1.0, poison]
    sent = [
        anabranch.Update(f"c{i}", f"t{i}", 0, examples if i == 4 else 1, {"w": np.full(3, d, np.float32)})
        for i, d in enumerate(deltas)
    ]
    return anabranch.aggregate(strategy, BUFFERED[strategy], {"w": np.zeros(3, np.float32)}, sent, robust)


@pytest.mark.parametrize("strategy", BUFFERED)
@pytest.mark.parametrize("rule", tuple(RULES))
def test_every_rule_in_every_buffered_strategy_shrugs_off_a_hundredfold_update(
    strategy: str, rule: str
) -> None:
    found = five(strategy, {"rule": rule, "attackers": 0.2}, -100.0)
    assert found.version == 1
    assert found.model["w"] == pytest.approx(1.0, abs=0.45)
    assert five(strategy, {}, -100.0).model["w"] == pytest.approx(-19.2, abs=0.01), "the mean does not"


@pytest.mark.parametrize("strategy", BUFFERED)
def test_with_a_rule_a_device_gains_nothing_by_claiming_examples(strategy: str) -> None:
    robust = {"rule": "median"}
    assert np.array_equal(
        five(strategy, robust, 9.0).model["w"], five(strategy, robust, 9.0, 10**6).model["w"]
    )


def test_models_that_are_mixed_are_mixed_with_the_rules_result() -> None:
    """Alpha = 0.5: half way to the median of the five models."""
    params = {"cache_size": 3, "alpha": 0.5}
    sent = [
        anabranch.Update(f"c{i}", f"t{i}", 0, 1, {"w": np.array([d])}) for i, d in enumerate((1.0, 3.0, 99.0))
    ]
    found = anabranch.aggregate("teasq", params, {"w": np.array([10.0])}, sent, {"rule": "median"})
    assert found.model["w"] == pytest.approx([11.5])


def test_parts_of_a_model_are_combined_where_they_are_covered() -> None:
    b = Bench(
        "teasq_drop", cache_size=3, concurrency_fraction=1.0, any_submodel=True, robust={"rule": "median"}
    )
    b.enrol("a", "b", "c")
    sent = [("a", (5, 1), part(0, 1)), ("b", (7,), part(1)), ("c", (90,), part(1))]
    for client, _, _ in sent:
        b.ask(client, client)
    for client, delta, where in sent:
        b.push(client, client, delta, submodel=where)
    assert b.engine.vector.tolist() == [5, 7, 0, 0]


def test_momentum_runs_on_the_rules_result() -> None:
    b = Bench("fedbuff", buffer_size=1, momentum=0.5, robust={"rule": "median"})
    b.enrol("a")
    for i in range(2):
        b.work("a", f"t{i}", (2, 0, 0, 0))
    assert b.engine.vector[0] == pytest.approx(2 + 3)


@pytest.mark.parametrize("strategy", BUFFERED)
def test_a_snapshot_in_the_middle_of_a_buffer_goes_on_to_the_same_model(strategy: str) -> None:
    def run(cut: int) -> Any:
        rounds = {"over_selection": 4.0} if strategy in ("fedavg", "fedprox") else {}
        options: dict[str, Any] = {**BUFFERED[strategy], **rounds, "robust": {"rule": "centred_clipping"}}
        b = Bench(strategy, **options)
        b.enrol(*"abcdefgh")
        for i in range(13):
            if i == cut:
                e = b.engine
                b.engine = restore(take_snapshot(e), e.spec, e.strategy, e.settings)
                assert state_digest(b.engine) == state_digest(e)
            b.work("abcdefgh"[i % 8], f"t{i}", (1 + i, -i, 0.5, 100 * (i % 5)), now=float(i))
        return b.engine

    whole, broken = run(99), run(8)
    assert whole.version == 2
    assert state_digest(whole) == state_digest(broken)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedasync", "asyncdrop"])
def test_a_strategy_without_a_buffer_has_no_rule(strategy: str) -> None:
    with pytest.raises(ConfigError, match=r"robust\.rule is 'median', but .* gathers no buffer"):
        make_strategy(strategy, {}, RobustTable(rule="median"))
    make_strategy(strategy, {}, RobustTable())


@pytest.mark.parametrize(
    ("robust", "words"),
    [
        ({"rule": "mean"}, "robust.rule must be one of none, trimmed_mean"),
        ({"attackers": 0.5}, "robust.attackers must be less than 0.5"),
        ({"clip": "often"}, "robust.clip must be 'auto' or a number"),
        ({"clip": -1.0}, "robust.clip must not be negative"),
        ({"iterations": 0}, "robust.iterations must be greater than 0"),
        ({"attacker": 0.1}, "did you mean 'attackers'"),
    ],
)
def test_a_bad_table_names_the_key(robust: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        anabranch.aggregate("fedbuff", {}, {"w": np.zeros(1)}, [], robust)


def test_the_rule_is_no_key_of_the_strategy() -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        make_strategy("fedbuff", {"rule": "median"})


def test_an_update_that_is_cut_says_so_whatever_the_strategy() -> None:
    b = Bench("fedasync", alpha=1.0, clip=2.0)
    b.enrol("a")
    for i in range(12):
        b.work("a", f"t{i}", (1, 0, 0, 0))
    b.ask("a", "x")
    found = decision(b.push("a", "x", (0, 100, 0, 0)))
    assert found.detail == "shortened to 0.02 of its length"
    assert b.engine.vector[1] == pytest.approx(2.0)


def test_nothing_is_cut_while_few_have_come_nor_without_a_clip() -> None:
    for clip, count in ((2.0, 9), (0.0, 40)):
        b = Bench("fedasync", alpha=1.0, clip=clip)
        b.enrol("a")
        for i in range(count):
            b.work("a", f"t{i}", (1, 0, 0, 0))
        assert b.work("a", "x", (0, 100, 0, 0)).detail == ""
        assert (b.engine.guard.lengths == []) == (clip == 0)


def test_a_part_counts_by_what_it_covers() -> None:
    """A quarter of the model with the same values is half as long; scaled it is as long as the others."""
    b = Bench("asyncdrop", clip=1.5, any_submodel=True)
    b.enrol("a")
    for i in range(12):
        b.work("a", f"t{i}", (1, 1, 1, 1))
    b.ask("a", "x")
    assert decision(b.push("a", "x", (1,), submodel=part(2))).detail == ""
    assert b.engine.guard.lengths[-1] == pytest.approx(2.0)


def test_what_lasts_is_a_copy_that_nobody_can_write_to_and_is_copied_once() -> None:
    array = np.arange(3.0)
    view = array[:]
    view.setflags(write=False)
    kept, of_view = lasting(array), lasting(view)
    array[0] = 9.0
    assert kept.tolist() == of_view.tolist() == [0.0, 1.0, 2.0]
    assert lasting(kept) is kept
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1.0


def test_who_keeps_updates_says_so() -> None:
    assert not make_strategy("fedbuff", {}).keeps_updates
    assert make_strategy("fedbuff", {}, RobustTable(rule="median")).keeps_updates
    assert make_strategy("teasq", {}).keeps_updates
