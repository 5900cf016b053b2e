"""One suite for every transport: in-process, wrapped, and gRPC against the real server by both doors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import live_server

from anabranch.client.faulty import FaultyTransport
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.testing import TransportConformance
from anabranch.testing.federation import config, first_weights
from anabranch.testing.transport import SETTINGS, Connect


@pytest.mark.usefixtures("patient")
class TestTransports(TransportConformance):
    @pytest.fixture(params=["in process", "wrapped", "calls", "stream"])
    def connect(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
        """How a device gets a transport to a new run."""
        settings = config(**SETTINGS)
        if request.param in ("calls", "stream"):
            opened: list[GrpcTransport] = []
            with live_server(tmp_path, first_weights(), settings) as info:

                def over_grpc(client_id: str) -> Transport:
                    opened.append(GrpcTransport(info.address, client_id, connection=request.param))
                    return opened[-1]

                yield over_grpc
                for transport in opened:
                    transport.close()
            return
        server = LocalServer(first_weights(), settings, time.time)

        def in_process(client_id: str) -> Transport:
            local = LocalTransport(server, client_id)
            return FaultyTransport(local) if request.param == "wrapped" else local

        yield in_process
