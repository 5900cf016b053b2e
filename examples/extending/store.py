"""A store of one's own: SQLite, whose file lies where the database's address says, apart from the rest.

`server.database = "./store.py:Elsewhere"`, with the file's folder in STORE_FOLDER.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from anabranch.core.limits import Limits
from anabranch.server.store.sqlite_store import SqliteStore


class Elsewhere(SqliteStore):
    name: ClassVar[str] = "elsewhere"

    @classmethod
    def of(cls, database: str, data_dir: Path, limits: Limits, lease_s: float) -> Elsewhere:
        folder = Path(os.environ["STORE_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder / "anabranch.db", data_dir, limits)
