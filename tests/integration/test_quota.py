"""`server.disk_bytes_max`: who holds so much takes nothing more, loses nothing, and goes on with more."""

from __future__ import annotations

import urllib.request
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from stores import LIMITS
from wire import CALL_S, Device, Served, server_config

from anabranch.core.errors import StoreFull
from anabranch.core.limits import MIB
from anabranch.core.retention import Keep
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.server.manifest import write_manifest
from anabranch.server.store.base import ChainLink, Projection
from anabranch.server.store.factory import open_store
from anabranch.server.store.quota import EVERY_S, Quota, held_bytes
from anabranch.server.store.sql import SqlStore
from anabranch.server.verify import verify
from anabranch.testing.store import INFO, published, reference, snapshot, update


def test_a_server_that_holds_so_much_takes_nothing_more(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "model", "test", {"w": np.zeros(100_000, np.float32)})
    bound = 8 * MIB
    server = {"disk_bytes_max": bound, "metrics_address": "127.0.0.1:0"}
    with Served(server_config(tmp_path / "data", server=server), manifest) as served:
        before = of_disk(served)
        assert before["full"] == 0
        assert 0 < before["free_bytes"] < before["size_bytes"] == bound
        device = served.device()
        taken, refused = filled(device)
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = served.operator().GetStatus(operators.GetStatusRequest(), timeout=CALL_S)
        assert f"over server.disk_bytes_max = {bound}" in status.disk_full
        assert device.fetch()[0].version == taken, "what is there is served"
        assert of_disk(served)["full"] == 1
    assert held_bytes(tmp_path / "data") > bound
    assert taken > 0
    with Served(server_config(tmp_path / "data", server={"disk_bytes_max": 64 * bound}), manifest) as served:
        served.device().work()
    found = verify(tmp_path / "data")
    assert (found.problems, found.version) == ((), taken + 1)


def of_disk(served: Served) -> dict[str, float]:
    """What Prometheus is told of it: `anabranch_disk_NAME`."""
    assert served.info is not None
    with urllib.request.urlopen(f"http://{served.info.metrics_address}/metrics", timeout=600) as answer:
        rows = [line.split() for line in answer.read().decode().splitlines()]
    prefix = "anabranch_disk_"
    return {row[0].removeprefix(prefix): float(row[1]) for row in rows if row[0].startswith(prefix)}


def filled(device: Device) -> tuple[int, Any]:
    """How many updates were taken until one was not, and why it was not."""
    for taken in count():
        try:
            device.work()
        except grpc.RpcError as error:
            return taken, error
    raise AssertionError


def test_what_is_dropped_makes_room(tmp_path: Path) -> None:
    """Four times as much as may be held comes in, and little of it is to be kept."""
    bound, rounds, size = 16 * MIB, 64, 16_000
    store = open_store("", tmp_path, LIMITS, disk_bytes_max=bound)
    assert isinstance(store, SqlStore)
    store._quota = Quota(tmp_path, bound, count(0.0, 1000.0).__next__)  # it looks each time
    store.start(INFO)
    for version in range(1, rounds + 1):
        first = 64 * (version - 1)
        (seq, *_) = store.append([update(first + n, f"{first + n}".encode().ljust(size)) for n in range(64)])
        assert seq is not None
        link = ChainLink(f"{version:064x}", f"{version:064x}")
        store.append([], [Projection(seq, 3.0, (published(version),), {}, {version: link})])
        store.save_snapshot(snapshot(version), seq, float(version), Keep.of("versions:1"))
        while store.trim(1000):
            pass
    assert held_bytes(tmp_path) < bound < rounds * 64 * size // 3
    store._quota = Quota(tmp_path, 1)
    with pytest.raises(StoreFull):
        store.append([update(0)])
    store.append([], [Projection(1, 4.0, ())])  # what is in the log is written up all the same
    data = f"{64 * rounds - 1}".encode().ljust(size)
    assert bytes(store.payload(reference(update(64 * rounds - 1, data)))) == data
    store.close()


def test_it_looks_now_and_then(tmp_path: Path) -> None:
    now = 0.0
    quota = Quota(tmp_path, 100_000, lambda: now)
    quota.check()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_bytes(bytes(200_000))
    quota.check()
    now = EVERY_S
    with pytest.raises(StoreFull, match="holds"):
        quota.check()
    (tmp_path / "folder/file").unlink()
    now = 2 * EVERY_S
    quota.check()
    Quota(tmp_path / "nowhere", 0).check()


def test_what_may_be_written_is_what_the_disk_and_the_bound_allow(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(65_536))
    assert Quota(tmp_path, 0).of_disk(7, 9) == (7, 9)
    free, size = Quota(tmp_path, 100_000).of_disk(10**9, 10**10)
    assert (free, size) == (100_000 - held_bytes(tmp_path), 100_000)
    assert Quota(tmp_path, 10**12).of_disk(5, 10**10) == (5, 10**10)
    assert Quota(tmp_path, 1).of_disk(5, 10) == (0, 1), "not less than nothing"
