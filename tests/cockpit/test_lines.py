"""The lines between browsers and the cockpit."""

from __future__ import annotations

import asyncio
import socket

from anabranch.cockpit.serving import _listening


def test_the_end_of_an_answer_waits_for_no_word_of_its_beginning() -> None:
    async def is_at_once() -> bool:
        found: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def served(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line = writer.get_extra_info("socket")
            found.set_result(bool(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        with _listening("127.0.0.1:0") as bound:
            async with await asyncio.start_server(served, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname())
                writer.close()
                return await found

    assert asyncio.run(is_at_once())
