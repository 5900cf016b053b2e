"""Runs that the tests look at, and somebody who looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpits import SMALL, Browser, entered, simulated

KINDS = {
    "buffered": ("strategy.name=fedbuff", "strategy.buffer_size=3"),
    "one by one": ("strategy.name=teasq", "strategy.staleness_max=2"),  # some are too stale
}


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that is over."""
    return simulated(tmp_path_factory.mktemp("simulated"), *SMALL, *KINDS[request.param])


@pytest.fixture(scope="module")
def browser(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Somebody who looks at it."""
    with entered(folder, cwd=tmp_path_factory.mktemp("cockpit")) as found:
        yield found
