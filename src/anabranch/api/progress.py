"""How far a run is: the share of its budget that is used, and a bar of it with the time left."""

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

    A context manager; on a terminal it is gone afterwards. Unless `shown` it is none. `console` is for tests.
    """

    def __init__(self, shown: bool = True, console: Console | None = None) -> None:
        self._left, self._page = TimeLeft(), _notebook_page() if shown else None
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        # rich's own way into a notebook wants a library of widgets.
        console = console or Console(stderr=True, force_jupyter=False)
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not shown or self._page is not None
        )
        self._task = self._bar.add_task("", total=1.0)

    def show(self, share: float, text: str) -> None:
        """So much is done, 0 to 1."""
        self._bar.update(self._task, completed=share, description=text)
        if self._page is not None:
            left_s = self._left.after(share)
            left = "" if left_s is None or share >= 1 else f", {duration_text(left_s)} left"
            self._page(f'<progress value="{share:.3f}"></progress> {100 * share:.0f} %{left}, {escape(text)}')

    def __enter__(self) -> Self:
        with suppress(OSError):
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # no work is lost for its bar: a terminal is closed, the disk of a log full
            self._bar.stop()


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
