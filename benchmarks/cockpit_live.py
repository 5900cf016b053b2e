"""What a server's cockpit costs it, and how old its news are.

    python -m benchmarks.cockpit_live news [--rate 200] [--seconds 30]
    python -m benchmarks.cockpit_live pixels [--rate 200] [--seconds 30]
    python -m benchmarks.cockpit_live cost [--pairs 5] [--updates 3200]

`news`: from the moment of an update in the server's log to the message that tells a browser of it, while
devices push so many updates a second. `pixels`: to the frame of a real browser that has counted it, on the
page of the river, which draws its picture beside. `cost`: updates a second of a server whose cockpit is open,
with a browser that follows the stream and asks for the river and the fleet every other second, against the
same server without a cockpit; pair by pair, the order changed from pair to pair.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright

from benchmarks.cockpit_fleet import Page
from benchmarks.throughput import RUNS, durable_server
from benchmarks.writers import Load, drive

UI = ("--ui", "127.0.0.1:0")
VALUES = 100_000  # 0.4 MB an update
SMALL = 1_000
LOOK_S = 2.0
COUNTED = ".strip > :nth-child(2) dd"  # the run's updates, in the bar of every page
# What is counted, and when it is drawn: a frame begins after the change, and the next one when that is shown.
WATCH = """selector => {
  window.frames_seen = []
  const look = () => requestAnimationFrame(() => requestAnimationFrame(() => {
    const text = document.querySelector(selector)?.textContent ?? ""
    const count = Number(text.replace(/[^0-9]/g, ""))
    const last = window.frames_seen.at(-1)
    if (!last || last[1] !== count) window.frames_seen.push([Date.now(), count])
  }))
  new MutationObserver(look).observe(document.body, {subtree: true, childList: true, characterData: true})
}"""
WARM_UP = 80


def news(rate: float, seconds: float) -> None:
    """Print how old the news of updates are when they come."""
    ages: list[float] = []
    with server(SMALL, UI) as (address, link):
        page = Page(link)
        run = json.loads(page.read("/api/runs"))["runs"][0]
        page.read(f"/api/runs/{run['id']}")
        began_at, over = float(run["started_at"]), threading.Event()

        def hear(message: dict[str, Any]) -> None:
            now = time.time()
            ages.extend(now - began_at - r["t"] for r in message["records"] if r["kind"] == "decided")

        following = threading.Thread(target=follow, args=(page, run["id"], hear, over))
        following.start()
        updates = int(rate * seconds)
        took_s = drive(Load(address, SMALL, updates, durable=True, rate=rate))
        time.sleep(1.0)
        over.set()
        following.join()
    p50, p99 = np.percentile(ages, [50, 99])
    print(
        f"{updates} updates at {updates / took_s:.0f} a second, {len(ages)} told: median {p50 * 1000:.0f} ms,"
        f" p99 {p99 * 1000:.0f} ms, oldest {max(ages) * 1000:.0f} ms"
    )


def pixels(rate: float, seconds: float) -> None:
    """Print how old updates are in the frame that first counts them."""
    times: list[float] = []
    with server(SMALL, UI) as (address, link), sync_playwright() as playwright:
        # As root, in a container, Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        window, over = browser.new_page(), threading.Event()
        window.goto(link)
        page = Page(link, "; ".join(f"{c['name']}={c['value']}" for c in window.context.cookies()))
        run = json.loads(page.read("/api/runs"))["runs"][0]
        page.read(f"/api/runs/{run['id']}")
        began_at = float(run["started_at"])

        def hear(message: dict[str, Any]) -> None:
            times.extend(began_at + r["t"] for r in message["records"] if r["kind"] == "decided")

        window.goto(f"{link.partition('/login')[0]}/#/run/{run['id']}/river")
        window.wait_for_selector(COUNTED)
        window.evaluate(WATCH, COUNTED)
        following = threading.Thread(target=follow, args=(page, run["id"], hear, over))
        following.start()
        updates = int(rate * seconds)
        took_s = drive(Load(address, SMALL, updates, durable=True, rate=rate))
        window.wait_for_timeout(1500)
        frames = window.evaluate("window.frames_seen")
        over.set()
        following.join()
        browser.close()
    print(_ages_text(sorted(times), frames, updates / took_s))


def _ages_text(times: list[float], frames: list[tuple[float, int]], rate: float) -> str:
    """`frames`: (milliseconds since 1970, updates counted by then)."""
    ages, counted = [], 0
    for at_ms, count in frames:
        ages += [at_ms / 1000 - at for at in times[counted:count]]
        counted = max(counted, count)
    p50, p95 = np.percentile(ages, [50, 95])
    return (
        f"{len(ages)} updates at {rate:.0f} a second in {len(frames)} frames: median {p50 * 1000:.0f} ms, "
        f"p95 {p95 * 1000:.0f} ms, oldest {max(ages) * 1000:.0f} ms"
    )


def cost(pairs: int, updates: int) -> None:
    """Print the rates of pairs, and the median of their ratios."""
    ratios = []
    for pair in range(pairs):
        order = [True, False] if pair % 2 else [False, True]
        rates = {with_it: _rate(with_it, updates) for with_it in order}
        ratios.append(rates[True] / rates[False])
        print(f"{rates[True]:.1f} with, {rates[False]:.1f} without: {ratios[-1]:.3f}", flush=True)
    print(f"median of {pairs}: {statistics.median(ratios):.3f}")


def _rate(with_it: bool, updates: int) -> float:
    with server(VALUES, UI if with_it else ()) as (address, link), ExitStack() as stack:
        drive(Load(address, VALUES, WARM_UP, durable=True, name="warm-up"))
        if with_it:
            stack.enter_context(looking(link))
        return updates / drive(Load(address, VALUES, updates, durable=True))


@contextmanager
def server(values: int, words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """A server's address, and its cockpit's link if it has one."""
    RUNS.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=RUNS) as folder,
        durable_server(Path(folder), values, words=words) as (address, process),
    ):
        assert process.stdout is not None
        yield address, json.loads(process.stdout.readline())["link"] if words else ""


@contextmanager
def looking(link: str) -> Iterator[None]:
    """Somebody looks meanwhile, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ready, over = context.Event(), context.Event()
    process = context.Process(target=_look, args=(link, ready, over))
    process.start()
    ready.wait()
    yield
    over.set()
    process.join()


