"""A link over which no chunk of the usual size comes in time: models and updates come all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wire import Served, server_config

from anabranch.client.calls import CallDoor, ModelChunks
from anabranch.client.transport import GrpcTransport
from anabranch.core.errors import Unavailable
from anabranch.core.limits import CHUNK_BYTES, DEFAULT_LIMITS, SLOW_CHUNK_BYTES
from anabranch.core.model.updates import Ask, Capability, Task, Verdict
from anabranch.protos.frames import Chunk
from anabranch.server.manifest import Manifest, write_manifest
from anabranch.server.rpc import Devices
from anabranch.server.uploads import Upload, Uploads
from anabranch.testing.federation import result_of

SIZE = 600_000
DAY_S = 86_400.0
LITTLE = [SLOW_CHUNK_BYTES] * 36 + [SIZE - 36 * SLOW_CHUNK_BYTES]
ONE = 200_000  # a chunk of the usual size
LITTLE_OF_ONE = [SLOW_CHUNK_BYTES] * 12 + [ONE - 12 * SLOW_CHUNK_BYTES]
USUAL = [CHUNK_BYTES] * 2 + [SIZE - 2 * CHUNK_BYTES]
PACE = "anabranch.client.transfer.USUAL_BYTES_PER_S"


class SlowLink:
    """Between a device and its server: a chunk over `most` is cut before the other side hears of it.

    `left` chunks at most come through before the connection breaks.
    """

    def __init__(self) -> None:
        self.most, self.left = SLOW_CHUNK_BYTES, 10**6
        self.came: list[int] = []
        self.sent: list[int] = []

    def through(self, chunks: Iterable[Chunk], sizes: list[int]) -> Iterator[Chunk]:
        for chunk in chunks:
            if len(chunk.data) > self.most or not self.left:
                return
            self.left -= 1
            sizes.append(len(chunk.data))
            yield chunk

    def model(self, door: Any, request: Any) -> ModelChunks:
        for header, chunk in MODEL(door, request):
            if not list(self.through([chunk], self.came)):
                raise Unavailable("cut on the way")
            yield header, chunk

    def push(self, door: Any, header: Any, chunks: Iterable[Chunk]) -> Any:
        try:  # a stream that ends too soon is a stream that was cut
            return PUSH(door, header, self.through(chunks, self.sent))
        except Exception as error:
            raise Unavailable("cut on the way") from error


def unreached(*_: Any) -> ModelChunks:
    error = Unavailable("nobody answers")
    error.reached = False
    raise error


MODEL, PUSH = CallDoor.model, CallDoor.push


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SlowLink:
    link = SlowLink()
    # By their names, as a test may put others in their place.
    monkeypatch.setattr(CallDoor, "model", lambda *said: link.model(*said))  # noqa: PLW0108
    monkeypatch.setattr(CallDoor, "push", lambda *said: link.push(*said))  # noqa: PLW0108
    return link


@pytest.fixture
def size() -> int:
    return SIZE


@pytest.fixture
def manifest(tmp_path: Path, size: int) -> Manifest:
    return write_manifest(tmp_path / "model", "test", {"w": np.zeros((size // 4, 1), np.float32)})


@pytest.fixture
def device(tmp_path: Path, manifest: Manifest) -> Iterator[GrpcTransport]:
    config = server_config(tmp_path / "data", client={"connection": "calls"})
    with Served(config, manifest) as served:
        assert served.info is not None
        with GrpcTransport(served.info.address, "a") as transport:
            yield transport


def test_a_model_comes_in_little_chunks_on_from_where_it_was_cut(
    device: GrpcTransport, link: SlowLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = device.enrol(Capability()).spec
    with pytest.raises(Unavailable, match="cut"):
        device.fetch(spec.layout_hash, 0)
    assert link.came == []
    link.left = 5
    with pytest.raises(Unavailable, match="cut"):
        device.fetch(spec.layout_hash, 0)
    assert link.came == LITTLE[:5]
    link.left = 10**6
    monkeypatch.setattr(PACE, 1e18)
    assert device.fetch(spec.layout_hash, 0).version == 0
    assert link.came == LITTLE, "what came is not sent again"
    link.came.clear()
    monkeypatch.setattr(PACE, 0)
    device.fetch(spec.layout_hash, 0)
    assert link.came == LITTLE, "it was slow at the last transfer"
    link.came.clear()
    link.most = CHUNK_BYTES
    device.fetch(spec.layout_hash, 0)
    assert link.came == USUAL


@pytest.mark.parametrize(("size", "little"), [(SIZE, LITTLE), (ONE, LITTLE_OF_ONE)])
def test_an_update_goes_out_in_little_chunks_on_from_where_it_was_cut(
    device: GrpcTransport, link: SlowLink, little: list[int]
) -> None:
    spec = device.enrol(Capability()).spec
    task = device.ask(Ask("a", "t-0"), spec)
    assert isinstance(task, Task)
    update = result_of(task, spec, "u-0", 1.0)
    with pytest.raises(Unavailable, match="cut"):
        device.push(update)
    assert link.sent == []
    link.left = 5
    with pytest.raises(Unavailable, match="cut"):
        device.push(update)
    assert link.sent == little[:5]
    assert device.query_upload("u-0").received_bytes == 5 * SLOW_CHUNK_BYTES
    link.left = 10**6
    assert device.push(update).decision.verdict is Verdict.PUBLISHED
    assert link.sent == little, "what came is not sent again"


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Of the device's calls for payloads, one each, as the server is told."""
    told: list[float | None] = []

    def telling(method: Any) -> Any:
        def call(self: Devices, requests: Any, context: Any) -> Any:
            told.append(context.time_remaining())
            return method(self, requests, context)

        return call

    for name in ("FetchModel", "PushUpdate"):
        monkeypatch.setattr(Devices, name, telling(getattr(Devices, name)))
    return told


