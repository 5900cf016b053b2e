"""The run's own row a second time, `run.json` beside SQLite's file: all that the log of a run does not have.

With it a database that is lost is made anew from the log (`server/rebuild.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from anabranch.core.errors import DataError
from anabranch.identity.files import write_private
from anabranch.server.store.base import RunInfo
from anabranch.server.store.rows import info_of, run_row

FILE = "run.json"


def note_run(data_dir: Path, info: RunInfo) -> None:
    """Write it down, durably, unless it is there. Raises `StoreError`."""
    stored = info_of(run_row(info))  # the layout's order counts, so no keys are sorted here
    path, text = data_dir / FILE, json.dumps(asdict(stored), indent=1).encode()
    try:
        known = path.read_bytes() == text
    except OSError:
        known = False
    if not known:
        write_private(path, text)


def noted_run(data_dir: Path) -> RunInfo | None:
    """The run that was written down, None where none was. Raises `DataError` where it cannot be read."""
    path = data_dir / FILE
    try:
        return RunInfo(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): put it back from a backup") from error
