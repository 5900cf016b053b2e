"""Compressed updates on Flower's Grid: a mod by which a ClientApp answers with what it has changed, encoded.

    app = ClientApp(mods=[compressed_uplink])        # the first of them: the others see whole arrays

A task's message has one record more, `anabranch.uplink`, which says how its reply shall be encoded; the mod
takes it out, so the app sees none of this. In the place of the trained arrays goes one `Array`, whose stype
names the chain of codecs and whose data is the payload that a device of `anabranch client` would send. A
message without that record is answered as it always was, and so is one whose training has diverged or whose
arrays are others than the model's: the server then says what is wrong with them.

Error feedback (`compress/feedback.py`) needs to know which updates counted, and Flower never says. So the
next message does: it names the updates whose memories may count, oldest first: the newest that the server
has taken, and those that it has not heard of yet. The mod goes on from the newest of them that it remembers,
and forgets the rest. It remembers in `context.state`, which Flower keeps, in step with the replies, for as
long as the SuperNode and the run last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from anabranch.compress.feedback import Memory, Uplink
from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.engine.buffers import DeviceBuffers
from anabranch.core.errors import AppError, InvalidUpdate, WireError
from anabranch.core.model.chains import RAW, payload_codec
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Task
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version
from anabranch.flower.records import arrays_of
from anabranch.host.submission import check_codec, check_size

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message
    from flwr.clientapp.typing import ClientAppCallable

RECORD = "anabranch.uplink"  # in a message: the order
STYPE = "anabranch."  # of an Array: before its chain
MEMORY = "anabranch.memory."  # in a context's state: before the task's id


@dataclass(frozen=True)
class Encoded:
    """An update as bytes."""

    codec: str
    data: bytes

    @classmethod
    def whole(cls, delta: Vector, spec: ParamSpec) -> Encoded:
        """What has come as arrays, as it is stored, whatever the values are."""
        return cls(RAW, make_codec(RAW).encode(delta, Layout.of(spec)))

    def checked(self, task: Task, spec: ParamSpec) -> Encoded:
        """Itself. Raises `AppError` for what the task did not ask for, and for more than there can be."""
        try:
            check_codec(self.codec, task.uplink)
            check_size(len(self.data), self.codec, spec, None)
        except WireError as error:
            raise AppError(f"the reply is of no use: {error}") from error
        return self


def encoded_in(record: ArrayRecord) -> Encoded | None:
    """What the mod has put in a reply; None where there are arrays."""
    arrays = list(record.values())
    if len(arrays) != 1 or not arrays[0].stype.startswith(STYPE):
        return None
    return Encoded(arrays[0].stype.removeprefix(STYPE), arrays[0].data)


@dataclass
class Counting:
    """On the server: the updates of a node whose memories may count, oldest first."""

    task_ids: list[str] = field(default_factory=list)

    def order(self, task: Task, buffers: Sequence[str] = ()) -> ConfigRecord:
        """The record that goes with a task, whose update may count from now on."""
        from flwr.app import ConfigRecord

        found = ConfigRecord(
            {
                "task": task.task_id,
                "uplink": task.uplink,
                "version": task.base_version,
                "seed": seed_of(task.seed, "codec"),
                "counting": list(self.task_ids),
                **({"buffers": list(buffers)} if buffers else {}),
            }
        )
        self.task_ids.append(task.task_id)
        return found

    def answered(self, task_id: str, taken: bool) -> None:
        """The server has taken an update, so those before it are of no use; or it has not, nor ever will."""
        if task_id in self.task_ids:
            at = self.task_ids.index(task_id)
            self.task_ids = self.task_ids[at:] if taken else [t for t in self.task_ids if t != task_id]


def compressed_uplink(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The mod: see the module."""
    flwr_version()
    order = message.content.config_records.get(RECORD)
    if order is None:
        return call_next(message, context)
    del message.content[RECORD]
    (sent,) = message.content.array_records.values()
    base = arrays_of(sent)  # before the training, which may write into what it is given
    reply = call_next(message, context)
    if reply.has_error() or len(reply.content.array_records) != 1:
        return reply
    ((name, record),) = reply.content.array_records.items()
    spec, trained = ParamSpec.of(base, buffers=order.get("buffers", ())), arrays_of(record)
    if {n: a.shape for n, a in trained.items()} != {n: a.shape for n, a in base.items()}:
        return reply
    memories, start = _Memories(context, order["counting"]), spec.flatten(base)
    told, _ = DeviceBuffers(spec).told(start, spec.flatten(trained) - start, None, b"")
    try:
        payload, memory = Uplink(order["uplink"]).encode(
            told,
            spec,
            None,
            memories.newest(),
            order["seed"],
            order["version"],
        )
    except InvalidUpdate:
        return reply
    if memory is not None:
        memories.put(order["task"], memory)
    reply.content[name] = _record(payload_codec(order["uplink"]), payload)
    return reply


def _record(codec: str, payload: bytes) -> ArrayRecord:
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({"update": Array("uint8", (len(payload),), STYPE + codec, payload)})


class _Memories:
    """What a node remembers, by task; only what may count is left of it."""

    def __init__(self, context: Context, counting: Sequence[str]) -> None:
        self._state, self._names = context.state, [MEMORY + task_id for task_id in counting]
        for name in list(self._state.config_records):
            if name.startswith(MEMORY) and name not in self._names:
                del self._state[name]

    def newest(self) -> Memory | None:
        """That of the newest update which may count."""
        name = next((n for n in reversed(self._names) if n in self._state.config_records), None)
        if name is None:
            return None
        kept = self._state.config_records[name]
        facts, residual = json.loads(str(kept["facts"])), kept["residual"]
        return Memory(np.frombuffer(residual, np.float32), **facts)

    def put(self, task_id: str, memory: Memory) -> None:
        from flwr.app import ConfigRecord

        facts = {
            "base_version": memory.base_version,
            "length_mean": memory.length_mean,
            "notes": dict(memory.notes),
        }
        self._state[MEMORY + task_id] = ConfigRecord(
            {"facts": json.dumps(facts), "residual": memory.residual.astype(np.float32).tobytes()}
        )
