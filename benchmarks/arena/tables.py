"""The arena's tables of what was run: a workload's rows by split, and each of its cells."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks.arena.cells import CELLS, Cell
from benchmarks.arena.play import Match
from benchmarks.arena.rows import CHAINS, REFERENCE, ROWS, Row
from benchmarks.arena.standings import BELOW, MARK, OURS, PLAIN, WORDS, half_way, lead, reached
from benchmarks.arena.store import Record
from benchmarks.studies import table

TITLES = {"digits": "Digits", "fashion-mnist": "Fashion-MNIST", "text": "Text", "regression": "Regression"}

# Of the rows that every cell has: who is held against whom.
HELD = (
    (MARK, PLAIN),
    ("fedbuff", MARK),
    (OURS, MARK),
    ("fedbuff", PLAIN),
    (OURS, "fedbuff"),
    ("annealed", "fedbuff"),
)

Finals = Sequence[Record]
Ended = Mapping[tuple[str, str], tuple[Match, Finals]]  # by the names of a cell and a row
Figure = Callable[[Record], float | None]


def sections(workload: str, ended: Ended) -> list[str]:
    """Tables of its rows, and one for each of its cells that has any; nothing where no row has ended."""
    cells = [cell for cell in CELLS if cell.workload == workload and any(at == cell.name for at, _ in ended)]
    each = (_cell(cell, ended) for cell in cells)
    return [_held(cells, ended), _overview(cells, ended), *each] if cells else []


def _held(cells: Sequence[Cell], ended: Ended) -> str:
    """The rows that every cell has against each other, cell by cell; empty where none has two of them."""
    lines = [[cell.name, chain, *_leads(cell, chain, ended)] for chain in CHAINS for cell in cells]
    found = [line for line in lines if any(line[2:])]
    if not found:
        return ""
    head = ("cell", "chain", *(f"{WORDS[mine]} over {WORDS[theirs]}" for mine, theirs in HELD))
    return f"""## Five rows, cell by cell

By how many points the rows that every cell has end over each other, at the same chain: **bold** where all of
the interval is over or under zero.

{table(head, found)}"""


def _leads(cell: Cell, chain: str, ended: Ended) -> list[str]:
    pairs = ([ended.get((cell.name, f"{name}/{chain}")) for name in pair] for pair in HELD)
    return [str(lead(mine[1], theirs[1])) if mine and theirs else "" for mine, theirs in pairs]


def _overview(cells: Sequence[Cell], ended: Ended) -> str:
    """A table for each kind of links and who leaves: rows by splits."""
    alike: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.links, cell.faults), []).append(cell)
    each = "\n\n".join(_group(", ".join(of), found, ended) for of, found in alike.items())
    return f"""## Accuracy at the end, less FedAvg's

Points, with their interval: **bold** where all of it is over or under zero. The line of `{REFERENCE}`
has its accuracy in %, as all lines have in a cell without it.

{each}"""


def _group(title: str, cells: Sequence[Cell], ended: Ended) -> str:
    lines = [[row.name, *(_at(cell, row, ended) for cell in cells)] for row in ROWS]
    return table((title, *(cell.split for cell in cells)), [line for line in lines if any(line[1:])])


def _at(cell: Cell, row: Row, ended: Ended) -> str:
    found = ended.get((cell.name, row.name))
    if found is None:
        return ""
    reference = _reference(cell, ended)
    if reference is None or row.name == REFERENCE:
        return _mean(found[1], lambda r: r.accuracy)
    return str(lead(found[1], reference))


def _reference(cell: Cell, ended: Ended) -> Finals | None:
    found = ended.get((cell.name, REFERENCE))
    return None if found is None else found[1]


def _cell(cell: Cell, ended: Ended) -> str:
    reference = _reference(cell, ended)
    found = [of for (at, _), of in ended.items() if at == cell.name]
    found.sort(key=lambda of: statistics.fmean(r.accuracy for r in of[1]))
    target = statistics.fmean(r.accuracy for r in reference or found[0][1]) - BELOW
    lines = [_line(match, finals, reference, target) for match, finals in found]
    to = f"to {target:.1f} %"
    head = ("", "accuracy, %", "less FedAvg", "at half the time, less FedAvg's end", f"seconds {to}")
    more = (
        f"MB up {to}",
        f"MB down {to}",
        "MB, both ways",
        "worst tenth, %",
        "updates",
        "staleness",
        "tuned to",
    )
    whose = f"`{REFERENCE}`'s" if reference else "the lowest row's"
    of_target = f"{to.removeprefix('to ')} is {whose} accuracy less {BELOW:g}"
    return f"## {cell.name}\n\nThe worst first; {of_target}.\n\n{table((*head, *more), lines)}"


def _line(match: Match, finals: Finals, reference: Finals | None, target: float) -> list[str]:
    against = half = ""
    if reference is not None and match.row.name != REFERENCE:
        against = str(lead(finals, reference))
        half = str(half_way(finals, reference))
    there = [at for r in finals if (at := reached(r, target)) is not None]
    some = "" if len(there) == len(finals) else f" ({len(there)} of {len(finals)})"
    return [
        match.row.name,
        _mean(finals, lambda r: r.accuracy),
        against,
        half,
        _average([seconds for seconds, _, _ in there], 0) + some,
        _average([up for _, up, _ in there], 2) + some,
        _average([down for _, _, down in there], 2) + some,
        _mean(finals, lambda r: r.both_ways_mb),
        _mean(finals, lambda r: r.worst_tenth),
        _mean(finals, lambda r: r.updates, 0),
        _mean(finals, lambda r: r.staleness),
        tuned_to(match, finals),
    ]


def _mean(finals: Finals, figure: Figure, digits: int = 1) -> str:
    return _average([value for r in finals if (value := figure(r)) is not None], digits)


def _average(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f}" if values else "-"


def tuned_to(match: Match, finals: Finals) -> str:
    """The setting that a row has ended at; †: a neighbour of it was left."""
    setting = ", ".join(f"{key.rsplit('.', 1)[1]} {value:g}" for key, value in finals[0].setting.items())
    return setting + ("" if match.progress.settled else " †")