def test_a_transfer_has_no_deadline_at_its_device(
    deadlines: list[float | None], device: GrpcTransport
) -> None:
    """As long as something moves: over a link of 5 KiB a second 600 kB take two minutes."""
    work(device)
    assert deadlines == [None, None]


def test_an_upload_that_began_long_ago_goes_on(
    deadlines: list[float | None], tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day ago by this server's clock: what comes of it counts, not when it began."""
    add, ahead_s = Upload.add, [-DAY_S]
    monkeypatch.setattr(Uploads, "now", lambda self: asyncio.get_running_loop().time() + ahead_s[0])

    async def adding(self: Upload, *chunk: Any) -> None:
        ahead_s[0] = 0.0
        await add(self, *chunk)

    monkeypatch.setattr(Upload, "add", adding)
    config = server_config(tmp_path / "data", client={"connection": "calls"})
    with Served(config, manifest, replace(DEFAULT_LIMITS, upload_idle_s=2 * DAY_S)) as served:
        assert served.info is not None
        with GrpcTransport(served.info.address, "a") as transport:
            work(transport)
    assert len(deadlines) == 2, "it was cut, and went on in another stream"


def work(device: GrpcTransport) -> None:
    """One task, from its model to the decision of its update."""
    spec = device.enrol(Capability()).spec
    task = device.ask(Ask("a", "t-0"), spec)
    assert isinstance(task, Task)
    device.fetch(spec.layout_hash, task.base_version)
    assert device.push(result_of(task, spec, "u-0", 1.0)).decision.verdict is Verdict.PUBLISHED


def test_a_server_that_nobody_reaches_says_nothing_of_the_link(
    device: GrpcTransport, link: SlowLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = device.enrol(Capability()).spec
    link.most = CHUNK_BYTES
    with monkeypatch.context() as away:
        away.setattr(link, "model", unreached)
        with pytest.raises(Unavailable, match="nobody answers"):
            device.fetch(spec.layout_hash, 0)
    device.fetch(spec.layout_hash, 0)
    assert link.came == USUAL
