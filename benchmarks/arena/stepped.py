"""Rows whose local steps are tuned beside the rate, in every cell that has them: counts and a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.arena.cells import CELLS, WORKLOADS, Cell
from benchmarks.arena.rows import CHAINS
from benchmarks.arena.standings import Ended, half_way, lead, tally
from benchmarks.arena.store import Record
from benchmarks.studies import table

STEPS = "client.steps"
ROUNDS = "fedavg, Nesterov"  # whom the others are held against
OTHERS: Mapping[str, str] = {"waves, Nesterov": "`waves`", "fedbuff": "FedBuff"}

Runs = Sequence[Record]


def section(ended: Ended) -> str:
    """What the page says of them; empty where no cell has rounds and one of the others."""
    lines: list[list[str]] = []
    met: dict[str, list[tuple[Runs, Runs]]] = {name: [] for name in OTHERS}
    for cell in CELLS:
        for chain in CHAINS:
            rounds, *others = (
                ended.get((cell.name, f"{name}, steps tuned/{chain}")) for name in (ROUNDS, *OTHERS)
            )
            if rounds is None or not any(others):
                continue
            lines.append([f"{cell.name}, {chain}", _of(cell, rounds), *_beside(cell, others, rounds)])
            for name, mine in zip(OTHERS, others, strict=True):
                met[name] += [] if mine is None else [(mine, rounds)]
    if not lines:
        return ""
    counts = [[OTHERS[name], *_counts(pairs)] for name, pairs in met.items()]
    of_each = ("steps", "at the end", "half-way", "times the bytes")
    head = ("cell, chain", "rounds: steps, %", *(f"{o}: {h}" for o in OTHERS.values() for h in of_each))
    return f"""## Tuned steps, cell by cell

Rows whose local steps are tuned beside the rate, against rounds with momentum whose steps are tuned as well:
40 devices a round, the smallest buffer. Half-way is against the *end* of those rounds. In how many cells each
is over them by the whole interval / level / under them:

{table(("", "cells", "at the end", "half-way"), counts)}

{table(head, lines)}"""


def _counts(pairs: Sequence[tuple[Runs, Runs]]) -> list[str]:
    counted = (str(tally(how(*pair) for pair in pairs)) for how in (lead, half_way))
    return [str(len(pairs)), *counted]


def _of(cell: Cell, rounds: Runs) -> str:
    return f"{_steps(cell, rounds)}, {statistics.fmean(record.accuracy for record in rounds):.1f}"


def _beside(cell: Cell, others: Sequence[Runs | None], rounds: Runs) -> list[str]:
    columns: list[str] = []
    for mine in others:
        if mine is None:
            columns += [""] * 4
        else:
            times = _megabytes(mine) / _megabytes(rounds)
            ends = str(lead(mine, rounds)), str(half_way(mine, rounds))
            columns += [_steps(cell, mine), *ends, f"{times:.1f}"]
    return columns


def _steps(cell: Cell, runs: Runs) -> str:
    """A run of the cell's own number is known by the row that has it untuned."""
    tables, _ = WORKLOADS[cell.workload]
    return f"{runs[0].setting.get(STEPS, tables['client']['steps']):g}"


def _megabytes(runs: Runs) -> float:
    return sum(record.both_ways_mb for record in runs)
