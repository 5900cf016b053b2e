"""Every page in a real browser: what stands on it, whom it serves, and that nothing is complained of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect
from watched import AXE, LOOKS

pytestmark = pytest.mark.slow

Look = Callable[..., Page]

DRAWN = "canvas[data-threads]:not([data-threads='0'])"  # a first picture is drawn before threads are there

# By its hash: what stands there once it is whole.
PAGES = {
    "run/eight/river": DRAWN,
    "run/eight/learning": "text=Staleness of what was applied",
    "run/eight/fleet": "text=device-7",
    "run/eight/device/device-3": "text=Its arm of the river",
    "run/eight/wire": "text=Codec by codec",
    "run/eight/defence": "text=Rejections by reason",
    "run/eight/settings": "text=About this run",
    "run/thousand/river": "text=of 1,000 devices",
    "compare?runs=eight,thousand": "text=2 runs side by side",
    "": "text=Choose two runs or more",
}

# With the quick tests; all the others with the journeys: a page costs some seconds.
QUICK = {("run/eight/river", "light"), ("run/eight/learning", "dark"), ("run/eight/fleet", "phone")}
EACH = [
    pytest.param(hash_, way, marks=() if (hash_, way) in QUICK else pytest.mark.journeys)
    for hash_ in PAGES
    for way in LOOKS
]


@pytest.mark.parametrize(("hash_", "way"), EACH)
def test_a_page_is_whole_and_accessible(look: Look, hash_: str, way: str) -> None:
    page = look(hash_, **LOOKS[way])
    page.locator(PAGES[hash_]).first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    found = Axe().run(page, options=AXE).response["violations"]
    assert found == [], json.dumps([(v["id"], [n["html"] for n in v["nodes"]][:3]) for v in found], indent=1)


def test_a_theme_is_kept(look: Look) -> None:
    page = look("run/eight/river", color_scheme="light")
    theme = page.locator("html")
    expect(theme).to_have_attribute("data-theme", "light")
    switch = page.get_by_role("button", name="Colours:")
    switch.click()
    switch.click()
    expect(theme).to_have_attribute("data-theme", "dark")
    page.reload()
    expect(theme).to_have_attribute("data-theme", "dark")


def test_the_river_is_walked_by_keyboard(look: Look, runs: Path) -> None:
    page = look("run/eight/river")
    canvas = page.locator(DRAWN)
    canvas.wait_for()
    canvas.focus()
    whole = canvas.get_attribute("data-window")
    page.keyboard.press("+")
    expect(canvas).not_to_have_attribute("data-window", whole or "")
    page.keyboard.press("0")
    expect(canvas).to_have_attribute("data-window", _whole(runs / "eight"))
    page.keyboard.press("ArrowDown")
    told = page.locator(".river .unseen[role=status]")
    expect(told).to_contain_text("left version")
    device = (told.text_content() or "").partition("left version")[0].strip()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=device, exact=True)).to_be_visible()


def _whole(folder: Path) -> str:
    """The window that shows all of a run."""
    last = json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["time_s"]
    return f"0.00000 {last:.6g}"


def test_a_thread_tells_of_itself_under_the_pointer(look: Look) -> None:
    page = look("run/eight/river")
    canvas = page.locator(DRAWN)
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box is not None
    tip = page.locator(".tip")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + (box["height"] - 26) / 2)
    expect(tip).to_contain_text("updates a second join")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    for share in range(0, 100, 2):  # down along a line, until a thread is met
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * share / 100)
        if "left version" in (tip.text_content() or "") and tip.is_visible():
            break
    expect(tip).to_contain_text("left version")


@pytest.mark.parametrize("sort", ["staleness", "speed", "seen"])
def test_no_head_of_the_fleet_is_cut(look: Look, sort: str) -> None:
    page = look(f"run/eight/fleet?sort={sort}&order=desc", width=1100)
    page.locator("text=device-7").first.wait_for()
    heads = page.get_by_role("columnheader")
    assert heads.count() == 11
    cut = heads.evaluate_all(
        "all => all.filter((h) => h.scrollWidth > h.clientWidth).map((h) => h.textContent)"
    )
    assert cut == []


def test_widths_are_shown_where_tasks_are_of_parts(look: Look) -> None:
    """The narrowest first at a second click; where all tasks are of the whole model there is no column."""
    page = look("run/parts/fleet", width=1180)
    head = page.get_by_role("columnheader", name="width")
    head.wait_for()
    shown = page.locator(".fleet-body [role=row]")
    assert {row.split()[-2:][0] for row in shown.all_inner_texts()} == {"28", "100"}
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    expect(shown.first).to_contain_text("100 %")
    head.get_by_role("button").click()
    expect(shown.first).to_contain_text("28 %")
    heads = page.get_by_role("columnheader")
    cut = heads.evaluate_all(
        "all => all.filter((h) => h.scrollWidth > h.clientWidth).map((h) => h.textContent)"
    )
    assert (heads.count(), cut) == (12, [])
    shown.first.get_by_role("link").click()
    expect(page.locator(".figures")).to_contain_text("28 %")
    page = look("run/eight/fleet")
    page.locator("text=device-7").first.wait_for()
    expect(page.get_by_role("columnheader", name="width")).to_have_count(0)


def test_the_river_stands_as_a_table_too(look: Look) -> None:
    page = look("run/eight/river")
    page.get_by_text("The same as a table").click()
    rows = page.get_by_role("region", name="The newest updates").get_by_role("row")
    expect(rows).to_have_count(101)
    expect(rows.nth(1).get_by_role("link")).to_contain_text("device-")


def test_the_fleet_is_sorted_and_filtered_by_the_server(look: Look) -> None:
    page = look("run/thousand/fleet")
    table = page.get_by_role("table", name="Devices")
    expect(table).to_have_attribute("aria-rowcount", "1001")
    assert page.locator(".fleet-body [role=row]").count() < 100  # of a thousand
    page.get_by_role("button", name="updates").click()
    expect(page.get_by_role("columnheader", name="updates")).to_have_attribute("aria-sort", "descending")
    page.get_by_label("Filter devices by name").fill("device-07")
    expect(page.get_by_text("10 match")).to_be_visible()
    expect(table).to_have_attribute("aria-rowcount", "11")
    page.get_by_label("Filter devices by name").fill("nobody")
    expect(page.get_by_text("No device matches")).to_be_visible()


def test_the_end_of_the_fleet_is_a_scroll_away(look: Look) -> None:
    page = look("run/thousand/fleet")
    scroll = page.get_by_role("region", name="Devices; sort")
    # The rows that are not drawn have their height a moment after those that are.
    expect(page.locator(".fleet-body")).to_have_attribute("style", re.compile("height"))
    scroll.evaluate("e => { e.scrollTop = e.scrollHeight }")
    expect(page.get_by_role("link", name="device-999")).to_be_visible()


def test_on_a_phone_the_page_that_is_open_is_seen_among_all(look: Look) -> None:
    page = look("run/eight/settings", width=320)
    page.get_by_role("heading", name="Settings of").wait_for()
    pages = page.get_by_role("navigation", name="Pages of the run")
    expect(pages.get_by_role("link", name="Settings")).to_be_in_viewport(ratio=1.0)
    expect(pages.get_by_role("link", name="River")).not_to_be_in_viewport()


def test_who_walks_by_keyboard_meets_a_visible_focus_and_a_way_past_the_head(look: Look) -> None:
    page = look("run/eight/fleet")
    page.get_by_role("link", name="device-0").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    met = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("document.activeElement.outerHTML")
        met.add(page.evaluate("document.activeElement.textContent"))
    assert len(met) > 8


def test_runs_lie_over_each_other(look: Look) -> None:
    page = look("")
    page.get_by_label("Compare eight").check()
    page.get_by_label("Compare thousand").check()
    page.get_by_role("link", name="Put 2 runs side by side").click()
    expect(page.get_by_role("list", name="Runs").get_by_role("listitem")).to_have_count(2)
    page.get_by_role("button", name="traffic").click()
    expect(page.get_by_role("img", name="accuracy against up and down")).to_be_visible()


def test_orders_are_not_given_to_files(look: Look) -> None:
    page = look("run/eight/river")
    page.get_by_text("Orders", exact=True).click()
    expect(page.get_by_role("button", name="Pause the run")).to_be_disabled()
    expect(page.get_by_text("there is no server to give orders to")).to_be_visible()


def test_what_was_before_the_cockpit_is_in_no_mean_and_is_told(look: Look) -> None:
    """A server that was started again counts bytes from then on, and the updates of the whole run."""
    page = look("run/eight/wire")
    mean = page.locator(".figure", has_text="An update, up").locator("dd")
    expect(mean).to_contain_text("mean of 203 updates")
    told = mean.inner_text()
    expect(page.get_by_text("since the server started")).to_have_count(0)

    def older(route: Route) -> None:
        head = route.fetch().json()
        more = {"applied": head["counters"]["applied"] + 1000, "rejected": head["counters"]["rejected"] + 7}
        route.fulfill(json={**head, "from_s": 60.0, "counters": {**head["counters"], **more}})

    page.route(re.compile(r"/api/runs/eight$"), older)
    page.reload()
    expect(page.get_by_text("since the server started")).to_have_count(2)
    assert mean.inner_text() == told
    rejected = page.locator(".strip div", has_text="rejected").locator("dd").inner_text().split()[0]
    page.get_by_role("link", name="Defence").click()
    expect(page.locator(".figure", has_text="Rejected").locator("strong")).to_have_text(rejected)
    expect(page.get_by_text("Why 7 other updates were rejected")).to_be_visible()
    page.get_by_role("link", name="Fleet").click()
    expect(page.get_by_text("what happened since 60.0 s of the run")).to_be_visible()
    page.get_by_role("link", name="device-0").click()
    expect(page.get_by_text("what happened since 60.0 s of the run")).to_be_visible()


def test_of_a_server_that_is_away_the_newest_reason_is_shown(look: Look) -> None:
    """Its state stays as it was, so the news do not say that the reason is another."""
    page, reasons = look("run/eight"), ["the stream was cut", "nobody answers"]
    expect(page.locator(".top .state")).to_be_visible()
    away = {"kind": "live", "served": True, "state": "interrupted"}

    def head(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), **away, "ended": reasons[0]})

    line = "class extends EventTarget { constructor() { super(); window.line = this } close() {} }"
    page.add_init_script(f"window.EventSource = {line}")
    page.route(re.compile(r"/api/runs/eight$"), head)
    page.reload()
    expect(page.locator(".notice")).to_contain_text(reasons[0])
    del reasons[0]
    news = {"now_s": 1, "version": 1, "counters": {}, "state": "interrupted", "records": [], "dropped": 0}
    page.evaluate(f"line.dispatchEvent(new MessageEvent('news', {{data: {json.dumps(json.dumps(news))}}}))")
    expect(page.locator(".notice")).to_contain_text("nobody answers")


def _going_on(route: Route) -> None:
    """The head of a run, which goes on."""
    route.fulfill(json={**route.fetch().json(), "state": "running", "ended": None})


@pytest.mark.parametrize(("goes_on", "state"), [(False, "still out"), (True, "training")])
def test_nobody_is_said_to_train_in_a_run_that_is_over(look: Look, goes_on: bool, state: str) -> None:
    page = look("run/eight")
    if goes_on:
        page.route(re.compile(r"/api/runs/eight$"), _going_on)
        page.reload()
    page.get_by_role("link", name="Fleet").click()
    row = page.locator(".fleet-body .fleet-row", has=page.locator(".state", has_text=state)).first
    expect(row).to_be_visible()
    others = {"still out": "training", "training": "still out"}[state]
    expect(page.locator(".fleet-page").get_by_text(others)).to_have_count(0)
    row.get_by_role("link").click()
    expect(page.locator(".device-head .state")).to_have_text(state)
    last_seen = page.locator(".figure", has_text="Last seen").locator("small")
    expect(last_seen).to_have_text(re.compile("lease|trains" if goes_on else "its task was still out"))
    page.unroute_all(behavior="wait")  # it asks again and again


def test_every_mark_of_the_river_is_told(look: Look) -> None:
    page = look("run/eight/river")
    marks = page.get_by_role("list", name="What colours and marks mean").get_by_role("listitem")
    expect(marks).to_contain_text(["fresh", "rejected", "lost", "in no version yet", "still out"])


def test_an_answer_that_takes_longer_than_questions_are_apart_is_waited_for(look: Look) -> None:
    """A page of a run that goes on asks every two seconds; over a slow line an answer takes longer."""
    page = look("run/eight/settings")
    expect(page.get_by_text("About this run")).to_be_visible()
    held: list[Route] = []

    def held_back(route: Route) -> None:
        held.append(route)

    page.clock.install()
    page.add_init_script("window.EventSource = class extends EventTarget { close() {} }")
    page.route(re.compile(r"/api/runs/eight$"), _going_on)
    page.route("**/series*", held_back)
    page.reload()
    with page.expect_request("**/series*"):
        page.get_by_role("link", name="Learning").click()
    page.clock.run_for(20_000)
    held[0].continue_()
    page.locator(PAGES["run/eight/learning"]).first.wait_for()


def test_an_answer_that_was_cut_is_none(look: Look) -> None:
    page = look("run/eight/settings")
    expect(page.get_by_text("About this run")).to_be_visible()
    page.route("**/wire*", lambda route: route.fulfill(body='{"up": 1', content_type="application/json"))
    page.get_by_role("link", name="Wire").click()
    expect(page.locator(".notice")).to_contain_text("does not answer")
    page.unroute("**/wire*")
    page.get_by_role("button", name="Try again").click()
    page.locator(PAGES["run/eight/wire"]).wait_for()


def test_a_loss_beyond_measure_and_a_long_name_stay_in_their_cards(look: Look) -> None:
    def odd(route: Route) -> None:
        series = route.fetch().json()
        of_loss = series["metrics"]["loss"]
        values = [10.0**power for power in range(275)]
        huge = {name: list(range(len(values))) for name in of_loss} | {"value": values}
        route.fulfill(json={**series, "metrics": {"loss": huge, "n" * 64: of_loss}})

    page = look("run/eight/settings", width=360, height=740)
    expect(page.get_by_text("About this run")).to_be_visible()
    page.route("**/series*", odd)
    page.get_by_role("link", name="Learning").click()
    expect(page.get_by_role("img", name="loss: 1.00e+274")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


# What was written beside the first curves, by its place from the top.
TICKS = """
const write = CanvasRenderingContext2D.prototype.fillText, written = [];
CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
  if (this.textAlign === "right") written.push([this.canvas, at[1], text]);
  return write.call(this, text, ...at);
};
window.ticks = () => {
  const first = document.querySelector(".chart canvas");
  const beside = written.filter(([canvas]) => canvas === first);
  return [...new Map(beside.map(([_, y, text]) => [y, text])).values()];
};
"""


@pytest.mark.parametrize("step", [250_000.0, 1e-9, 1e60])
def test_no_two_ticks_of_an_axis_say_the_same(look: Look, step: float) -> None:
    def odd(route: Route) -> None:
        series = route.fetch().json()
        of_loss = series["metrics"]["loss"]
        values = [step * i for i in range(4, 9)]
        metric = {name: list(range(len(values))) for name in of_loss} | {"value": values}
        route.fulfill(json={**series, "metrics": {"loss": metric}})

    page = look("run/eight/settings")
    expect(page.get_by_text("About this run")).to_be_visible()
    page.add_init_script(TICKS)
    page.route("**/series*", odd)
    page.reload()
    page.get_by_role("link", name="Learning").click()
    expect(page.get_by_role("img", name="loss against")).to_be_visible()
    expect(page.locator(".chart").first.locator(".u-value").last).to_have_text(re.compile(r"\d"))
    told = page.evaluate("ticks()")
    assert len(set(told)) == len(told), told
    assert all(told), told
