"""Splits: sizes, disjointness, determinism, and the errors of impossible ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_parts import forgotten

from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import ConfigError, DataError
from anabranch.core.rng import stream
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.splits import EXAMPLES_MIN, SPLITS, doubting, partition, take, train_validation

DISJOINT = ["iid", "dirichlet", "shards"]


def labels_of(count: int, seed: int = 0) -> np.ndarray:
    return stream(seed, "labels").integers(0, 10, count)


@given(
    split=st.sampled_from(DISJOINT),
    count=st.integers(1, 30),
    examples=st.integers(100, 600),
    alpha=st.sampled_from([0.01, 0.3, 100.0]),
    seed=st.integers(0, 2**40),
)
def test_a_disjoint_split_deals_every_example_once(
    split: str, count: int, examples: int, alpha: float, seed: int
) -> None:
    fleet = FleetTable(split=split, dirichlet_alpha=alpha)
    parts = partition(labels_of(examples), count, fleet, seed)
    again = partition(labels_of(examples), count, fleet, seed)
    assert len(parts) == count
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(examples))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    sizes = [len(p) for p in parts]
    if split == "dirichlet":
        assert min(sizes) >= min(EXAMPLES_MIN, examples // count)
    else:
        assert max(sizes) - min(sizes) <= (1 if split == "iid" else fleet.shards_per_client)


@given(groups=st.lists(st.integers(0, 4), min_size=1, max_size=20), seed=st.integers(0, 2**40))
def test_speed_groups_share_no_examples_and_each_device_has_half_of_its_group(
    groups: list[int], seed: int
) -> None:
    parts = partition(labels_of(500), len(groups), FleetTable(split="speed-shards"), seed, tuple(groups))
    owned = {
        g: {int(r) for p, h in zip(parts, groups, strict=True) if h == g for r in p} for g in set(groups)
    }
    assert sum(map(len, owned.values())) == len(set.union(*owned.values()))
    expected = 500 / len(owned) / 2
    assert all(abs(len(p) - expected) <= 2 and len(set(p.tolist())) == len(p) for p in parts)


def test_speed_shards_tie_the_labels_to_the_group() -> None:
    labels = np.arange(1600) % 16
    groups = tuple(i % 8 for i in range(24))
    parts = partition(labels, 24, FleetTable(split="speed-shards"), 0, groups)
    assert all(len(set(labels[p].tolist())) == 2 for p in parts)
    assert set(labels[parts[0]].tolist()) == set(labels[parts[8]].tolist())
    assert parts[0].tolist() != parts[8].tolist()


def test_a_device_more_changes_no_other_device_of_a_speed_group() -> None:
    few = partition(labels_of(500), 4, FleetTable(split="speed-shards"), 7, (0, 1, 0, 1))
    more = partition(labels_of(500), 5, FleetTable(split="speed-shards"), 7, (0, 1, 0, 1, 1))
    assert all(np.array_equal(a, b) for a, b in zip(few, more, strict=False))


@pytest.mark.parametrize("split", [*DISJOINT, "speed-shards"])
def test_the_cap_draws_from_the_same_part(split: str) -> None:
    groups = tuple(range(5))
    whole = partition(labels_of(400), 5, FleetTable(split=split), 1, groups)
    capped = partition(labels_of(400), 5, FleetTable(split=split, examples_per_client=10), 1, groups)
    for all_rows, rows in zip(whole, capped, strict=True):
        assert len(rows) == min(10, len(all_rows))
        assert set(rows.tolist()) <= set(all_rows.tolist())


def test_a_smaller_alpha_is_less_even() -> Any:
    labels = labels_of(5000)

    def classes_seen(alpha: float) -> float:
        parts = partition(labels, 20, FleetTable(split="dirichlet", dirichlet_alpha=alpha), 0)
        return float(np.mean([np.bincount(labels[p], minlength=10).max() / len(p) for p in parts]))

    assert classes_seen(0.1) > classes_seen(1.0) > classes_seen(100.0)
    assert classes_seen(100.0) < 0.2


def draws(**fleet: Any) -> FleetTable:
    return FleetTable(split="draws", **{"examples_per_client": 20, **fleet})


def test_draws_serve_more_devices_than_there_are_examples() -> None:
    labels = labels_of(50)
    parts = partition(labels, 400, draws(), 3)
    assert all(len(rows) == 20 for rows in parts)
    assert set(np.concatenate(parts).tolist()) == set(range(50))
    fewer = partition(labels, 5, draws(), 3)
    assert all(np.array_equal(a, b) for a, b in zip(parts, fewer, strict=False)), (
        "a device more changes no other"
    )


@settings(max_examples=24)  # each draws for 300 devices
@given(alpha=st.sampled_from([0.001, 0.1, 1.0, 1e4]), seed=st.integers(0, 2**40))
def test_draws_mix_classes_as_alpha_says_and_have_the_shares_of_all(alpha: float, seed: int) -> None:
    labels = np.repeat([0, 1, 2], [100, 200, 100])
    fleet = draws(dirichlet_alpha=alpha, examples_per_client=30)
    parts = partition(labels, 300, fleet, seed)
    shares = np.array([np.bincount(labels[rows], minlength=3) / 30 for rows in parts])
    np.testing.assert_allclose(shares.mean(0), [0.25, 0.5, 0.25], atol=0.12)
    # Of n draws of a mix from Dirichlet(a p), a = alpha C, shares vary by p (1 - p) (n + a) / (n (1 + a)).
    of_all, a = np.array([0.25, 0.5, 0.25]), 3 * alpha
    varied = ((shares - of_all) ** 2).sum(1).mean()
    assert varied == pytest.approx((of_all * (1 - of_all)).sum() * (30 + a) / (30 * (1 + a)), abs=0.07)


def test_one_device_s_draw_is_that_of_the_whole_partition() -> None:
    y = labels_of(200)
    pool = Examples(np.arange(200.0).reshape(-1, 1), y)
    training, _ = train_validation(200, 4)
    parts = partition(y[training], 7, draws(), 4)
    for device in (0, 6):
        found = take(pool, Shard("train", device, 7, draws(), 4))
        assert found.x[:, 0].astype(int).tolist() == training[parts[device]].tolist()


def test_other_seeds_give_other_splits() -> None:
    for split in [*DISJOINT, "draws"]:
        fleet = FleetTable(split=split, examples_per_client=20)
        one, two = (partition(labels_of(300), 3, fleet, seed)[0] for seed in (0, 1))
        assert one.tolist() != two.tolist()


@pytest.mark.parametrize(
    ("count", "fleet", "error", "text"),
    [
        (11, FleetTable(), DataError, "10 examples over 11 devices"),
        (0, FleetTable(), DataError, "over 0 devices"),
        (6, FleetTable(split="shards"), DataError, "12 shards"),
        (2, FleetTable(split="speed-shards"), ConfigError, "speed group of each of 2 devices"),
        (2, FleetTable(split="draws"), ConfigError, "draws needs fleet.examples_per_client"),
        (2, FleetTable(split="even"), ConfigError, r"fleet.split must be one of .*'even'"),
    ],
)
def test_an_impossible_split_says_why(
    count: int, fleet: FleetTable, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        partition(labels_of(10), count, fleet, 0)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], r"gave device 1 no rows: each needs one at least"),
        ([3, 10], r"gave device 1 rows from 3 to 10: there are 10, from 0 to 9"),
        ([-1], r"gave device 1 rows from -1 to -1: there are 10"),
        ([0.5], r"gave device 1 an array of shape \(1,\) of float64: give row numbers"),
        ([[1, 2]], r"gave device 1 an array of shape \(1, 2\) of int64: give row numbers"),
    ],
)
def test_what_a_split_of_ones_own_gives_is_looked_at(rows: list[Any], text: str) -> None:
    def own(labels: Any, count: int, fleet: FleetTable, seed: int, groups: Any) -> list[Any]:
        return [[0, 9], rows]

    own.name = "own"  # type: ignore[attr-defined]
    with forgotten():
        SPLITS.let_in("mine.py:own", own)
        with pytest.raises(DataError, match=r"fleet.split 'own' " + text):
            partition(labels_of(10), 2, FleetTable(split="own"), 0)


def test_a_split_of_ones_own_draws_the_same_on_every_device_or_is_refused() -> None:
    def halves(order: Any) -> list[Any]:
        return [order[:5], order[5:]]

    def seeded(labels: Any, count: int, fleet: FleetTable, seed: int, groups: Any) -> list[Any]:
        return halves(np.random.permutation(len(labels)))

    def unseeded(labels: Any, count: int, fleet: FleetTable, seed: int, groups: Any) -> list[Any]:
        return halves(np.random.default_rng().permutation(len(labels)))

    def writing(labels: Any, count: int, fleet: FleetTable, seed: int, groups: Any) -> list[Any]:
        labels[:] = 0
        return halves(np.arange(len(labels)))

    labels = labels_of(10)
    with forgotten():
        for split in (seeded, unseeded, writing):
            split.name = split.__name__  # type: ignore[attr-defined]
            SPLITS.let_in(f"mine.py:{split.__name__}", split)
        one, other, third = (partition(labels, 2, FleetTable(split="seeded"), seed) for seed in (0, 0, 1))
        assert [rows.tolist() for rows in one] == [rows.tolist() for rows in other]
        assert sorted(np.concatenate(one).tolist()) == list(range(10)), "each row on one device"
        assert [rows.tolist() for rows in one] != [rows.tolist() for rows in third]
        with pytest.raises(DataError, match="'unseeded' gave other rows when it was asked again"):
            partition(labels, 2, FleetTable(split="unseeded"), 0)
        with pytest.raises(ValueError, match="read-only"):
            partition(labels, 2, FleetTable(split="writing"), 0)
    assert labels.tolist() == labels_of(10).tolist()


@given(count=st.integers(1, 1000), seed=st.integers(0, 100))
def test_validation_is_a_tenth_apart_from_training(count: int, seed: int) -> None:
    training, validation = train_validation(count, seed)
    assert len(validation) == round(count / 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([training, validation])), np.arange(count))


BY_CLASS = ["dirichlet", "shards", "speed-shards", "draws"]


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("split", BY_CLASS)
def test_labels_of_several_numbers_are_refused_where_a_split_goes_by_them(split: str, columns: int) -> None:
    """A column, as of a regression, had every device train on the rows that have the least number."""
    labels, groups = np.arange(120).repeat(columns).reshape(120, columns) % 3, (0, 0, 1, 1)
    fleet = FleetTable(split=split, examples_per_client=9)
    shape = rf"\(120, {columns}\)"
    with pytest.raises(DataError, match=f"labels of shape {shape} cannot be split by class: set fleet"):
        partition(labels, 4, fleet, 1, groups)
    parts = partition(labels, 4, FleetTable(split="iid"), 1, groups)
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))


@pytest.mark.parametrize("split", BY_CLASS)
def test_labels_may_be_a_list(split: str) -> None:
    """As a table's column is, in Python."""
    labels: Any = labels_of(200).tolist()
    fleet = FleetTable(split=split, examples_per_client=20)
    lists, arrays = (partition(some, 4, fleet, 1, (0, 0, 1, 1)) for some in (labels, np.array(labels)))
    assert [part.tolist() for part in lists] == [part.tolist() for part in arrays]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_labels_of_a_regression_are_no_classes(kind: str) -> None:
    """Each was a class of one example: small alphas gave even parts, and large ones few devices all of it."""
    labels, fleet = labels_of(120).astype(kind), FleetTable(split="dirichlet", dirichlet_alpha=0.1)
    parts = partition(labels, 4, fleet, 1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))
    labels += (np.arange(120) / 128).astype(kind)
    said = rf"a class number for each example, not {kind} with fractions.*np.unique\(y, return_inverse=True\)"
    with pytest.raises(DataError, match=said):
        partition(labels, 4, fleet, 1)
    assert len(partition(np.unique(labels, return_inverse=True)[1], 4, fleet, 1)) == 4
    for split in ("iid", "shards"):
        assert len(partition(labels, 4, FleetTable(split=split), 1)) == 4


