"""The river of a report: every task of the run that is shown, where it belongs, on one small page."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from page_tables import cells_of

from anabranch.core.config.goal import Goal
from anabranch.core.model.updates import Decision, Reason, Verdict
from anabranch.reports.html import REPORT_FILE, write_report
from anabranch.reports.recorder import EVENTS_FILE, Recorder
from anabranch.reports.result import Result
from anabranch.reports.river import LANES_OF_MANY, THREADS_MAX

PAGE_BYTES_MAX = 2_000_000
LANE, BASE, LEFT, VERSION, JOINED, STALENESS, VERDICT, WEIGHT = range(8)


def written(folder: Path, devices: int, tasks: int, names: str = "device-{}") -> Result:
    """A run whose devices take turns: every fifth update is rejected, every tenth task stays out."""
    recorder = Recorder("fedasync", "synthetic", 0, Goal(), {}, "simulated", events_path=folder / EVENTS_FILE)
    version = 0
    with recorder:
        for i in range(tasks):
            client, base = names.format(i % devices), max(version - i % 4, 0)
            recorder.granted(float(i), client, f"t{i}", base)
            if i % 10 == 9:
                continue
            if i % 5 == 4:
                refused = Decision(Verdict.REJECTED, version - base, None, Reason.STALE)
                recorder.decided(i + 0.5, client, version, refused, 100, 1, task=f"t{i}")
                continue
            decision = Decision(Verdict.PUBLISHED, version - base, 0.5)
            version += 1
            recorder.decided(i + 0.5, client, version, decision, 100, 1, task=f"t{i}")
            recorder.published(i + 0.5, version)
    return recorder.result("0" * 64, "f" * 64, 1.0)


def shown(page: str) -> dict[str, Any]:
    """The data of the figure, as a browser reads them."""
    [data] = re.findall(r'<script type="application/json">(.*?)</script>', page, re.S)
    found: dict[str, Any] = json.loads(data)
    return found


def test_it_shows_every_task_of_a_small_run(tmp_path: Path) -> None:
    result = written(tmp_path, devices=8, tasks=120)
    page = write_report(result, tmp_path).read_text()
    river = shown(page)
    assert river["lanes"] == sorted(result.clients)
    assert Counter(t[VERDICT] for t in river["threads"]) == {"applied": 96, "rejected": 12, "open": 12}
    applied = [t for t in river["threads"] if t[VERDICT] == "applied"]
    assert Counter(t[STALENESS] for t in applied) == dict(result.staleness.histogram)
    assert all(t[VERSION] - 1 - t[BASE] == t[STALENESS] and t[JOINED] == t[LEFT] + 0.5 for t in applied)
    assert [v for v, _ in river["versions"]] == list(range(result.versions + 1))
    assert (river["version"], river["now_s"], river["units"]) == (96, 119.0, "virtual")
    assert "drawn by lot" not in page


def test_who_sees_no_figure_reads_of_the_newest_tasks_first(tmp_path: Path) -> None:
    page = write_report(written(tmp_path, devices=2, tasks=10), tmp_path).read_text()
    head, *rows = cells_of(page, "The river")
    assert head == ["device", "left version", "at", "counted in", "at", "verdict", "staleness", "weight"]
    none = "\N{EN DASH}"
    assert rows[:2] == [
        ["device-1", "7", "9.00 s", none, none, "still out", none, none],
        ["device-0", "7", "8.00 s", "8", "8.50 s", "applied", "0", "0.500"],
    ]
    assert rows[5] == ["device-0", "4", "4.00 s", none, "4.50 s", "rejected", "0", none]
    assert len(rows) == 10


def test_many_devices_and_tasks_are_drawn_by_lot_and_the_page_says_so(tmp_path: Path) -> None:
    result = written(tmp_path, devices=600, tasks=9_000)
    few = shown(write_report(result, tmp_path).read_text())
    assert len(set(few["lanes"])) == LANES_OF_MANY
    assert few["lanes_of"] == 600
    assert len(few["threads"]) == LANES_OF_MANY * 15
    page = write_report(written(tmp_path, devices=90, tasks=9_000), tmp_path)
    told, river = page.read_text(), shown(page.read_text())
    assert len(river["threads"]) == THREADS_MAX
    assert len(river["lanes"]) == 90
    assert "Of their 9,000 tasks 6,000 are shown, drawn by lot." in told
    assert page.stat().st_size < PAGE_BYTES_MAX


def test_a_page_that_goes_elsewhere_has_the_river_of_its_run(tmp_path: Path) -> None:
    result = written(tmp_path / "run", devices=3, tasks=30)
    page = write_report(result, tmp_path / "elsewhere", run=tmp_path / "run")
    assert page == tmp_path / "elsewhere" / REPORT_FILE
    assert len(shown(page.read_text())["threads"]) == 30


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>{}"
    page = write_report(written(tmp_path, 2, 10, hostile), tmp_path).read_text()
    assert "<script>alert" not in page
    assert shown(page)["lanes"] == [hostile.format(i) for i in range(2)]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (None, f"There is no {EVENTS_FILE} of this run"),
        ('{"kind": "granted"}\n', "has a line that is no event"),
    ],
)
def test_without_events_the_page_says_why_there_is_none(tmp_path: Path, lines: str | None, told: str) -> None:
    result = replace(written(tmp_path, devices=2, tasks=10), kind="live")
    (tmp_path / EVENTS_FILE).unlink()
    if lines is not None:
        (tmp_path / EVENTS_FILE).write_text(lines)
    page = write_report(result, tmp_path).read_text()
    assert told in page
    assert "<canvas" not in page
