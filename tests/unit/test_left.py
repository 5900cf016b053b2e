"""What tests must leave as they found it is said."""

from __future__ import annotations

import asyncio
import gc

from grpc import aio
from left import FREED


def test_a_server_of_grpcs_that_was_not_stopped_is_heard_of_and_no_other() -> None:
    async def freed(stops: bool) -> None:
        server = aio.server()
        if stops:
            await server.start()
            await server.stop(None)

    for stops in (True, False):
        asyncio.run(freed(stops))
        gc.collect()
        assert bool(FREED.taken()) is not stops
