"""docs/combinations.md says of every cell what comes of it when it is tried."""

from __future__ import annotations

import pytest
from combination_table import FEATURES, PAGE, REFUSED, SYSTEMS, WORKS, tried

OFTEN = ("error feedback", "delta log", "robust rule", "rollback", "privacy")
LINES = PAGE.read_text(encoding="utf-8").splitlines()


def cell(system: str, feature: str) -> str:
    """What the page says: empty where it works, else why not."""
    (head,) = (line for line in LINES if line.startswith("| | "))
    (found,) = (line for line in LINES if line.startswith(f"| {system} | "))
    columns = [column.strip() for column in head.split("|")[2:-1]]
    said = found.removeprefix(f"| {system} |").split("|")[columns.index(feature)].strip()
    begin = f"- {system} with {feature}: "
    why = [line.removeprefix(begin) for line in LINES if line.startswith(begin)]
    assert (said, len(why)) in ((WORKS, 0), (REFUSED, 1)), (system, feature)
    return why[0] if why else ""


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_system_goes_with_what_the_page_says(system: str) -> None:
    for feature in OFTEN:
        assert tried(system, feature) == cell(system, feature)


@pytest.mark.prove
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rest_of_the_page(system: str) -> None:
    for feature in FEATURES.keys() - set(OFTEN):
        assert tried(system, feature) == cell(system, feature)


def test_the_page_has_no_other_rows_and_columns() -> None:
    rows = [line for line in LINES if line.startswith("| ")]
    assert len(rows) == 1 + len(SYSTEMS)
    assert all(line.count("|") == len(FEATURES) + 2 for line in rows)
    assert [cell(system, feature) == "" for system in SYSTEMS for feature in FEATURES].count(False) == sum(
        line.startswith("- ") for line in LINES
    )
