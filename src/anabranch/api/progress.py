"""How far a run is: the share of its budget that is used, and a bar of it, or lines, with the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import RunTable
from anabranch.reports.metrics import metric_text
from anabranch.reports.text import duration_text, number_text
from anabranch.simulation.run import RunProgress

LINE_EVERY_S = 30.0


def share_done(run: RunTable, progress: RunProgress) -> float:
    """The share of the budget that is used, 0 to 1: of several, of that which is nearest to its end."""
    parts = (
        (progress.updates, run.updates_max),
        (progress.version, run.versions_max),
        (progress.virtual_s, run.virtual_s_max),
    )
    return max((min(1.0, done / most) for done, most in parts if most), default=0.0)


class TimeLeft:
    """Real seconds that are left of a run, by the share of it that is done; `now` is for tests."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._began = now, now()

    def after(self, share: float) -> float | None:
        """With this share done; None as long as nothing is."""
        return (self._now() - self._began) * (1.0 - share) / share if share > 0 else None

    def text(self, share: float) -> str:
        """The same in words: `12.3 s left`; empty as long as nothing is done, and once all is."""
        left_s = self.after(share)
        return "" if left_s is None or share >= 1 else f"{duration_text(left_s)} left"


class UpdateRate:
    """Updates a real second, since the first look: a run that goes on had those of before it already."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[float, int] | None = None

    def text(self, updates: int) -> str:
        """With so many updates by now: `12.3 updates/s`; empty as long as there is none to count."""
        at = self._now()
        began, before = self._first = self._first or (at, updates)
        return f"{number_text((updates - before) / (at - began))} updates/s" if at > began else ""


class LiveBar:
    """A bar with per cent, time left and a text: on standard error, or in a notebook's own page.

    A context manager; on a terminal it is gone afterwards. Where there is none, a line of the same tells it
    every 30 s. Unless `shown` it is nothing. `console` and `now` are for tests.
    """

    def __init__(
        self,
        shown: bool = True,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left, self._page = TimeLeft(now), _notebook_page() if shown else None
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # rich's own way into a notebook wants a library of widgets.
        console = console or Console(stderr=True, force_jupyter=False)
        alone = shown and self._page is None
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not (alone and console.is_terminal)
        )
        self._lines = _RareLines(console, now) if alone and not console.is_terminal else None
        self._task = self._bar.add_task("", total=1.0)

    def show(self, share: float, text: str) -> None:
        """So much is done, 0 to 1."""
        self._bar.update(self._task, completed=share, description=text)
        words = ", ".join(part for part in (f"{100 * share:.0f} %", self._left.text(share), text) if part)
        if self._page is not None:
            self._page(f'<progress value="{share:.3f}"></progress> {escape(words)}')
        elif self._lines is not None:
            with suppress(OSError):
                self._lines(words)

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # no work is lost for its bar: a terminal is closed, the disk of a log full
            self._bar.stop()


class _RareLines:
    """A line now and then; of work that is over before the first is due, none."""

    def __init__(self, console: Console, now: Callable[[], float]) -> None:
        self._console, self._now, self._last = console, now, now()

    def __call__(self, words: str) -> None:
        at = self._now()
        if at - self._last >= LINE_EVERY_S:
            self._last = at
            self._console.print(words, markup=False, highlight=False, soft_wrap=True)


def _notebook_page() -> Callable[[str], None] | None:
    """What writes a line into the page of the notebook that this runs in; None elsewhere."""
    found = sys.modules.get("IPython")
    shell = None if found is None else found.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    display: Any = import_module("IPython.display")
    line = display.display(display.HTML(""), display_id=True)
    return lambda text: line.update(display.HTML(text))


class RunBar:
    """A bar of one run, as a callback: how much of its budget is used, how fast, and what counts."""

    def __init__(self, run: RunTable, bar: LiveBar) -> None:
        self._run, self._goal, self._bar, self._rate = run, Goal.of(run), bar, UpdateRate()

    def __call__(self, progress: RunProgress) -> None:
        """Show it."""
        goal, value = self._goal.among(progress.metrics), self._goal.value(progress.metrics)
        told = "" if value is None else f"{goal.metric} {metric_text(goal.metric, value)}"
        parts = (self._rate.text(progress.updates), told)
        self._bar.show(share_done(self._run, progress), ", ".join(part for part in parts if part))
