"""The stream of a run: what happened since the last message, a few times a second, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from anabranch.cockpit.runs import ShownRun, counters, standing
from anabranch.core.errors import AnabranchError
from anabranch.reports.picture.picture import Picture

EVERY_S = 0.25
STANDS_S = 2.0  # so often a page is told how a run that goes on stands, where nothing happens
ALIVE_S = 15.0  # a comment goes out of one that does not, so that nobody in between hangs up
RECORDS_MAX = 200
CALL_AGAIN_MS = 1000
GOES_ON = ("running", "paused")  # time passes, and devices fall silent, without an event


class News:
    """Streams of runs. A cursor is of this process, as the happenings are counted in it."""

    def __init__(self, closing: Callable[[], bool]) -> None:
        self._closing, self._epoch = closing, secrets.token_hex(4)

    async def stream(self, run: ShownRun, last_id: str) -> AsyncIterator[str]:
        """The messages of a run, from a cursor on; from now on where it is none of ours.

        They end without `ended` where its picture is forgotten: whoever calls again has another one made.
        """
        picture = run.picture
        cursor, said, silent_s = self._place(last_id, picture.happened), ("", ""), 0.0
        yield f"retry: {CALL_AGAIN_MS}\n\n"
        while run.picture is picture and not self._closing():
            run.looked_at, over = time.monotonic(), run.over
            now = state, _ = await asyncio.to_thread(_standing, run)
            stands = silent_s >= STANDS_S and state in GOES_ON
            if stands or now != said or picture.happened > cursor:
                cursor, message = await asyncio.to_thread(self._message, picture, cursor, state)
                yield message
                said, silent_s = now, 0.0
            elif over:
                yield f"event: ended\nid: {self._epoch}-{cursor}\ndata: {{}}\n\n"
                return
            elif silent_s >= ALIVE_S:
                yield ": still here\n\n"
                silent_s = 0.0
            await asyncio.sleep(EVERY_S)
            silent_s += EVERY_S

    def _place(self, last_id: str, newest: int) -> int:
        epoch, _, number = last_id.partition("-")
        if epoch != self._epoch or not (number.isascii() and number.isdecimal()):
            return newest
        return min(int(number), newest)

    def _message(self, picture: Picture, cursor: int, state: str) -> tuple[int, str]:
        with picture.lock:
            records, dropped = picture.since(cursor, RECORDS_MAX)
            cursor = picture.happened
            data: dict[str, Any] = {
                "now_s": picture.now_s,
                "version": picture.version,
                "counters": counters(picture),
                "state": state,
                "records": [happening.to_json() for happening in records],
                "dropped": dropped,
            }
        return cursor, f"event: news\nid: {self._epoch}-{cursor}\ndata: {json.dumps(data)}\n\n"


def _standing(run: ShownRun) -> tuple[str, str]:
    """How a run stands, and why: of a server that is away the first reason is seldom the one that stays."""
    try:
        return standing(run, run.source.head())
    except AnabranchError as error:
        return "interrupted", str(error)
