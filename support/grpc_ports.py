"""A server of gRPC's takes calls, or is freed whole."""

from __future__ import annotations

import grpc
from grpc import aio


async def serve_on(server: aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Take calls on an address, in the clear without credentials; returns the port. Raises `RuntimeError`.

    gRPC frees what a server holds where it was started and stopped. Of another one it tells its log at
    DEBUG, by a record with the object that is just being freed: a process that keeps the record, as pytest
    does, has the memory of something else in it, and dies in a collection of garbage.
    """
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except BaseException:
        await server.start()
        await server.stop(None)
        raise
    await server.start()
    return port
