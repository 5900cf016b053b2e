"""Every kind of store, and a short history to put in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import (
    BAD,
    GOOD,
    LIMITS,
    NOW_GOOD,
    Backend,
    History,
    asked,
    decided,
    project,
    published,
    task,
    update,
)

from anabranch.core.effects import Granted
from anabranch.server.store.base import Store
from anabranch.server.store.memory import MemoryStore


def make_backend(kind: str, folder: Path, request: pytest.FixtureRequest) -> Backend:
    if kind == "memory":
        return Backend(kind, "memory", folder, MemoryStore(LIMITS))
    return Backend(kind, "" if kind == "sqlite" else request.getfixturevalue("postgresql_url"), folder)


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return make_backend(request.param, tmp_path / "data", request)


@pytest.fixture(params=["sqlite", "postgresql"])
def on_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    """A backend with files, tables and locks."""
    return make_backend(request.param, tmp_path / "data", request)


@pytest.fixture
def store(backend: Backend) -> Iterator[Store]:
    opened = backend.start()
    yield opened
    opened.close()


@pytest.fixture
def a_history() -> History:
    """Two updates in version 1, one rejected, one held, one in version 2, and one not yet decided."""
    entries = [asked("t1"), update(1), update(2), update(3), update(4), update(5), update(6)]
    return entries, [
        project(1, Granted(task("t1"))),
        project(2, decided(1, GOOD, 0)),
        project(3, decided(2, NOW_GOOD, 1), published(1, 1, 2), v1="aa" * 32),
        project(4, decided(3, BAD, 1)),
        project(5, decided(4, GOOD, 1)),
        project(6, decided(5, NOW_GOOD, 2), published(2, 4, 5)),
    ]
