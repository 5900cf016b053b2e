"""A guarded server, and an authority by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from guarded import Federation, federation

from anabranch.identity.authority import Authority


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Federation]:
    """A server that adds deltas up, with mutual TLS on all ports."""
    with federation(tmp_path) as made:
        yield made


@pytest.fixture
def authority(tmp_path: Path) -> Iterator[Authority]:
    """A new authority."""
    with Authority.create(tmp_path / "ca") as made:
        yield made
