"""docs/combinations.md says of every cell what comes of it when it is tried."""

from __future__ import annotations

import pytest
from combination_table import FEATURES, GRIDS, PAGE, REFUSED, SYSTEMS, WORKS, Grid, reasons_in, refusal, tried
from trained_table import COLUMNS, ROWS, trained

OFTEN = ("privacy", "robust rule", "rollback", "error feedback", "delta log")  # the rarest first
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


def in_turn(system: str) -> set[str]:
    """Of the features that it works with: the rarest, and one of the codecs' that remember."""
    known = [feature for feature in OFTEN if not cell(SERVERS, system, feature)]
    other = -1 - list(SYSTEMS).index(system) % 2
    return {*known[:1], *known[other:][:1]}


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_goes_with_what_the_page_says(system: str) -> None:
    for feature in FEATURES:
        assert refusal(system, feature) == cell(SERVERS, system, feature)
    for feature in in_turn(system):
        assert tried(system, feature) == cell(SERVERS, system, feature)


@pytest.mark.prove
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rest_of_the_page(system: str) -> None:
    for feature in FEATURES.keys() - set(in_turn(system)):
        assert tried(system, feature) == cell(SERVERS, system, feature)


@pytest.mark.parametrize("row", ROWS)
def test_devices_go_with_what_the_page_says(row: str) -> None:
    for column in COLUMNS:
        assert trained(row, column) == cell(DEVICES, row, column)


def test_the_page_has_no_other_rows_and_columns() -> None:
    rows = [line for line in LINES if line.startswith("| ")]
    assert len(rows) == sum(1 + len(grid.rows) for grid in GRIDS)
    refused = 0
    for grid in GRIDS:
        start = LINES.index(grid.head)
        assert all(line.count("|") == len(grid.columns) + 2 for line in LINES[start : start + len(grid.rows)])
        refused += sum(cell(grid, row, column) != "" for row in grid.rows for column in grid.columns)
    assert refused == sum(len(columns) for rows in REASONS.values() for columns in rows.values())
