"""Plays the test vector of docs/protocol.md to a server, and compares its answers byte for byte.

It needs grpcio, protobuf and the code generated of protos/v1, nothing else of anabranch.

python examples/foreign_replay.py 127.0.0.1:7070 [examples/foreign_exchange.json]

The server must be new, and of the model and the settings that docs/protocol.md names. Exit code 1: an answer
is another than the recorded one.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from anabranch.protos.v1 import devices_pb2

CALL_S = 60.0
STREAMS_IN, STREAMS_OUT = ("PushUpdate", "Exchange"), ("FetchModel", "Exchange")
Step = dict[str, Any]


def play(channel: grpc.Channel, step: Step, varies: Mapping[str, Sequence[str]]) -> Step:
    """Send the step's requests; what came back, as the step of a recording has it."""
    call, data = step["call"], [bytes.fromhex(text) for text in step["requests"]]
    shape = f"{'stream' if call in STREAMS_IN else 'unary'}_{'stream' if call in STREAMS_OUT else 'unary'}"
    method = getattr(channel, shape)(f"/anabranch.v1.Devices/{call}")  # bytes go out and come in as they are
    try:
        answer = method(iter(data) if call in STREAMS_IN else data[0], timeout=CALL_S)
        came = list(answer) if call in STREAMS_OUT else [answer]
    except grpc.RpcError as error:
        failed: Any = error
        metadata = dict(failed.trailing_metadata() or ())
        return {"status": failed.code().name, "error": metadata.get("anabranch-error", "")}
    kind = getattr(devices_pb2, f"{call}Response")
    return {"responses": [steady(kind.FromString(message), varies).hex() for message in came]}


def steady(message: Message, varies: Mapping[str, Sequence[str]]) -> bytes:
    """The message without the fields that may differ from one time to the next."""
    for part in _parts(message):
        for name in varies.get(part.DESCRIPTOR.name, ()):
            part.ClearField(name)
    return message.SerializeToString(deterministic=True)


def _parts(message: Message) -> Iterator[Message]:
    """The message and every one inside it."""
    yield message
    for _, value in message.ListFields():
        for inner in value if hasattr(value, "__iter__") else [value]:
            if isinstance(inner, Message):
                yield from _parts(inner)


def main(address: str, file: str = str(Path(__file__).with_name("foreign_exchange.json"))) -> int:
    """Play every step; 0 if all answers are as recorded."""
    recording = json.loads(Path(file).read_text(encoding="utf-8"))
    differ = 0
    with grpc.insecure_channel(address) as channel:
        for number, step in enumerate(recording["steps"], 1):
            came = play(channel, step, recording["varies"])
            expected = {key: step[key] for key in ("responses", "status", "error") if key in step}
            differ += came != expected
            print(f"{'same ' if came == expected else 'OTHER'} {number:2} {step['call']}: {step['what']}")
            if came != expected:
                print(f"  recorded {expected}\n  came     {came}")
    print(f"{len(recording['steps']) - differ} of {len(recording['steps'])} answers are as recorded")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
