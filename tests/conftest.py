"""What tests of every folder share: a real PostgreSQL, one cluster a session, one database a test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
from hypothesis import settings
from postgres import cluster, new_database

# A busy machine is slow at times: how long an example takes says nothing.
settings.register_profile("anabranch", deadline=None)
settings.load_profile("anabranch")

# The longest tests, those that mostly wait beside those that mostly work. They come first, so that no process
# is left alone with one at the end.
LONGEST = (
    "architecture/test_contracts.py::test_the_tree_passes[types]",
    "crash/test_failover.py",
    "flower/test_superlink.py",
    "crash/test_soak.py",
    "journeys/test_walks.py",
    "crash/test_failpoints.py",
    "api/test_page.py",
    "crash/test_kill.py",
    "architecture/test_mutants.py",
    "crash/",
    "architecture/test_wheel.py",
    "cockpit/browser/",
    "flower/test_examples.py",
    "api/test_join.py",
    "cockpit/test_folders.py",
)

# PostgreSQL is started by a fork, and gRPC's own handlers of a fork may abort the child before it gets there.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # what is not wanted has gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--dist worksteal` each process begins with a stretch of the list: each stretch with its share of
    the longest, and the others in their order."""
    if config.getoption("dist", "no") != "worksteal":
        return
    places = [(_place(item.nodeid), number) for number, item in enumerate(items)]
    longest = [items[number] for place, number in sorted(places) if place < len(LONGEST)]
    others = iter([items[number] for place, number in places if place == len(LONGEST)])
    left, stretches = len(items), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    dealt: list[pytest.Item] = []
    for begun in range(stretches):
        size = left // (stretches - begun)  # as the processes get them
        share = longest[begun::stretches]
        dealt += [*share, *islice(others, max(size - len(share), 0))]
        left -= size
    items[:] = [*dealt, *others]


def _place(nodeid: str) -> int:
    """Where in `LONGEST` a test is, or behind it."""
    name = nodeid.removeprefix("tests/")
    return next((place for place, words in enumerate(LONGEST) if name.startswith(words)), len(LONGEST))


@pytest.fixture(scope="session")
def postgresql_cluster() -> Iterator[str]:
    """How to connect to a running cluster. Without the programs, the test fails and says what to install."""
    with cluster() as address:
        yield address


@pytest.fixture
def postgresql_url(postgresql_cluster: str) -> Iterator[str]:
    """The URL of a new, empty database."""
    with new_database(postgresql_cluster) as url:
        yield url


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Say what was measured: it is printed after the last test."""
    return lambda text: record_property("figure", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures of the tests that had any."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    figures = [(r.nodeid, text) for r in reports for name, text in r.user_properties if name == "figure"]
    if figures:
        terminalreporter.section("figures")
    for node, text in figures:
        terminalreporter.write_line(f"{node.rpartition('::')[2]}: {text}")
