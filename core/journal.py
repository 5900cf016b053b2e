"""Events as records; `host/journal.py` replays them.

A record is one JSON object; its canonical line (sorted keys, no spaces) is what is hashed, so two
journals are equal exactly when their digests are. The values of an update are not in its record:
the record has the SHA-256 of the payload, and whoever replays brings the bytes and the decoder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from anabranch.core import events as ev
from anabranch.core.model.params import Delta, ParamSpec
from anabranch.core.model.submodels import Submodel, submodel_from_json
from anabranch.core.model.updates import Ask, Update
from anabranch.core.snapshot import capability_of

Record = dict[str, Any]
LoadDelta = Callable[[ev.Payload, Submodel | None], Delta]

_PLAIN: dict[str, type[Any]] = {
    "renewed": ev.LeaseRenewed,
    "dropped": ev.TaskDropped,
    "ticked": ev.Ticked,
    "returned": ev.Returned,
    "paused": ev.Paused,
    "resumed": ev.Resumed,
    "quarantined": ev.Quarantined,
    "released": ev.Released,
    "settings_changed": ev.SettingsChanged,
}
_KIND = {cls: kind for kind, cls in _PLAIN.items()}


def to_record(event: ev.Event) -> Record:
    """The record of an event."""
    match event:
        case ev.Enrolled():
            return {"kind": "enrolled", **vars(event), "capability": dict(vars(event.capability))}
        case ev.TaskAsked():
            return {"kind": "asked", "now": event.now, **_without(vars(event.ask), "session", "succeeds")}
        case ev.LeaseRenewed():
            return _without(_plain(event), "session")
        case ev.UpdateArrived():
            return _update_record(event)
        case ev.TaskDropped(diverged=False):  # as it was before there was the other
            return _without(_plain(event), "diverged")
        case ev.RolledBack(now, to_version, to_seq, without, everyone):
            found = {"now": now, "to_version": to_version, "to_seq": to_seq, "without": list(without)}
            return {"kind": "rolled_back", **found, "everyone": everyone}
        case _:
            return _plain(event)


def _without(record: Record, *keys: str) -> Record:
    return {k: v for k, v in record.items() if k not in keys}


def _plain(event: ev.Event) -> Record:
    return {"kind": _KIND[type(event)], **vars(event)}


def from_record(record: Record, spec: ParamSpec, load_delta: LoadDelta) -> ev.Event:
    """The event of a record; `load_delta` brings the values of an update of the model `spec`."""
    data = {k: v for k, v in record.items() if k != "kind"}
    kind = record["kind"]
    if kind == "enrolled":
        return ev.Enrolled(data["now"], data["client_id"], capability_of(data["capability"]))
    if kind == "asked":
        return ev.TaskAsked(data.pop("now"), Ask(**data))
    if kind == "update":
        return _update_event(data, spec, load_delta)
    if kind == "rolled_back":  # whoever handles it brings its state
        return ev.RolledBack(**{**data, "without": tuple(data["without"])})
    event: ev.Event = _PLAIN[kind](**data)
    return event


def line(record: Record) -> str:
    """The canonical line of a record, without the line feed."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)


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


def _update_record(event: ev.UpdateArrived) -> Record:
    u = event.update
    proof = {} if event.proof is None else {"proof": {k: v for k, v in vars(event.proof).items() if v}}
    return {
        "kind": "update",
        "now": event.now,
        "update_id": u.update_id,
        "task_id": u.task_id,
        "client_id": u.client_id,
        "base_version": u.base_version,
        "examples": u.examples,
        "local_steps": u.local_steps,
        "metrics": dict(u.metrics),
        "submodel": None if u.submodel is None else u.submodel.to_json(),
        "payload": dict(vars(event.payload)),
        "flaw": event.flaw,
        **proof,
        **({"other_base": True} if event.other_base else {}),
    }


def _update_event(data: Record, spec: ParamSpec, load_delta: LoadDelta) -> ev.UpdateArrived:
    now, flaw, payload = data.pop("now"), data.pop("flaw"), ev.Payload(**data.pop("payload"))
    signed = data.pop("proof", None)
    proof = None if signed is None else ev.Proof(**signed)
    other_base = data.pop("other_base", False)
    found = data.pop("submodel")
    submodel = None if found is None else submodel_from_json(found, spec)
    delta = np.empty(0, np.float32) if flaw else load_delta(payload, submodel)
    return ev.UpdateArrived(
        now, Update(delta=delta, submodel=submodel, **data), payload, flaw, proof, other_base
    )
