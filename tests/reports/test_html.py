"""The report page: complete, self-contained, and safe whatever the names are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from page_tables import cells_of

from anabranch.core.config.privacy import PrivacyTable, Promise
from anabranch.core.config.secagg import SecaggSummary
from anabranch.core.config.tables import merge
from anabranch.reports.compare import compare_html
from anabranch.reports.devices import spread_text
from anabranch.reports.html import report_html, write_report
from anabranch.reports.metrics import final_text
from anabranch.reports.result import ClientShare, Result

VOID = {"meta", "link", "br", "wbr"}
HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>"


class Outline(HTMLParser):
    """Checks that tags nest, and collects them with their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(page: str) -> Outline:
    """The parsed page, checked to nest, to be self-contained and to have well-formed charts."""
    parsed = Outline()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    for tag, attributes in parsed.seen:
        assert tag not in {"link", "img", "iframe", "object", "base"}
        assert not {"src", "href", "action", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert sum(tag == "script" for tag, _ in parsed.seen) == 1
    assert "@import" not in page
    assert "url(" not in page
    for svg in re.findall(r"<svg xmlns.*?</svg>(?=</div>|</section>|<svg xmlns|<details|<p)", page, re.S):
        ET.fromstring(svg)
    return parsed


def charts(page: str) -> int:
    return sum(tag == "svg" and attrs.get("role") == "img" for tag, attrs in outline(page).seen)


def test_the_page_shows_the_run(record: Callable[..., Result]) -> None:
    result = record()
    page = report_html(result)
    assert charts(page) == 7
    for shown in (
        "fedbuff on synthetic",
        "seed 0",
        "Time to 60 %",
        "Accuracy over traffic",
        "virtual time (s)",
        "duplicate task",
        "[run]",
        "About this run",
        result.started_at.replace("T", " "),
        escape(result.host),
        result.model_sha256,
        result.journal_sha256,
        f"{100 * (result.final_accuracy or 0):.2f} %",
    ):
        assert shown in page


def key_figures(page: str) -> dict[str, tuple[str, str]]:
    """The tiles by their names: the figure, and the remark below it."""
    tile = r'<div class="tile"><span>(.*?)</span><strong>(.*?)</strong>(?:<small>(.*?)</small>)?</div>'
    return {name: (figure, remark) for name, figure, remark in re.findall(tile, page)}


def test_the_key_figures_are_those_of_the_run(figured: Result) -> None:
    assert key_figures(report_html(figured)) == {
        "Final accuracy": ("81.00 %", "at version 9"),
        "Best accuracy": ("90.00 %", "at version 6"),
        "Time to 60 %": ("83.1 s", "virtual"),
        "Traffic to 60 %": ("50.0 kB", "up and down"),
        "Versions": ("9", "published"),
        "Updates applied": ("30", "3 of 4 devices"),
        "Updates rejected": ("10", "25.00 % of all"),
        "Uplink": ("80.0 kB", "2.00 kB an update, 3.00x fewer"),
        "Downlink": ("4.00 kB", "100 B an update"),
        "Mean staleness": ("1.50", "versions"),
        "Greatest staleness": ("7", "versions"),
        "Wall time": ("1.50 s", "10.0 min virtual"),
    }
    told = key_figures(report_html(replace(figured, metric="loss", mode="min", target=0.1, kind="live")))
    assert (told["Final loss"], told["Best loss"]) == (("0.400", "at version 9"), ("0.200", "at version 6"))
    assert told["Time to loss 0.1"] == ("83.1 s", "since the start")
    rolled_back = report_html(replace(figured, kind="live", updates_left_out=4))
    assert key_figures(rolled_back)["Updates applied"] == ("30", "4 left out by rollbacks")


PROMISE = PrivacyTable(clip=0.5, epsilon=8.0, participations=8, separation=3).promise(9)


MASKED = SecaggSummary(("north", "south"), 8, 0.5, 32, 1)


@pytest.mark.parametrize("masked", [None, MASKED])
@pytest.mark.parametrize("promise", [None, PROMISE])
@pytest.mark.parametrize("settings", [{}, {"target": 0.0}, {"evaluate": False}, {"updates": 0}])
def test_no_key_figure_stands_in_a_row_of_its_own(
    record: Callable[..., Result],
    settings: dict[str, object],
    promise: Promise | None,
    masked: SecaggSummary | None,
) -> None:
    page = report_html(replace(record(**settings), privacy=promise, masked=masked))
    count = page.count('<div class="tile">')
    assert [width for width in range(2, 7) if count % width == 1] == []


def test_a_run_with_masked_sums_says_whose_they_were(record: Callable[..., Result]) -> None:
    page = report_html(replace(record(), masked=MASKED))
    for shown in ("Unmasked by", "2 keepers", "sums of 8 updates and more; 1 lost", "numbers of 32 bits"):
        assert shown in page
    assert "by each of 2 keepers" in report_html(replace(record(), masked=MASKED, privacy=PROMISE))
    assert "Unmasked by" not in report_html(record())


def test_a_private_run_says_what_it_promises(record: Callable[..., Result]) -> None:
    page = report_html(replace(record(), privacy=PROMISE))
    for shown in (
        "Epsilon so far",
        "8 updates of a device, 3 versions apart",
        "clip 0.5, noise",
        "delta 1e-06",
    ):
        assert shown in page


def test_whom_a_rule_has_heard(record: Callable[..., Result]) -> None:
    result = record(config={"robust": {"rule": "multi_krum"}})
    assert "heard" not in report_html(result)
    shares = dict(zip(result.clients, (0.9, 0.04, None), strict=True))
    told = {c: replace(s, heard=shares[c]) for c, s in result.clients.items()}
    page = report_html(replace(result, clients=told))
    assert "What multi krum heard of each device" in page
    _, _, bars = page.partition("share of each device&#x27;s updates that the rule heard")
    assert re.findall(r">(b|a|90|4)</text>", bars)[:4] == ["b", "4", "a", "90"], "the least first"
    assert "median 47.00 %" in page


def test_the_table_of_devices_has_each_figure_under_its_head(figured: Result) -> None:
    busy, idle = ClientShare(12, 3, 480, 1.25, 60_000, 7_000), ClientShare(0, 1, 0, 0.0, 500, 900, heard=0.5)
    page = report_html(replace(figured, clients={"idle": idle, "busy": busy}))
    assert cells_of(page, "Contribution of each device") == [
        ["device", "applied", "rejected", "examples", "mean staleness", "uplink", "downlink", "heard"],
        ["busy", "12", "3", "480", "1.25", "60.0 kB", "7.00 kB", "\N{EN DASH}"],
        ["idle", "0", "1", "0", "\N{EN DASH}", "500 B", "900 B", "50.00 %"],
    ]


def test_the_page_fetches_nothing(record: Callable[..., Result]) -> None:
    page = report_html(record())
    assert "default-src 'none'" in page
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"] * 7


EDGES = {
    "nothing": {"updates": 0},
    "never evaluated": {"evaluate": False},
    "one point": {"updates": 3, "target": 0.0},
    "one update": {"updates": 1},
    "live": {"kind": "live", "config": {}},
    "forty devices": {"clients": tuple(f"d{i}" for i in range(40)), "updates": 80},
    "a thousand devices": {"clients": tuple(f"d{i}" for i in range(1000)), "updates": 1100},
    "flat configuration": {
        "config": {"lonely": True, "empty": "", "nested": {"deep": {"er": 1}, "none": {}}}
    },
}


@pytest.mark.parametrize("settings", EDGES.values(), ids=EDGES)
def test_edge_cases(record: Callable[..., Result], settings: dict[str, object]) -> None:
    result = record(**settings)
    page = report_html(result)
    outline(page)
    assert len(page) < 250_000
    assert ("No version of this run was evaluated" in page) == (not result.history)


def test_a_run_whose_every_update_was_rejected(record: Callable[..., Result]) -> None:
    lost = {c: replace(s, updates=0, rejected=9) for c, s in record().clients.items()}
    page = report_html(replace(record(evaluate=False), clients=lost, updates_applied=0))
    outline(page)
    assert "no update of theirs was applied" in page


def test_losses_that_were_not_finite_are_left_out_and_counted(record: Callable[..., Result]) -> None:
    result = record()
    diverged = tuple(replace(p, loss=None) if p.version > 3 else p for p in result.history)
    page = report_html(replace(result, history=diverged))
    count = len(diverged) - 3
    assert f"{count} measurements were not finite: marked above the curves" in page
    assert page.count('class="flaw') == count
    nowhere = tuple(replace(p, loss=None, accuracy=None) for p in diverged)
    lost = replace(result, history=nowhere)
    assert "No measurement was finite" in report_html(lost)
    assert final_text(lost) == "no measurement was finite"
    assert final_text(replace(lost, history=())) == "not measured"
    unnamed = report_html(replace(lost, metric="auto", mode="auto", target=0.6))
    assert "Time to 0.6<" in unnamed


def test_a_run_without_accuracy_has_the_curves_that_it_has(record: Callable[..., Result]) -> None:
    result = record(target=0.0)
    history = tuple(replace(p, accuracy=None, metrics={"mae": 0.5, "r2": None}) for p in result.history)
    unnamed = replace(result, metric="auto", mode="auto", target=None)
    page = report_html(replace(unnamed, history=history, final_accuracy=None, best_accuracy=None))
    outline(page)
    for shown in ("Final loss", "Best loss", "Loss over traffic", "mae over time"):
        assert shown in page
    for missing in ("ccuracy", "r2 over time", "not finite"):
        assert missing not in page


def test_of_versions_that_are_as_good_the_first_is_the_best(record: Callable[..., Result]) -> None:
    """As `best.safetensors`, `status` and an export of the best have it."""
    result = record()
    first, *others = (replace(point, accuracy=0.5) for point in result.history[:3])
    page = report_html(replace(result, history=(replace(first, accuracy=0.25), *others)))
    assert f"at version {others[0].version}<" in page[page.index("Best accuracy") :]


def test_what_ended_a_run_early_is_at_the_top(record: Callable[..., Result]) -> None:
    page = report_html(replace(record(), status="interrupted", why="AppError: <it>"))
    assert "This run was interrupted: AppError: &lt;it&gt;." in page
    assert "This run was given up: too bad." in report_html(replace(record(), given_up="too bad"))
    assert 'class="notice"' not in report_html(record())


def test_only_settings_that_differ_are_shown_and_the_others_folded(record: Callable[..., Result]) -> None:
    told = merge([("a", {"run": {"workload": "synthetic", "updates_max": 60}, "fleet": {"clients": 3}})])
    result = replace(record(config=told.to_json()), parameters=1234, model_bytes=4936)
    page = report_html(result)
    shown, folded = page[page.index("<h2>Settings") :].split("<details>", 1)
    assert "updates_max" in shown
    assert "clients" in shown
    assert "lease_s" not in shown
    assert "lease_s" in folded
    assert "1,234 parameters and buffers, 4.94 kB" in page
    command = "anabranch simulate --set run.workload=synthetic --set run.updates_max=60 --set fleet.clients=3"
    assert f"<pre>{command} --set strategy.name=fedbuff</pre>" in page
    like_it = "anabranch init synthetic\nanabranch server --set run.updates_max=60 --set fleet.clients=3"
    assert f"<pre>{like_it} --set strategy.name=fedbuff</pre>" in report_html(replace(result, kind="live"))
    of_flower = {**told.to_json(), "flower": {"train": {"arrays": "arrays"}}}
    assert "<pre>" not in report_html(replace(result, kind="live", config=of_flower))


def test_hostile_names_stay_text(record: Callable[..., Result]) -> None:
    result = record(
        strategy=HOSTILE, clients=(HOSTILE, "\ud800\x00", "b"), config={HOSTILE: {HOSTILE: HOSTILE}}
    )
    result = replace(
        result,
        workload=HOSTILE,
        model_sha256=HOSTILE,
        journal_sha256=HOSTILE,
        anabranch_version=HOSTILE,
        rejections={HOSTILE: 3},
    )
    for page in (report_html(result), compare_html([result, replace(result, config={})])):
        outline(page)
        page.encode()
        assert "&lt;script&gt;alert(1)" in page


def test_the_page_is_written_into_the_folder(record: Callable[..., Result], tmp_path: Path) -> None:
    path = write_report(record(), tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_how_evenly_the_devices_gave() -> None:
    assert spread_text([6, 3, 1, 0]) == (
        "The busiest 1 of 4 devices made 60 % of the applied updates; 1 made none. Median 2 a device."
    )
