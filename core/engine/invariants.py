"""What must hold after every event, whatever happened. Tests and `anabranch verify` call it."""

from __future__ import annotations

import numpy as np

from anabranch.core.engine.engine import Engine


def violations(engine: Engine) -> list[str]:
    """Every broken invariant, in words; empty when all hold."""
    ledger, found = engine.ledger, []

    def check(holds: bool, what: str) -> None:
        if not holds:
            found.append(what)

    live = ledger.leased()
    check(ledger.live == len(live), f"{len(live)} live tasks, but {ledger.live} counted")
    # A cap that was lowered is kept by those who come, and says nothing of those who are there.
    cap = 0 if "server.concurrency" in engine.changes.made else engine.settings.concurrency
    check(not cap or len(live) <= cap, f"{len(live)} live tasks over the cap of {cap}")
    share = 0 if "server.tasks_per_client" in engine.changes.made else engine.settings.tasks_per_client
    for client_id in {t.client_id for t in live}:
        mine = len(ledger.live_of(client_id))
        check(not share or mine <= share, f"client {client_id} holds {mine} live tasks")
    for task in ledger.tasks.values():
        check(0 <= task.base_version <= engine.offered, f"task {task.task_id} starts from a future version")
        check(task.client_id in ledger.clients, f"task {task.task_id} is of an unknown client")
        check(ledger.receipt_of_task(task.task_id) is None, f"task {task.task_id} is open and answered")
    if engine.strategy.needs_base:
        lost = {version for version in {t.base_version for t in live} if engine.base(version) is None}
        check(not lost or bool(engine.finished), f"the models of versions {sorted(lost)} are not held")
    check(set(engine.history) <= set(ledger.bases), "models are held that no live task started from")
    check(engine.vector.size == engine.spec.size, "the vector does not have the size of the spec")
    check(bool(np.isfinite(engine.vector).all()), "the model has values that are not finite")
    check(engine.version <= engine.counters.applied + engine.counters.rollbacks, "more versions than updates")
    check(_are_in_cohorts(engine), "what is pending is not what the cohorts have, each device once in one")
    return found


def _are_in_cohorts(engine: Engine) -> bool:
    """Whether masked updates that are in no version are those of the cohorts, in their order."""
    cohorts = engine.cohorts
    if cohorts is None:
        return True
    groups = [*(cohort.members for cohort in cohorts.waiting), cohorts.members]
    members = [member.update_id for group in groups for member in group]
    once = all(len({member.client_id for member in group}) == len(group) for group in groups)
    return once and members == engine.pending
