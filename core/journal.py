"""Events as records; `host/journal.py` replays them.

A record is one JSON object; its canonical line (sorted keys, no spaces) is what is hashed, so two
journals are equal exactly when their digests are. The values of an update are not in its record:
the record has the SHA-256 of the payload, and whoever replays brings the bytes and the decoder.

Most events are their own records, under a `kind`. Four are not: an ask without the sessions, which the log
has nothing of; an update and a sum of masks without their values; a rollback without the state that it leads
to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from anabranch.core import events as ev
from anabranch.core.model.params import Delta, ParamSpec
from anabranch.core.model.submodels import Submodel, SubmodelJson, submodel_from_json, submodel_json
from anabranch.core.model.updates import Ask, Update
from anabranch.core.plain import FieldError, UnknownField, finite, from_plain, make_converter, written
from anabranch.core.unwritten import dataclass

Record = dict[str, Any]
LoadDelta = Callable[[ev.Payload, Submodel | None], Delta]


@dataclass(frozen=True)
class AskRecord:
    """A device applied for a task."""

    now: float
    client_id: str
    task_id: str
    holds_version: int | None = None
    holds_parts: tuple[tuple[int, SubmodelJson | None], ...] = ()

    @classmethod
    def of(cls, event: ev.TaskAsked) -> AskRecord:
        """Of an event."""
        ask = event.ask
        parts = tuple(held.to_json() for held in ask.holds_parts)
        return cls(event.now, ask.client_id, ask.task_id, ask.holds_version, parts)

    @property
    def event(self) -> ev.TaskAsked:
        """The event again, without the parts: they are for who counts bytes, not for the engine."""
        return ev.TaskAsked(self.now, Ask(self.client_id, self.task_id, self.holds_version))


@dataclass(frozen=True)
class UpdateRecord:
    """A complete update came; see `Update`."""

    now: float
    update_id: str
    task_id: str
    client_id: str
    base_version: int
    examples: int
    payload: ev.Payload
    local_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    submodel: SubmodelJson | None = None
    flaw: str = ""
    proof: ev.Proof | None = None
    other_base: bool = False
    seals: Mapping[str, str] = field(default_factory=dict)
    base_head: str = ""
    salt: str = ""

    @classmethod
    def of(cls, event: ev.UpdateArrived) -> UpdateRecord:
        """Of an event."""
        u = event.update
        return cls(
            now=event.now,
            update_id=u.update_id,
            task_id=u.task_id,
            client_id=u.client_id,
            base_version=u.base_version,
            examples=u.examples,
            payload=event.payload,
            local_steps=u.local_steps,
            metrics=u.metrics,
            submodel=submodel_json(u.submodel),
            flaw=event.flaw,
            proof=event.proof,
            other_base=event.other_base,
            seals=event.seals,
            base_head=event.base_head,
            salt=event.salt,
        )

    def event(self, spec: ParamSpec, load_delta: LoadDelta) -> ev.UpdateArrived:
        """The event again, of the model `spec`. Raises `InvalidUpdate` for a sub-model of another."""
        submodel = submodel_from_json(self.submodel, spec)
        update = Update(
            update_id=self.update_id,
            task_id=self.task_id,
            client_id=self.client_id,
            base_version=self.base_version,
            examples=self.examples,
            delta=np.empty(0, np.float32) if self.flaw else load_delta(self.payload, submodel),
            submodel=submodel,
            local_steps=self.local_steps,
            metrics=self.metrics,
        )
        return ev.UpdateArrived(
            self.now,
            update,
            self.payload,
            flaw=self.flaw,
            proof=self.proof,
            other_base=self.other_base,
            seals=self.seals,
            base_head=self.base_head,
            salt=self.salt,
        )


@dataclass(frozen=True)
class RollbackRecord:
    """An operator went back to a version. Whoever handles the event brings its state."""

    now: float
    to_version: int
    to_seq: int
    without: tuple[str, ...]
    everyone: bool = False
    rules: int = 0

    @classmethod
    def of(cls, event: ev.RolledBack) -> RollbackRecord:
        """Of an event."""
        return cls(event.now, event.to_version, event.to_seq, event.without, event.everyone, event.rules)

    @property
    def event(self) -> ev.RolledBack:
        """The event again. Raises `UnknownField`."""
        _check_rules(self.rules, ev.RolledBack.rules)
        return ev.RolledBack(self.now, self.to_version, self.to_seq, self.without, self.everyone, self.rules)


@dataclass(frozen=True)
class SettingsRecord:
    """Settings were changed."""

    now: float
    values: Mapping[str, Any]
    by: str
    at_start: bool = False
    rules: int = 0

    @classmethod
    def of(cls, event: ev.SettingsChanged) -> SettingsRecord:
        """Of an event."""
        return cls(event.now, event.values, event.by, event.at_start, event.rules)

    @property
    def event(self) -> ev.SettingsChanged:
        """The event again. Raises `UnknownField`."""
        _check_rules(self.rules, ev.SettingsChanged.rules)
        return ev.SettingsChanged(self.now, self.values, self.by, self.at_start, self.rules)


@dataclass(frozen=True)
class MaskSumRecord:
    """A keeper answered. The numbers are its payload."""

    now: float
    number: int
    keeper: str
    payload: ev.Payload

    @classmethod
    def of(cls, event: ev.MaskSumArrived) -> MaskSumRecord:
        """Of an event."""
        return cls(event.now, event.number, event.keeper, event.payload)

    def event(self, load_delta: LoadDelta) -> ev.MaskSumArrived:
        """The event again."""
        numbers: Any = load_delta(self.payload, None)
        return ev.MaskSumArrived(self.now, self.number, self.keeper, self.payload, numbers)


KINDS: dict[str, type[Any]] = {
    "enrolled": ev.Enrolled,
    "asked": AskRecord,
    "renewed": ev.LeaseRenewed,
    "dropped": ev.TaskDropped,
    "update": UpdateRecord,
    "ticked": ev.Ticked,
    "returned": ev.Returned,
    "paused": ev.Paused,
    "resumed": ev.Resumed,
    "quarantined": ev.Quarantined,
    "released": ev.Released,
    "rolled_back": RollbackRecord,
    "settings_changed": SettingsRecord,
    "mask_sum": MaskSumRecord,
    "cohort_dropped": ev.CohortDropped,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}


def canonical_lines() -> Callable[[Record], str]:
    """What writes lines. `JSONEncoder` makes its compiled half anew for each: up to a fifth of the time."""
    whole = json.JSONEncoder(check_circular=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    compiled: Any = getattr(json.encoder, "c_make_encoder", None)
    if compiled is None:
        return whole.encode
    text = json.encoder.encode_basestring_ascii
    pieces = compiled(None, whole.default, text, None, ":", ",", True, False, False)  # no record is in itself
    return lambda record: "".join(pieces(record, 0))


_encoded = canonical_lines()
_converter = make_converter(finite)
written(_converter, AskRecord, later=("holds_parts",))
written(_converter, ev.LeaseRenewed, absent=("session",))
written(_converter, ev.TaskDropped, later=("diverged",))
written(_converter, RollbackRecord, later=("rules",))
written(_converter, SettingsRecord, later=("rules",))
written(_converter, ev.Proof, later=("at",))
written(_converter, UpdateRecord, later=("proof", "other_base", "seals", "base_head", "salt"))


def to_record(event: ev.Event) -> Record:
    """The record of an event."""
    match event:
        case ev.TaskAsked():
            kept: Any = AskRecord.of(event)
        case ev.UpdateArrived():
            kept = UpdateRecord.of(event)
        case ev.RolledBack():
            kept = RollbackRecord.of(event)
        case ev.SettingsChanged():
            kept = SettingsRecord.of(event)
        case ev.MaskSumArrived():
            kept = MaskSumRecord.of(event)
        case _:
            kept = event
    return {"kind": _KIND_OF[type(kept)], **_converter.unstructure(kept)}


def from_record(record: Record, spec: ParamSpec, load_delta: LoadDelta) -> ev.Event:
    """The event of a record; `load_delta` brings the values of an update of the model `spec`.

    Raises `FieldError` where the record is none, `UnknownField` where it is one of a newer release,
    `InvalidUpdate`, and as `load_delta` does.
    """
    kind = record.get("kind")
    if not isinstance(kind, str):
        raise FieldError(f"kind must be that of an event, not {kind!r}")
    if kind not in KINDS:
        raise UnknownField(f"is of an unknown kind, {kind!r}")
    kept = from_plain({k: v for k, v in record.items() if k != "kind"}, KINDS[kind], _converter)
    match kept:
        case AskRecord() | RollbackRecord() | SettingsRecord():
            return kept.event
        case UpdateRecord():
            return kept.event(spec, load_delta)
        case MaskSumRecord():
            return kept.event(load_delta)
    event: ev.Event = kept
    return event


def _check_rules(said: int, newest: int) -> None:
    if said > newest:
        raise UnknownField(f"has rules {said}, and {newest} are the newest known here")


def payload_of(record: Record) -> ev.Payload | None:
    """The bytes that a record needs to be an event again: of a good update, or a keeper's answer."""
    if "payload" not in record or record.get("flaw"):
        return None
    return ev.Payload(**record["payload"])


def line(record: Record) -> str:
    """The canonical line of a record, without the line feed."""
    return _encoded(record)


class JournalDigest:
    """A running SHA-256 over canonical lines."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, record: Record) -> str:
        """Take a record; returns its line."""
        text = line(record)
        self._sha.update(text.encode() + b"\n")
        return text

    def hexdigest(self) -> str:
        """The digest of the records so far."""
        return self._sha.hexdigest()

    def copy(self) -> JournalDigest:
        """One that goes on by itself."""
        made = JournalDigest()
        made._sha = self._sha.copy()
        return made
