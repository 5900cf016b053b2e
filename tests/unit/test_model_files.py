"""The files of published models, and who waits for them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from desks import LIMITS, Desk, settings

from anabranch.server.models import ModelRequest
from anabranch.server.store.memory import MemoryStore

FIRST = ModelRequest(0, "exact")


def test_who_goes_while_a_file_is_made_leaves_it_to_the_others(tmp_path: Path) -> None:
    desk = Desk(MemoryStore(LIMITS), tmp_path, settings())
    begin = threading.Event()
    desk.models._executor.submit(begin.wait)  # what is asked for next is queued behind it

    async def waiting() -> int:
        desk.models.keep(desk.books.engine, FIRST)
        gone, stays = (asyncio.create_task(desk.models.get(FIRST)) for _ in range(2))
        await asyncio.sleep(0)  # both wait now
        gone.cancel()
        await asyncio.wait([gone])
        desk.models.keep(desk.books.engine, FIRST)  # as the writer does for the next who asks
        begin.set()
        assert gone.cancelled()
        return (await stays).size_bytes

    try:
        assert asyncio.run(waiting()) >= 8 * 4
    finally:
        begin.set()
        desk.drop()
