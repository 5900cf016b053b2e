"""Many strangers knock at once: a server lives, whatever gRPC does under their handshakes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from anabranch.identity.authority import Authority
from anabranch.server.tls import ServerIdentity

CALLERS, HANDSHAKES = 32, 5_000


def _stranger() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the default one reads every authority of the system
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


def knock(port: int, context: ssl.SSLContext) -> None:
    """One handshake, as a stranger makes it. Raises `OSError` if nobody answers."""
    with socket.create_connection(("127.0.0.1", port)) as line, context.wrap_socket(line):
        pass


@pytest.mark.prove
def test_handshakes_at_the_same_time_do_not_end_the_server(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path / "authority")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        stranger = _stranger()
        with ThreadPoolExecutor(CALLERS) as callers:
            knocks = [callers.submit(knock, port, stranger) for _ in range(HANDSHAKES)]
        ended = server.poll()
        server.kill()
    assert ended is None
    assert [str(error) for one in knocks if (error := one.exception())] == []


async def _serve(folder: Path) -> None:
    """A guarded port, its number on standard output, until the process is killed."""
    identity = ServerIdentity(Authority.create(folder), life_s=86_400.0)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", identity.credentials(clients=False))
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
