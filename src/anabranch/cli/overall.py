"""How far long work is: a bar on a terminal, lines elsewhere; of what goes along a log, the event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from anabranch.api.progress import LiveBar, TimeLeft
from anabranch.cli.output import Output, Ticker
from anabranch.reports.text import count_text


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
            ticker.show(text + left_text(share, left), share=share, **data)

        yield show


@contextmanager
def along_log(output: Output, data_dir: Path) -> Iterator[Callable[[str, int], None]]:
    """What hears what is being done to a server's data, and up to which event (0: none yet)."""
    with Ticker(output, patient=True) as ticker:

        def tell(doing: str, seq: int) -> None:
            there = f": up to event {count_text(seq)}" if seq else ""
            ticker.show(f"{data_dir}: {doing}{there}", doing=doing, events=seq)

        yield tell


def left_text(share: float, left: TimeLeft, rate: str = "") -> str:
    """How much is done, how fast it goes and how long the rest will take, in brackets; empty at first."""
    done = f"{100 * share:.0f} %" if share > 0 else ""
    said = ", ".join(part for part in (done, rate, left.text(share)) if part)
    return f" ({said})" if said else ""
