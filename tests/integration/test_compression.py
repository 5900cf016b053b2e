"""Compressed traffic over real gRPC: the cheapest of what there is; what is damaged changes nothing."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import zstandard
from wire import Device, Served, server_config

from anabranch.compress.downloads import LIST, SNAPSHOT, SUM, apply_download
from anabranch.compress.layout import Layout
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core.params import Vector, digest
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import operators_pb2 as operators
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


# --- what is wrong ---------------------------------------------------------------------------------


def encoded(device: Device) -> bytes:
    return make_codec(CHAIN).encode(np.ones(device.spec.size, np.float32), Layout.of(device.spec))


def changed(data: bytes, at: int, value: bytes) -> bytes:
    """Other bytes at a place after the checksum, which is mended."""
    out = bytearray(data)
    out[at : at + len(value)] = value
    struct.pack_into("<I", out, 12, zlib.crc32(out[16:]))
    return bytes(out)


def flipped(data: bytes) -> bytes:
    out = bytearray(data)
    out[-5] ^= 1
    return bytes(out)


def bomb(data: bytes) -> bytes:
    """The last stream in the place of a frame that says it is small and is not."""
    return data[:-200] + zstandard.ZstdCompressor().compress(bytes(1 << 27))[:200]


BAD: dict[str, tuple[str, str, Callable[[Device, devices.Task, bytes], Any]]] = {
    "another chain than the task's": (
        "INVALID_ARGUMENT",
        "the task asked for",
        lambda d, t, data: d.send(
            t, make_codec("int8").encode(np.ones(d.spec.size, np.float32), Layout.of(d.spec)), codec="int8"
        ),
    ),
    "an unknown stage": (
        "UNIMPLEMENTED",
        "unknown stage 'magic'",
        lambda d, t, data: d.send(t, data, codec="magic(1)"),
    ),
    "no chain": ("UNIMPLEMENTED", "write stages", lambda d, t, data: d.send(t, data, codec="int8||")),
    "more than the chain can need": (
        "OUT_OF_RANGE",
        "needs at most",
        lambda d, t, data: d.send(t, data + bytes(1 << 20), codec=CHAIN),
    ),
    "cut short": (
        "INVALID_ARGUMENT",
        "payload",
        lambda d, t, data: d.send(t, data[: len(data) // 2], codec=CHAIN),
    ),
    "a flipped bit": (
        "INVALID_ARGUMENT",
        "damaged",
        lambda d, t, data: d.send(t, flipped(data), codec=CHAIN),
    ),
    "a tail": (
        "INVALID_ARGUMENT",
        "",
        lambda d, t, data: d.send(t, changed(data + b"xx", 0, b""), codec=CHAIN),
    ),
    "another magic": (
        "INVALID_ARGUMENT",
        "format",
        lambda d, t, data: d.send(t, changed(data, 0, b"zz"), codec=CHAIN),
    ),
    "another layout": (
        "INVALID_ARGUMENT",
        "another layout",
        lambda d, t, data: d.send(t, changed(data, 4, bytes(8)), codec=CHAIN),
    ),
    "too many values": (
        "INVALID_ARGUMENT",
        "values",
        lambda d, t, data: d.send(t, changed(data, 19, struct.pack("<I", 1 << 31)), codec=CHAIN),
    ),
    "a bomb": (
        "INVALID_ARGUMENT",
        "",
        lambda d, t, data: d.send(t, changed(bomb(data), 0, b""), codec=CHAIN),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_payload_changes_nothing(name: str, compressed: Served) -> None:
    device = compressed.device(codecs=STAGES)
    status, words, send = BAD[name]
    with pytest.raises(grpc.RpcError) as caught:
        send(device, device.task(), encoded(device))
    error: Any = caught.value
    assert error.code().name == status, error.details()
    assert words in error.details()
    assert np.array_equal(compressed.model(), compressed.manifest.vector)
    assert work(device, 1).decision.verdict == "published"  # and the server goes on
    compressed.close()
    assert verify(Path(compressed.config.server.data_dir)).problems == ()
