"""How far long work is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from anabranch.api.progress import LiveBar, TimeLeft
from anabranch.cli.output import Output, Ticker


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


def left_text(share: float, left: TimeLeft, rate: str = "") -> str:
    """How much is done, how fast it goes and how long the rest will take, in brackets; empty at first."""
    done = f"{100 * share:.0f} %" if share > 0 else ""
    said = ", ".join(part for part in (done, rate, left.text(share)) if part)
    return f" ({said})" if said else ""
