"""A version of a robust rule: the loops over rows compiled beside numpy's, on one core.

    python -m benchmarks.rules

Ten updates of normal values, dense or a hundredth of them; the time of a thread's processor for what the rule
makes of them, in interleaved pairs, and the medians. Both come to the same bits, which is checked.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import numpy as np

from anabranch.core.engine.robust import RobustTable
from anabranch.core.kernels import plain_tables
from anabranch.core.kernels.table import TableLoops
from anabranch.core.model.params import Delta, SparseVector
from anabranch.strategies.robust import rows as rows_module
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rows import Floats, Row, Rows

RULES = ("trimmed_mean", "median", "multi_krum", "geometric_median", "centred_clipping")
UPDATES, SHARE = 10, 0.01
SIZES = ((100_000, 5), (10_000_000, 3))  # values, pairs


@dataclass(frozen=True)
class Pair:
    """Milliseconds a version, medians."""

    rule: str
    plain: float
    compiled: float


def updates(size: int, *, sparse: bool) -> list[Row]:
    """Rows of weights as staleness gives them."""
    draw, rows = np.random.default_rng(0), []
    for i in range(UPDATES):
        values = draw.standard_normal(size, dtype=np.float32)
        places = np.flatnonzero(draw.random(size, dtype=np.float32) < SHARE) if sparse else None
        delta: Delta = values if places is None else SparseVector(places, values[places], size)
        rows.append(Row(delta, scale=1 / np.sqrt(1 + i % 3)))
    return rows


def took_ms(rule: str, given: list[Row], size: int, loops: TableLoops) -> tuple[float, Floats]:
    """What a version takes, and what it is."""
    made = make_rule(RobustTable(rule=rule))
    assert made is not None
    setattr(rows_module, "table_loops", loops)  # noqa: B010 - it is not exported
    before = time.thread_time()
    found = made.combine(Rows(given, size), np.zeros(size))
    return 1000 * (time.thread_time() - before), found


def measure(size: int, pairs: int, *, sparse: bool) -> list[Pair]:
    """Every rule."""
    from anabranch.core.kernels import compiled_tables  # see `benchmarks/kernels.py`

    given, found = updates(size, sparse=sparse), []
    for rule in RULES:
        times: dict[str, list[float]] = {"plain": [], "compiled": []}
        for _ in range(pairs):
            slow, one = took_ms(rule, given, size, plain_tables)
            fast, other = took_ms(rule, given, size, compiled_tables)
            assert one.tobytes() == other.tobytes(), f"{rule} has other bits"
            times["plain"].append(slow)
            times["compiled"].append(fast)
        found.append(Pair(rule, median(times["plain"]), median(times["compiled"])))
    return found


def section() -> str:
    """The page's."""
    lines = []
    for size, pairs in SIZES:
        for sparse in (False, True):
            kind = "1 %" if sparse else "dense"
            lines += [
                f"| {p.rule} | {size:,} | {kind} | {p.plain:.1f} | {p.compiled:.1f} |"
                f" **{p.plain / p.compiled:.1f}** |"
                for p in measure(size, pairs, sparse=sparse)
            ]
    return f"""## A version of a robust rule

{UPDATES} updates, dense or 1 % of the values of each; processor time of the thread that makes the version, by
numpy and by compiled loops (`core/kernels/table.c`), to the same bits; medians of interleaved pairs.

| rule | values | updates | numpy, ms | compiled, ms | numpy / compiled |
{"|---" * 6}|
{chr(10).join(lines)}
"""


def main() -> None:
    """Measure and print."""
    print(section())


if __name__ == "__main__":
    main()
