"""Runs that the tests look at, and somebody who looks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpits import Browser, entered
from nursery import COMMAND, run

SMALL = (
    *("run.workload=synthetic", "fleet.clients=6", "fleet.examples_per_client=40", "run.updates_max=120"),
    *("uplink.codec=topk(0.1)|int8", "fleet.dropout=0.1"),
)
KINDS = {
    "buffered": ("strategy.name=fedbuff", "strategy.buffer_size=3"),
    "one by one": ("strategy.name=teasq", "strategy.staleness_max=2"),  # some are too stale
}


def simulated(where: Path, *settings: str) -> Path:
    """The folder of a simulated run of these settings."""
    words = [word for setting in settings for word in ("--set", setting)]
    done = run(COMMAND, "simulate", *words, "--out", "run", "--json", cwd=where)
    assert done.returncode == 0, done.stderr
    return where / "run"


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that is over."""
    return simulated(tmp_path_factory.mktemp("simulated"), *SMALL, *KINDS[request.param])


@pytest.fixture(scope="module")
def browser(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Somebody who looks at it."""
    with entered(folder, cwd=tmp_path_factory.mktemp("cockpit")) as found:
        yield found
