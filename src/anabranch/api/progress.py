"""How far a run is: the share of its budget that is used, and a bar of it with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import RunTable
from anabranch.reports.metrics import metric_text
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


class ProgressBar:
    """A bar on standard error, as a callback and a context manager: per cent, time left, what counts."""

    def __init__(self, run: RunTable, console: Console | None = None) -> None:
        self._run, self._goal = run, Goal.of(run)
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console or Console(stderr=True), transient=True)
        self._task = self._bar.add_task("", total=1.0)

    def __call__(self, progress: RunProgress) -> None:
        """Show it."""
        goal, value = self._goal.among(progress.metrics), self._goal.value(progress.metrics)
        told = "" if value is None else f"{goal.metric} {metric_text(goal.metric, value)}"
        self._bar.update(self._task, completed=share_done(self._run, progress), description=told)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
