"""Pictures of the cockpit's pages at fleets of several sizes, to be looked at; and how long a page takes.

    python -m benchmarks.cockpit_pictures OUT [--devices 8,1000,100000] [--runs FOLDER] [--pages river,fleet]

Every page wide in light and dark, and on a phone, of drawn runs of so many devices; or of the runs below a
folder. Times are from the address to the page's figures, and from the last letter of a filter to the rows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from benchmarks.cockpit_fleet import write

PAGES = ("river", "learning", "fleet", "wire", "defence", "settings")
EVENTS_EACH, EVENTS_MIN, EVENTS_MAX = 20, 4000, 1_000_000
WIDE, PHONE = ViewportSize(width=1440, height=900), ViewportSize(width=390, height=844)
LOOKS: dict[str, tuple[Literal["light", "dark"], ViewportSize]] = {
    "light": ("light", WIDE),
    "dark": ("dark", WIDE),
    "phone": ("light", PHONE),
}
SHOWN = "main :is(.figures, canvas, table, .river, .fleet-page, pre)"
DRAWN_MS = 500  # what is drawn frame by frame is there then
READ_MS = 300_000  # for the first page of a large run on a busy machine


def draw(browser: Browser, link: str, pages: list[str], out: Path) -> None:
    """Every page of every run, in every look."""
    base = "{0.scheme}://{0.netloc}".format(urlsplit(link))
    first = browser.new_context()
    first.new_page().goto(link)
    runs = [run["id"] for run in first.request.get(f"{base}/api/runs").json()["runs"]]
    for look, (scheme, size) in LOOKS.items():
        context = browser.new_context(color_scheme=scheme, viewport=size, storage_state=first.storage_state())
        page = context.new_page()
        for run in runs:
            for name in pages:
                took_ms = _shown(page, f"{base}/#/run/{run}/{name}")
                path = out / f"{run}-{name}-{look}.png"
                page.screenshot(path=path)
                sys.stdout.write(f"{path.name:40} {took_ms:6.0f} ms\n")
                if name == "fleet" and look == "light":
                    sys.stdout.write(f"{run + ', filtered':40} {_filtered(page):6.0f} ms\n")
        context.close()


def _shown(page: Page, address: str) -> float:
    """Milliseconds until the page of an address has its figures; the program itself is loaded anew."""
    page.goto("about:blank")
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector(SHOWN, timeout=READ_MS)
    took_ms = (time.perf_counter() - began) * 1000
    page.wait_for_timeout(DRAWN_MS)
    return took_ms


def _filtered(page: Page) -> float:
    """Milliseconds from a typed filter to the count of what matches it."""
    began = time.perf_counter()
    page.locator("input.search").fill("7")
    page.locator(".count", has_text="match").wait_for()
    return (time.perf_counter() - began) * 1000


def show(runs: Path, pages: list[str], out: Path) -> None:
    """Open the cockpit of these runs, and draw its pages."""
    command = [sys.executable, "-m", "anabranch.cli.main", "ui", str(runs), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as cockpit:
        assert cockpit.stdout is not None
        link = json.loads(cockpit.stdout.readline())["link"]
        try:
            with sync_playwright() as playwright:
                # As root, in a container, Chromium has no sandbox of its own.
                path = shutil.which("chromium")
                browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
                draw(browser, link, pages, out)
                browser.close()
        finally:
            cockpit.terminate()


def main() -> None:
    """Make the runs, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the pictures go")
    parser.add_argument("--devices", default="8,1000,100000", help="a run of each so many is drawn")
    parser.add_argument("--runs", type=Path, help="take these runs, and draw none")
    parser.add_argument("--pages", default=",".join(PAGES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = options.runs or Path(temporary)
        if options.runs is None:
            for devices in map(int, options.devices.split(",")):
                events = min(max(EVENTS_EACH * devices, EVENTS_MIN), EVENTS_MAX)
                write(runs / f"of-{devices}", devices, events)
        show(runs, options.pages.split(","), options.out)


if __name__ == "__main__":
    main()
