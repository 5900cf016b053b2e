"""What an engine takes over of the state that a rollback's fold (`host/rollback.py`) has come to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anabranch.core import events as ev
from anabranch.core.engine.buffers import Bounds
from anabranch.core.engine.part_changes import PartChanges
from anabranch.core.engine.strategy import State
from anabranch.core.model.params import Vector
from anabranch.core.model.updates import Task, Verdict

if TYPE_CHECKING:
    from anabranch.core.engine.engine import Engine


@dataclass(frozen=True)
class RollbackOutcome:
    """What an engine takes over of a fold.

    `bounds`: what the next values of the buffers are within. `part_changes`: after the new version, with what
    the fold holds. `folded`: updates that had been held and are in the new version; `pending`: those that are
    still held; `left_out`: how many count no more, and `left_out_total` how many with what the fold itself
    has left out, or what it began with; `in_doubt`: open tasks whose results would bring back what is left
    out.
    """

    state: State
    vector: Vector
    bounds: Bounds
    lengths: list[float]
    part_changes: PartChanges
    folded: list[str]
    pending: list[str]
    left_out: int
    left_out_total: int
    in_doubt: list[Task]


def outcome(event: ev.RolledBack, engine: Engine) -> RollbackOutcome:
    """What becomes of an engine by a rollback that has its state."""
    fold = event.fold
    assert fold is not None, "a rollback is handled with the state that the log gives"
    held, counting = set(fold.pending), fold.ledger.receipts
    left_out, total = _left_out(event, engine, fold)
    return RollbackOutcome(
        # The numbers of versions in it are the fold's; its newest one is to be our next.
        state=engine.strategy.shifted(fold.state, engine.version + 1 - fold.version),
        vector=fold.vector,
        bounds=fold.buffers.bounds,
        lengths=list(fold.guard.lengths),
        part_changes=replace(engine.part_changes.taken(None).published(), held=fold.part_changes.held),
        folded=[u for u in engine.pending if u not in held and u in counting],
        pending=[u for u in engine.pending if u in held and engine.cohorts is None],
        left_out=left_out,
        left_out_total=total,
        in_doubt=in_doubt(event, engine),
    )


def _left_out(event: ev.RolledBack, engine: Engine, fold: Engine) -> tuple[int, int]:
    """How many updates count no more, and how many with those of before."""
    if engine.cohorts is not None and event.rules > 2:
        # Those in versions: what waits is lost, and some may have been before.
        counted = fold.updates_summed - fold.counters.left_out
        total = engine.updates_summed - counted
        return total - engine.counters.left_out, total
    if event.rules > 4:  # of receipts there may be fewer than updates
        left_out = engine.counters.applied - fold.counters.applied
        return left_out, fold.counters.left_out + left_out
    told, counting = engine.ledger.receipts, fold.ledger.receipts
    taken = (u for u, receipt in told.items() if receipt.decision.verdict is not Verdict.REJECTED)
    left_out = sum(u not in counting for u in taken)
    return left_out, fold.counters.left_out + left_out


def in_doubt(event: ev.RolledBack, engine: Engine) -> list[Task]:
    """Open tasks of later versions, where the model they started from would be mixed into ours again.

    A difference from it does little harm, so strategies that add differences up take those; unless nothing of
    anybody's is to be left.
    """
    if not (engine.strategy.mixes_models or event.everyone):
        return []
    tasks = engine.ledger.tasks.values()
    return [t for t in tasks if t.base_version > event.to_version and t.client_id not in event.without]
