"""`report.html` in a real browser, from a disk: whole, accessible, and its river answers pointer and keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, ViewportSize, expect
from watched import AXE, LOOKS, Watched

from anabranch.reports.html import write_report
from anabranch.reports.page import card, document, table
from anabranch.reports.result import Result

pytestmark = pytest.mark.slow

QUICK = ("light", "dark", "phone")


@pytest.fixture
def look(chromium: Browser, runs: Path) -> Iterator[Callable[..., Page]]:
    """Opens the report of a run; at the end nothing may have been complained of, and nothing asked for."""
    opened: list[tuple[Page, Watched, list[str]]] = []

    def open_(run: str, width: int = 1280, height: int = 900, **more: Any) -> Page:
        context = chromium.new_context(
            viewport=ViewportSize(width=width, height=height), offline=True, **more
        )
        page, asked = context.new_page(), []
        page.on("request", lambda request: asked.append(request.url))
        opened.append((page, Watched(page), asked))
        page.goto(write_report(Result.read(runs / run), runs / run).as_uri())
        page.locator("canvas[data-window]").wait_for()
        return page

    yield open_
    for page, watched, asked in opened:
        page.context.close()
        assert watched.complaints == []
        assert len(asked) == 1, "only itself"


@pytest.mark.parametrize(
    "way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.journeys) for way in LOOKS]
)
def test_it_is_whole_and_accessible(look: Callable[..., Page], way: str) -> None:
    page = look("thousand" if way == "wall" else "eight", **LOOKS[way])
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    found = Axe().run(page, options=AXE).response["violations"]
    assert found == [], json.dumps([(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found], indent=1)


def test_its_river_answers_pointer_and_keys(look: Callable[..., Page], runs: Path) -> None:
    page = look("eight")
    canvas, tip = page.locator("canvas"), page.locator("figure.river .tip")
    canvas.focus()
    before = canvas.get_attribute("data-window") or ""
    page.keyboard.press("+")
    expect(canvas).not_to_have_attribute("data-window", before)
    page.keyboard.press("ArrowDown")
    expect(tip).to_contain_text("left version")
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.locator("figure.river").get_by_role("button", name="versions").click()
    versions = Result.read(runs / "eight").versions
    expect(canvas).to_have_attribute("data-window", f"0.00000 {versions}.000")
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + (box["height"] - 26) / 2)
    expect(tip).to_contain_text("updates a second join")


PRINTED = """() => {
  const canvas = document.querySelector("canvas"), water = [207, 227, 241];
  matchMedia("print").addEventListener("change", ({ matches }) => {
    if (!matches) return;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let light = false;
    for (let i = 0; i < data.length; i += 4) light ||= water.every((part, at) => data[i + at] === part);
    window.printed = { light, drawn: canvas.width, wide: canvas.clientWidth };
  });
}"""


def test_its_river_is_printed_as_wide_as_paper_and_in_the_colours_of_paper(look: Callable[..., Page]) -> None:
    page = look("eight", width=1400, color_scheme="dark")
    on_screen = page.evaluate("document.querySelector('canvas').clientWidth")
    page.evaluate(PRINTED)
    page.pdf(format="A4")
    printed = page.evaluate("window.printed")
    assert printed["wide"] < on_screen, "paper is narrower"
    assert printed["drawn"] == printed["wide"]
    assert printed["light"]


WIDEST_JS = """() => matchMedia("print").addEventListener("change", ({ matches }) => {
  const table = document.querySelector("table");
  if (matches) window.beyond = Math.max(0, table.offsetWidth - table.parentElement.clientWidth);
})"""


@pytest.mark.parametrize("paper", ["A4", "Letter"])
def test_no_setting_that_was_tuned_is_beyond_the_paper(chromium: Browser, tmp_path: Path, paper: str) -> None:
    tuned = {"client.learning_rate": "0.03", "client.epochs": "2", "strategy.buffer_size": "16"}
    tuned |= {"strategy.staleness.a": "0.5", "strategy.alpha": "0.25"}
    figures = {"trial": "3 (recommended)", "budget": "100 %", "accuracy": "97.22 %", "time": "10.6 s"}
    row = figures | {"updates": "80.0", "bytes": "365 kB"} | tuned
    path = tmp_path / "tune.html"
    path.write_text(document("Tuning", [card("The front", table([*row], [[*row.values()]] * 3))]))
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.evaluate(WIDEST_JS)
    page.pdf(format=paper)
    assert page.evaluate("window.beyond") == 0
    page.close()
