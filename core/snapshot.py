"""The whole state of the server machine as data, its digest, and the way back.

A snapshot is JSON and named arrays, so it can be written as one safetensors file. The digest is a
SHA-256 over both: two engines with one digest behave alike for ever.

Clients and receipts are many, and few of them change from one snapshot to the next. A store that keeps them
as rows gets those that changed (`take_changes`), and gives back all of them; the rest is as small as what is
live.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from cattrs import Converter

from anabranch.core import unwritten
from anabranch.core.engine.broadcast import Broadcast
from anabranch.core.engine.buffers import Bounds
from anabranch.core.engine.changes import Changes
from anabranch.core.engine.cohorts import Cohorts, CohortState
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.guard import Guard
from anabranch.core.engine.ledger import ClientRecord, Counters
from anabranch.core.engine.loan import Loan
from anabranch.core.engine.part_changes import PartChanges
from anabranch.core.engine.planner import Planner
from anabranch.core.engine.settable import in_force
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.shelf import ROW, Remembered, Shelf, Shelved
from anabranch.core.engine.strategy import Strategy, Sums
from anabranch.core.errors import UPGRADE, AppError, InvalidUpdate, StoreCorrupt, StoreNewer
from anabranch.core.model.arrays import Array, own, to_bytes
from anabranch.core.model.params import Delta, ParamSpec, SparseVector
from anabranch.core.model.submodels import (
    Coordinates,
    Submodel,
    SubmodelJson,
    TensorSet,
    UnitMap,
    submodel_from_json,
)
from anabranch.core.model.updates import Capability, Decision, Reason, Receipt, Task, Verdict
from anabranch.core.plain import FieldError, UnknownField, from_plain, make_converter, written

T = TypeVar("T")
FORMAT = 2
RECEIPTS_OF = "receipts_of"  # the client and the payload of each receipt
VECTOR = "vector"
HISTORY = "history/"  # the names of the bases of open tasks
ARRAY = "$array"  # the key under which an array's name stays in the JSON
DATA = (
    "a state is a dataclass of numbers, texts, arrays, lists and dictionaries by texts, each field with the "
    "type of what it has: see docs/extending/strategy.md"
)
BESIDE = ("format", "clients", "receipts", RECEIPTS_OF, "rows")  # what the JSON has beside an `EngineState`
APART = 3  # the format without clients and receipts: they are rows of the store that has it
_VERDICTS, _REASONS = {v.value: v for v in Verdict}, {r.value: r for r in Reason}


@dataclass(frozen=True)
class SnapshotRows:
    """Clients and receipts apart from a snapshot: all of them, or those that changed since the one before.

    Receipts are with whether they answer their task. `enrolled`: the ids of clients that are new, in order.
    """

    clients: Mapping[str, ClientRecord]
    receipts: Sequence[tuple[Receipt, bool]]
    enrolled: Sequence[str] = ()


@dataclass(frozen=True)
class Snapshot:
    """`meta` is JSON; `arrays` are safe to write while the engine goes on, or lie in a file.

    They are copies, or what the engine never writes on; the vector may be its own, lent while `loan` is held.

    `rows`: clients and receipts, where they are not in `meta`. That says then under `rows` how many clients
    there are, and the numbers, from 1 for the first ever, of the receipts: the last that is gone, the newest.

    `holds`: what it names on a shelf, which therefore stays there as long as this lives.
    """

    meta: dict[str, Any]
    arrays: Mapping[str, Array]
    rows: SnapshotRows | None = None
    loan: Loan | None = field(default=None, repr=False, compare=False)
    holds: tuple[Shelved, ...] = field(default=(), repr=False, compare=False)


def take_snapshot(engine: Engine, copy: bool = True) -> Snapshot:
    """The engine's state. With `copy=False` the arrays are the engine's own: read them at once."""
    meta, arrays, holds = _state(engine)
    ledger = engine.ledger
    meta["clients"] = [{"client_id": c, **_converter.unstructure(r)} for c, r in ledger.clients.items()]
    meta["receipts"] = [[*receipt_row(r), ledger.answers_task(r)] for r in ledger.receipts.values()]
    meta[RECEIPTS_OF] = [[r.client_id, r.sha256] for r in ledger.receipts.values()]
    if copy:
        arrays = {name: a.copy() for name, a in arrays.items()}
    return Snapshot(meta, arrays, holds=holds)


def take_changes(engine: Engine) -> Snapshot:
    """The engine's state, copied, and what its ledger has noted as unsaved as rows.

    The bases of open tasks are the engine's own, which never writes on them, and so is the vector, lent.
    """
    meta, arrays, holds = _state(engine)
    loan = engine.lend()
    shared = {name for name in arrays if name.startswith(HISTORY)} | {VECTOR}
    arrays = {name: a if name in shared else a.copy() for name, a in arrays.items()}
    ledger, unsaved = engine.ledger, engine.ledger.unsaved
    assert unsaved is not None, "a ledger that is saved in pieces notes what changed"
    filed = engine.counters.applied + engine.counters.rejected
    span = [filed - len(ledger.receipts), filed]
    meta |= {"format": APART, "rows": {"clients": len(ledger.clients), "receipts": span}}
    newest = ledger.newest_receipts(unsaved.receipts)
    rows = SnapshotRows(
        clients={c: ledger.clients[c] for c in sorted(unsaved.clients)},
        receipts=[(r, ledger.answers_task(r)) for r in newest],
        enrolled=list(unsaved.enrolled),
    )
    return Snapshot(meta, arrays, rows, loan, holds)


@dataclass(frozen=True)
class EngineState:
    """Everything but the vector, the bases of tasks, and clients and receipts.

    The states of strategy, downlink and planner are of the types that these say. What has come later is not
    there while it says nothing: the digest of an unchanged run stays what it was.
    """

    version: int
    paused: bool
    finished: str
    pending: list[str]
    counters: Counters
    guard: Guard
    tasks: list[Task]
    strategy: Any
    broadcast: Any
    planner: Any
    layout: str
    buffers: Bounds | None = None
    changes: Changes = field(default_factory=Changes)
    noise: list[Array] = field(default_factory=list)
    part_changes: PartChanges = field(default_factory=PartChanges)
    cohorts: CohortState | None = None

    @classmethod
    def of(cls, engine: Engine) -> EngineState:
        """Of an engine, whose own arrays these are."""
        return cls(
            version=engine.version,
            paused=engine.paused,
            finished=engine.finished,
            pending=engine.pending,
            counters=engine.counters,
            guard=engine.guard,
            tasks=list(engine.ledger.tasks.values()),
            strategy=engine.state,
            broadcast=engine.broadcast_state,
            planner=engine.planner_state,
            layout=engine.spec.layout_hash,
            buffers=engine.buffers.bounds if engine.buffers else None,
            changes=engine.changes,
            noise=[] if engine.sums is None else engine.sums.history,
            part_changes=engine.part_changes,
            cohorts=None if engine.cohorts is None else engine.cohorts.state,
        )


def _state(engine: Engine) -> tuple[dict[str, Any], dict[str, Array], tuple[Shelved, ...]]:
    """JSON and arrays of everything but clients and receipts, and what they name on a shelf.

    Raises `AppError` where a strategy's or a planner's state has what is no data.
    """
    arrays: dict[str, Array] = {VECTOR: engine.vector}
    holds: list[Shelved] = []
    arrays |= {f"{HISTORY}{v}": a for v, a in sorted(engine.history.items())}
    plain = _converter.unstructure(EngineState.of(engine))
    tasks = [_apart(t, f"task/{t['task_id']}", arrays) for t in plain.pop("tasks")]
    meta: dict[str, Any] = {}
    for name, value in {**plain, "tasks": tasks}.items():
        try:
            meta[name] = _apart(value, name, arrays, holds)
        except FieldError as error:
            planner = engine.planner if name == "planner" else None
            whose = f"strategy {engine.strategy.name!r}" if planner is None else f"planner {planner.name!r}"
            raise AppError(f"{whose}, no snapshot can be made: {error}; {DATA}") from error
    known = {f.name: meta[f.name] for f in fields(EngineState) if f.name in meta}
    return {"format": FORMAT, **known}, arrays, tuple(holds)


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
    sums: Sums | None = None,
    cohorts: Cohorts | None = None,
    shelf: Shelf | None = None,
) -> Engine:
    """An engine that goes on where the snapshot was taken. The snapshot stays as it is.

    Raises `StoreCorrupt`, naming the field, where that is no state of such an engine, and `StoreNewer` where
    it is one of a newer release.
    """
    try:
        return _restored(snapshot, spec, strategy, settings, broadcast, planner, sums, cohorts, shelf)
    except UnknownField as error:
        version = snapshot.meta.get("version")
        raise StoreNewer(f"the snapshot of version {version}: {error}: {UPGRADE}") from error
    except (FieldError, InvalidUpdate) as error:
        raise StoreCorrupt(f"the snapshot of version {snapshot.meta.get('version')}: {error}") from error


def _restored(
    snapshot: Snapshot,
    spec: ParamSpec,
    strategy: Strategy,
    settings: EngineSettings,
    broadcast: Broadcast | None,
    planner: Planner | None,
    sums: Sums | None,
    cohorts: Cohorts | None,
    shelf: Shelf | None,
) -> Engine:
    arrays = {name: own(snapshot.arrays, name) for name in snapshot.arrays if name != VECTOR}
    meta, rows = _together(snapshot.meta, arrays, shelf), snapshot.rows
    state = from_plain({k: v for k, v in meta.items() if k not in BESIDE}, EngineState, _converter_of(spec))
    vector = own(snapshot.arrays, VECTOR)
    parts = broadcast, planner, sums, cohorts
    engine = Engine(spec, strategy, settings, vector, *parts, own=True, shelf=shelf)
    if sums is not None:
        sums.history = state.noise
    engine.changes = state.changes
    engine.settings = in_force(settings, engine.changes.values)
    engine.version = state.version
    engine.paused, engine.finished = state.paused, state.finished
    engine.pending, engine.counters, engine.guard = state.pending, state.counters, state.guard
    engine.state = _own_state(state.strategy, strategy.state_type)
    if broadcast is not None:
        engine.broadcast_state = _own_state(state.broadcast, broadcast.state_type)
    if planner is not None:
        engine.planner_state = _own_state(state.planner, planner.state_type)
    engine.part_changes = state.part_changes
    if cohorts is not None and state.cohorts is not None:
        cohorts.restore(state.cohorts)
    if state.buffers is not None:
        engine.buffers.bounds = state.buffers
    engine.history = {int(k.removeprefix(HISTORY)): a for k, a in arrays.items() if k.startswith(HISTORY)}
    engine.ledger.restore(
        clients=_clients(meta) if rows is None else rows.clients,
        tasks=state.tasks,
        receipts=_receipts(meta) if rows is None else rows.receipts,
    )
    engine.deadlines.restore(engine.ledger.tasks.values())
    return engine


def _own_state(plain: Any, cls: type[T]) -> T:
    """The state of a part, which may be one's own: a field too many is no sign of a newer release."""
    try:
        return from_plain(plain, cls, _converter)
    except UnknownField as error:
        raise FieldError(str(error)) from error


