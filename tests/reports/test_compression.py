"""What a report says of compression: the savings, the decisions, and their picture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from page_tables import cells_of

from anabranch.core.config.goal import Goal
from anabranch.core.model.updates import Decision, Verdict
from anabranch.reports.compare import compare, compare_html
from anabranch.reports.compression import ReportedStrength, saving, strength_of
from anabranch.reports.html import report_html
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import CompressionStep, Result

STEPS = (
    CompressionStep(0, 0.1, "ef(0.9)|topk(0.05)|int4(256)|gaps|zstd", "log(2)", "start"),
    CompressionStep(10, 3.0, "ef(0.9)|topk(0.25)|int4(256)|bitmap|zstd", "log(2)", "schedule"),
    CompressionStep(15, 5.0, "ef(0.9)|int8(256)|zstd", "log(2)", "schedule"),
)


def compressed(result: Result, steps: tuple[CompressionStep, ...] = STEPS) -> Result:
    up, down = 40 * result.uplink_bytes, 10 * result.downlink_bytes
    return replace(result, compression=steps, uplink_bytes_raw=up, downlink_bytes_full_equivalent=down)


def picture(page: str) -> ET.Element | None:
    found = re.search(r'<svg[^>]*aria-label="compression over versions".*?</svg>', page, re.DOTALL)
    return None if found is None else ET.fromstring(found[0])


@pytest.mark.parametrize(
    ("codec", "strength"),
    [
        ("raw", ReportedStrength(1.0, 32)),
        ("ef(0.9)|topk(0.1)|int8(256,sr)|gaps|zstd", ReportedStrength(0.1, 8)),
        ("topk(0.01)", ReportedStrength(0.01, 32)),
        ("mask(0.5)|bf16", ReportedStrength(0.5, 16)),
        ("int4(256)|zstd", ReportedStrength(1.0, 4)),
        ("deadzone(0.1)|gaps", None),
        ("log(1)", None),
        ("topk|int8", None),
        ("topk(2)|int8", None),
        ("what is this", None),
    ],
)
def test_the_strength_of_a_codec(codec: str, strength: ReportedStrength | None) -> None:
    assert strength_of(codec) == strength


@pytest.mark.parametrize(
    ("sent", "whole", "says"), [(10, 405, "40.5x fewer"), (0, 9, ""), (9, 9, ""), (9, 0, "")]
)
def test_a_saving(sent: int, whole: int, says: str) -> None:
    assert saving(sent, whole) == says


def test_the_page_shows_what_was_saved_and_every_decision(record: Callable[..., Result]) -> None:
    page = report_html(compressed(record()))
    assert page.count("40.0x fewer") == page.count("10.0x fewer") == 2
    for step in STEPS:
        assert page.count(f"<code>{step.uplink}</code>") == 1
    assert cells_of(page, "Compression") == [
        ["", "sent", "uncompressed", "saved"],
        ["uplink", "30.0 kB", "1.20 MB", "40.0x fewer"],
        ["downlink", "60.0 kB", "600 kB", "10.0x fewer"],
    ]
    step = STEPS[1]
    _, _, second, _ = cells_of(page, "Compression", 1)
    assert second == ["10", "3.00 s", step.uplink, step.downlink, "schedule"]
    root = picture(page)
    assert root is not None
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [t for t in texts if t and "bits" in t] == ["4 bits", "8 bits"]
    assert "uplink" not in texts, "one line needs no legend"
    tips = [c.get("data-tip") for c in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert tips[1] == "uplink from version 10: 25 % of the values, 4 bits"


def test_both_directions_are_drawn_where_both_change(record: Callable[..., Result]) -> None:
    steps = tuple(
        replace(s, downlink=d) for s, d in zip(STEPS, ("int4|zstd", "int4|zstd", "raw"), strict=True)
    )
    root = picture(report_html(compressed(record(), steps)))
    assert root is not None
    legend = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("class") == "legend"]
    assert legend == ["uplink", "downlink"]


def test_a_run_that_was_not_compressed_says_nothing_of_it(record: Callable[..., Result]) -> None:
    raw = (CompressionStep(0, 0.1, "raw", "raw", "start"),)
    for result in (record(), replace(record(), compression=raw)):
        assert "Compression" not in report_html(result)


@pytest.mark.parametrize(
    "steps",
    [(), STEPS[:1], tuple(replace(s, uplink="deadzone(0.1)") for s in STEPS)],
    ids=["unknown", "one", "of no known strength"],
)
def test_without_changes_that_can_be_drawn_there_is_no_picture(
    record: Callable[..., Result], steps: tuple[CompressionStep, ...]
) -> None:
    page = report_html(compressed(record(), steps))
    assert "<h2>Compression</h2>" in page
    assert picture(page) is None


def test_many_decisions_are_folded_and_codecs_from_outside_stay_text(record: Callable[..., Result]) -> None:
    steps = tuple(CompressionStep(i, float(i), f"<b>{i}", "raw", "<i>") for i in range(20))
    page = report_html(compressed(record(), steps))
    assert "All 20 decisions" in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_only_a_change_is_recorded(tmp_path: Path) -> None:
    with Recorder("teasq", "digits", 0, Goal(), {}, "simulated", tmp_path / "events.jsonl") as recorder:
        for now, version, uplink in ((1.0, 0, "raw"), (2.0, 0, "raw"), (3.0, 4, "int8"), (4.0, 5, "int8")):
            recorder.compressed(now, version, uplink, "log(1)")
        recorder.downloaded(5.0, "a", 10, 100)
        recorder.downloaded(5.5, "a", 30)  # whole, as it is
        recorder.decided(6.0, "a", 5, Decision(Verdict.HELD, 0, 1.0), 7, 1, 70)
        recorder.decided(7.0, "a", 5, Decision(Verdict.HELD, 0, 1.0), 30, 1)
    result = recorder.result("", "", 0.0)
    assert result.compression == (
        CompressionStep(0, 1.0, "raw", "log(1)", "start"),
        CompressionStep(4, 3.0, "int8", "log(1)", "schedule"),
    )
    assert (result.uplink_bytes, result.uplink_bytes_raw) == (37, 100)
    assert (result.downlink_bytes, result.downlink_bytes_full_equivalent) == (40, 130)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["version"] for e in lines if e["kind"] == "compression"] == [0, 4]


def test_an_older_result_is_read_without_the_new_fields(record: Callable[..., Result]) -> None:
    data: dict[str, Any] = json.loads(json.dumps(compressed(record()).to_json()))
    assert Result.from_json(data).compression == STEPS
    for name in ("uplink_bytes_raw", "downlink_bytes_full_equivalent", "compression"):
        del data[name]
    assert Result.from_json(data).compression == ()


def test_a_comparison_has_both_directions_and_a_logarithmic_axis_where_traffic_differs(
    record: Callable[..., Result],
) -> None:
    plain = record()
    history = tuple(replace(p, uplink_bytes=p.uplink_bytes // 40) for p in plain.history)
    history = tuple(replace(p, downlink_bytes=p.downlink_bytes // 10) for p in history)
    small = replace(
        plain, strategy="teasq", history=history, uplink_bytes=plain.uplink_bytes // 40, downlink_bytes=6000
    )
    rows = compare([plain, small])
    for row, result in zip(rows, (plain, small), strict=True):
        first = next(p for p in result.history if (p.accuracy or 0.0) >= 0.6)
        assert row.uplink_to_target is not None
        assert row.downlink_to_target is not None
        assert row.uplink_to_target.mean == first.uplink_bytes
        assert row.downlink_to_target.mean == first.downlink_bytes
    way, drawing = shown(compare_html([plain, small]))
    assert (way, re.findall(TICKS, drawing)) == ("logarithmic", ["1", "10"])
    way, drawing = shown(compare_html([plain, replace(plain, seed=1, strategy="fedavg")]))
    assert way == "linear"
    assert "0" in re.findall(TICKS, drawing)


TICKS = r'class="tick mid x"[^>]*>(\d+)</text>'


def shown(page: str) -> tuple[str, str]:
    """The drawing of the traffic that is shown at first, and its name."""
    figure = page.split("Accuracy over traffic")[1].split("</figure>")[0]
    [(way, drawing)] = re.findall(r'<div data-way="(\w+)">(.*?)</div>', figure, re.DOTALL)
    return way, drawing
