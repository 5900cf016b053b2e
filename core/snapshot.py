"""The whole state of the server machine as data, its digest, and the way back.

A snapshot is JSON and named arrays, so it can be written as one safetensors file. The digest is a
SHA-256 over both: two engines with one digest behave alike for ever.

Clients and receipts are many, and few of them change from one snapshot to the next. A store that keeps them
as rows gets those that changed (`take_changes`), and gives back all of them; the rest is as small as what is
live.
"""

from __future__ import annotations

import copy as copying
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.engine.broadcast import Broadcast
from anabranch.core.engine.changes import Changes
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.ledger import ClientRecord, Counters
from anabranch.core.engine.planner import Planner
from anabranch.core.engine.settable import in_force
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Strategy
from anabranch.core.model.arrays import to_bytes
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Coordinates, Submodel, UnitMap, submodel_from_json
from anabranch.core.model.updates import (
    Capability,
    Decision,
    LocalPlan,
    Reason,
    Receipt,
    Task,
    TaskState,
    Verdict,
)

Array = npt.NDArray[Any]
FORMAT = 2
RECEIPTS_OF = "receipts_of"  # the client and the payload of each receipt
HISTORY = "history/"  # the names of the bases of open tasks
APART = 3  # the format without clients and receipts: they are rows of the store that has it
_VERDICTS, _REASONS = {v.value: v for v in Verdict}, {r.value: r for r in Reason}


@dataclass(frozen=True)
class Rows:
    """Clients and receipts apart from a snapshot: all of them, or those that changed since the one before.

    Receipts are with whether they answer their task. `enrolled`: the ids of clients that are new, in order.
    """

    clients: Sequence[ClientRecord]
    receipts: Sequence[tuple[Receipt, bool]]
    enrolled: Sequence[str] = ()


@dataclass(frozen=True)
class Snapshot:
    """`meta` is JSON; `arrays` are copies, safe to write while the engine goes on.

    `rows`: clients and receipts, where they are not in `meta`. That says then under `rows` how many clients
    there are, and the numbers, from 1 for the first ever, of the receipts: the last that is gone, the newest.
    """

    meta: dict[str, Any]
    arrays: dict[str, Array]
    rows: Rows | None = None


def take_snapshot(engine: Engine, copy: bool = True) -> Snapshot:
    """The engine's state. With `copy=False` the arrays are the engine's own: read them at once."""
    meta, arrays = _state(engine)
    ledger = engine.ledger
    meta["clients"] = [asdict(c) for c in ledger.clients.values()]
    meta["receipts"] = [[*receipt_row(r), ledger.answers_task(r)] for r in ledger.receipts.values()]
    meta[RECEIPTS_OF] = [[r.client_id, r.sha256] for r in ledger.receipts.values()]
    if copy:
        arrays = {name: a.copy() for name, a in arrays.items()}
    return Snapshot(meta, arrays)


def take_changes(engine: Engine) -> Snapshot:
    """The engine's state, copied, and what its ledger has noted as unsaved as rows.

    The bases of open tasks are the engine's own, which never writes on them.
    """
    meta, arrays = _state(engine)
    arrays = {name: a if name.startswith(HISTORY) else a.copy() for name, a in arrays.items()}
    ledger, unsaved = engine.ledger, engine.ledger.unsaved
    assert unsaved is not None, "a ledger that is saved in pieces notes what changed"
    filed = engine.counters.applied + engine.counters.rejected
    span = [filed - len(ledger.receipts), filed]
    meta |= {"format": APART, "rows": {"clients": len(ledger.clients), "receipts": span}}
    newest = ledger.newest_receipts(unsaved.receipts)
    rows = Rows(
        clients=[ledger.clients[c] for c in sorted(unsaved.clients)],
        receipts=[(r, ledger.answers_task(r)) for r in newest],
        enrolled=list(unsaved.enrolled),
    )
    return Snapshot(meta, arrays, rows)


def _state(engine: Engine) -> tuple[dict[str, Any], dict[str, Array]]:
    """JSON and arrays of everything but clients and receipts."""
    arrays: dict[str, Array] = {"vector": engine.vector}
    arrays |= {f"{HISTORY}{v}": a for v, a in sorted(engine.history.items())}
    meta = {
        "format": FORMAT,
        "version": engine.version,
        "paused": engine.paused,
        "finished": engine.finished,
        "pending": list(engine.pending),
        "counters": asdict(engine.counters),
        "guard": _guard(engine.guard),
        "tasks": [_pack(t, f"task/{t.task_id}", arrays) for t in engine.ledger.tasks.values()],
        "strategy": _pack(engine.state, "strategy", arrays),
        "broadcast": _pack(engine.broadcast_state, "broadcast", arrays),
        "planner": _pack(engine.planner_state, "planner", arrays),
        "layout": engine.spec.layout_hash,
    }
    if engine.buffers:
        meta["buffers"] = _pack(engine.buffers.to_state(), "buffers", arrays)
    if engine.changes:  # as it was before there were such
        meta["changes"] = engine.changes.to_json()
    return meta, arrays


def state_digest(engine: Engine) -> str:
    """SHA-256 of the whole state.

    Without whose the receipts are: snapshots of before that was kept have the digest of the same state.
    """
    snapshot = take_snapshot(engine, copy=False)
    meta = {k: v for k, v in snapshot.meta.items() if k != RECEIPTS_OF}
    sha = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(snapshot.arrays):
        array = snapshot.arrays[name]
        sha.update(f"{name} {array.dtype.name} {array.shape}".encode())
        sha.update(to_bytes(array))
    return sha.hexdigest()


