"""Compressed traffic over real gRPC: a device gets the cheapest of what leads to a version, bit by bit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from wire import Device, Served, server_config

from anabranch.compress.downloads import LIST, SNAPSHOT, SUM, apply_download
from anabranch.compress.registry import STAGES
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Vector, digest
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Blueprint
from anabranch.host.journal import replay
from anabranch.host.submission import loader
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
from anabranch.reports.journal_files import JournalReader
from anabranch.server.export import export_run
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.verify import verify

CHAIN = "topk(0.1)|int8(64)|gaps|zstd"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A model whose first weights are not zero."""
    values = np.random.default_rng(0).standard_normal((1000, 100)).astype(np.float32)
    tensors: dict[str, Any] = {"layer.weight": values, "layer.seen": np.asarray([7], np.int64)}
    return write_manifest(tmp_path / "model", "test", tensors)


@pytest.fixture
def compressed(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server with a chain up and the delta log down."""
    tables = {"uplink": {"codec": f"ef(0.9)|{CHAIN}"}, "downlink": {"codec": "log(1)"}}
    with Served(server_config(tmp_path / "data", **tables), manifest) as server:
        yield server


def work(device: Device, seed: int) -> devices.PushUpdateResponse:
    delta = np.random.default_rng(seed).standard_normal(device.spec.size).astype(np.float32)
    answer: devices.PushUpdateResponse = device.push(device.task(), 1e-2 * delta)
    return answer


def fetch(device: Device, held: tuple[int, Vector] | None = None, **fields: Any) -> tuple[Any, Vector]:
    if held is not None:
        fields["holds_version"] = held[0]
    header, data = device.fetch(codecs=STAGES, **fields)
    assert hashlib.sha256(data).digest() == header.part.sha256
    start = header.from_version if header.HasField("from_version") else None
    vector, _ = apply_download(device.spec, header.part.encoding.codec, data, start, held)
    assert not header.vector_sha256 or digest(vector) == header.vector_sha256.hex()
    return header, vector


def test_a_device_gets_what_leads_from_the_version_it_has(compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    first, p0 = fetch(device)
    assert (first.part.encoding.codec, first.HasField("from_version")) == (SNAPSHOT, False)
    for seed in range(3):
        assert work(device, seed).decision.verdict == "published"
    delta, p3 = fetch(device, (0, p0))
    assert delta.part.encoding.codec in (SUM, LIST)
    assert delta.from_version == 0
    whole, again = fetch(device)
    assert np.array_equal(p3, again)
    assert delta.part.size_bytes < whole.part.size_bytes < 4 * device.spec.size / 2
    exact, w3 = fetch(device, exact=True)
    assert exact.part.encoding.codec == "raw"
    assert not np.array_equal(w3, p3)
    assert np.linalg.norm(w3 - p3) < 0.1 * np.linalg.norm(w3)


def test_a_task_announces_what_its_device_will_get(compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    work(device, 1)
    request = devices.AskTaskRequest(
        client_id=device.client_id,
        task_id="t-held",
        manifest_sha256=device.manifest_sha256,
        holds_version=0,
    )
    (part,) = device.stub.AskTask(request).task.parts
    header, data = device.fetch(version=1, holds_version=0, codecs=STAGES)
    assert (part.sha256, part.size_bytes, part.encoding.codec) == (header.part.sha256, len(data), SUM)


def test_a_device_without_the_stages_gets_the_same_values_raw(compressed: Served) -> None:
    old, new = compressed.device("old"), compressed.device("new", STAGES)
    assert old.task().uplink.codec == "raw"
    assert new.task().uplink.codec == f"ef(0.9)|{CHAIN}"
    work(new, 1)
    header, data = old.fetch(holds_version=0)
    assert (header.part.encoding.codec, header.HasField("from_version")) == ("raw", False)
    _, replica = fetch(new)
    assert np.array_equal(np.frombuffer(data, np.float32, old.spec.size), replica)
    assert work(old, 2).decision.verdict == "published"


def test_a_broken_download_goes_on_after_a_later_version(compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    _, p0 = fetch(device)
    work(device, 1)
    header, data = device.fetch(version=1, holds_version=0, codecs=STAGES)
    work(device, 2)
    cut = len(data) // 2
    resumed, rest = device.fetch(version=1, holds_version=0, codecs=STAGES, offset=cut)
    assert resumed.part.sha256 == header.part.sha256
    vector, _ = apply_download(device.spec, header.part.encoding.codec, data[:cut] + rest, 0, (0, p0))
    assert digest(vector) == header.vector_sha256.hex()


def test_a_broken_download_goes_on_after_a_restart(compressed: Served, manifest: Manifest) -> None:
    device = compressed.device(codecs=STAGES)
    _, p0 = fetch(device)
    for seed in range(3):
        work(device, seed)
    header, data = device.fetch(version=2, holds_version=0, codecs=STAGES)
    compressed.close()
    with Served(compressed.config, manifest) as again:
        device, cut = again.device(codecs=STAGES), len(data) // 2
        resumed, rest = device.fetch(version=2, holds_version=0, codecs=STAGES, offset=cut)
        assert (resumed.part, resumed.vector_sha256) == (header.part, header.vector_sha256)
        vector, _ = apply_download(device.spec, header.part.encoding.codec, data[:cut] + rest, 0, (0, p0))
        assert digest(vector) == header.vector_sha256.hex()


def test_the_cheapest_of_a_snapshot_a_sum_and_a_list(tmp_path: Path) -> None:
    """Zeros grow out of their grid, so the log begins at version 1: what it does not reach comes whole."""
    zeros = write_manifest(tmp_path / "zeros", "test", {"layer.weight": np.zeros((1000, 100), np.float32)})
    with Served(server_config(tmp_path / "data", downlink={"codec": "log(1)"}), zeros) as served:
        device, draw = served.device(codecs=STAGES), np.random.default_rng(0)
        held = {0: fetch(device)[1]}
        for unit in (1.0, 2.0**-4, 2.0**-14):  # a sum would have the fine unit for the coarse range
            moves = draw.choice(np.array([-unit, unit], np.float32), device.spec.size)
            version = device.push(device.task(), moves).version
            held[version] = fetch(device)[1]
        forms = {v: fetch(device, (v, p)) for v, p in held.items() if v < 3}
        codecs = {v: header.part.encoding.codec for v, (header, _) in forms.items()}
        assert codecs == {0: SNAPSHOT, 1: LIST, 2: SUM}
        assert all(np.array_equal(vector, held[3]) for _, vector in forms.values())
        sizes = [forms[v][0].part.size_bytes for v in (2, 1, 0)]
        assert sizes == sorted(sizes)


def test_a_list_of_stages_that_is_none(compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    for codecs in (["int8:1"] * 65, ["x" * 65], [""]):
        for call in (lambda c: device.fetch(codecs=c), lambda c: compressed.device("other", c)):
            with pytest.raises(grpc.RpcError) as refused:
                call(codecs)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "at most 64 stages" in str(refused.value.details())
    assert work(device, 1).decision.verdict == "published"


def test_a_run_keeps_the_codecs_that_it_was_started_with(compressed: Served, manifest: Manifest) -> None:
    work(compressed.device(codecs=STAGES), 1)
    compressed.close()
    data_dir, config = Path(compressed.config.server.data_dir), compressed.config
    for table, codec in (("uplink", "int8"), ("downlink", "log(0.5)")):
        codecs = {"uplink": {"codec": config.uplink.codec}, "downlink": {"codec": config.downlink.codec}}
        changed = server_config(data_dir, **{**codecs, table: {"codec": codec}})
        with pytest.raises(ConfigError, match=f"link.*'{re.escape(codec)}'"), Served(changed, manifest):
            pass


def test_an_exported_run_replays(compressed: Served, manifest: Manifest, tmp_path: Path) -> None:
    device = compressed.device(codecs=STAGES)
    for seed in range(3):
        work(device, seed)
    compressed.close()
    export_run(tmp_path / "data", "", tmp_path / "run")
    reader = JournalReader(tmp_path / "run")
    engine = Blueprint.of(reader.config, manifest.spec).engine(manifest.tensors)
    with reader.open_payloads() as read:
        for _ in replay(engine, reader.records(), loader(read, reader.spec)):
            pass
    assert state_digest(engine) == verify(tmp_path / "data").state_sha256


def test_a_restart_serves_the_same_bits(compressed: Served, manifest: Manifest) -> None:
    device = compressed.device(codecs=STAGES)
    for seed in range(3):
        work(device, seed)
    before = fetch(device)[1]
    compressed.close()
    with Served(compressed.config, manifest) as again:
        device = again.device(codecs=STAGES)
        assert np.array_equal(fetch(device)[1], before)
        assert work(device, 9).decision.verdict == "published"


def test_saved_bytes_are_in_the_status(compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    fetch(device)
    work(device, 1)
    fetch(device, exact=True)
    status = compressed.operator().GetStatus(operators.GetStatusRequest())
    full = 4 * device.spec.size + 8
    assert status.uplink_bytes_raw == 4 * device.spec.size > 20 * status.uplink_bytes
    assert status.downlink_bytes_full_equivalent == full > status.downlink_bytes > 0
    assert status.observer_bytes == full
