"""A served run of a small model, on SQLite, and rows that wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wire import Served, server_config

from anabranch.server.manifest import Manifest, write_manifest

VALUES = 100_000  # 400 kB: an update is over the inline limit and has two chunks


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """A model with a frozen counter."""
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "layer.weight": np.zeros((VALUES // 100, 100), np.float32),
        "layer.seen": np.asarray([7], np.int64),
    }
    return write_manifest(tmp_path / "model", "test", tensors)


@pytest.fixture
def served(tmp_path: Path, manifest: Manifest) -> Iterator[Served]:
    """A server that adds deltas up."""
    with Served(server_config(tmp_path / "data"), manifest) as server:
        yield server


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine they would be written in the midst: one more event that waits, one more commit."""
    monkeypatch.setattr("anabranch.server.writer.FOLLOWED_S", 3600.0)
