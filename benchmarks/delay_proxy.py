"""A TCP proxy on loopback that delays every byte, both ways: a link with a round trip, of any bandwidth.

    python -m benchmarks.delay_proxy TARGET ROUND_TRIP_S      prints its own address, serves until killed

The kernel's own means (netem) need rights and a module that many machines do not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

READ_BYTES = 64 * 1024
FLYING_MAX = 4_096  # pieces on their way, per direction; then the sender waits


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Every piece leaves `delay_s` after it came, in order."""
    loop = asyncio.get_running_loop()
    flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(FLYING_MAX)

    async def deliver() -> None:
        while True:
            due, data = await flying.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                writer.close()
                return
            writer.write(data)
            await writer.drain()

    async def take() -> None:
        data = b"all"
        while data:
            data = await reader.read(READ_BYTES)
            await flying.put((loop.time() + delay_s, data))

    with contextlib.suppress(ConnectionError):  # one side has gone: so does the other
        await asyncio.gather(deliver(), take())
    writer.close()


async def serve(target: str, round_trip_s: float) -> None:
    """Pass connections on to `target` (host:port), each byte half a round trip later."""
    host, _, port = target.rpartition(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        for one in (writer, far_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        delay_s = round_trip_s / 2
        await asyncio.gather(_pump(reader, far_writer, delay_s), _pump(far_reader, writer, delay_s))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    sys.stdout.write(f"127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], float(sys.argv[2])))
