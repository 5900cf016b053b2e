"""One check of what devices send, whoever takes it in: the codec is the task's, and the values fit to apply.

A payload of another codec than its task's is refused before a byte of it is taken, and leaves no trace. What
was taken is on record, flaw included, so that its task is closed and a resend gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import InvalidUpdate, TooLarge, UnknownTask
from anabranch.core.journal import LoadDelta
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.chains import RAW, payload_codec
from anabranch.core.model.params import Delta, ParamSpec
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Task, Update, find_flaw

Data = bytes | memoryview


def check_codec(codec: str, uplink: str) -> None:
    """Raises `InvalidUpdate` unless a payload is as its task's uplink wants it, or raw."""
    wanted = payload_codec(uplink)
    if codec not in (wanted, RAW):
        raise InvalidUpdate(f"payload is of codec {codec!r}, the task asked for {wanted!r}")


def check_open(engine: Engine, client_id: str, task_id: str, codec: str) -> None:
    """Raises `UnknownTask` where an update can have no verdict, and `InvalidUpdate` as `check_codec` does.

    So only who holds a task takes up room, and only with what the task asked for.
    """
    check_task(engine.ledger.tasks.get(task_id), client_id, task_id, codec)


def check_task(task: Task | None, client_id: str, task_id: str, codec: str) -> None:
    """The same of the task of this id, where it is open."""
    if task is None or task.client_id != client_id:
        raise UnknownTask(f"task {task_id!r} is not open for {client_id!r}: it ended, ask anew")
    check_codec(codec, task.uplink)


def check_size(size_bytes: int, codec: str, spec: ParamSpec, submodel: Submodel | None) -> None:
    """Raises `TooLarge` for more than the codec can need, and `UnknownCodec`."""
    layout, made = Layout.of(spec, submodel), make_codec(codec)
    if size_bytes > (most := made.bytes_max(layout)):
        raise TooLarge(
            f"payload of {size_bytes} bytes: {made.text} needs at most {most} for {layout.size} values"
        )


def decode(payload: ev.Payload, data: Data, spec: ParamSpec, submodel: Submodel | None) -> Delta:
    """The values of an update, (covered coordinates,). Raises `InvalidUpdate`, `TooLarge`, `UnknownCodec`."""
    return make_codec(payload.codec).decode(data, Layout.of(spec, submodel))


def loader(read: Callable[[ev.Payload], Data], spec: ParamSpec) -> LoadDelta:
    """What brings the values of a journal's updates: `read` has their bytes."""
    return lambda payload, submodel: decode(payload, read(payload), spec, submodel)


def examined(
    update: Update, payload: ev.Payload, data: Data, spec: ParamSpec, limits: Limits = DEFAULT_LIMITS
) -> tuple[Update, str]:
    """An update, which comes without values, with those of its payload; or as it came, and its flaw."""
    try:
        delta = decode(payload, data, spec, update.submodel)
        flaw = find_flaw(spec, delta, update.examples, update.submodel, limits)
    except (InvalidUpdate, TooLarge) as error:
        flaw = str(error)
    return (update, flaw) if flaw else (replace(update, delta=delta), "")
