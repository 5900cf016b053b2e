"""Rounds whose deadline is tuned, in every cell that has them: counts and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.arena.cells import CELLS, FAULTS, FAULTS_SAID, Cell
from benchmarks.arena.rows import RAW
from benchmarks.arena.standings import MARK, OURS, Ended, lead, tally
from benchmarks.arena.store import Record
from benchmarks.studies import table

Runs = Sequence[Record]


@dataclass(frozen=True)
class DeadlineRow:
    """A row of rounds whose deadline is tuned, and what was tuned beside it.

    `axes`: how a line tells its point. `others`: who stands against it, tuned by as many points.
    """

    row: str
    beside: str
    axes: Mapping[str, str]
    others: Mapping[str, str]


DEADLINE = {"strategy.deadline_s": "{:g} s"}
DEADLINE_ROWS = (
    DeadlineRow(
        f"{MARK}, deadline tuned",
        "cohort",
        DEADLINE | {"strategy.clients_per_round": "of {:g}"},
        {MARK: "rounds as set", "fedbuff": "FedBuff", OURS: "`annealed`, schedule-free"},
    ),
    DeadlineRow(
        f"{MARK}, steps and deadline tuned",
        "steps",
        DEADLINE | {"client.steps": "{:g} steps"},
        {
            f"{MARK}, steps tuned": "rounds, steps tuned",
            "fedbuff, steps tuned": "FedBuff, steps tuned",
            "waves, Nesterov, steps tuned": "`waves`, steps tuned",
        },
    ),
)


def section(ended: Ended) -> str:
    """What the page says of them; empty where no cell has them."""
    parts = [_part(tuned, cells, ended) for tuned in DEADLINE_ROWS if (cells := _cells(tuned, ended))]
    if not parts:
        return ""
    head = """## Deadlines tuned, cell by cell

Rounds with momentum that end with what has come by a deadline, which is tuned: whole values, as many
points as every row has. `Rounds as set` wait for all of their cohort where nobody leaves, and else for the
slowest."""
    return "\n\n".join((head, *parts))


def _part(tuned: DeadlineRow, cells: Sequence[Cell], ended: Ended) -> str:
    counts = [[said, *_counts(tuned, name, cells, ended)] for name, said in tuned.others.items()]
    head = ("cell", "deadline", "%", *tuned.others.values())
    return f"""### The deadline and the {tuned.beside}

In how many cells the others end over these rounds by the whole interval / level with them / under them:

{table(("", *FAULTS_SAID.values()), counts)}

How far over these rounds they end, in points:

{table(head, [_line(tuned, cell, ended) for cell in cells])}"""


def _cells(tuned: DeadlineRow, ended: Ended) -> list[Cell]:
    return [cell for cell in CELLS if _of(cell, tuned.row, ended)]


def _of(cell: Cell, name: str, ended: Ended) -> Runs:
    return ended.get((cell.name, f"{name}/{RAW}"), ())


def _counts(tuned: DeadlineRow, other: str, cells: Sequence[Cell], ended: Ended) -> list[str]:
    counted = []
    for faults in FAULTS:
        met = [cell for cell in cells if cell.faults == faults and _of(cell, other, ended)]
        leads = (lead(_of(cell, other, ended), _of(cell, tuned.row, ended)) for cell in met)
        counted.append(str(tally(leads)) if met else "")
    return counted


def _line(tuned: DeadlineRow, cell: Cell, ended: Ended) -> list[str]:
    mine = _of(cell, tuned.row, ended)
    point = ", ".join(way.format(mine[0].setting[key]) for key, way in tuned.axes.items())
    leads = (str(lead(other, mine)) if (other := _of(cell, name, ended)) else "" for name in tuned.others)
    return [cell.name, point, f"{statistics.fmean(record.accuracy for record in mine):.1f}", *leads]
