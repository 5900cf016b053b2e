"""Whether parts of one's own give the same for the same, as every restart and replay needs.

A part that draws by itself, reads a clock or remembers beside its state makes a run that ends with its first
restart: its log comes to other versions, of which nobody can say why. So some events are handled twice, the
second time by a copy of the engine, and both must come to one state.
"""

from __future__ import annotations

import json

from anabranch.core import events as ev
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import AppError, StoreCorrupt
from anabranch.core.snapshot import Snapshot, restore, take_snapshot
from anabranch.host.parts import own_named

BYTES_MAX = 64 * 2**20  # of models that are copied in passing
CLIENTS_MAX = 10_000


def copied(engine: Engine) -> Snapshot | None:
    """The state before an event that is handled twice; None where it is large, or no part is one's own."""
    bytes_, clients = engine.vector.nbytes * (1 + len(engine.history)), len(engine.ledger.clients)
    if not own_named() or bytes_ > BYTES_MAX or clients > CLIENTS_MAX:
        return None
    if engine.cohorts is not None or engine.sums is not None:  # they remember beside the engine
        return None
    found = _taken(engine, copy=True)
    return None if found is None or found.holds else found


def check_alike(before: Snapshot, event: ev.TaskAsked | ev.UpdateArrived, engine: Engine) -> None:
    """Raises `AppError` where the event, handled again from the state before it, comes to something else."""
    parts = engine.broadcast, engine.planner
    try:
        again = restore(before, engine.spec, engine.strategy, engine.settings, *parts, shelf=engine.shelf)
    except StoreCorrupt:
        return  # as in `_taken`
    again.handle(event)
    one, other = _taken(engine), _taken(again)
    if one is None or other is None or not (where := _difference(one, other)):
        return
    what = f"ask of {event.ask.client_id}" if isinstance(event, ev.TaskAsked) else "update"
    raise AppError(
        f"{own_named()}: the same {what} came to something else when it was handled again ({where} "
        "differ), so no server that is started again could go on with this run: draw of core.rng alone, "
        "read no clock but context.now, and remember nothing but in the state"
    )


def _taken(engine: Engine, copy: bool = False) -> Snapshot | None:
    """None where a state is no data: of which field is said with the next update that is looked at."""
    try:
        return take_snapshot(engine, copy)
    except AppError:
        return None


def _difference(one: Snapshot, other: Snapshot) -> str:
    """What of two states is not the same; empty: all is."""
    for name, plain in one.meta.items():
        there = other.meta.get(name)
        if plain != there and _text(plain) != _text(there):  # a NaN is not equal to itself
            return name
    for name, array in one.arrays.items():
        again = other.arrays.get(name)
        if again is None or array.tobytes() != again.tobytes():
            return name
    return ""


def _text(plain: object) -> str:
    return json.dumps(plain, sort_keys=True)
