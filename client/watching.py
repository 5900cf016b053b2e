"""What a server tells of as it happens, and how far it was heard: another connection goes on there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WatchedEvent:
    """Something that happened: see `WatchResponse` in protos/v1/operators.proto for the kinds."""

    seq: int
    at_s: float
    kind: str
    client_id: str
    version: int
    data: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class WatchPlace:
    """How far it was heard: several happenings share a number, and those of the newest one are counted.

    `after_seq`: begin after this number; None: with what happens from the first connection on.
    """

    def __init__(self, after_seq: int | None) -> None:
        self._after, self._seq, self._of_seq = after_seq, 0, 0

    def fresh(self, watch: Callable[[int | None], Iterator[WatchedEvent]]) -> Iterator[WatchedEvent]:
        """What was not heard yet, over a connection of its own: `watch` tells what comes after a number."""
        again, skip = self._seq, self._of_seq
        for event in watch(again - 1 if again else self._after):
            if event.seq == again and skip:
                skip -= 1
                continue
            self._of_seq = self._of_seq + 1 if event.seq == self._seq else 1
            self._seq = event.seq
            yield event
