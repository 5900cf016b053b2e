"""What tests of every folder share: a real PostgreSQL, one cluster a session, one database a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from postgres import cluster, new_database

# PostgreSQL is started by a fork, and gRPC's own handlers of a fork may abort the child before it gets there.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture(scope="session")
def postgresql_cluster() -> Iterator[str]:
    """How to connect to a running cluster. Without the programs, the test fails and says what to install."""
    with cluster() as address:
        yield address


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print what was measured, captured or not: for the long proofs."""
    plugins = request.config.pluginmanager
    reporter: Any = plugins.get_plugin("terminalreporter")
    capture: Any = plugins.get_plugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n    {request.node.name}: {text}")

    return say


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
