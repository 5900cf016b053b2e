"""What tests of every folder share: the wheel; a real PostgreSQL, a cluster a session, a database a test."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from blank import copy_tree
from dealing import begun_at, dealt, file_of
from hypothesis import HealthCheck, settings
from left import FREED, ended, loggers_put_back
from postgres import cluster, new_database
from sharing import once
from wheels import build

ROOT = Path(__file__).parents[1]

# A busy machine is slow at times: how long an example takes says nothing, nor how long it is made.
settings.register_profile("anabranch", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anabranch")

# PostgreSQL is started by a fork, and gRPC's own handlers of a fork may abort the child before it gets there.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# With it Python writes a line and its end one after the other, and another process's line comes between them.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # modules and tests stay, and nothing else is there yet: the end of the collection enables it


@pytest.hookimpl(wrapper=True)  # in every process: that which deals the tests to others collects none
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is there by now stays to the end: no look for garbage goes through it, a tenth of all time."""
    config = session.config
    if hasattr(config, "workerinput") and config.args == ["tests"]:
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        config.args = begun_at(number / config.workerinput["workercount"], ROOT / "tests")
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # what is not wanted has gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest come first in each process; one of xdist no longer has its options in `config.option`."""
    if hasattr(config, "workerinput"):
        found = {item.nodeid: item for item in items}
        items[:] = [
            found[name] for name in dealt(sorted(found, key=file_of), config.workerinput["workercount"])
        ]


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """No test leaves processes behind, logging set otherwise, nor a server of gRPC's that was not stopped."""
    with loggers_put_back() as changed, ended():
        yield
    assert not changed, "the test must put logging back"
    assert not FREED.taken(), "gRPC freed a server that was not stopped, of this test or of one before"


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run have."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(scope="session")
def wheel(shared: Path) -> Path:
    """The wheel of this tree, made of its sdist, which lies beside it."""
    return once(shared / "wheel", lambda folder: build(copy_tree(ROOT, folder / "tree"), folder / "dist"))


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
