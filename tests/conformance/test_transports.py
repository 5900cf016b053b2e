"""One suite for every transport: in-process, wrapped, and gRPC against the real server by both doors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from job_hosts import Host
from live_server import live_server

from anabranch.api.jobs import add_job
from anabranch.client.faulty import FaultyTransport
from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.transport import GrpcTransport, Transport
from anabranch.core.config.tables import Config
from anabranch.server.job import JobState
from anabranch.server.manifest import write_manifest
from anabranch.testing import TransportConformance
from anabranch.testing.federation import BASE, config, first_weights
from anabranch.testing.transport import SETTINGS, Connect


@contextmanager
def of_a_job(folder: Path) -> Iterator[str]:
    """The address of a run of the suite's settings on a server of several."""
    written = folder / "settings.toml"
    tables = {name: {**BASE.get(name, {}), **SETTINGS.get(name, {})} for name in BASE | SETTINGS}
    lines = [
        f"{name}.{key} = {json.dumps(value)}" for name, of in tables.items() for key, value in of.items()
    ]
    written.write_text("\n".join(lines))
    write_manifest(folder / "model", "test", first_weights())
    for name in ("one", "two"):
        add_job(folder / "jobs", name, written, folder / "model", ())
    with Host(folder) as host:
        host.until("one", JobState.RUNNING)
        yield f"{host.info.address}/one"


@contextmanager
def of_one_run(folder: Path, settings: Config) -> Iterator[str]:
    """The address of a server of nothing else."""
    with live_server(folder, first_weights(), settings) as info:
        yield info.address


@pytest.mark.usefixtures("patient")
class TestTransports(TransportConformance):
    @pytest.fixture(params=["in process", "wrapped", "calls", "stream", "calls of a job", "stream of a job"])
    def connect(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
        """How a device gets a transport to a new run."""
        settings = config(**SETTINGS)
        door, _, job = request.param.partition(" of a ")
        if door in ("calls", "stream"):
            opened: list[GrpcTransport] = []
            with of_a_job(tmp_path) if job else of_one_run(tmp_path, settings) as address:

                def over_grpc(client_id: str) -> Transport:
                    opened.append(GrpcTransport(address, client_id, connection=door))
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
