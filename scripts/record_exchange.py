"""Record examples/foreign_exchange.json, the test vector of docs/protocol.md, from a server of this tree.

anabranch init examples/foreign_model.py:App --out model
anabranch server examples/foreign.toml --model model
python scripts/record_exchange.py 127.0.0.1:7070 > examples/foreign_exchange.json

The server must be new: the exchange is a run's whole life. A recording changes only where the protocol does.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from google.protobuf.message import Message

from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = '[["weight", [1, 3], "float32"], ["bias", [1], "float32"], ["seen", [1], "int64"]]'
MANIFEST = hashlib.sha256(LAYOUT.encode()).digest()
DEVICE = "device-1"
# What a repetition may say otherwise: times, texts for people, the run's id, the heads, which come
# of them, and the settings, which grow.
VARIES = {
    "AskTaskResponse": ["server_time_s"],
    "Decision": ["detail"],
    "EnrolResponse": ["run_id", "config_json", "server_time_s"],
    "HeartbeatResponse": ["expires_at_s", "server_time_s"],
    "ModelHeader": ["head", "published_at_s"],
    "Notice": ["detail"],
    "Refusal": ["detail"],
    "Task": ["base_head", "expires_at_s"],
}
DELTAS = {
    "update-1": [0.25, 0.5, -0.125, 1.0],
    "update-2": [-0.5, 0.0, 0.25, -0.25],
    "update-3": [1.0, 1.0, 1.0, 1.0],
}


def ask(task_id: str, client_id: str = DEVICE, manifest: bytes = MANIFEST) -> devices.AskTaskRequest:
    """An ask."""
    return devices.AskTaskRequest(client_id=client_id, task_id=task_id, manifest_sha256=manifest)


def fetch(**fields: Any) -> devices.FetchModelRequest:
    """A fetch of a device that knows raw payloads only."""
    return devices.FetchModelRequest(client_id=DEVICE, manifest_sha256=MANIFEST, codecs=["raw:1"], **fields)


def push(update_id: str, task_id: str, base: int, start: int = 0, stop: int = 16, **more: Any) -> list[Any]:
    """The messages of an update, with its bytes from `start` to `stop` in chunks of at most ten."""
    data = struct.pack("<4f", *DELTAS[update_id])
    header = devices.UpdateHeader(
        client_id=DEVICE,
        task_id=task_id,
        update_id=update_id,
        manifest_sha256=MANIFEST,
        base_version=base,
        base_kind=model.BASE_KIND_VERSION,
        examples=6,
        local_steps=4,
        parts=[
            model.Part(
                size_bytes=len(data),
                sha256=hashlib.sha256(data).digest(),
                encoding=model.Encoding(codec="raw"),
            )
        ],
        metrics={"train_s": 0.5},
        **more,
    )
    chunks = [
        devices.UpdateChunk(offset=at, data=data[at : min(at + 10, stop)]) for at in range(start, stop, 10)
    ]
    return [
        devices.PushUpdateRequest(header=header),
        *(devices.PushUpdateRequest(chunk=chunk) for chunk in chunks),
    ]


def exchange(data: bytes = b"", **head: Any) -> devices.ExchangeRequest:
    """A message of the other door."""
    return devices.ExchangeRequest(head=devices.RequestHead(**head), data=data)


def query(update_id: str) -> devices.QueryUploadRequest:
    """Where an upload stands."""
    return devices.QueryUploadRequest(client_id=DEVICE, update_id=update_id)


def heartbeat(task_id: str, progress: float) -> devices.HeartbeatRequest:
    """A heartbeat."""
    return devices.HeartbeatRequest(client_id=DEVICE, task_id=task_id, progress=progress)


def steps() -> list[tuple[str, str, Sequence[Message]]]:
    """Call, what it shows, and its requests: a whole life of a device and of its run."""
    enrol = devices.EnrolRequest(
        client_id=DEVICE,
        protocol_version=1,
        capability=devices.Capability(examples=6, accelerator="cpu", codecs=["raw:1"]),
    )
    drop = devices.DropTaskRequest(client_id=DEVICE, task_id="task-3", why="the battery is low")
    return [
        ("AskTask", "an ask before enrolment is refused", [ask("task-0")]),
        ("Enrol", "the device becomes known", [enrol]),
        ("Enrol", "enrolled again: the same answer", [enrol]),
        ("AskTask", "an ask for another model", [ask("task-1", manifest=bytes(32))]),
        ("AskTask", "a task of version 0", [ask("task-1")]),
        ("AskTask", "the same ask again: the same task", [ask("task-1")]),
        ("FetchModel", "version 0", [fetch(version=0)]),
        ("FetchModel", "version 0, from byte 10 on", [fetch(version=0, offset=10)]),
        ("Heartbeat", "progress: the lease is renewed", [heartbeat("task-1", 1.0)]),
        ("QueryUpload", "an update of which nothing is here", [query("update-1")]),
        ("PushUpdate", "it is added to the model: version 1", push("update-1", "task-1", 0)),
        ("PushUpdate", "the same push again: the stored decision", push("update-1", "task-1", 0)),
        ("QueryUpload", "the stored decision", [query("update-1")]),
        ("PushUpdate", "a second update of the same task", push("update-2", "task-1", 0)),
        ("AskTask", "the id of a task that is over", [ask("task-1")]),
        ("Heartbeat", "a task that is over: CANCEL", [heartbeat("task-1", 2.0)]),
        ("AskTask", "a task of version 1", [ask("task-2")]),
        ("Exchange", "by the other door: answers that are known", _known()),
        ("Exchange", "an error ends it", _failing()),
        ("FetchModel", "the newest version", [fetch()]),
        ("FetchModel", "no newer one than version 1", [fetch(newer_than=1)]),
        ("FetchModel", "a version that is not there", [fetch(version=9)]),
        ("PushUpdate", "an upload that ends too soon", push("update-2", "task-2", 1, stop=10)),
        ("QueryUpload", "its ten bytes are here", [query("update-2")]),
        (
            "PushUpdate",
            "it goes on from there, and asks for the next task",
            push("update-2", "task-2", 1, start=10, next=ask("task-3")),
        ),
        ("DropTask", "that task is given back", [drop]),
        ("Heartbeat", "a task that was given back: CANCEL", [heartbeat("task-3", 1.0)]),
        ("AskTask", "a task of version 2", [ask("task-4")]),
        (
            "PushUpdate",
            "the last update of the run, and an ask that is refused for good",
            push("update-3", "task-4", 2, next=ask("task-5")),
        ),
        ("AskTask", "the run has ended", [ask("task-6")]),
        ("Heartbeat", "the run has ended: FINISHED", [heartbeat("task-6", 0.0)]),
        ("FetchModel", "the last version", [fetch()]),
    ]


def _known() -> list[Message]:
    """The same ask again, a model, a push again in one message, and what else an exchange has."""
    header, *chunks = push("update-1", "task-1", 0)
    data = b"".join(chunk.chunk.data for chunk in chunks)
    return [
        exchange(ask=ask("task-2")),
        exchange(fetch=fetch(version=1, offset=10)),
        exchange(data, push=header.header),
        exchange(query=query("update-1")),
        exchange(heartbeat=heartbeat("task-1", 2.0)),
    ]


def _failing() -> list[Message]:
    """A version that is not there, and a request that is not looked at any more."""
    return [exchange(fetch=fetch(version=9)), exchange(query=query("update-1"))]


def record(address: str) -> dict[str, Any]:
    """Play every step to a server; the recording."""
    replay, recorded = _replay(), []
    with grpc.insecure_channel(address) as channel:
        for call, what, requests in steps():
            step = {"call": call, "what": what, "requests": [_bytes(message).hex() for message in requests]}
            recorded.append(step | replay.play(channel, step, VARIES))
    about = "The test vector of docs/protocol.md: a run's whole life. Messages in hexadecimal."
    return {"about": about, "layout": LAYOUT, "deltas": DELTAS, "varies": VARIES, "steps": recorded}


def _bytes(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _replay() -> ModuleType:
    """The program that plays a recording."""
    spec = spec_from_file_location("foreign_replay", ROOT / "examples" / "foreign_replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments: Sequence[str]) -> None:
    """Write the recording to standard output."""
    recording: Mapping[str, Any] = record(*arguments)
    sys.stdout.write(json.dumps(recording, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
