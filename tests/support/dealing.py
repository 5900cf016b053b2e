"""In which order tests come that run in several processes: the longest first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path

# The longest files, those that mostly wait beside those that mostly work. They come first, so that no process
# is left alone with one at the end.
LONGEST = (
    "architecture/test_contracts.py",
    "crash/test_failover.py",
    "crash/test_soak.py",
    "journeys/test_walks.py",
    "crash/test_failpoints.py",
    "api/test_page.py",
    "crash/test_kill.py",
    "architecture/test_mutants.py",
    "crash/",
    "architecture/test_wheel.py",
    "cockpit/browser/",
    "conformance/test_executors.py",
    "flower/",
    "api/test_ray_runs.py",
    "security/test_attested_restore.py",
    "simulation/test_arrival.py",
    "simulation/test_digests.py",
    "simulation/test_checkpoint.py",
    "integration/test_spool.py",
    "integration/test_kept_state.py",
    "api/test_join.py",
    "cockpit/test_folders.py",
)


def dealt(names: Sequence[str], processes: int) -> list[str]:
    """The names of tests in the order in which they are to come.

    With `--dist worksteal` each process begins with a stretch of the list: each stretch begins with its share
    of the longest files. A file stays whole, as its tests share what was made for them.
    """
    longest = sorted((name for name in names if _place(name) < len(LONGEST)), key=_turn)
    files = [list(file) for _, file in groupby(longest, _turn)]
    left = [name for name in names if _place(name) == len(LONGEST)]
    order: list[str] = []
    for begun in range(processes):
        stretch = (len(names) - len(order)) // (processes - begun)  # as xdist counts it
        share = [name for file in files[begun::processes] for name in file]
        others = max(stretch - len(share), 0)
        order += [*share, *left[:others]]
        del left[:others]
    return [*order, *left]


def begun_at(share: float, tests: Path) -> list[str]:
    """All folders of tests, in turn, from one on that such a share of them comes before.

    Each of several processes reads all of them. Where nothing of them is compiled yet, as in a fresh clone,
    each compiles those with which it begins, and finds the others done.
    """
    sizes = {folder: sum(f.stat().st_size for f in folder.rglob("test_*.py")) for folder in tests.iterdir()}
    folders = sorted(folder for folder, size in sizes.items() if size)
    before = accumulate((sizes[folder] for folder in folders), initial=0)
    first = sum(size < share * sum(sizes.values()) for size in before) % len(folders)
    return [str(folder) for folder in (*folders[first:], *folders[:first])]


def file_of(name: str) -> str:
    """The file of a test."""
    return name.partition("::")[0]


def _turn(name: str) -> tuple[int, str]:
    """When the file of a test has its turn among the longest."""
    return _place(name), file_of(name)


def _place(name: str) -> int:
    """Where in `LONGEST` a test is, or behind it."""
    below = name.removeprefix("tests/")
    return next((place for place, words in enumerate(LONGEST) if below.startswith(words)), len(LONGEST))
