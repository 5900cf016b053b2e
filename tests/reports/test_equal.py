"""Runs when they were equally far; and the comparison as files that papers are made of."""

from __future__ import annotations

import csv
import re
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.core.errors import ConfigError, DataError
from anabranch.reports.against import AT
from anabranch.reports.compare import compare_html
from anabranch.reports.drawings import plain_svg
from anabranch.reports.equal import at_equal
from anabranch.reports.latex import comparison_latex, escaped
from anabranch.reports.result import Result

SMALL: dict[str, Any] = {
    "fleet": ab.Fleet(clients=4, examples_per_client=40, speed=ab.Levels(ratio=4)),
    "settings": {"run.evaluate_every_versions": 1},
    "progress": False,
}
DOCUMENT = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n%s\\end{document}\n"


@pytest.fixture(scope="module")
def found() -> ab.Comparison:
    """Two kinds of run that end at different times."""
    choices = [
        {"strategy": "fedasync", "until": ab.Until(updates=24)},
        {"strategy": ab.strategies.FedBuff(buffer_size=3), "until": ab.Until(updates=12)},
    ]
    return ab.sweep("synthetic", choices, seeds=2, **SMALL).comparison


@pytest.mark.parametrize("against", ["time", "updates", "bytes"])
def test_each_is_taken_where_the_shortest_has_ended(found: ab.Comparison, against: Any) -> None:
    of = AT[against]
    least = min(of(run.history[-1]) for run in found.results)
    rows = at_equal(found.results, against)
    assert [row.at for row in rows] == [least, least]
    for row, name in zip(rows, ("fedasync", "fedbuff"), strict=True):
        runs = [run for run in found.results if run.strategy == name]
        last = [[p for p in run.history if of(p) <= least][-1].accuracy for run in runs]
        assert row.value is not None
        assert row.value.mean == pytest.approx(sum(filter(None, last)) / 2)
        assert row.value.count == 2
    assert [row[against] for row in found.equal(against)] == [least, least]


@pytest.mark.parametrize("at", [float("nan"), "5"])
def test_how_far_is_a_number(found: ab.Comparison, at: Any) -> None:
    with pytest.raises(DataError, match=f"at a number of time, not at {at!r}"):
        found.equal("time", at)


@pytest.mark.parametrize("given", [None, 3, [3]])
def test_what_is_no_run_and_no_folder_is_refused(given: Any) -> None:
    with pytest.raises(DataError, match=r"compare\((None|3)\): give runs, or the folders of runs"):
        ab.compare(given)


def test_where_nothing_was_measured_there_is_nothing(found: ab.Comparison) -> None:
    assert [row.value for row in at_equal(found.results, "time", -1.0)] == [None, None]
    assert found.equal("updates", 0).column("accuracy") == [
        row.value.mean for row in at_equal(found.results, "updates", 0) if row.value
    ]


def test_another_measure_is_refused(found: ab.Comparison) -> None:
    with pytest.raises(DataError, match="by one of time, updates, bytes, not 'seconds'"):
        found.equal("seconds")  # type: ignore[arg-type]


def test_the_page_has_them(found: ab.Comparison, tmp_path: Path) -> None:
    page = found.save(tmp_path / "compare.html").read_text()
    assert "At equal time, work and traffic" in page
    assert "after 12 updates" in page


def test_a_table_of_figures(found: ab.Comparison, tmp_path: Path) -> None:
    with found.save(tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == ["fedasync", "fedbuff"]
    final = found.spreads[0].final_accuracy
    assert final is not None
    assert float(rows[0]["final_accuracy"]) == pytest.approx(final.mean)


def test_a_table_of_latex_is_whole(found: ab.Comparison, tmp_path: Path) -> None:
    text = found.save(tmp_path / "table.tex").read_text()
    assert text == comparison_latex(found.results)
    columns = re.search(r"begin\{tabular\}\{(lr*)\}", text)
    assert columns is not None
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 3, "a head, and a row for each kind"
    assert {len(re.split(r"(?<!\\)&", row)) for row in rows} == {len(columns[1])}
    order = [text.index(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")]
    assert order == sorted(order)
    assert not re.search(r"(?<!\\)%", "\n".join(rows)), "else the rest of a line would be a remark"
    assert "after 12 updates" not in text
    assert re.search(r"after [\d.]+ s ", text)


def test_a_table_of_latex_has_each_figure_under_its_head(two_seeds: list[Result]) -> None:
    """At equal traffic the second seed's is that of its first version, for it sends twice as much."""
    lines = [line for line in comparison_latex(two_seeds).splitlines() if line.endswith(r"\\")]
    head, row = (line.removesuffix(r" \\").split(" & ") for line in lines)
    assert dict(zip(head, row, strict=True)) == {
        "strategy": "fedbuff",
        "seeds": "2",
        "metric": "accuracy",
        "final": r"68.00 \% $\pm$ 18.38 \%",
        "after 90.0 s": r"68.00 \% $\pm$ 18.38 \%",
        "after 9.09 kB": r"60.50 \% $\pm$ 28.99 \%",
        "time to target": "83.1 s",
        "uplink": r"82.0 kB $\pm$ 2.83 kB",
        "downlink": r"5.00 kB $\pm$ 1.41 kB",
    }


HARD = r"a_b & 50% of {x} ~ #1 $2 ^3 \n <|> ±"


def test_what_latex_would_read_is_escaped() -> None:
    assert escaped("a_b & 5 %") == r"a\_b \& 5 \%"
    assert escaped("\\") == r"\textbackslash{}"
    left = re.sub(r"\\[&%$#_{}]|\\text\w+\{\}|\$\\\w+\$", "", escaped(HARD))
    assert not set(left) & set("&%$#_{}~^\\")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs Debian's texlive-latex-recommended")
def test_latex_takes_it(found: ab.Comparison, tmp_path: Path) -> None:
    table = comparison_latex(found.results).replace("fedasync", escaped(HARD))
    (tmp_path / "it.tex").write_text(DOCUMENT % table)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "it.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "it.pdf").stat().st_size > 10_000


def test_a_figure_as_a_png_is_the_figure(found: ab.Comparison, tmp_path: Path) -> None:
    data = found.save(tmp_path / "curves.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width == 1600
    assert height > 800
    assert found.plot().save(tmp_path / "one.png").read_bytes() == data


def test_no_variable_is_left_for_a_program_that_knows_none(found: ab.Comparison) -> None:
    plain = plain_svg(found.plot().svg)
    assert "var(" not in plain
    assert "svg .line.c0 { stroke: #0072b2" in re.sub(r"\s+", " ", plain)
    assert "svg .line.c1 { stroke: #c35200" in re.sub(r"\s+", " ", plain)


@pytest.mark.parametrize("name", ["curves.pdf", "curves"])
def test_another_kind_of_file_is_refused(found: ab.Comparison, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"end the name with"):
        found.save(tmp_path / name)
    with pytest.raises(ConfigError, match=r"end the name with"):
        found.plot().save(tmp_path / name)


def test_runs_that_are_judged_by_other_metrics_stand_side_by_side_by_one(
    found: ab.Comparison, tmp_path: Path
) -> None:
    mixed = [
        replace(run, metric="loss", mode="min") if run.strategy == "fedbuff" else run for run in found.results
    ]
    told, rows = at_equal(found.results), at_equal(mixed)
    assert {row.metric for row in rows} == {"accuracy"}
    assert [row.value for row in rows] == [row.value for row in told]
    assert "Accuracy: what each had come to" in compare_html(mixed)