def packed(value: Any, path: str, arrays: dict[str, Array], holds: list[Shelved] | None = None) -> Any:
    """JSON of a state; every array in it moves to `arrays`, its path stays behind.

    What it names on a shelf comes to `holds`. Raises `FieldError` for what is no data.
    """
    return _apart(_converter.unstructure(value), path, arrays, holds)


def unpacked(plain: Any, arrays: Mapping[str, Array], cls: type[T]) -> T:
    """The inverse of `packed`. Raises `FieldError`."""
    return from_plain(_together(plain, arrays), cls, _converter)


def _apart(plain: Any, path: str, arrays: dict[str, Array], holds: list[Shelved] | None = None) -> Any:
    if isinstance(plain, np.ndarray):
        arrays[path] = plain
        return {ARRAY: path}
    if isinstance(plain, Shelved):
        assert holds is not None, "only a strategy has a shelf"
        holds.append(plain)
        return {ROW: plain.sha256, "size": plain.size}
    if isinstance(plain, Mapping):
        return {k: _apart(v, f"{path}/{k}", arrays, holds) for k, v in plain.items()}
    if isinstance(plain, list | tuple):
        return [_apart(v, f"{path}/{i}", arrays, holds) for i, v in enumerate(plain)]
    if plain is None or isinstance(plain, str | int | float):
        return plain
    raise FieldError(f"{path} is of type {type_name(plain)}, which is no data")


