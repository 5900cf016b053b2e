"""A signal to stop during a run: an event in hand is finished first, so that what is left is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from anabranch.support.stop_signals import Terminated, mute_children, stop_signals


class Interruptions:
    """While entered, SIGINT is a `KeyboardInterrupt` and the other `stop_signals` are `Terminated`.

    Within `whole` they come at its end. In another thread than the main one signals are nobody's business
    here.
    """

    def __init__(self) -> None:
        self.whole = _Whole()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)

    def _take(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the handler's contract
        mute_children()
        if self.whole.entered:
            self.whole.waiting = number
        else:
            _interrupt(number)


class _Whole:
    """Entered again and again; a signal waits until it is left."""

    entered = False
    waiting: int | None = None

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered = False
        if self.waiting is not None and kind is None:
            _interrupt(self.waiting)


def _interrupt(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(128 + number)
