"""A server of several runs in a real browser: its jobs come as they are added, and an order is of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from served_jobs import jobs_server
from watched import Watched

pytestmark = pytest.mark.slow


def test_jobs_come_and_an_order_goes_to_the_one_that_is_shown(chromium: Browser, tmp_path: Path) -> None:
    with jobs_server(tmp_path, "--ui", "127.0.0.1:0") as served:
        page = chromium.new_page()
        watched = Watched(page)
        page.goto(str(served.printed.next("cockpit")["link"]))
        expect(page.get_by_text("There is no run here yet")).to_be_visible()
        for name in ("one", "two"):
            served.add(name)
        expect(page.locator(".runs .run h2")).to_have_text(["one", "two"])
        served.train("two", 2)

        page.get_by_role("link", name="two").click()
        expect(page.locator(".run-title")).to_have_text("two")
        expect(page.locator(".strip div", has_text="updates").locator("dd")).to_have_text("2")
        page.get_by_text("Orders", exact=True).click()
        page.get_by_role("button", name="Pause the run").click()
        dialog = page.get_by_role("dialog", name="Pause the run")
        expect(dialog.get_by_role("status")).to_contain_text("two")
        dialog.get_by_role("button", name="Yes, do it").click()
        expect(dialog.get_by_role("status")).to_have_text("paused")
        assert (served.paused("one"), served.paused("two")) == (False, True)
        assert watched.complaints == []
        page.close()
