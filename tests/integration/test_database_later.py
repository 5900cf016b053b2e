"""A server on PostgreSQL whose database comes later, or lets nobody in."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit, urlunsplit

import pytest
from postgres_gate import SOCKET
from wire import server_config

from anabranch.core.errors import StoreUnreachable
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import Manifest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where the database's socket will be: a path of 107 bytes at most."""
    made = Path(tempfile.mkdtemp(prefix="anabranch-later-"))
    yield made
    shutil.rmtree(made)


def test_a_database_that_comes_later_is_waited_for(
    tmp_path: Path, folder: Path, manifest: Manifest, postgresql_url: str
) -> None:
    parts = urlsplit(postgresql_url)
    (host,) = parse_qs(parts.query)["host"]
    url = urlunsplit(parts._replace(query=f"host={folder}"))
    said: list[str] = []
    served: list[ServerInfo] = []
    stop = asyncio.Event()

    def waiting(why: str) -> None:
        said.append(why)
        (folder / SOCKET).symlink_to(f"{host}/{SOCKET}")  # now it is there

    def ready(info: ServerInfo) -> None:
        served.append(info)
        stop.set()

    config = server_config(tmp_path / "data", server={"database": url})
    assert asyncio.run(serve(config, manifest, ready=ready, waiting=waiting, stop=stop)) == 0
    assert len(served) == 1
    (why,) = said
    assert why.startswith("waiting for the database: postgresql+psycopg://")
    assert "cannot be reached" in why


def test_one_that_lets_nobody_in_is_not_waited_for(
    tmp_path: Path, manifest: Manifest, postgresql_url: str
) -> None:
    url = urlunsplit(urlsplit(postgresql_url)._replace(path="/there-is-none"))
    config = server_config(tmp_path / "data", server={"database": url})
    with pytest.raises(StoreUnreachable, match="does not exist"):
        asyncio.run(serve(config, manifest, waiting=pytest.fail))
