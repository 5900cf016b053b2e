"""How far a run is, in per cent and in time."""

from __future__ import annotations

import errno
import io
import os
from typing import Any

import pytest
from rich.console import Console

import anabranch as ab
from anabranch.api.progress import LiveBar, RunBar, TimeLeft, UpdateRate, share_done
from anabranch.core.config.tables import RunTable


def at(**counts: Any) -> ab.RunProgress:
    """A run that is so far."""
    known: dict[str, Any] = {"virtual_s": 0.0, "version": 0, "updates": 0, "rejected": 0, **counts}
    return ab.RunProgress(**known, accuracy=0.25, loss=None, evaluated=True, metrics={"accuracy": 0.25})


@pytest.mark.parametrize(
    ("budget", "counts", "share"),
    [
        ({"updates_max": 40}, {"updates": 10}, 0.25),
        ({"updates_max": 40, "versions_max": 20}, {"updates": 10, "version": 15}, 0.75),
        ({"virtual_s_max": 8.0}, {"virtual_s": 2.0, "updates": 100}, 0.25),
        ({"updates_max": 40}, {"updates": 41}, 1.0),
        ({}, {"updates": 41}, 0.0),
    ],
)
def test_the_budget_that_is_nearest_to_its_end_counts(
    budget: dict[str, Any], counts: dict[str, Any], share: float
) -> None:
    assert share_done(RunTable(**budget), at(**counts)) == share


def test_the_time_left_is_as_the_time_so_far() -> None:
    moments = iter([100.0, 103.0, 108.0])
    left = TimeLeft(lambda: next(moments))
    assert left.after(0.0) is None
    assert left.after(0.25) == 9.0
    assert left.after(0.8) == pytest.approx(2.0)


def test_the_rate_is_of_what_was_seen() -> None:
    moments = iter([100.0, 104.0, 110.0])
    rate = UpdateRate(lambda: next(moments))
    assert [rate.text(updates) for updates in (1000, 1010, 1200)] == ["", "2.50 updates/s", "20.0 updates/s"]


def test_a_bar_shows_per_cent_and_what_counts() -> None:
    screen = io.StringIO()
    with LiveBar(console=Console(file=screen, force_terminal=True, width=100)) as bar:
        told = RunBar(RunTable(updates_max=40), bar)
        told(at(updates=9))
        told(at(updates=10))
        bar._bar.refresh()
    assert "25%" in screen.getvalue()
    assert "updates/s, accuracy 25.00 %" in screen.getvalue()


def test_without_a_terminal_lines_tell_it_now_and_then() -> None:
    """Of work that is over sooner nothing is said: what reads standard error is not bothered."""
    moment, said = [100], io.StringIO()
    with LiveBar(console=Console(file=said, width=20), now=lambda: moment[0]) as bar:
        for at_s, share in ((100, 0), (129, 0.25), (130, 0.3), (159, 0.5), (160, 0.6), (190, 1)):
            moment[0] = at_s
            bar.show(share, "[of 2] runs on [red]")
    assert said.getvalue().splitlines() == [
        "30 %, 70.0 s left, [of 2] runs on [red]",
        "60 %, 40.0 s left, [of 2] runs on [red]",
        "100 %, [of 2] runs on [red]",
    ]


class Full(io.StringIO):
    """A stream on a full disk, or of a terminal that was closed."""

    def write(self, text: str) -> int:
        """Never."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("terminal", [False, True])
def test_no_work_is_lost_for_a_bar_that_cannot_be_written(terminal: bool) -> None:
    done, moment = False, [0.0]
    console = Console(file=Full(), force_terminal=terminal, force_interactive=False)
    with LiveBar(console=console, now=lambda: moment[0]) as bar:
        bar.show(0.5, "half")
        moment[0] = 100.0
        bar.show(0.6, "more")
        done = True
    assert done
