"""Kinds of run against one of them, seed by seed."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch

import anabranch as ab
from anabranch.core.errors import DataError
from anabranch.reports.pairs import paired
from anabranch.reports.result import Result

SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=4, examples_per_client=40, speed=ab.Levels(ratio=4)),
    "until": ab.Until(updates=24, accuracy=0.01, go_on=True),
    "settings": {"run.evaluate_every_versions": 1},
    "progress": False,
}
CHOICES: list[dict[str, Any]] = [{"strategy": "fedasync"}, {"strategy": ab.strategies.FedBuff(buffer_size=3)}]
T_OF_TWO = (
    4.302652729911275  # that |t| exceeds in one case of twenty, of two degrees of freedom: from a table
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of run from three seeds."""
    out = tmp_path_factory.mktemp("pairs")
    ab.sweep("synthetic", CHOICES, seeds=3, out=out, **SMALL)
    return out


@pytest.fixture
def found(folder: Path) -> ab.Comparison:
    """The same side by side."""
    return ab.compare(folder)


def finals(found: ab.Comparison, strategy: str) -> list[float]:
    """By seed."""
    runs = sorted((r for r in found.results if r.strategy == strategy), key=lambda r: r.seed)
    return [r.history[-1].accuracy or 0.0 for r in runs]


def test_it_is_the_mean_of_the_differences_with_students_interval(found: ab.Comparison) -> None:
    more = [b - a for a, b in zip(finals(found, "fedasync"), finals(found, "fedbuff"), strict=True)]
    half = T_OF_TWO * statistics.stdev(more) / 3**0.5
    [row] = found.paired()
    assert (row["base"], row["label"]) == ("fedasync", "fedbuff")
    assert row["final_accuracy_seeds"] == 3
    middle = statistics.fmean(more)
    ends = [row[f"final_accuracy{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([middle, middle - half, middle + half])
    assert row["time_to_target_s"] is not None, "all have reached it"


def test_the_other_way_round_it_is_as_much_less(found: ab.Comparison) -> None:
    [row], [back] = found.paired(), found.paired("fedbuff")
    assert back["label"] == "fedasync"
    assert back["final_accuracy_low"] == pytest.approx(-row["final_accuracy_high"])


def test_the_order_of_the_runs_pairs_nothing_else(found: ab.Comparison) -> None:
    first, *rest = found.results
    mixed = [first, *reversed(rest)]
    assert [row.final_value for row in paired(mixed, "fedasync")] == [
        row.final_value for row in paired(found.results, "fedasync")
    ]


def test_of_seeds_that_one_has_alone_nothing_is_taken(found: ab.Comparison) -> None:
    lacking = [r for r in found.results if (r.strategy, r.seed) != ("fedbuff", 0)]
    [row] = paired(lacking)
    assert row.final_value is not None
    assert row.final_value.seeds == 2
    one = [r for r in lacking if r.strategy == "fedasync" or r.seed == 2]
    assert [r.final_value for r in paired(one)] == [None], "one pair has no interval"


def test_runs_of_one_seed_are_no_pairs(found: ab.Comparison) -> None:
    """As live ones are, of which nothing says which belongs to which."""
    alike: list[Result] = [replace(r, seed=0) for r in found.results]
    assert [row.final_value for row in paired(alike)] == [None]


def test_times_are_left_out_where_not_all_have_reached_the_target(found: ab.Comparison) -> None:
    late = [replace(r, time_to_target_s=None) if r is found.results[-1] else r for r in found.results]
    [row] = paired(late)
    assert row.time_to_target_s is None
    assert row.final_value is not None


@pytest.mark.parametrize(
    ("base", "said"),
    [("fedavg", "none of the kinds of run: fedasync; fedbuff"), ("fedbuff", "several kinds")],
)
def test_a_base_that_is_none_is_named(base: str, said: str, found: ab.Comparison) -> None:
    other = [r for r in found.results if r.strategy == "fedbuff"]
    config = {**other[0].config, "client": {"learning_rate": 0.01}}
    more = [*found.results, replace(other[0], config=config)] if base == "fedbuff" else found.results
    with pytest.raises(DataError, match=said):
        paired(more, base)


def test_terminal_and_page_say_it(found: ab.Comparison, folder: Path, tmp_path: Path) -> None:
    done = anabranch(tmp_path, "compare", folder)
    page = (tmp_path / "compare.html").read_text(encoding="utf-8")
    [row] = found.paired()
    points = [f"{100 * row[f'final_accuracy{end}']:+.2f}" for end in ("", "_low", "_high")]
    for said in (page, done.stdout):
        assert "ore than fedasync" in said
        assert "{} ({} to {})".format(*points) in said
