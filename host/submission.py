"""What devices send, whoever takes it in: from the words that announce an update to what is answered.

    announced(...)      an update without its values, and its payload's reference
    check_size          before a byte of it is taken: the codec may need as many
    check_coming        its task is open, and the codec is the task's
    examined            the values, or their flaw
    arrived             the event
    answered            its receipt, or `InvalidUpdate` where it has a flaw

A payload of another codec than its task's is refused before a byte of it is taken, and leaves no trace. What
was taken is on record, flaw included, so that its task is closed. Its device hears of a flaw as an error; if
that is lost and the same is sent again, it hears the verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache

import numpy as np

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core import events as ev
from anabranch.core.content import SHA256, kind_of
from anabranch.core.effects import Decided, Effect
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import InvalidUpdate, TooLarge, UnknownTask
from anabranch.core.journal import LoadDelta
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.chains import RAW, payload_codec
from anabranch.core.model.metrics import TRAINED_MAX, names_flaw
from anabranch.core.model.params import Delta, ParamSpec
from anabranch.core.model.submodels import Submodel
from anabranch.core.model.updates import Task, Update, find_flaw
from anabranch.core.unwritten import dataclass
from anabranch.host.chain import is_of_other_base
from anabranch.host.log import Data


@dataclass(frozen=True)
class Submission:
    """An update as its device announces it: `update` has no values yet, `payload` says what they are in.

    `base_head` names the version that it was trained from, where its number may not do; else it is empty.
    `seals`: of a masked one, see `UpdateArrived`.
    """

    update: Update
    payload: ev.Payload
    base_head: str = ""
    seals: Mapping[str, str] = field(default_factory=dict)


def announced(
    spec: ParamSpec,
    *,
    update_id: str,
    task_id: str,
    client_id: str,
    base_version: int,
    examples: int,
    local_steps: int,
    metrics: Mapping[str, float],
    sha256: str,
    size_bytes: int,
    codec: str,
    submodel: Submodel | None = None,
    base_head: str = "",
    seals: Mapping[str, str] | None = None,
) -> Submission:
    """What a device says of its update, with what follows of it."""
    nothing = np.empty(0, spec.vector_dtype)
    update = Update(
        update_id,
        task_id,
        client_id,
        base_version,
        examples,
        nothing,
        submodel,
        local_steps,
        metrics,
    )
    values = 0 if submodel is None else submodel.size
    return Submission(update, ev.Payload(sha256, size_bytes, codec, values), base_head, seals or {})


def check_offered(digest: str, offered: str) -> None:
    """Raises `InvalidUpdate` for a digest by what a run does not offer: SHA-256 goes in every run.

    What was decided of the update before is to be looked up first.
    """
    if (algorithm := kind_of(digest)) not in (SHA256, offered):
        raise InvalidUpdate(
            f"the payload is named by {algorithm}, which this run does not offer (run.payload_digest): send "
            "its sha256"
        )


def checked_metrics(metrics: Mapping[str, float], names_max: int = TRAINED_MAX) -> dict[str, float]:
    """Metrics that may be kept. Raises `InvalidUpdate`, which names the metric."""
    if flaw := names_flaw(metrics, names_max):
        raise InvalidUpdate(f"metrics: {flaw}")
    if bad := [k for k, v in metrics.items() if not math.isfinite(v)]:
        raise InvalidUpdate(f"metric {bad[0]!r} is not finite: leave it out")
    return dict(metrics)


def check_coming(engine: Engine, client_id: str, task_id: str, update_id: str, codec: str) -> None:
    """Whether the payload of an update may come. Raises as `check_task` does.

    That of one that was decided before may: it has its answer.
    """
    if update_id not in engine.ledger.receipts:
        check_task(engine.ledger.tasks.get(task_id), client_id, task_id, codec)


def check_codec(codec: str, uplink: str) -> None:
    """Raises `InvalidUpdate` unless a payload is as its task's uplink wants it, or raw."""
    wanted = payload_codec(uplink)
    if codec not in (wanted, RAW):
        raise InvalidUpdate(f"payload is of codec {codec!r}, the task asked for {wanted!r}")