def restore(
    snapshot: Snapshot,
    spec: ParamSpec,
    strategy: Strategy,
    settings: EngineSettings,
    broadcast: Broadcast | None = None,
    planner: Planner | None = None,
) -> Engine:
    """An engine that goes on where the snapshot was taken. The snapshot stays as it is."""
    meta, rows = snapshot.meta, snapshot.rows
    arrays = {name: a.copy() for name, a in snapshot.arrays.items() if name != "vector"}
    engine = Engine(spec, strategy, settings, snapshot.arrays["vector"], broadcast, planner)
    engine.changes = Changes.from_json(meta["changes"]) if "changes" in meta else Changes()
    engine.settings = in_force(settings, engine.changes.values)
    engine.version = meta["version"]
    engine.paused, engine.finished = meta["paused"], meta["finished"]
    engine.pending = list(meta["pending"])
    engine.counters = Counters(**meta["counters"])
    engine.guard = Guard(**copying.deepcopy(meta["guard"]))
    engine.state = strategy.state_type(**_unpack(meta["strategy"], arrays))
    if broadcast is not None:
        engine.broadcast_state = broadcast.state_type(**_unpack(meta["broadcast"], arrays))
    if planner is not None:
        engine.planner_state = planner.state_type(**_unpack(meta["planner"], arrays))
    if engine.buffers:
        engine.buffers.restore(_unpack(meta["buffers"], arrays))
    engine.history = {int(k.removeprefix(HISTORY)): a for k, a in arrays.items() if k.startswith(HISTORY)}
    engine.ledger.restore(
        clients=[_client(c) for c in meta["clients"]] if rows is None else rows.clients,
        tasks=[_task(_unpack(t, arrays), spec) for t in meta["tasks"]],
        receipts=_receipts(meta) if rows is None else rows.receipts,
    )
    engine.deadlines.restore(engine.ledger.tasks.values())
    return engine


def _pack(value: Any, path: str, arrays: dict[str, Array]) -> Any:
    """JSON of a value; every array in it moves to `arrays`, its path stays behind."""
    if isinstance(value, UnitMap):
        return value.to_json()
    if isinstance(value, np.ndarray):
        arrays[path] = value
        return {"$array": path}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _pack(getattr(value, f.name), f"{path}/{f.name}", arrays) for f in fields(value)}
    if isinstance(value, Mapping):
        return {k: _pack(v, f"{path}/{k}", arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(v, f"{path}/{i}", arrays) for i, v in enumerate(value)]
    return value


def _unpack(value: Any, arrays: Mapping[str, Array]) -> Any:
    if isinstance(value, dict):
        if "$array" in value:
            return arrays[value["$array"]]
        return {k: _unpack(v, arrays) for k, v in value.items()}
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    return value


def _guard(guard: Guard) -> dict[str, Any]:
    """The guard's fields; without those on flaws while there are none, as before there were such."""
    since_flaws = ("flaws_in_row", "wasted", "last_flaw")
    return {k: v for k, v in asdict(guard).items() if v or k not in since_flaws}


def _client(data: dict[str, Any]) -> ClientRecord:
    return ClientRecord(**{**data, "capability": capability_of(data["capability"])})


def _submodel(data: dict[str, Any], spec: ParamSpec) -> Submodel:
    return Coordinates(data["indices"]) if "indices" in data else submodel_from_json(data, spec)


def _task(data: dict[str, Any], spec: ParamSpec) -> Task:
    submodel = data["submodel"]
    return Task(
        **{
            **data,
            "local": LocalPlan(**data["local"]),
            "submodel": None if submodel is None else _submodel(submodel, spec),
            "state": TaskState(data["state"]),
        }
    )


def receipt_row(r: Receipt) -> list[Any]:
    """A list, not a dict: there are many receipts."""
    d = r.decision
    told = (d.verdict.value, d.staleness, d.weight, d.reason.value, d.detail)
    return [r.update_id, r.task_id, r.version, *told]


def _receipts(meta: dict[str, Any]) -> list[tuple[Receipt, bool]]:
    """Each receipt, and whether it is the one that used up its task."""
    rows = meta["receipts"]
    of = meta.get(RECEIPTS_OF) or [("", "")] * len(rows)
    return [(receipt_of(row, *named), answers) for (*row, answers), named in zip(rows, of, strict=True)]


def receipt_of(row: list[Any], client_id: str, sha256: str) -> Receipt:
    """The receipt of a row; names are kept once. Raises `ValueError`, `KeyError` where that is none."""
    update_id, task_id, version, verdict, staleness, weight, reason, detail = row
    decision = Decision(_VERDICTS[verdict], staleness, weight, _REASONS[reason], detail)
    return Receipt(update_id, task_id, version, decision, sys.intern(client_id), sha256)


def capability_of(data: Mapping[str, Any]) -> Capability:
    """The inverse of `asdict`."""
    return Capability(**{**data, "codecs": tuple(data["codecs"])})


def decision_of(data: Mapping[str, Any]) -> Decision:
    """The inverse of `asdict`."""
    return Decision(**{**data, "verdict": Verdict(data["verdict"]), "reason": Reason(data["reason"])})