def _look(link: str, ready: Any, over: Any) -> None:
    page = Page(link)
    run = json.loads(page.read("/api/runs"))["runs"][0]["id"]
    page.read(f"/api/runs/{run}")
    follow_over = threading.Event()
    following = threading.Thread(target=follow, args=(page, run, lambda _: None, follow_over))
    following.start()
    ready.set()
    while not over.wait(LOOK_S):
        page.read(f"/api/runs/{run}/river")
        page.read(f"/api/runs/{run}/fleet")
    follow_over.set()
    following.join()


def follow(page: Page, run: str, hear: Callable[[dict[str, Any]], None], over: threading.Event) -> None:
    """Read the stream of a run."""
    line = http.client.HTTPConnection(page.line.host, page.line.port)
    line.request("GET", f"/api/runs/{run}/stream", headers={"Cookie": page.cookie})
    answer = line.getresponse()
    while not over.is_set() and (text := answer.readline()):
        if text.startswith(b"data: {") and b"records" in text:
            hear(json.loads(text[6:]))
    answer.close()
    line.close()


def main() -> None:
    """Measure one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["news", "pixels", "cost"])
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--updates", type=int, default=3200)
    options = parser.parse_args()
    if options.what == "news":
        news(options.rate, options.seconds)
    elif options.what == "pixels":
        pixels(options.rate, options.seconds)
    else:
        cost(options.pairs, options.updates)


if __name__ == "__main__":
    main()
