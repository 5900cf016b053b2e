"""Every kind of store, and a short history to put in one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import (
    LIMITS,
    Backend,
    History,
)

from anabranch.server.store.base import Store
from anabranch.server.store.memory import MemoryStore
from anabranch.testing.store import a_history as short_history


def make_backend(kind: str, folder: Path, request: pytest.FixtureRequest) -> Backend:
    if kind == "memory":
        return Backend(kind, "memory", folder, MemoryStore(LIMITS))
    return Backend(kind, "" if kind == "sqlite" else request.getfixturevalue("postgresql_url"), folder)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's deadline is not what these tests are about: a busy machine is given time to answer."""
    monkeypatch.setattr("anabranch.client.transport.CONTROL_S", 120.0)


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
    return short_history()
