"""The asks of one process of a device, which say what process it is: see `core/engine/sessions.py`."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from pathlib import Path

from anabranch.client.state import SESSION
from anabranch.core.errors import InvalidUpdate, StoreError
from anabranch.core.ids import checked_id
from anabranch.core.model.holdings import Holdings
from anabranch.core.model.updates import Ask
from anabranch.core.rng import unique_id
from anabranch.identity.files import write_private


class Applications:
    """Makes asks. With the first one the device's folder learns the name of this process."""

    def __init__(self, client_id: str, state_dir: Path, seed: int) -> None:
        self._client_id, self._file = client_id, state_dir / SESSION
        self._session = unique_id(seed, "session", client_id)

    def ask(self, task_id: str, holds: Holdings) -> Ask:
        """An ask for a task."""
        whole, parts = (None, holds) if isinstance(holds, tuple) else (holds, ())
        return Ask(self._client_id, task_id, whole, self._session, self._succeeds, parts)

    @cached_property
    def _succeeds(self) -> str:
        """The process before this one, empty if none is known."""
        before = self._read()
        # As late as can be: a process that never asked is none that the next one could succeed. Where it
        # cannot be written the next one may have to wait, no more.
        with suppress(StoreError):
            write_private(self._file, f"{self._session}\n".encode())
        return before

    def _read(self) -> str:
        try:
            return checked_id(self._file.read_text(encoding="utf-8").strip(), SESSION)
        except (OSError, ValueError, InvalidUpdate):
            return ""
