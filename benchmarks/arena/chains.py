"""What the sparse chain does to each strategy, and how they stand by the better chain."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.arena.cells import CELLS, FAULTS, FAULTS_SAID, LINKS, LINKS_SAID, WORKLOADS, Cell
from benchmarks.arena.rows import RAW, SPARSE
from benchmarks.arena.standings import MARK, WORDS, lead, tally
from benchmarks.arena.store import Record
from benchmarks.arena.tables import TITLES, Ended
from benchmarks.studies import table

ALSO = {
    "fedbuff, Nesterov": "FedBuff with that momentum",
    "fedasync": "FedAsync",
    "teasq": "TEASQ-Fed",
    "port": "PORT",
    "fadas": "FADAS",
    "ca2fl": "CA2FL",
}
SAID: Mapping[str, str] = {**WORDS, **ALSO}


class Both(NamedTuple):
    """A strategy in a cell by both chains: what it came to, and which of them the tuning seeds chose."""

    raw: Sequence[Record]
    sparse: Sequence[Record]
    best: Sequence[Record]


def section(ended: Ended) -> str:
    """What the page says of them; empty where nobody has gone both ways."""
    parts = [_part(*kind, ended) for kind in itertools.product(WORKLOADS, LINKS, FAULTS)]
    if not any(parts):
        return ""
    head = f"""## The sparse chain, and whole values

For each strategy, in the cells in which it has ended by both: in how many the sparse chain ends over whole
values by the whole interval / level with them / under them, by how many points in the mean of these cells,
from the least to the most, and by how many times fewer bytes, both ways. Then in how many of the cells that
{WORDS[MARK]} have as well it ends over / level with / under these: both by whole values, both by the
sparse chain, and each by the chain that its own tuning seeds did better by."""
    return "\n\n".join((head, *filter(None, parts)))


def _part(workload: str, links: str, faults: str, ended: Ended) -> str:
    cells = [c for c in CELLS if (c.workload, c.links, c.faults) == (workload, links, faults)]
    met = {name: dict(_both(cells, name, ended)) for name in SAID}
    lines = [_line(name, both, met[MARK]) for name, both in met.items() if both]
    head = ("", "cells", "sparse, whole", "points", "bytes", "whole", "sparse", "each by its best")
    title = f"### {TITLES[workload]}, {LINKS_SAID[links]}, {FAULTS_SAID[faults]}"
    return f"{title}\n\n{table(head, lines)}" if lines else ""


def _both(cells: Sequence[Cell], name: str, ended: Ended) -> Iterator[tuple[str, Both]]:
    for cell in cells:
        whole, chained = (ended.get((cell.name, f"{name}/{chain}")) for chain in (RAW, SPARSE))
        if whole is None or chained is None:
            continue
        best = max((whole, chained), key=lambda way: way[0].tuned)
        yield cell.name, Both(whole[1], chained[1], best[1])


def _line(name: str, cells: Mapping[str, Both], mark: Mapping[str, Both]) -> list[str]:
    leads = [lead(both.sparse, both.raw) for both in cells.values()]
    means = [interval.mean for interval in leads]
    fewer = statistics.fmean(_bytes(both.raw) / _bytes(both.sparse) for both in cells.values())
    line = [SAID[name], str(len(cells)), str(tally(leads)), _points(means), f"{fewer:.1f}"]
    common = [(both, mark[at]) for at, both in cells.items() if at in mark and name != MARK]
    return line + [
        str(tally(lead(mine[way], theirs[way]) for mine, theirs in common)) if common else ""
        for way in range(len(Both._fields))
    ]


def _bytes(of: Sequence[Record]) -> float:
    return statistics.fmean(record.both_ways_mb for record in of)


def _points(means: Sequence[float]) -> str:
    return f"{statistics.fmean(means):+.1f} ({min(means):+.1f} to {max(means):+.1f})"