def type_name(value: Any) -> str:
    """The type of a value, for a message: `set`, `numpy.int64`."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _together(plain: Any, arrays: Mapping[str, Array], shelf: Shelf | None = None) -> Any:
    if isinstance(plain, dict):
        if ROW in plain:
            return _named(plain, shelf)
        if ARRAY in plain:
            name = plain[ARRAY]
            if not isinstance(name, str) or name not in arrays:
                raise FieldError(f"the array {name!r} is missing")
            return arrays[name]
        return {k: _together(v, arrays, shelf) for k, v in plain.items()}
    if isinstance(plain, list):
        return [_together(v, arrays, shelf) for v in plain]
    return plain


def _named(plain: Any, shelf: Shelf | None) -> Shelved:
    """The reference of a row. Raises `FieldError`."""
    try:
        sha256, size = from_plain([plain[ROW], plain["size"]], tuple[str, int], _converter)
    except (KeyError, ValueError) as error:
        raise FieldError(f"a reference to a shelf cannot be read: {error}") from error
    if shelf is None:
        raise FieldError(f"{sha256[:16]} lies on a shelf (strategy.memory), and here is none")
    return shelf.named(sha256, size)


def _delta_out(delta: Any) -> Any:
    if isinstance(delta, SparseVector):
        return {"values": delta.values, "indices": delta.indices, "size": delta.size}
    return {"values": delta}


def _delta_in(plain: Any, _: Any) -> Any:
    if isinstance(plain, dict) and plain.keys() == {"values"}:
        return _converter.structure(plain["values"], Array)
    return _converter.structure(plain, SparseVector)


_converter = make_converter()
_converter.register_unstructure_hook(UnitMap, UnitMap.to_json)
_converter.register_unstructure_hook(TensorSet, TensorSet.to_json)
_converter.register_unstructure_hook(Delta, _delta_out)
_converter.register_structure_hook(Delta, _delta_in)
_converter.register_unstructure_hook(Remembered, lambda it: it if isinstance(it, Shelved) else _delta_out(it))
_converter.register_structure_hook(
    Remembered, lambda plain, of: plain if isinstance(plain, Shelved) else _delta_in(plain, of)
)
written(_converter, Guard, later=("flaws_in_row", "wasted", "last_flaw"))
written(_converter, Counters, later=("left_out",))
written(_converter, ClientRecord, later=("steps",))
written(_converter, EngineState, later=("buffers", "changes", "noise", "part_changes", "cohorts"))


@lru_cache(maxsize=4)
def _converter_of(spec: ParamSpec) -> Converter:
    """One that knows the model whose parts tasks are of."""

    def submodel(plain: Any, _: Any) -> Submodel | None:
        if isinstance(plain, dict) and "indices" in plain:
            return made.structure(plain, Coordinates)
        return submodel_from_json(made.structure(plain, kept), spec)

    kept: Any = SubmodelJson | None
    made = make_converter()
    made.register_structure_hook(Submodel | None, submodel)
    return made


@unwritten.dataclass(frozen=True, kw_only=True)
class _Client(ClientRecord):
    client_id: str


_RECORD = tuple(f.name for f in fields(ClientRecord))


def _clients(meta: dict[str, Any]) -> dict[str, ClientRecord]:
    try:
        found = from_plain(meta.get("clients"), list[_Client], _converter)
    except FieldError as error:
        raise type(error)(f"clients {error}") from error
    return {c.client_id: ClientRecord(*(getattr(c, name) for name in _RECORD)) for c in found}


def receipt_row(r: Receipt) -> list[Any]:
    """A list, not a dict: there are many receipts."""
    d = r.decision
    told = (d.verdict.value, d.staleness, d.weight, d.reason.value, d.detail)
    return [r.update_id, r.task_id, r.version, *told]


# As `receipt_row` makes it, and whether it is the one that used up its task.
_ReceiptRow = tuple[str, str, int, Verdict, int, float | None, Reason, str, bool]


def _receipts(meta: dict[str, Any]) -> list[tuple[Receipt, bool]]:
    """Each receipt, and whether it is the one that used up its task. Raises `FieldError`."""
    try:
        rows = from_plain(meta.get("receipts"), list[_ReceiptRow], _converter)
        of = from_plain(meta.get(RECEIPTS_OF, []), list[tuple[str, str]], _converter) or [("", "")] * len(
            rows
        )
        return [(receipt_of(row[:-1], *named), row[-1]) for row, named in zip(rows, of, strict=True)]
    except ValueError as error:
        raise FieldError(f"receipts {error}") from error


def receipt_of(row: Sequence[Any], client_id: str, sha256: str) -> Receipt:
    """The receipt of a row; names are kept once. Raises `ValueError`, `KeyError` where that is none."""
    update_id, task_id, version, verdict, staleness, weight, reason, detail = row
    decision = _decision(verdict, staleness, weight, reason, detail)
    return Receipt(update_id, task_id, version, decision, sys.intern(client_id), sha256)


@lru_cache(maxsize=1024, typed=True)  # 1 and 1.0 are written differently
def _decision(verdict: str, staleness: int, weight: float | None, reason: str, detail: str) -> Decision:
    """What the verdict was: of a hundred thousand receipts most have one of a few."""
    return Decision(_VERDICTS[verdict], staleness, weight, _REASONS[reason], detail)


def capability_row(capability: Capability) -> dict[str, Any]:
    """As plain values, for one row of a table."""
    row: dict[str, Any] = _converter.unstructure(capability)
    return row


def capability_of(data: Any) -> Capability:
    """The inverse of `capability_row`. Raises `FieldError`."""
    return from_plain(data, Capability, _converter)