def check_task(task: Task | None, client_id: str, task_id: str, codec: str) -> None:
    """Raises `UnknownTask` where an update can have no verdict, and `InvalidUpdate` as `check_codec` does.

    `task` is that of the id, where it is open. So only who holds a task takes up room, and only with what the
    task asked for.
    """
    if task is None or task.client_id != client_id:
        raise UnknownTask(
            f"task {task_id!r} is not open for {client_id!r}: it ended, or is another run's: ask anew"
        )
    check_codec(codec, task.uplink)


def check_seals(seals: Mapping[str, str], keepers: Sequence[str]) -> None:
    """Raises `InvalidUpdate` unless an update is sealed for the run's keepers, and for nobody else.

    One that is not could be in no sum, and would hold up those of others.
    """
    if sorted(seals) != sorted(keepers):
        wanted = ", ".join(keepers) or "nobody, as the run's updates are not masked"
        raise InvalidUpdate(f"seals are for {', '.join(sorted(seals)) or 'nobody'}; the run wants {wanted}")


def check_size(size_bytes: int, codec: str, spec: ParamSpec, submodel: Submodel | None) -> None:
    """Raises `TooLarge` for more than the codec can need, and `UnknownCodec`."""
    most = _whole_bytes_max(codec, spec) if submodel is None else _bytes_max(codec, spec, submodel)
    if size_bytes > most:
        text, values = make_codec(codec).text, Layout.of(spec, submodel).size
        raise TooLarge(f"payload of {size_bytes} bytes: {text} needs at most {most} for {values} values")


def _bytes_max(codec: str, spec: ParamSpec, submodel: Submodel | None) -> int:
    return make_codec(codec).bytes_max(Layout.of(spec, submodel))


@lru_cache(maxsize=64)
def _whole_bytes_max(codec: str, spec: ParamSpec) -> int:
    return _bytes_max(codec, spec, None)


def decode(payload: ev.Payload, data: Data, spec: ParamSpec, submodel: Submodel | None) -> Delta:
    """The values of an update, (covered coordinates,). Raises `InvalidUpdate`, `TooLarge`, `UnknownCodec`."""
    return make_codec(payload.codec).decode(data, Layout.of(spec, submodel))


def loader(read: Callable[[ev.Payload], Data], spec: ParamSpec) -> LoadDelta:
    """What brings the values of a journal's updates: `read` has their bytes."""
    return lambda payload, submodel: decode(payload, read(payload), spec, submodel)


def examined(
    submission: Submission, data: Data, spec: ParamSpec, limits: Limits = DEFAULT_LIMITS
) -> tuple[Update, str]:
    """An update with the values of its payload; or as it came, and its flaw."""
    update = submission.update
    try:
        delta = decode(submission.payload, data, spec, update.submodel)
        flaw = find_flaw(spec, delta, update.examples, update.submodel, limits)
    except (InvalidUpdate, TooLarge) as error:
        flaw = str(error)
    return (update, flaw) if flaw else (replace(update, delta=delta), "")


def arrived(
    submission: Submission,
    found: tuple[Update, str],
    now: float,
    head: str | None = None,
    proof: ev.Proof | None = None,
    salt: str = "",
) -> ev.UpdateArrived:
    """The event of an update that was `examined`. `head`: its base version's own, where it is known."""
    update, flaw = found
    return ev.UpdateArrived(
        now,
        update,
        submission.payload,
        flaw=flaw,
        proof=proof,
        other_base=is_of_other_base(submission.base_head, head),
        seals=submission.seals,
        base_head=submission.base_head if submission.seals else "",
        salt=salt,
    )


def answered(event: ev.UpdateArrived, effects: Sequence[Effect]) -> Decided:
    """What a device is told of its update. Raises `InvalidUpdate` for a flaw that was found in it now."""
    decided = next(e for e in effects if isinstance(e, Decided))
    if event.flaw and not decided.duplicate:
        raise InvalidUpdate(f"update {event.update.update_id}: {event.flaw}")
    return decided
