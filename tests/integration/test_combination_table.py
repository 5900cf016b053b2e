"""docs/combinations.md says of every cell what comes of it when it is tried."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from combination_table import (
    FEATURES,
    GRIDS,
    PAGE,
    REFUSED,
    SYSTEMS,
    WORKS,
    Grid,
    nameless,
    reasons_in,
    refusal,
    tried,
)
from trained_table import COLUMNS, ROWS, trained
from trained_table import refusal as refusal_to_train

LINES = PAGE.read_text(encoding="utf-8").splitlines()
REASONS = reasons_in(LINES)
SERVERS, DEVICES = GRIDS


def cell(grid: Grid, row: str, column: str) -> str:
    """What the page says: empty where it works, else why not."""
    (head,) = (line for line in LINES if line == grid.head)
    (found,) = (line for line in LINES if line.startswith(f"| {row} | "))
    columns = [name.strip() for name in head.split("|")[2:-1]]
    said = found.removeprefix(f"| {row} |").split("|")[columns.index(column)].strip()
    why = [text for text, rows in REASONS.items() if column in rows.get(row, ())]
    assert (said, len(why)) in ((WORKS, 0), (REFUSED, 1)), (row, column)
    return why[0] if why else ""


def in_turn(grid: Grid, row: str) -> set[str]:
    """One of the columns that a row works with, if any: the one that has had the fewest turns by then."""
    works = {r: [c for c in grid.columns if not cell(grid, r, c)] for r in grid.rows}
    rows_of = Counter(itertools.chain.from_iterable(works.values()))
    turns: Counter[str] = Counter()
    for one, columns in works.items():
        found = min(columns, key=lambda column: (turns[column], rows_of[column]), default=None)
        if one == row:
            break
        turns.update({found} if found else ())
    return {found} if found else set()


@pytest.mark.parametrize("grid", GRIDS, ids=["servers", "devices"])
def test_each_column_has_its_turn(grid: Grid) -> None:
    assert set().union(*(in_turn(grid, row) for row in grid.rows)) == set(grid.columns)


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_goes_with_what_the_page_says(system: str) -> None:
    for feature in FEATURES:
        assert nameless(refusal(system, feature)) == cell(SERVERS, system, feature)
    for feature in in_turn(SERVERS, system):
        assert tried(system, feature) == ""


@pytest.mark.prove
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rest_of_the_page(system: str) -> None:
    for feature in FEATURES.keys() - in_turn(SERVERS, system):
        assert nameless(tried(system, feature)) == cell(SERVERS, system, feature)


@pytest.mark.parametrize("row", ROWS)
def test_devices_go_with_what_the_page_says(row: str) -> None:
    for column in COLUMNS:
        assert nameless(refusal_to_train(row, column)) == cell(DEVICES, row, column)
    for column in in_turn(DEVICES, row):
        assert trained(row, column) == ""


@pytest.mark.prove
@pytest.mark.parametrize("row", ROWS)
def test_the_rest_of_the_devices(row: str) -> None:
    for column in COLUMNS.keys() - in_turn(DEVICES, row):
        assert nameless(trained(row, column)) == cell(DEVICES, row, column)


def test_the_page_has_no_other_rows_and_columns() -> None:
    rows = [line for line in LINES if line.startswith("| ")]
    assert len(rows) == sum(1 + len(grid.rows) for grid in GRIDS)
    refused = 0
    for grid in GRIDS:
        start = LINES.index(grid.head)
        assert all(line.count("|") == len(grid.columns) + 2 for line in LINES[start : start + len(grid.rows)])
        refused += sum(cell(grid, row, column) != "" for row in grid.rows for column in grid.columns)
    assert refused == sum(len(columns) for rows in REASONS.values() for columns in rows.values())
