"""The port for Prometheus: its text, over plain HTTP, to whoever reaches the address. Off unless it is named.

It answers in threads of its own and asks neither the event loop nor the writer, so that it tells how things
stand while one of them is stuck.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from anabranch.core.errors import PortInUse
from anabranch.identity.addresses import host_and_port, is_loopback

log = logging.getLogger(__name__)


class Exposition:
    """Serves metrics on `HOST:PORT` until it is closed. Raises `ConfigError` and `PortInUse`."""

    def __init__(self, registry: CollectorRegistry, address: str) -> None:
        host, port = host_and_port(address)
        try:
            served: Any = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise PortInUse(f"server.metrics_address: {address} cannot be served on: {error}") from error
        self._server, self._thread = served
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        if not is_loopback(address):
            log.warning(
                "the metrics on %s are for whoever reaches it: figures of the whole run, no names of devices",
                self.address,
            )

    async def close(self) -> None:
        """Serve no more; who is being answered gets the rest."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        self._thread.join()
