"""How far long work is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from anabranch.api.progress import LiveBar, TimeLeft
from anabranch.cli.output import Output, Ticker
from anabranch.reports.text import duration_text


class Show(Protocol):
    """What is told how far it is."""

    def __call__(self, share: float, text: str, /, **data: Any) -> None:
        """Such a share is done, 0 to 1, in words, and `data` for programs."""


@contextmanager
def bar_or_lines(output: Output, patient: bool = False) -> Iterator[Show]:
    """What shows it: a bar with the time left, or a line every few seconds, of JSON for programs.

    The first line comes at once, or, of one that is `patient`, where the work lasts.
    """
    if output.console.is_terminal and not output.as_json:
        with LiveBar() as bar:
            yield lambda share, text, /, **_: bar.show(share, text)
        return
    left = TimeLeft()
    with Ticker(output, patient) as ticker:

        def show(share: float, text: str, /, **data: Any) -> None:
            ticker.show(text + left_text(share, left.after(share)), share=share, **data)

        yield show


def left_text(share: float, left_s: float | None, rate: str = "") -> str:
    """How much is done, how long the rest will take and how fast it goes, in brackets; empty at first."""
    if left_s is None:
        return f" ({rate})" if rate else ""
    left = f"{duration_text(left_s)} left" if share < 1 else ""
    return f" ({', '.join(part for part in (f'{100 * share:.0f} %', rate, left) if part)})"
