"""Who waits for the writer: a lane for operators' calls, and one for all others, which it goes before.

A server that has more devices than it can take is steered out of that by its operators' orders.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from anabranch.server.books import Call


class Lanes(asyncio.Queue["Call | None"]):
    """Of the calls in a lane the first comes first. `None` is the end, behind all of them.

    By the log's times, what goes ahead happens no later than what it passes.
    """

    def _init(self, maxsize: int) -> None:  # noqa: ARG002 - as a queue without a bound has it
        self._ahead: deque[Call] = deque()
        self._others: deque[Call | None] = deque()

    def _put(self, item: Call | None) -> None:
        if item is None or not item.ahead:
            self._others.append(item)
            return
        passed = next(
            (call.event for call in self._others if call is not None and call.event is not None), None
        )
        if item.event is not None and passed is not None:
            item.event = replace(item.event, now=min(item.event.now, passed.now))
        self._ahead.append(item)

    def _get(self) -> Call | None:
        return self._ahead.popleft() if self._ahead else self._others.popleft()

    def qsize(self) -> int:
        """How many wait."""
        return self.ahead + len(self._others)

    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self.qsize()

    @property
    def ahead(self) -> int:
        """How many wait that go ahead of the others."""
        return len(self._ahead)
