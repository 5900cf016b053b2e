"""The run's own row a second time, `run.json` beside SQLite's file: all that the log of a run does not have.

With it a database that is lost is made anew from the log (`server/rebuild.py`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anabranch.core.errors import DataError
from anabranch.core.plain import from_kept
from anabranch.identity.files import tighten, write_private
from anabranch.server.store.base import RunInfo
from anabranch.server.store.rows import info_of, run_row

FILE = "run.json"
SHA256 = "sha256"  # its key, of all that comes before it


def note_run(data_dir: Path, info: RunInfo) -> None:
    """Write it down, durably, unless it is there. Raises `StoreError`."""
    stored = asdict(info_of(run_row(info)))  # the layout's order counts, so no keys are sorted here
    path, text = data_dir / FILE, json.dumps({**stored, SHA256: _sha256(stored)}, indent=1).encode()
    try:
        known = path.read_bytes() == text
    except OSError:
        known = False
    if known:
        tighten(path)
    else:
        write_private(path, text)


def noted_run(data_dir: Path) -> RunInfo | None:
    """The run that was written down, None where none was. Raises `DataError` where it cannot be read."""
    path = data_dir / FILE
    try:
        found = json.loads(path.read_bytes())
        if found.pop(SHA256) == _sha256(found):
            return from_kept(found, RunInfo, path)
        why = "its digest is another"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        why = str(error)
    raise DataError(f"{path} is damaged ({why}): put it back from a backup")


def _sha256(note: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note).encode()).hexdigest()
