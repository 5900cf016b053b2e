"""Which leases end when: the earliest first, each once, and one that was extended only at its newest end."""

from __future__ import annotations

from dataclasses import replace

from anabranch.core.engine.deadlines import Deadlines
from anabranch.core.engine.ledger import Ledger
from anabranch.core.model.updates import LocalPlan, Task, TaskState


def books(*ends: float) -> tuple[Ledger, list[Task]]:
    """An open task for each end of a lease."""
    ledger = Ledger(receipts_max=1)
    tasks = [Task(f"t{n}", "a", 0, 0.0, at, at, 1, LocalPlan()) for n, at in enumerate(ends)]
    for task in tasks:
        ledger.open(task)
    return ledger, tasks


def test_leases_end_in_the_order_of_their_ends_also_when_they_are_filled_in_anew() -> None:
    ends = (40.0, 10.0, 30.0, 20.0, 50.0, 5.0)
    ledger, tasks = books(*ends)
    grown, filled = Deadlines(ledger), Deadlines(ledger)
    for task in tasks:
        grown.add(task)
    filled.add(tasks[0])  # of before: filled anew has nothing of it
    filled.restore(tasks)
    for deadlines in (grown, filled):
        assert deadlines.earliest() == 5.0
        assert list(deadlines.ended(4.9)) == []
        assert [task.expires_at for task in deadlines.ended(30.0)] == [5.0, 10.0, 20.0, 30.0]
        assert deadlines.earliest() == 40.0
        assert [task.expires_at for task in deadlines.ended(99.0)] == [40.0, 50.0]
        assert deadlines.earliest() is None


def test_a_lease_that_was_extended_ends_once_and_late() -> None:
    ledger, (task, other) = books(10.0, 15.0)
    deadlines = Deadlines(ledger)
    deadlines.restore([task, other])
    longer = replace(task, expires_at=20.0)
    ledger.replace(longer)
    deadlines.add(longer)
    deadlines.add(longer)  # extended to the same moment: no second end
    assert deadlines.earliest() == 15.0
    found = []
    for ended in deadlines.ended(20.0):
        found.append(ended)
        ledger.replace(replace(ended, state=TaskState.EXPIRED))
    assert found == [other, longer]
    assert deadlines.earliest() is None


def test_a_task_that_is_closed_has_no_deadline() -> None:
    ledger, (task, other) = books(10.0, 15.0)
    deadlines = Deadlines(ledger)
    deadlines.restore([task, other])
    ledger.close(task)
    assert deadlines.earliest() == 15.0
    ledger.close(other)
    assert list(deadlines.ended(99.0)) == []