@pytest.mark.parametrize(("classes", "count", "is_crude"), [(10, 20, False), (10, 21, True), (100, 4, True)])
def test_few_examples_of_a_class_make_a_crude_split(classes: int, count: int, is_crude: bool) -> None:
    """Two hundred examples: of a class fewer than there are devices, or not."""
    labels, said = np.arange(200) % classes, list[str]()
    with doubting(said.append):
        partition(labels, count, FleetTable(split="iid"), 0)
        partition(labels, count, FleetTable(split="dirichlet"), 0)
    assert len(said) == is_crude
    for text in said:
        assert f"{classes} classes have {200 // classes} examples each on average" in text
        assert f"fewer than there are devices ({count})" in text
    partition(labels, count, FleetTable(split="dirichlet"), 0)
    assert len(said) == is_crude, "outside nobody hears it"


@pytest.mark.parametrize("count", [4, 20])
def test_ratings_are_classes_though_they_have_fractions(count: int) -> None:
    """From 0.5 to 5.0, twenty examples each: they are dealt like any numbers in their place."""
    ratings, said = (np.arange(200) % 10 + 1) / 2, list[str]()
    with doubting(said.append):
        parts = partition(ratings, count, FleetTable(split="dirichlet", dirichlet_alpha=0.1), 1)
    assert not said
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))
    with pytest.raises(DataError, match="with fractions"):
        partition(ratings, 21, FleetTable(split="dirichlet"), 1)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_labels_of_a_regression_are_not_drawn_as_classes(kind: str) -> None:
    """Each was a class of one example, and at a small alpha a device had one of them twenty times."""
    labels, fleet = (np.arange(120) / 128).astype(kind), draws(dirichlet_alpha=0.1)
    pool = Examples(np.zeros((120, 1), np.float32), labels)
    for deal in (
        lambda: partition(labels, 4, fleet, 1),
        lambda: take(pool, Shard("train", 2, 4, fleet, 1)),
    ):
        with pytest.raises(DataError, match=rf"'draws' needs a class number .*, not {kind} with fractions"):
            deal()
    assert len(take(pool, Shard("validation", 0, 4, fleet, 1))) == 12
    numbers = np.unique(labels, return_inverse=True)[1]
    assert {len(part) for part in partition(numbers, 4, fleet, 1)} == {20}
    ratings = (np.arange(120) % 6 + 1) / 2  # twenty examples each
    drawn = [part.tolist() for part in partition(ratings, 9, fleet, 1)]
    assert drawn == [part.tolist() for part in partition((2 * ratings).astype(int), 9, fleet, 1)]
    with pytest.raises(DataError, match="with fractions"):
        partition(ratings, 9, draws(examples_per_client=21), 1)


def test_what_has_no_number_for_a_label_is_dealt_all_the_same() -> None:
    labels = np.where(np.arange(120) % 3, labels_of(120).astype(float), np.nan)
    parts = partition(labels, 4, FleetTable(split="dirichlet"), 1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))
