"""What the devices' notes of the soak come to: an oracle that knows nothing of the server's code.

An update whose answer was lost is looked up in the tables, with SQLite alone; all that was answered is known
by the notes, whatever the server has forgotten since.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Set
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from soak_device import SHAPE, delta_of

from anabranch.core.model.params import digest
from anabranch.server.store.files import SQLITE_FILE
from anabranch.server.verify import VerifyReport

WAL = f"{SQLITE_FILE}-wal"


@dataclass
class Oracle:
    """Updates by their ids: the number of each that was made, those that were applied, and what was lost.

    `lost` went with data that were put back to an older state; `refused` counts the reasons of rejections.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    again: int = 0
    found: int = 0
    lost: int = 0

    def take(self, note: dict[str, Any]) -> None:
        """A line of a device's notes."""
        if note["kind"] == "made":
            self.numbers[note["update"]] = note["number"]
        elif note["kind"] == "pushed":
            self.acknowledged += 1
            self.again += note["duplicate"]
            if note["verdict"] == "rejected":
                self.refused[note["reason"]] += 1
            else:
                self.applied.add(note["update"])

    def look_up(self, data_dir: Path) -> None:
        """Those that were applied and whose devices were not told, by the tables of a server that is down."""
        found = applied_in(data_dir) & (self.numbers.keys() - self.applied)
        self.found += len(found)
        self.applied |= found

    def go_back(self, applied: Set[str]) -> int:
        """The data are those of a backup, in which just these are applied. How many are lost."""
        lost = len(self.applied - applied)
        self.lost += lost
        self.applied = set(applied)
        return lost

    def problems(self, found: VerifyReport) -> list[str]:
        """What is wrong with a server's data, in words, by what was acknowledged."""
        problems = list(found.problems)
        if found.version != len(self.applied):
            problems.append(f"{len(self.applied)} updates were applied by the notes, {found.version} are")
        if found.model_sha256 != digest(self._model()):
            problems.append("the model is not what the acknowledged updates come to")
        return problems

    def _model(self) -> Any:
        model = np.zeros(SHAPE, np.float32)
        for number, times in Counter(self.numbers[update] for update in self.applied).items():
            model += np.float32(times) * delta_of(number)
        assert abs(model).max() < 1 << 24, "sums are exact up to there"
        return model.ravel()


def applied_in(data_dir: Path) -> set[str]:
    """The ids of the applied updates that the tables still have; the files are left as they are."""
    with TemporaryDirectory() as folder:
        for name in (SQLITE_FILE, WAL):
            if (data_dir / name).exists():
                shutil.copy(data_dir / name, folder)
        with closing(sqlite3.connect(Path(folder) / SQLITE_FILE)) as database:
            rows = database.execute("SELECT update_id FROM updates WHERE state = 'applied'")
            known = {update_id for (update_id,) in rows}
            receipts = [json.loads(text) for (text,) in database.execute("SELECT receipt FROM receipts")]
    return known | {update_id for update_id, _, _, verdict, *_ in receipts if verdict != "rejected"}
