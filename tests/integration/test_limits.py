"""`[limits]` of a configuration, at a real server: a cap that was set holds, and devices go by it."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
from wire import Served, chunks, requests, server_config

from anabranch.client.transport import GrpcTransport
from anabranch.core.model.updates import Ask, Capability, Task, Verdict
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.testing.federation import result_of

CHUNK = 4096


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros(5000, np.float32)})


def test_chunks_are_as_small_as_the_server_wants_them(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", limits={"chunk_bytes_max": CHUNK})
    with Served(config, manifest) as served:
        assert served.info is not None
        with GrpcTransport(served.info.address, "told") as transport:
            spec = transport.enrol(Capability()).spec
            task = transport.ask(Ask("told", "t-1"), spec)
            assert isinstance(task, Task)
            entry = result_of(task, spec, "u-1", 0.5)
            assert len(entry.payload) == 20_000 > 4 * CHUNK
            assert transport.push(entry).decision.verdict is Verdict.PUBLISHED
            assert len(transport.fetch(spec.layout_hash).data) == 20_000
        untold, data = served.device("untold"), np.ones(5000, np.float32).tobytes()
        header = untold.header(untold.task(), data)
        with pytest.raises(grpc.RpcError, match="4096"):
            untold.stub.PushUpdate(requests(header, chunks(data, size=2 * CHUNK)), timeout=600)


def test_what_an_update_may_claim_is_as_was_set(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", limits={"delta_abs_max": 10.0, "clients_max": 1})
    with Served(config, manifest) as served:
        device = served.device()
        assert device.work(10.0).version == 1
        with pytest.raises(grpc.RpcError, match="are over 10"):
            device.work(11.0)
        with pytest.raises(grpc.RpcError, match="1 clients are enrolled, as many as the server takes"):
            served.device("one-more")
        served.device()  # who is known may say so again
