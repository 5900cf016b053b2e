"""Runs for all tests of reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reported_runs

from anabranch.reports.result import Result


@pytest.fixture
def record() -> Callable[..., Result]:
    """The function that makes a run."""
    return reported_runs.record_run


@pytest.fixture
def figured() -> Result:
    """A run with figures of which no two are the same."""
    return reported_runs.figured_run()


@pytest.fixture
def two_seeds() -> list[Result]:
    """It, and one of another seed."""
    return reported_runs.two_seeds()
