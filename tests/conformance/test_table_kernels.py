"""The compiled loops over rows beside their twins in numpy, and both beside sums that are made one by one."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from anabranch.core.kernels import plain_tables
from anabranch.core.kernels.table import BLOCK, RowTable, TableLoops, TableRow, network

MANY = 2 * BLOCK + 1077  # for which other threads may run; the last block is short, and no power of two
DRAWS = st.tuples(st.integers(1, 11), st.integers(2, 700), st.floats(0, 1), st.integers(0, 2**32 - 1))


@pytest.fixture(scope="module")
def compiled(loops_module: None) -> TableLoops:
    from anabranch.core.kernels import compiled_tables

    return compiled_tables


def table_of(n: int, size: int, sparse: float, seed: int) -> RowTable:
    """Rows of which each is sparse with this probability; some values are equal, some 0 of either sign."""
    draw, rows = np.random.default_rng(seed), []
    for _ in range(n):
        scale = float(draw.choice([1.0, 0.3, 1e-3, 7.0]))
        values = (draw.standard_normal(size) * draw.lognormal(0, 3, size)).astype(np.float32)
        values = np.where(draw.random(size) < 0.3, draw.choice([0.0, -0.0, 1.0, -2.0], size), values)
        places = np.flatnonzero(draw.random(size) < draw.random()) if draw.random() < sparse else None
        kept = values if places is None else values[places]
        rows.append(TableRow(kept.astype(np.float32), scale, places))
    return RowTable(rows, size)


def spread(table: RowTable) -> list[list[float]]:
    """Every value of every row."""
    found = []
    for row in table.rows:
        values = [0.0] * table.size
        places = range(table.size) if row.places is None else row.places.tolist()
        for place, value in zip(places, row.values.tolist(), strict=True):
            values[place] = value * row.scale
        found.append(values)
    return found


def in_halves(values: list[float]) -> float:
    """The sum as numpy makes it along a row: eight sums side by side of up to 128 values, those of halves."""
    n = len(values)
    if n > 128:
        half = n // 2 - n // 2 % 8
        return in_halves(values[:half]) + in_halves(values[half:])
    whole = n - n % 8
    sums = [0.0] * 8
    for i, value in enumerate(values[:whole]):
        sums[i % 8] += value
    found = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]))
    for value in values[whole:]:
        found += value
    return found


def apart(a: list[float], b: list[float]) -> float:
    return in_halves([(x - y) * (x - y) for x, y in zip(a, b, strict=True)])


def centre_of(table: RowTable, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(table.size)


def same(one: Any, other: Any) -> None:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert one.tobytes() == other.tobytes()


@given(DRAWS)
def test_squares_from_a_centre_and_between_rows(compiled: TableLoops, drawn: Any) -> None:
    table = table_of(*drawn)
    rows, centre, n = spread(table), centre_of(table, 1), drawn[0]
    of_pairs = np.zeros((n, n))
    for i, j in combinations(range(n), 2):
        of_pairs[i, j] = apart(rows[i], rows[j])
    for loops in (compiled, plain_tables):
        same(loops.row_squares(table, centre), [apart(row, centre.tolist()) for row in rows])
        squares, shared = loops.pair_squares(table)
        same(squares, of_pairs)
        same(shared, np.triu(np.full((n, n), float(table.size)), 1))


@given(DRAWS)
@example((9, 2, 0.0, 0))
def test_means(compiled: TableLoops, drawn: Any) -> None:
    table = table_of(*drawn)
    rows, centre = spread(table), centre_of(table, 2)
    weights = np.random.default_rng(3).random(drawn[0])
    total = float(weights[:, None].sum(axis=0)[0])
    assert total == pytest.approx(math.fsum(weights.tolist()))
    means, steps = [], []
    for at, here in enumerate(centre.tolist()):
        mean = pulls = 0.0
        for weight, row in zip(weights.tolist(), rows, strict=True):
            mean += weight * row[at]
            pulls += weight * (row[at] - here)
        means.append(mean / total)
        steps.append(here + pulls / len(rows))
    for loops in (compiled, plain_tables):
        same(loops.row_mean(table, weights), means)
        out = np.empty(table.size)
        same(loops.row_step(table, weights, None, out), [apart(row, means) for row in rows])
        same(out, means)
        moved = centre.copy()
        same(loops.row_step(table, weights, moved, moved), [apart(row, steps) for row in rows])
        same(moved, steps)


@given(DRAWS, st.floats(0, 0.49))
@example((2, 3, 0.0, 0), 0.49)
def test_what_lies_in_the_middle(compiled: TableLoops, drawn: Any, share: float) -> None:
    table = table_of(*drawn)
    rows, n = spread(table), drawn[0]
    cuts = np.floor(share * np.arange(n + 1)).astype(np.int64)
    f = int(cuts[n])
    means, inside = [], [0] * n
    for column in zip(*rows, strict=True):
        kept = sorted(column)[f : n - f]
        total = 0.0
        for value in kept:
            total += value
        means.append(total / len(kept))
        inside = [k + (kept[0] <= value <= kept[-1]) for k, value in zip(inside, column, strict=True)]
    for loops in (compiled, plain_tables):
        found, counts = loops.row_middle(table, cuts)
        same(found, means)
        assert counts.tolist() == inside


@pytest.mark.parametrize("sparse", [0.0, 0.5, 1.0])
def test_over_many_blocks(compiled: TableLoops, sparse: float) -> None:
    table = table_of(6, MANY, sparse, 5)
    centre, weights, cuts = centre_of(table, 6), np.linspace(0.1, 1, 6), np.arange(7) // 3
    same(compiled.row_squares(table, centre), plain_tables.row_squares(table, centre))
    same(compiled.pair_squares(table)[0], plain_tables.pair_squares(table)[0])
    same(compiled.row_mean(table, weights), plain_tables.row_mean(table, weights))
    made = [centre.copy(), centre.copy()]
    same(*(x.row_step(table, weights, m, m) for x, m in zip((compiled, plain_tables), made, strict=True)))
    same(*made)
    (one, counts), (other, wanted) = compiled.row_middle(table, cuts), plain_tables.row_middle(table, cuts)
    same(one, other)
    assert counts.tolist() == wanted.tolist()


@pytest.mark.usefixtures("loops_module")
@pytest.mark.parametrize("start", [1, 64, 1000, BLOCK, MANY - 1])
def test_a_loop_may_begin_anywhere(start: int) -> None:
    from anabranch.core.kernels import _loops

    table = table_of(4, MANY, 0.7, 8)
    rows = tuple((row.values, row.places, row.scale) for row in table.rows)
    out, inside = np.full(MANY, 7.0), np.zeros(4, np.int64)
    assert _loops.row_middle(rows, network(4, 1, 2), 1, 2, start, MANY, out, inside)
    wanted, _ = plain_tables.row_middle(table, np.array([0, 0, 0, 1, 1]))
    same(out[start:], wanted[start:])
    assert (out[:start] == 7.0).all()


class Twin(Exception):
    """Numpy's loop was called."""


