"""A live server in a real browser: what happens shows, an order is asked twice, a lost line is told.

And a server that a cockpit beside it outlives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
from cockpits import Printed, cockpit
from nursery import COMMAND, PIPE, Process, run
from playwright.sync_api import Browser, Locator, Page, Route, expect
from ports import free_port
from watched import Watched

pytestmark = pytest.mark.slow

SYNTHETIC = "synthetic"
CONFIG = """
[run]
workload = "{workload}"
updates_max = 1000
[fleet]
clients = 2
examples_per_client = 40
"""
TASKS = 4
DONE = {"Pause the run": "paused", "Resume the run": "resumed"}
LATE = "told late"
LINES = 6
FOLLOWED_S = 10.0
DRAWN = """
  drawn = 0
  const clear = CanvasRenderingContext2D.prototype.clearRect
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    drawn += 1
    return clear.apply(this, box)
  }
"""
SEEN = """is_seen => {
  Object.defineProperty(document, "hidden", {value: !is_seen, configurable: true})
  document.dispatchEvent(new Event("visibilitychange"))
}"""
HEAD = re.compile(r"/api/runs/[^/]+$")


@contextmanager
def served(folder: Path, workload: str = SYNTHETIC) -> Iterator[tuple[Process, Printed]]:
    """A server with its cockpit; drained at the end unless it is gone."""
    (folder / "run.toml").write_text(CONFIG.format(workload=workload))
    assert run(COMMAND, "init", "synthetic", "--out", "model", "--json", cwd=folder).returncode == 0
    where = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0", "--ui", "127.0.0.1:0")
    with (folder / "server.log").open("ab") as log:
        command = (COMMAND, "server", "run.toml", "--model", "model", "--data-dir", "data", *where, "--json")
        with Process(*command, cwd=folder, stdout=PIPE, stderr=log) as process:
            yield process, Printed(process)
            if process.poll() is None:
                process.terminate()
                assert process.wait(600) == 0, (folder / "server.log").read_text()


def status(admin: str, cwd: Path) -> dict[str, Any]:
    """What the server itself says."""
    done = run(COMMAND, "admin", "status", "--admin", admin, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


def give(page: Page, order: str) -> None:
    """An order of the menu, and what is asked before it is given."""
    page.get_by_text("Orders", exact=True).click()
    page.get_by_role("button", name=order).click()
    dialog = page.get_by_role("dialog", name=order)
    expect(dialog.get_by_role("status")).to_contain_text("synthetic")
    dialog.get_by_role("button", name="Yes, do it").click()
    expect(dialog.get_by_role("status")).to_have_text(DONE[order])
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def asked(page: Page, order: str, **values: str) -> Locator:
    """An order of the menu, its form filled in by words of the labels; its dialog, once answered."""
    page.get_by_text("Orders", exact=True).click()
    page.get_by_role("button", name=order).click()
    dialog = page.get_by_role("dialog", name=order)
    for label, value in values.items():
        dialog.get_by_label(label).fill(value)
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog.get_by_role("status")).to_have_text(re.compile(r"\.$|write"))
    return dialog


def left(dialog: Locator) -> None:
    """It is not given."""
    dialog.get_by_role("button", name=re.compile("No, leave it|Close")).click()
    expect(dialog).to_have_count(0)


class LateAnswers:
    """What the page asks of how the run stands until `no_more` is answered late, by what was so then."""

    def __init__(self, page: Page) -> None:
        self.page, self.held, self._was = page, list[Route](), dict[str, Any]()
        page.route(HEAD, self._meet)

    def _meet(self, route: Route) -> None:
        if self._was:
            route.fulfill(json={**route.fetch().json(), "title": LATE})
        else:
            self.held.append(route)

    def no_more(self) -> None:
        """Keeps what is so; what is asked from now on is answered at once."""
        self._was = self.page.request.get(self.page.url.partition("#")[0] + "api/runs/synthetic").json()

    def come(self) -> None:
        """The answers, the newest first."""
        for route in reversed(self.held):
            route.fulfill(json={**self._was, "title": LATE})
        expect(self.page.locator(".run-title")).to_have_text(LATE)
        self.page.unroute_all(behavior="wait")  # one that is being met is not to be let go meanwhile


def test_what_happens_shows_and_an_order_asked_twice_reaches_the_server(
    chromium: Browser, tmp_path: Path
) -> None:
    with served(tmp_path) as (process, printed):
        said = printed.next("serving")
        page = chromium.new_page()
        watched = Watched(page)
        page.goto(str(printed.next("cockpit")["link"]))
        expect(page.locator(".line.open")).to_have_text("live")
        expect(page.get_by_text("No device has called yet")).to_be_visible()

        where = ("--server", said["address"], "--id", "phone", "--tasks-max", TASKS)
        assert run(COMMAND, "client", "synthetic", *where, "--json", cwd=tmp_path).returncode == 0
        expect(page.locator(".strip div", has_text="updates").locator("dd")).to_have_text(str(TASKS))
        expect(page.locator("canvas")).to_have_attribute("data-threads", str(TASKS))
        expect(page.get_by_text("No device has called yet")).to_have_count(0)

        give(page, "Pause the run")
        expect(page.locator(".top .state")).to_have_text("paused")
        assert status(said["admin_address"], tmp_path)["paused"]
        give(page, "Resume the run")
        expect(page.locator(".top .state")).to_have_text("running")
        assert not status(said["admin_address"], tmp_path)["paused"]

        # What was asked before the stream told of an order, and answered after it, is not how the run stands.
        # The page asks once after its own order; of the next, which somebody else gives, the stream tells it.
        late = LateAnswers(page)
        with page.expect_request(HEAD):
            give(page, "Pause the run")
        expect(page.locator(".top .state")).to_have_text("paused")
        late.no_more()
        admin = ("--admin", said["admin_address"], "--json")
        assert run(COMMAND, "admin", "resume", *admin, cwd=tmp_path).returncode == 0
        expect(page.locator(".top .state")).to_have_text("running")
        late.come()
        assert page.locator(".top .state").inner_text() == "running"
        page.reload()
        expect(page.locator(".top .state")).to_have_text("running")

        # An order that is asked for and then left alone is not given.
        page.get_by_text("Orders", exact=True).click()
        page.get_by_role("button", name="Pause the run").click()
        page.get_by_role("button", name="No, leave it").click()
        assert not status(said["admin_address"], tmp_path)["paused"]

        page.get_by_role("link", name="Server").click()
        expect(page.get_by_text("Up for")).to_be_visible()
        assert watched.complaints == []
        process.terminate()
        assert process.wait(600) == 0
        expect(page.locator(".line.lost")).to_contain_text("trying again")
        page.close()


def seen(page: Page, is_seen: bool) -> None:
    """Its tab is looked at, or another one is: without a screen a browser hides none of itself."""
    page.evaluate(SEEN, is_seen)


def test_tabs_that_nobody_sees_leave_the_browsers_lines_to_the_one_that_is_seen(
    chromium: Browser, tmp_path: Path
) -> None:
    """It has six to one server, for all tabs together."""
    with served(tmp_path) as (_, printed):
        said = printed.next("serving")
        work = (COMMAND, "client", "synthetic", "--server", said["address"], "--id", "phone")
        assert run(*work, "--tasks-max", TASKS, "--json", cwd=tmp_path).returncode == 0
        context = chromium.new_context()
        first = context.new_page()
        first.goto(str(printed.next("cockpit")["link"]))
        pages = [first, *(context.new_page() for _ in range(LINES))]
        for page in pages:
            page.goto(first.url)
            expect(page.locator(".line.open")).to_have_text("live")
            seen(page, False)
        expect(first.locator(".line.open")).to_have_count(0)
        assert run(*work, "--tasks-max", TASKS, "--json", cwd=tmp_path).returncode == 0
        seen(first, True)
        expect(first.locator(".line.open")).to_have_text("live")
        expect(first.locator(".strip div", has_text="updates").locator("dd")).to_have_text(str(2 * TASKS))
        expect(first.locator("canvas")).to_have_attribute("data-threads", str(2 * TASKS))

        # However short its tasks are: what is followed can be read.
        began, ends = map(float, (first.locator("canvas").get_attribute("data-window") or "").split())
        assert ends - began > FOLLOWED_S - 0.01

        # News of the run are told four times a second: curves are drawn again for other data alone.
        first.add_init_script(DRAWN)
        first.goto(first.url.replace("river", "learning"))
        first.reload()
        first.locator("canvas").last.wait_for()
        first.route("**/series?*", lambda route: None)
        with first.expect_request("**/series?*"):
            pass
        drawn = first.evaluate("drawn")
        assert run(*work, "--tasks-max", TASKS, "--json", cwd=tmp_path).returncode == 0
        expect(first.locator(".strip div", has_text="updates").locator("dd")).to_have_text(str(3 * TASKS))
        assert first.evaluate("drawn") == drawn > 0
        context.close()


def test_orders_that_have_a_form_reach_the_server(chromium: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as (_, printed):
        said = printed.next("serving")
        where = ("--server", said["address"], "--id", "phone", "--tasks-max", TASKS)
        assert run(COMMAND, "client", "synthetic", *where, "--json", cwd=tmp_path).returncode == 0
        context = chromium.new_context()
        page = context.new_page()
        page.goto(str(printed.next("cockpit")["link"]))
        expect(page.locator(".strip div", has_text="updates").locator("dd")).to_have_text(str(TASKS))

        dialog = asked(page, "Roll back", After="0", Without="phone, tablet")
        expect(dialog).to_contain_text("without the updates of phone, tablet after version 0")
        left(dialog)
        dialog = asked(page, "Roll back", After="0")
        expect(dialog).to_contain_text("without every update after version 0")
        dialog.get_by_role("button", name="Yes, do it").click()
        expect(dialog.get_by_role("status")).to_have_text(f"version 1, without {TASKS} updates")
        left(dialog)

        dialog = asked(page, "Change a setting", Setting="updates_max", Value="2")
        expect(dialog).to_contain_text("'updates_max' is no setting: write table.key")
        left(dialog)
        dialog = asked(page, "Change a setting", Setting="run.updates_max", Value="2_000")
        dialog.get_by_role("button", name="Yes, do it").click()
        expect(dialog.get_by_role("status")).to_have_text("run.updates_max = 2000 (was 1000)")
        left(dialog)
        page.get_by_role("link", name="Settings").click()
        changed = page.get_by_role("region", name="Changed settings").get_by_role("row").nth(1)
        expect(changed.get_by_role("cell").nth(1)).to_have_text("1000")

        dialog = asked(page, "Put a device in quarantine", Device="fone")
        expect(dialog).to_contain_text("No device of this name has called so far.")
        left(dialog)
        dialog = asked(page, "Put a device in quarantine", Device="phone")
        expect(dialog).not_to_contain_text("No device of this name")
        left(dialog)

        # A session that was begun anew in another window is this page's as well.
        other = context.new_page()
        other.goto(str(printed.next("cockpit", 1)["link"]))
        expect(other.locator(".top .state")).to_have_text("running")
        give(page, "Pause the run")
        expect(other.locator(".top .state")).to_have_text("paused")
        context.close()


def test_a_served_flower_app_takes_orders_and_its_data_take_none(chromium: Browser, tmp_path: Path) -> None:
    """Whose app it is says nothing of whether it is live, and that nothing of whether a server is there."""
    with served(tmp_path, "flower:app") as (_, printed):
        said = printed.next("serving")
        where = ("--server", said["address"], "--id", "phone", "--tasks-max", TASKS)
        assert run(COMMAND, "client", SYNTHETIC, *where, "--json", cwd=tmp_path).returncode == 0
        page = chromium.new_page()
        page.goto(str(printed.next("cockpit")["link"]))
        expect(page.locator(".run-name .about")).to_have_text(re.compile(r"on flower:app, Flower$"))
        expect(page.locator(".strip div", has_text="devices online")).to_be_visible()
        page.get_by_role("link", name="Fleet").click()
        page.get_by_role("link", name="phone").click()
        page.get_by_role("button", name="Quarantine").click()
        dialog = page.get_by_role("dialog")
        for answer in ("Go on", "Yes, do it"):
            dialog.get_by_role("button", name=answer).click()
        expect(dialog.get_by_role("status")).to_have_text(re.compile("quarantine"))
        assert list(status(said["admin_address"], tmp_path)["quarantined"]) == ["phone"]
        left(dialog)
        page.get_by_role("link", name="Server").click()
        expect(page.get_by_text("Up for")).to_be_visible()
        page.get_by_role("link", name="Wire").click()
        expect(page.get_by_text("A server does not tell it")).to_be_visible()
        page.close()
    with cockpit("data", cwd=tmp_path) as printed:
        page = chromium.new_page()
        page.goto(str(printed.next("cockpit")["link"]))
        expect(page.locator(".run-name .about")).to_have_text(re.compile(r"on flower:app, Flower$"))
        expect(page.locator(".strip div", has_text="virtual time")).to_have_count(0)
        expect(page.locator(".notice")).to_have_text("the server was stopped before the end")
        expect(page.get_by_role("link", name="Server")).to_have_count(0)
        page.get_by_text("Orders", exact=True).click()
        expect(page.get_by_text("there is no server to give orders to")).to_be_visible()
        page.close()


def goes_on(page: Page) -> None:
    """The run does, nothing is missed, and the river follows what happens now."""
    expect(page.locator(".top .state")).to_have_text("running")
    expect(page.locator(".notice")).to_have_count(0)
    expect(page.get_by_role("button", name="follow")).to_have_attribute("aria-pressed", "true")


def test_pages_tell_that_a_server_is_away_and_go_on_once_it_is_back(
    chromium: Browser, tmp_path: Path
) -> None:
    """The page that saw it go, and one that was opened meanwhile."""
    (tmp_path / "run.toml").write_text(CONFIG.format(workload=SYNTHETIC))
    assert run(COMMAND, "init", "synthetic", "--out", "model", "--json", cwd=tmp_path).returncode == 0
    address, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    where = ("--address", address, "--admin-address", admin)
    server = (COMMAND, "server", "run.toml", "--model", "model", "--data-dir", "data", *where, "--json")
    work = (COMMAND, "client", "synthetic", "--server", address, "--id", "phone", "--tasks-max", TASKS)
    ui = (COMMAND, "ui", "--admin", admin, "--listen", "127.0.0.1:0", "--json")
    with (
        (tmp_path / "log").open("ab") as log,
        Process(*server, cwd=tmp_path, stdout=PIPE, stderr=log) as process,
    ):
        Printed(process).next("serving")
        assert run(*work, "--json", cwd=tmp_path).returncode == 0
        beside = Process(*ui, cwd=tmp_path, stdout=PIPE, stderr=log)
        with beside:
            somebody = chromium.new_context()
            pages = [somebody.new_page()]
            pages[0].goto(str(Printed(beside).next("cockpit")["link"]))
            expect(pages[0].locator(".top .state")).to_have_text("running")
            expect(pages[0].locator(".line.open")).to_have_text("live")
            beside.send_signal(SIGSTOP)  # as a line that was cut without a word
            expect(pages[0].locator(".line.lost")).to_contain_text("trying again")
            beside.send_signal(SIGCONT)
            expect(pages[0].locator(".line.open")).to_have_text("live")
            process.kill()
            process.wait(60)
            expect(pages[0].locator(".top .state")).to_have_text("interrupted")
            pages.append(somebody.new_page())
            pages[1].goto(pages[0].url)
            for page in pages:
                expect(page.locator(".notice")).to_contain_text(f"{admin}: nobody answers")
                expect(page.locator(".line.open")).to_have_count(0)
            with Process(*server, cwd=tmp_path, stdout=PIPE, stderr=log) as back:
                Printed(back).next("serving")
                for page in pages:
                    goes_on(page)
                assert run(*work, "--json", cwd=tmp_path).returncode == 0
                for page in pages:
                    updates = page.locator(".strip div", has_text="updates").locator("dd")
                    expect(updates).to_have_text(str(2 * TASKS))
                somebody.close()
                back.terminate()
                assert back.wait(600) == 0
            beside.terminate()
