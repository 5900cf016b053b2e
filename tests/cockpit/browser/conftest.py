"""A real browser: Debian's Chromium, by Playwright. Where it is not, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cockpits import Browser as Somebody
from cockpits import entered
from made_runs import made_run
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, sync_playwright
from watched import Watched

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium")
EIGHT, THOUSAND, PARTS = "eight", "thousand", "parts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why none of these runs where there is no browser. `items` are the tests of all folders."""
    if CHROMIUM is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="chromium is not here: apt-get install chromium"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small run and a large one."""
    folder: Path = tmp_path_factory.mktemp("runs")
    made_run(folder / EIGHT, devices=8, updates=200)
    made_run(folder / THOUSAND, devices=1000, updates=4000)
    made_run(folder / PARTS, devices=8, updates=200, parts=True)
    return folder


# While Playwright is there its thread has an event loop, which no test of another module may meet.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root, in a container, Chromium has no sandbox of its own.
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def somebody(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Somebody]:
    """Who has used the link of a cockpit of these runs."""
    with entered(runs, cwd=tmp_path_factory.mktemp("cockpit")) as found:
        yield found


@pytest.fixture
def look(chromium: Browser, somebody: Somebody) -> Iterator[Callable[..., Page]]:
    """Opens a page by its hash; at the end nothing may have been complained of."""
    contexts: list[tuple[BrowserContext, Watched]] = []
    base = f"http://{somebody.host}"
    name, _, value = somebody.cookie.partition("=")

    def open_(hash_: str, width: int = 1280, height: int = 800, **more: Any) -> Page:
        viewport = ViewportSize(width=width, height=height)
        context = chromium.new_context(viewport=viewport, **more)
        context.add_cookies([{"name": name, "value": value, "url": base}])
        page = context.new_page()
        contexts.append((context, Watched(page)))
        page.goto(f"{base}/#/{hash_}")
        return page

    yield open_
    for context, watched in contexts:
        context.close()
        assert watched.complaints == []
