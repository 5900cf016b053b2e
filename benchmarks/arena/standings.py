"""Who ends over whom: the rows that every cell has, against each other, cell by cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.arena.cells import Cell
from benchmarks.arena.intervals import Interval, bootstrap, paired
from benchmarks.arena.rows import HORIZON_S, RAW, SPARSE
from benchmarks.arena.store import Record

MARK = "fedavg, Nesterov"  # rounds with momentum, the strongest peer: zero of the picture
PLAIN = "fedavg"
OURS = "annealed, schedule-free"
MET = (OURS, "annealed", "fedbuff", PLAIN)  # against it
AGAINST = (MARK, "fedbuff", PLAIN)  # whom each is counted against
BELOW = 1.0  # points under the reference's accuracy at the end: what time and bytes are counted to
WORDS: Mapping[str, str] = {
    MARK: "rounds with momentum",
    PLAIN: "plain rounds",
    "fedbuff": "FedBuff",
    "annealed": "`annealed`",
    OURS: "`annealed`, schedule-free",
}

Ended = Mapping[tuple[str, str], Sequence[Record]]  # by the names of a cell and a row
# In a cell, by a chain, of one strategy over another; None where either has not been run.
Lead = Callable[[Cell, str, str, str, Ended], Interval | None]


@dataclass(frozen=True)
class Standing:
    """How far strategies end over the mark in a cell, in points; all travel by `chain`."""

    cell: Cell
    chain: str
    of: Mapping[str, Interval]


@dataclass(frozen=True)
class Count:
    """In how many cells a strategy is over another by a whole interval, level with it, and under it."""

    over: int
    level: int
    under: int

    def __str__(self) -> str:
        return f"{self.over} / {self.level} / {self.under}"


def standings(cells: Sequence[Cell], ended: Ended) -> list[Standing]:
    """Of each cell in which the mark has ended and all of `MET`: with whole values, else with the chain."""
    return [found for cell in cells if (found := _standing(cell, ended)) is not None]


def _standing(cell: Cell, ended: Ended) -> Standing | None:
    for chain in (RAW, SPARSE):
        of = {name: found for name in MET if (found := over(cell, chain, name, MARK, ended)) is not None}
        if len(of) == len(MET):
            return Standing(cell, chain, of)
    return None


def over(cell: Cell, chain: str, mine: str, theirs: str, ended: Ended) -> Interval | None:
    """How far one strategy ends over another, paired by seed; None where either has not been run."""
    rows = [ended.get((cell.name, f"{name}/{chain}")) for name in (mine, theirs)]
    return None if rows[0] is None or rows[1] is None else lead(rows[0], rows[1])


def lead(mine: Sequence[Record], theirs: Sequence[Record]) -> Interval:
    """How far the accuracy of some runs is over that of others, paired by seed."""
    return bootstrap(paired(*({record.seed: record.accuracy for record in of} for of in (mine, theirs))))


def half_way(mine: Sequence[Record], theirs: Sequence[Record]) -> Interval:
    """How far some runs are half-way over where others end, paired by seed."""
    ends = {record.seed: record.accuracy for record in theirs}
    return bootstrap(paired({record.seed: record.half for record in mine}, ends))


def count(found: Sequence[Standing], mine: str, theirs: str, ended: Ended) -> Count:
    """Over these cells, by the accuracy at the end."""
    return _counted(over, found, mine, theirs, ended)


def soonness(found: Sequence[Standing], mine: str, theirs: str, ended: Ended) -> Count:
    """In how many cells `mine` is at the target sooner (`over`) or later (`under`) by a whole interval."""
    return _counted(sooner, found, mine, theirs, ended)


def _counted(lead: Lead, found: Sequence[Standing], mine: str, theirs: str, ended: Ended) -> Count:
    leads = (lead(standing.cell, standing.chain, mine, theirs, ended) for standing in found)
    return tally(each for each in leads if each is not None)


def reached(record: Record, target: float) -> tuple[float, float, float] | None:
    """Seconds, MB up and MB down until the accuracy was first at the target; None: it never was."""
    found = ((t, up, down) for t, accuracy, up, down in record.curve if accuracy >= target)
    return next(found, None)


def sooner(cell: Cell, chain: str, mine: str, theirs: str, ended: Ended) -> Interval | None:
    """Seconds, paired by seed, by which one is at the target before the other.

    The target: what plain rounds by the same chain come to, less `BELOW`. A run that never was there counts
    with all of its time. None where one of the three has not been run.
    """
    plain, his, other = (ended.get((cell.name, f"{name}/{chain}")) for name in (PLAIN, mine, theirs))
    if plain is None or his is None or other is None:
        return None
    target = statistics.fmean(record.accuracy for record in plain) - BELOW
    took, their = ({record.seed: _seconds(record, target) for record in of} for of in (his, other))
    return bootstrap(paired(their, took))


def _seconds(record: Record, target: float) -> float:
    at = reached(record, target)
    return HORIZON_S if at is None else at[0]


def tally(intervals: Iterable[Interval]) -> Count:
    """How many are over zero, level with it, and under it."""
    each = list(intervals)
    above, below = sum(i.above for i in each), sum(i.below for i in each)
    return Count(above, len(each) - above - below, below)
