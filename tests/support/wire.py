"""A device and an operator that speak the protocol by hand, and a server in a thread to speak with."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from contents import package
from server_thread import ServerThread

from anabranch.client.operator import OperatorClient
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.config.tables import Config, merge
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.chains import payload_codec
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Submodel
from anabranch.protos.convert import PROTOCOL_VERSION, submodel_from_proto
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model
from anabranch.protos.v1.devices_pb2_grpc import DevicesStub
from anabranch.protos.v1.operators_pb2_grpc import OperatorsStub
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import Manifest
from anabranch.server.store.base import Store

CHUNK = 256 * 1024
CALL_S = 120.0
UNHELD = replace(DEFAULT_LIMITS, early_calls_at_once=1000)  # nothing is answered late
# Connects again soon. The second is how long a connection may take to be made: a busy server is not gone.
QUICK = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
]

Tables = Mapping[str, Mapping[str, Any]]
# The model is the sum of all deltas: whole numbers make every check exact.
SUM = {"name": "fedbuff", "buffer_size": 1, "server_lr": 1.0, "staleness": {"name": "constant"}}


def server_config(data_dir: Path, **tables: Mapping[str, Any]) -> Config:
    """A server on free ports, with these tables on top; unless they name a strategy it adds deltas up."""
    base: Tables = {
        "server": {
            "address": "127.0.0.1:0",
            "admin_address": "127.0.0.1:0",
            "data_dir": str(data_dir),
            "drain_s": 5.0,
        },
        "strategy": {} if "name" in tables.get("strategy", {}) else SUM,
    }
    return merge([("test", base), ("test", tables)])


class Device:
    """One device; every call is one call on the wire. With `blake3` that is how it names its updates."""

    blake3 = False

    def __init__(
        self,
        channel: grpc.Channel,
        spec: ParamSpec,
        client_id: str = "device-1",
        codecs: tuple[str, ...] = (),
    ) -> None:
        self.channel, self.stub = channel, DevicesStub(channel)
        self.spec, self.client_id, self.codecs = spec, client_id, codecs
        self.manifest_sha256 = bytes.fromhex(spec.layout_hash)

    def enrol(self, **said: Any) -> devices.EnrolResponse:
        """Become known; `said` is more of its capability."""
        request = devices.EnrolRequest(
            client_id=self.client_id,
            protocol_version=PROTOCOL_VERSION,
            capability=devices.Capability(codecs=self.codecs, **said),
        )
        return self.stub.Enrol(request, timeout=CALL_S)

    def ask(self, task_id: str = "") -> devices.AskTaskResponse:
        """Apply for a task."""
        return self.stub.AskTask(self.asked(task_id), timeout=CALL_S)

    def asked(self, task_id: str = "") -> devices.AskTaskRequest:
        """The application for a task, under a new id unless it is given."""
        return devices.AskTaskRequest(
            client_id=self.client_id,
            task_id=task_id or str(uuid.uuid4()),
            manifest_sha256=self.manifest_sha256,
        )

    def task(self) -> devices.Task:
        """A task, which the server must grant."""
        answer = self.ask()
        assert answer.HasField("task"), answer
        return answer.task

    def fetch(self, **fields: Any) -> tuple[devices.ModelHeader, bytes]:
        """A model from an offset on."""
        fields.setdefault("manifest_sha256", self.manifest_sha256)
        request = devices.FetchModelRequest(client_id=self.client_id, **fields)
        messages = list(self.stub.FetchModel(request, timeout=CALL_S))
        return messages[0].header, b"".join(m.data for m in messages)

    def submodel(self, task: devices.Task) -> Submodel | None:
        """What the task covers; None: the whole model."""
        return submodel_from_proto(task.submodel, self.spec) if task.HasField("submodel") else None

    def push(self, task: devices.Task, delta: Vector, update_id: str = "", **more: Any) -> Any:
        """Send a result as the task wants it; `more` has fields of the header, and `offset` to begin at."""
        codec = more.setdefault("codec", payload_codec(task.uplink.codec))
        if task.HasField("submodel"):
            more.setdefault("submodel", task.submodel)
        layout = Layout.of(self.spec, self.submodel(task))
        data, offset = make_codec(codec).encode(delta, layout), more.pop("offset", 0)
        return self.send(task, data, update_id, offset, **more)

    def send(self, task: devices.Task, data: bytes, update_id: str = "", offset: int = 0, **more: Any) -> Any:
        """Send these very bytes."""
        header = self.header(task, data, update_id, **more)
        return self.stub.PushUpdate(requests(header, chunks(data, offset)), timeout=CALL_S)

    def header(
        self, task: devices.Task, data: bytes, update_id: str = "", **more: Any
    ) -> devices.UpdateHeader:
        """The header of an upload; `size_bytes`, `sha256` and `codec` are those of its one part."""
        part = model.Part(
            size_bytes=more.pop("size_bytes", len(data)),
            encoding=model.Encoding(codec=more.pop("codec", "raw")),
        )
        if sha256 := more.pop("sha256", None):
            part.sha256 = sha256
        elif self.blake3:
            part.blake3 = package().blake3(data).digest()
        else:
            part.sha256 = hashlib.sha256(data).digest()
        fields = {
            "client_id": self.client_id,
            "task_id": task.task_id,
            "update_id": update_id or str(uuid.uuid4()),
            "manifest_sha256": self.manifest_sha256,
            "base_version": task.base_version,
            "base_kind": model.BASE_KIND_VERSION,
            "examples": 1,
            "parts": [part],
        }
        return devices.UpdateHeader(**{**fields, **more})

    def query(self, update_id: str) -> devices.QueryUploadResponse:
        """Where an upload stands."""
        request = devices.QueryUploadRequest(client_id=self.client_id, update_id=update_id)
        return self.stub.QueryUpload(request, timeout=CALL_S)

    def heartbeat(self, task_id: str, progress: float = 1.0) -> devices.HeartbeatResponse:
        """Renew a lease."""
        request = devices.HeartbeatRequest(client_id=self.client_id, task_id=task_id, progress=progress)
        return self.stub.Heartbeat(request, timeout=CALL_S)

    def work(self, value: float = 1.0) -> devices.PushUpdateResponse:
        """Ask, train in no time, push."""
        return self.answer(self.task(), value)

    def answer(self, task: devices.Task, value: float = 1.0, **more: Any) -> devices.PushUpdateResponse:
        """Train in no time, push: one value everywhere on what the task covers."""
        part = self.submodel(task)
        delta = np.full(self.spec.size if part is None else part.size, value, np.float32)
        answer: devices.PushUpdateResponse = self.push(task, delta, **more)
        return answer


def chunks(data: bytes, offset: int = 0, size: int = CHUNK) -> Iterator[devices.UpdateChunk]:
    """The bytes from an offset on, as chunks."""
    for start in range(offset, len(data), size):
        yield devices.UpdateChunk(offset=start, data=data[start : start + size])


def requests(
    header: devices.UpdateHeader, parts: Iterable[devices.UpdateChunk]
) -> Iterator[devices.PushUpdateRequest]:
    """The messages of a push."""
    yield devices.PushUpdateRequest(header=header)
    for chunk in parts:
        yield devices.PushUpdateRequest(chunk=chunk)


class Served(ServerThread):
    """A server in a thread of its own: started by `with`, drained at its end."""

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        limits: Limits | None = None,
        store: Store | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("test-server")
        self.config, self.manifest, self._limits, self._store = config, manifest, limits, store
        self._wall = wall
        self._channels: list[grpc.Channel] = []
        self.info: ServerInfo | None = None

    def close(self) -> int | None:
        """See `ServerThread`; the channels are closed behind it."""
        try:
            return super().close()
        finally:
            for channel in self._channels:
                channel.close()

    def device(self, client_id: str = "device-1", codecs: tuple[str, ...] = ()) -> Device:
        """A device that is enrolled, and has these stages."""
        device = Device(self.channel(), self.manifest.spec, client_id, codecs)
        device.enrol()
        return device

    def operator(self) -> OperatorsStub:
        """A stub for the admin port."""
        return OperatorsStub(self.channel(admin=True))

    def admin(self) -> OperatorClient:
        """An operator's client."""
        assert self.info is not None
        return OperatorClient(self.info.admin_address)

    def channel(self, admin: bool = False) -> grpc.Channel:
        """A new connection, in the clear."""
        assert self.info is not None
        address = self.info.admin_address if admin else self.info.address
        return self.keep(grpc.insecure_channel(address, options=QUICK))

    def keep(self, channel: grpc.Channel) -> grpc.Channel:
        """Close a channel at the end."""
        self._channels.append(channel)
        return self._channels[-1]

    def model(self) -> Vector:
        """The newest model's vector, the server's own."""
        _, data = Device(self.channel(), self.manifest.spec, "reader").fetch(exact=True)
        return np.frombuffer(data, self.manifest.spec.vector_dtype, self.manifest.spec.size)

    async def _serve(self) -> int:
        return await serve(
            self.config,
            self.manifest,
            ready=self._tell,
            limits=self._limits,
            stop=self._stop,
            store=self._store,
            wall=self._wall,
        )

    def _tell(self, info: ServerInfo) -> None:
        self.info = info
        self._ready.set()
