"""Comparison of runs: rows with their spreads, mean curves, and the page."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from page_tables import cells_of, lines_of

from anabranch.api.comparing import Comparison
from anabranch.cli.output import Output
from anabranch.cli.runs import tell_comparison
from anabranch.core.config.tables import Config
from anabranch.core.errors import DataError
from anabranch.reports.compare import compare, compare_html, comparison_svg, spans
from anabranch.reports.result import Result
from anabranch.reports.spreads import Spread, spread


def test_rows_have_the_spread_over_the_seeds(record: Callable[..., Result]) -> None:
    runs = [
        replace(record(seed=s), final_accuracy=a, time_to_target_s=t, bytes_to_target=b)
        for s, a, t, b in ((1, 0.7, 10.0, 100), (2, 0.8, None, None), (3, 0.9, 30.0, 300))
    ]
    [row] = compare(runs)
    assert (row.strategy, row.workload, row.kind, row.seeds) == (
        "fedbuff",
        "synthetic",
        "simulated",
        (1, 2, 3),
    )
    assert row.final_accuracy is not None
    assert astuple(row.final_accuracy) == pytest.approx((0.8, 0.1, 0.7, 0.9, 3))
    assert row.time_to_target_s is not None
    assert astuple(row.time_to_target_s) == pytest.approx((20.0, 200**0.5, 10.0, 30.0, 2))
    assert row.bytes_to_target is not None
    assert row.bytes_to_target.mean == 200.0
    assert (row.reached, row.target_accuracy, row.label) == (2, 0.6, "fedbuff")
    assert json.loads(json.dumps(asdict(row)))["uplink_bytes"]["mean"] == 30_000.0


def test_each_figure_of_a_row_is_its_own(two_seeds: list[Result]) -> None:
    [row] = compare(two_seeds)
    means = {name: value.mean for name, value in vars(row).items() if isinstance(value, Spread)}
    assert means == {
        "time_to_target_s": 83.1,
        "bytes_to_target": 50_000,
        "uplink_to_target": 6_000,
        "downlink_to_target": 60,
        "final_accuracy": pytest.approx(0.68),
        "best_accuracy": pytest.approx(0.725),
        "updates_applied": 32,
        "versions": 10,
        "staleness_mean": 2.0,
        "uplink_bytes": 82_000,
        "downlink_bytes": 5_000,
        "wall_s": 2.0,
        "final_value": pytest.approx(0.68),
        "best_value": pytest.approx(0.725),
    }
    assert (row.reached, row.aimed, row.target, row.target_accuracy) == (1, 2, 0.6, 0.6)
    first, second = two_seeds
    [row] = compare([first, replace(second, target=None, target_accuracy=0.0)])
    assert (row.reached, row.aimed, row.target, row.target_accuracy) == (1, 1, None, None)
    [row] = compare([replace(run, metric="loss", mode="min") for run in two_seeds])
    assert row.best_value is not None
    assert row.final_value is not None
    assert (row.best_value.mean, row.final_value.mean) == pytest.approx((0.35, 0.45))


def figures(page: str) -> dict[str, str]:
    """The table's only row, by the heads of its columns."""
    return dict(zip(*cells_of(page, "Figures"), strict=True))


def test_the_table_of_the_page_has_them_in_units_that_suit(two_seeds: list[Result]) -> None:
    assert figures(compare_html(two_seeds)) == {
        "strategy": "fedbuff",
        "seeds": "2",
        "reached": "1 of 2",
        "time to target": "83.1 s",
        "uplink to target": "6.00 kB",
        "downlink to target": "60.0 B",
        "final accuracy": "68.0 % ± 18",
        "best accuracy": "72.5 % ± 25",
        "final loss": "0.450 ± 0.071",
        "updates": "32.0 ± 2.8",
        "mean staleness": "2.00 ± 0.71",
        "uplink": "82.0 kB ± 2.8",
        "downlink": "5.00 kB ± 1.4",
        "real time": "2.00 s ± 0.71",
    }
    by_loss = [replace(run, metric="loss", mode="min", target=None) for run in two_seeds]
    judged = figures(compare_html(by_loss))
    assert (judged["best loss"], judged["final loss"]) == ("0.350 ± 0.21", "0.450 ± 0.071")