@pytest.fixture
def no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    def twin(*_: Any) -> Any:
        raise Twin

    for name in ("row_squares", "pair_squares", "row_mean", "row_step", "row_middle"):
        monkeypatch.setattr(plain_tables, name, twin)


def all_of(loops: TableLoops, table: RowTable) -> Any:
    n = len(table.rows)
    yield lambda: loops.row_squares(table, np.ones(table.size))
    yield lambda: loops.pair_squares(table)
    yield lambda: loops.row_mean(table, np.ones(n))
    yield lambda: loops.row_step(table, np.ones(n), None, np.empty(table.size))
    yield lambda: loops.row_step(table, np.ones(n), np.ones(table.size), np.empty(table.size))
    yield lambda: loops.row_middle(table, np.zeros(n + 1, np.int64))


@pytest.mark.usefixtures("no_twins")
def test_what_the_compiled_ones_are_for(compiled: TableLoops) -> None:
    dense = TableRow(np.ones(20, np.float32), 1.0)
    sparse = TableRow(np.ones(2, np.float32), 1.0, np.array([3, 19]))
    for call in all_of(compiled, RowTable([dense, sparse, dense], 20)):
        call()
    for call in all_of(compiled, RowTable([TableRow(np.ones(BLOCK + 1, np.float32), 1.0)], BLOCK + 1)):
        with pytest.raises(Twin):  # a block of one column
            call()
    strange = [
        TableRow(np.ones(20), 1.0),
        TableRow(np.ones(40, np.float32)[::2], 1.0),
        TableRow(np.ones(19, np.float32), 1.0),
        TableRow(np.frombuffer(b"." + bytes(80), np.float32, offset=1), 1.0),
        TableRow(np.ones(2, np.float32), 1.0, np.array([3, 19]), np.array([3, 19])),
    ]
    for row in strange:
        for call in all_of(compiled, RowTable([dense, row], 20)):
            with pytest.raises(Twin):
                call()


def test_a_place_beyond_the_end_is_passed_over(compiled: TableLoops) -> None:
    """Nobody sends one; what is written is what was asked for."""
    row = TableRow(np.ones(3, np.float32), 1.0, np.array([2, 5, 900]))
    assert compiled.row_mean(RowTable([row], 5), np.ones(1)).tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("n", range(1, 18))
def test_a_network_puts_what_is_wanted_in_its_place(n: int) -> None:
    """Of zeros and ones alone: who sorts them sorts all numbers (Knuth's principle of 0 and 1)."""
    inputs = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1 if n <= 12 else None
    if inputs is None:
        inputs = np.random.default_rng(n).integers(0, 2, (3000, n))
    for first, last in {(0, n - 1), ((n - 1) // 2, n // 2), (n // 3, n - 1 - n // 3)}:
        found = inputs.copy()
        for i, j in network(n, first, last).tolist():
            assert i < j
            found[:, [i, j]] = np.sort(found[:, [i, j]], axis=1)
        assert np.array_equal(found[:, first : last + 1], np.sort(inputs, axis=1)[:, first : last + 1])
