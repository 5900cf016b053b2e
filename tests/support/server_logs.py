"""The log of a server that has ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from anabranch.core.journal import Record
from anabranch.server.store.factory import open_store


def records_of(data_dir: Path, database: str = "", kind: str = "") -> list[Record]:
    """Its events, or those of a kind, as records."""
    with closing(open_store(database, data_dir)) as store:
        return [record for _, record in store.records() if kind in ("", record["kind"])]
