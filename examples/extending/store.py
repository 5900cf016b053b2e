"""A store of one's own: SQLite, whose file lies where the database's address says, apart from the rest.

`server.database = "./store.py:Elsewhere"`, with the file's folder in STORE_FOLDER.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from sqlalchemy import URL

from anabranch.core.limits import Limits
from anabranch.server.store.sql import SqlStore


class Elsewhere(SqlStore):
    name: ClassVar[str] = "elsewhere"

    @classmethod
    def of(cls, database: str, data_dir: Path, limits: Limits, lease_s: float) -> Elsewhere:
        folder = Path(os.environ["STORE_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        url = URL.create("sqlite", database=str(folder / "anabranch.db"))
        return cls(url, data_dir, limits, lease_s)
