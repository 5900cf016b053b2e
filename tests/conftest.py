"""What tests of every folder share: a real PostgreSQL, one cluster a session, one database a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from postgres import cluster, new_database


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
