"""A server that must not start, or must not go on: a full disk, a port in use, data of another kind."""

from __future__ import annotations

import shutil
import socket
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from wire import Device, Served, server_config

from anabranch.core.errors import ConfigError, ManifestMismatch, PortInUse, StoreFull, StoreLocked, StoreNewer
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.server.manifest import MANIFEST, Manifest, read_manifest, write_manifest
from anabranch.server.store.factory import open_store
from anabranch.server.store.sql import SqlStore
from anabranch.server.verify import verify


def ones(device: Device) -> np.ndarray:
    return np.ones(device.spec.size, np.float32)


def test_a_disk_that_is_full_at_the_start(tmp_path: Path, manifest: Manifest) -> None:
    full = replace(DEFAULT_LIMITS, free_disk_bytes_min=shutil.disk_usage(tmp_path).total)
    with pytest.raises(StoreFull), Served(server_config(tmp_path / "data"), manifest, full):
        pass


def test_a_disk_that_fills_while_serving(tmp_path: Path, manifest: Manifest) -> None:
    store = open_store("", tmp_path / "data")
    assert isinstance(store, SqlStore)
    full = replace(DEFAULT_LIMITS, free_disk_bytes_min=shutil.disk_usage(tmp_path).total)
    with Served(server_config(tmp_path / "data"), manifest, store=store) as served:
        device = served.device()
        task = device.task()
        store._limits = full
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as refused:
                device.push(task, ones(device), "update-1")
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            names = [str(m.value) for m in refused.value.trailing_metadata() if m.key == "anabranch-error"]
            assert names == ["StoreFull"]
        assert not served.model().any()
        store._limits = DEFAULT_LIMITS
        assert device.push(task, ones(device), "update-1").decision.verdict == "published"
        assert (served.model() == 1.0).all()
        assert served.close() == 0
    assert verify(tmp_path / "data").problems == ()


@pytest.mark.parametrize("which", ["address", "admin_address"])
def test_a_port_in_use(which: str, tmp_path: Path, manifest: Manifest) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = server_config(tmp_path / "data", server={which: address})
        with pytest.raises(PortInUse, match=address), Served(config, manifest):
            pass


def test_another_server_on_the_same_data(served: Served) -> None:
    with pytest.raises(StoreLocked), Served(served.config, served.manifest):
        pass


def test_a_database_of_a_newer_revision(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        served.close()
    with sqlite3.connect(tmp_path / "data" / "anabranch.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    database.close()
    with pytest.raises(StoreNewer), Served(config, manifest):
        pass


def test_another_model_or_other_settings(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data")
    with Served(config, manifest) as served:
        served.device().work()
        served.close()
    other = write_manifest(tmp_path / "other", "test", {"w": np.zeros(3, np.float32)})
    with pytest.raises(ManifestMismatch), Served(config, other):
        pass
    changed = server_config(tmp_path / "data", strategy={"buffer_size": 3})
    with pytest.raises(ConfigError, match="buffer_size"), Served(changed, manifest):
        pass


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"privacy": {"clip": 1.0, "noise": 1.0}, "robust": {"rule": "median"}}, "looks at single updates"),
        ({"secagg": {"mode": "keeper", "keepers": ["k"], "clip": 1.0}}, "secagg"),
        ({"strategy": {"name": "fedbuff"}, "submodel": {"name": "ist", "parts": 2}}, "ist"),
    ],
    ids=["privacy", "masked sums", "sub-models"],
)
def test_settings_that_do_not_go_together_are_said_before_the_run_is_entered(
    tables: Any, words: str, tmp_path: Path, manifest: Manifest
) -> None:
    wrong = server_config(tmp_path / "data", **tables)
    with pytest.raises(ConfigError, match=words), Served(wrong, manifest):
        pass
    with Served(server_config(tmp_path / "data"), manifest) as served:
        served.device().work()


def test_an_address_that_others_reach(tmp_path: Path, manifest: Manifest) -> None:
    config = server_config(tmp_path / "data", server={"address": "0.0.0.0:0"})
    with pytest.raises(ConfigError, match="insecure"), Served(config, manifest):
        pass


@pytest.mark.parametrize("damage", ["absent", "cut", "other weights", "newer format", "not JSON"])
def test_a_damaged_manifest(damage: str, tmp_path: Path, manifest: Manifest) -> None:
    folder = tmp_path / "model"
    assert read_manifest(folder).initial_sha256 == manifest.initial_sha256
    head, weights = folder / MANIFEST, folder / "initial.safetensors"
    match damage:
        case "absent":
            head.unlink()
        case "cut":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "other weights":
            data = bytearray(weights.read_bytes())
            data[-2] ^= 1
            weights.write_bytes(data)
        case "newer format":
            head.write_text(head.read_text().replace('"format": 1', '"format": 2'))
        case "not JSON":
            head.write_text("{")
    with pytest.raises(ConfigError, match="anabranch init"):
        read_manifest(folder)
