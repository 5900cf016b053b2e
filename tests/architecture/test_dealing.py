"""A run in several processes begins with its longest tests, in all of them."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from dealing import LONGEST, begun_at, dealt
from hypothesis import given
from hypothesis import strategies as st

TESTS = Path(__file__).parents[1]
LONG = [f"tests/{words}{'' if words.endswith('.py') else 'test_any.py'}" for words in LONGEST]
NAMES = st.lists(st.sampled_from([*LONG, "tests/unit/test_a.py", "tests/unit/test_b.py"]), max_size=60).map(
    lambda files: [f"{file}::test_{number}" for number, file in enumerate(sorted(files))]
)


def test_each_process_has_its_share_of_the_longest_first() -> None:
    short = [f"tests/unit/test_a.py::test_{number}" for number in range(10)]
    soak = ["tests/crash/test_soak.py::test_one", "tests/crash/test_soak.py::test_two"]
    names = ["tests/architecture/test_contracts.py::test_types", *soak, *short[:9], short[9]]
    assert dealt(names, 2) == [names[0], *short[:5], *soak, *short[5:]]
    assert dealt(names, 1) == names


@given(NAMES, st.integers(1, 8))
def test_each_is_there_once_and_a_long_file_in_one_piece(names: list[str], processes: int) -> None:
    order = dealt(names, processes)
    assert sorted(order) == sorted(names)
    files = [file for file, _ in groupby(order, lambda name: name.partition("::")[0]) if "unit" not in file]
    assert len(files) == len(set(files))


def test_each_process_begins_elsewhere_to_read_all_folders() -> None:
    read = [begun_at(number / 4, TESTS) for number in range(4)]
    assert len({folders[0] for folders in read}) == 4
    everything = {str(file.relative_to(TESTS).parts[0]) for file in TESTS.rglob("test_*.py")}
    for folders in read:
        assert [Path(folder).parent for folder in folders] == [TESTS] * len(folders)
        assert sorted(Path(folder).name for folder in folders) == sorted(everything)


def test_what_is_named_is_there() -> None:
    assert [words for words in LONGEST if not any(TESTS.glob(f"{words.removesuffix('.py')}*"))] == []


def test_this_very_run_has_that_order(request: pytest.FixtureRequest) -> None:
    """xdist takes its options from a process that it starts: an order that asked for them was never made."""
    dealt_to = getattr(request.config, "workerinput", {}).get("workercount")
    names = [item.nodeid for item in request.session.items]
    assert names == (dealt(names, dealt_to) if dealt_to else names)
