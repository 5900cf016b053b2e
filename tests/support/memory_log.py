"""A log that nothing stays of."""

from __future__ import annotations

import json
from itertools import islice

from anabranch.core import events as ev
from anabranch.core.errors import StoreCorrupt
from anabranch.core.journal import Record, line
from anabranch.host.log import Data, Numbered, WholeLog


class MemoryLog(WholeLog):
    """A log that is gone with its process."""

    def __init__(self) -> None:
        super().__init__(self._after, self._bytes_of)
        self._lines: list[str] = []
        self._payloads: dict[str, Data] = {}

    def append(self, record: Record, payload: Data | None = None) -> None:
        """See `Journal`."""
        self._lines.append(line(record))
        if payload is not None:
            self._payloads[record["payload"]["sha256"]] = bytes(payload)

    def _after(self, place: int) -> Numbered:
        return islice(enumerate(map(json.loads, self._lines), 1), place, None)

    def _bytes_of(self, reference: ev.Payload) -> Data:
        try:
            return self._payloads[reference.sha256]
        except KeyError:
            raise StoreCorrupt(f"payload {reference.sha256} is not in the log") from None