def test_the_terminal_has_them_too(
    two_seeds: list[Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    tell_comparison(Output(), Comparison(two_seeds), tmp_path / "page.html")
    head, row = lines_of(capsys.readouterr().out)
    assert dict(zip(head, row, strict=True)) == {
        "strategy": "fedbuff, simulated",
        "seeds": "2",
        "final accuracy": "68.00 % ± 18.38 %",
        "final loss": "0.450 ± 0.0707",
        "time to target": "83.1 s",
        "updates": "32 ± 3",
        "uplink": "82.0 kB ± 2.83 kB",
        "downlink": "5.00 kB ± 1.41 kB",
    }


def test_settings_that_all_runs_share_are_told_once(record: Callable[..., Result]) -> None:
    runs = [record(config={"client": {"epochs": 3, "learning_rate": rate}}) for rate in (0.1, 0.2)]
    shared = compare_html(runs).split("Settings that all of these runs share")[1].split("</details>")[0]
    assert "epochs" in shared
    assert "learning_rate" not in shared


def test_rows_keep_strategies_workloads_and_kinds_apart(record: Callable[..., Result]) -> None:
    runs = [
        record(strategy="fedavg"),
        record(strategy="fedbuff"),
        replace(record(strategy="fedavg"), workload="digits"),
        record(strategy="fedavg", kind="live"),
        record(strategy="fedavg", seed=1),
    ]
    keys = [(r.workload, r.kind, r.strategy, len(r.seeds)) for r in compare(runs)]
    assert keys == [
        ("synthetic", "simulated", "fedavg", 2),
        ("synthetic", "simulated", "fedbuff", 1),
        ("digits", "simulated", "fedavg", 1),
        ("synthetic", "live", "fedavg", 1),
    ]


def test_what_flower_made_of_an_app_has_none_of_our_settings(record: Callable[..., Result]) -> None:
    """Such a run records few settings, and ours nothing of what its ServerApp was told."""

    def theirs(rounds: int) -> Result:
        told = {"run": {}, "flower": {"run_config": {"num-server-rounds": rounds}}}
        return record(strategy="flower", kind="live", config=told)

    ours = record(
        strategy="fedasync",
        kind="live",
        config=asdict(Config()) | {"uplink": {"codec": "raw"}, "flower": {"run_config": {}}},
    )
    assert [r.label for r in compare([theirs(3), ours])] == ["flower", "fedasync"]
    labels = [r.label for r in compare([theirs(3), ours, theirs(5)])]
    assert labels == [
        "flower, run_config={ num-server-rounds = 3 }",
        "fedasync",
        "flower, run_config={ num-server-rounds = 5 }",
    ]


def test_runs_of_other_code_are_other_rows(record: Callable[..., Result]) -> None:
    """Where it is known; what is our own may differ from release to release."""
    mine, ours = "my.py:Mine", "synthetic"

    def ran(seed: int, release: str = "1.0", **code: str) -> Result:
        return replace(record(seed=seed), anabranch_version=release, code=code)

    def seeds(*runs: Result) -> list[tuple[int, ...]]:
        return [row.seeds for row in compare(runs)]

    first, edited = ran(1, **{mine: "aa" * 32, ours: "cc"}), ran(2, **{mine: "bb" * 32, ours: "cc"})
    rows = compare([ran(0), first, edited, ran(3, **{mine: "bb" * 32, ours: "cc"}), ran(4)])
    assert [row.seeds for row in rows] == [(0, 1, 4), (2, 3)]
    assert [row.label for row in rows] == [f"fedbuff, {mine} of code {name * 4}" for name in ("aa", "bb")]
    assert [dict(row.settings) for row in rows] == [{f"code of {mine}": n * 4} for n in ("aa", "bb")]
    assert compare_html([first, edited]).count(f"{mine} of code") >= 2
    assert seeds(ran(1, **{ours: "cc"}), ran(2, **{ours: "dd"})) == [(1,), (2,)]
    assert seeds(ran(1, **{ours: "cc"}), ran(2, "1.1", **{ours: "dd"})) == [(1, 2)]
    assert seeds(ran(1, **{mine: "cc"}), ran(2, "1.1", **{mine: "dd"})) == [(1,), (2,)]
    assert seeds(ran(1, **{mine: ""}), ran(2, **{mine: "dd"})) == [(1, 2)], "there was no source to read"


def tried(seed: int, **strategy: object) -> dict[str, object]:
    return {"run": {"seed": seed, "name": f"try-{seed}"}, "strategy": {"name": "fedasync", **strategy}}


def test_runs_that_differ_in_a_setting_are_rows_of_their_own(record: Callable[..., Result]) -> None:
    runs = [
        record("fedasync", seed=seed, config=tried(seed, alpha=alpha))
        for alpha in (0.2, 0.9)
        for seed in (0, 1)
    ]
    runs.append(record("fedbuff", config={"run": {"seed": 0}, "strategy": {"name": "fedbuff"}}))
    assert [(r.label, r.seeds, dict(r.settings)) for r in compare(runs)] == [
        ("fedasync, alpha=0.2", (0, 1), {"strategy.alpha": 0.2}),
        ("fedasync, alpha=0.9", (0, 1), {"strategy.alpha": 0.9}),
        ("fedbuff", (0,), {}),
    ]
    page = compare_html(runs)
    assert "fedasync, alpha=0.2" in page
    assert "5 runs of 3 kinds" in page


def test_a_name_of_several_settings_is_told_with_its_table(record: Callable[..., Result]) -> None:
    def run(up: str, down: str, server: float, client: float) -> Result:
        codecs = {"uplink": {"codec": up}, "downlink": {"codec": down}, "client": {"momentum": client}}
        return record(config={**codecs, "strategy": {"name": "fedbuff", "momentum": server}})

    labels = [row.label for row in compare([run("int8", "raw", 0.9, 0.0), run("raw", "int8", 0.0, 0.9)])]
    assert labels == [
        "fedbuff, momentum=0.9, uplink.codec=int8, downlink.codec=raw, client.momentum=0.0",
        "fedbuff, momentum=0.0, uplink.codec=raw, downlink.codec=int8, client.momentum=0.9",
    ]


ELSEWHERE = {"metrics_address": "127.0.0.1:9464", "archive": "gone"}


def test_another_fleet_is_told_of_every_row_and_another_place_of_none(record: Callable[..., Result]) -> None:
    few = {"fleet": {"clients": 4}, "server": {"data_dir": "a"}, "run": {"seed": 0}}
    many = {
        "fleet": {"clients": 8, "split": "iid"},
        "server": {**ELSEWHERE, "data_dir": "b"},
        "run": {"seed": 0},
    }
    again: dict[str, object] = {"fleet": {}, "run": {"seed": 1}}  # as many by default
    runs = [record("fedavg", config=few), record(config=many), record(seed=1, config=again)]
    found = [(r.label, r.seeds) for r in compare(runs)]
    assert found == [("fedavg, clients=4", (0,)), ("fedbuff, clients=8", (0, 1))]


def test_one_run_has_no_deviation(record: Callable[..., Result]) -> None:
    [row] = compare([record(evaluate=False)])
    assert row.final_accuracy is None
    assert row.updates_applied.deviation == 0.0
    assert spread([2.0]) == Spread(2.0, 0.0, 2.0, 2.0, 1)


def test_a_band_covers_what_all_curves_cover() -> None:
    curves = [[(0, 0.0), (4, 4.0)], [(2, 4.0), (6, 8.0)]]
    assert spans(curves) == [(2.0, 3.0, 2.0, 4.0), (4.0, 5.0, 4.0, 6.0)]
    assert spans([[(0, 1.0)], [(5, 1.0)]]) == []


def test_the_page_has_charts_for_each_workload_and_a_table(record: Callable[..., Result]) -> None:
    runs = [record(strategy=s, seed=seed) for s in ("fedavg", "fedbuff") for seed in range(3)]
    runs += [replace(r, workload="digits") for r in runs[:2]]
    page = compare_html(runs)
    assert page.count("<figure") == 2 * (3 + 1)  # accuracy three times, loss once
    assert page.count("<table") == 2 + 2  # figures of each; of two kinds at equal time, too, and by seed
    assert "8 runs of 2 kinds" in page
    # Of two strategies in both ways of four figures; and of the one of the other workload.
    assert page.count('class="band') == 2 * 2 * 4 + 4
    assert 'class="line thin' not in page


def test_pages_of_no_runs_and_of_runs_without_evaluations(record: Callable[..., Result]) -> None:
    assert "There is no run to compare" in compare_html([])
    assert "No version of these runs was evaluated" in compare_html([record(evaluate=False)])
    whole = record()
    nowhere = tuple(replace(p, accuracy=None, loss=None, metrics={}) for p in whole.history)
    assert "No measurement was finite" in compare_html([replace(whole, history=nowhere)])
    mixed = compare_html([record(evaluate=False, strategy="fedavg"), record(target=0.0)])
    assert mixed.count("<figure") == 4


def test_runs_of_losses_are_compared_by_their_losses(record: Callable[..., Result]) -> None:
    runs = [record(seed=s, target=0.0) for s in range(2)]
    runs = [
        replace(
            r,
            history=tuple(replace(p, accuracy=None, metrics={"mae": 2.0 * (p.loss or 0)}) for p in r.history),
            final_accuracy=None,
            best_accuracy=None,
        )
        for r in runs
    ]
    [row] = compare(runs)
    assert row.final_accuracy is None
    assert row.metrics["mae"].mean == pytest.approx(2 * row.metrics["loss"].mean)
    page = compare_html(runs)
    assert "Loss over traffic" in page
    assert "mae over time" in page
    assert "<th>final mae</th>" in page
    assert "ccuracy" not in page


def test_measurements_that_were_not_finite_are_counted_and_marked(record: Callable[..., Result]) -> None:
    run = record(strategy="fedavg")
    torn = tuple(replace(p, accuracy=None) if p.version in (2, 5) else p for p in run.history)
    runs = [replace(run, history=torn), record()]
    assert [row.not_finite for row in compare(runs)] == [2, 0]
    page = compare_html(runs)
    assert page.count("2 measurements were not finite") == 3
    assert page.count('class="flaw') == 3 * 2 * 2


def test_numbers_at_the_end_of_floats_are_compared_and_drawn(record: Callable[..., Result]) -> None:
    whole, huge = record(), 1.7e308
    apart = [
        tuple(replace(p, loss=None, metrics={"score": sign * huge, "mse": huge}) for p in whole.history)
        for sign in (-1, 1)
    ]
    runs = [replace(whole, seed=seed, history=history) for seed, history in enumerate(apart)]
    [row] = compare(runs)
    assert (row.metrics["mse"].mean, row.metrics["mse"].deviation) == (huge, 0.0)
    assert (row.metrics["score"].mean, row.metrics["score"].deviation) == (0.0, sys.float_info.max)
    page = compare_html(runs)
    assert "score over time" in page
    assert not re.search(r"\b(nan|inf)\b", page.split("<main>")[1].split("<script>")[0])


def test_seeds_without_a_stretch_in_common_are_lines_of_their_own(record: Callable[..., Result]) -> None:
    one, two = record(seed=0), record(seed=1)
    late = tuple(replace(p, time_s=p.time_s + 1e6) for p in two.history)
    page = compare_html([one, replace(two, history=late)])
    assert page.count('class="line thin') >= 2


def test_one_chart_as_a_file(record: Callable[..., Result]) -> None:
    svg = comparison_svg([record(seed=s) for s in range(2)], "bytes")
    assert ET.fromstring(svg).get("aria-label") == "accuracy against uplink + downlink"
    assert ">target 60 %<" in svg
    assert 'data-log="0"' in svg
    other = record(target=0.7, strategy="fedavg")
    cheap = tuple(replace(p, uplink_bytes=0, downlink_bytes=p.downlink_bytes // 9) for p in other.history)
    svg = comparison_svg([record(), replace(other, history=cheap)], "bytes")
    assert ">target" not in svg, "they have not the same"
    assert 'data-log="1"' in svg, "else the cheap one would be a sliver"
    with pytest.raises(DataError, match="one workload"):
        comparison_svg([record(), record(kind="live")])
    with pytest.raises(DataError, match="these are of none"):
        comparison_svg([])
