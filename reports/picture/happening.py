"""One thing that happened in a run, whoever tells of it: a line of `events.jsonl`, or a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from anabranch.core.errors import DataError

SHOWN = {"published": "applied"}  # a verdict as the pages have it
CHUNK_BYTES = 1 << 18
HEAD = ("time_s", "kind", "client", "version")


class Happened(NamedTuple):
    """`t`: seconds since the run's start; `client` and `version` are empty where it is of none.

    `data` may have these again, as a line has them: `others` is without.
    """

    t: float
    kind: str
    client: str
    version: int | None
    data: Mapping[str, Any]

    @property
    def others(self) -> dict[str, Any]:
        """What else is told of it."""
        return {key: value for key, value in self.data.items() if key not in HEAD}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        own: dict[str, Any] = {"t": self.t, "kind": self.kind}
        own |= {"client": self.client} if self.client else {}
        own |= {} if self.version is None else {"version": self.version}
        own |= {"verdict": SHOWN.get(said, said)} if (said := self.data.get("verdict")) else {}
        return {**self.others, **own}


def of_line(row: Mapping[str, Any]) -> Happened:
    """That of a line of `events.jsonl`."""
    return Happened(row["time_s"], row["kind"], row.get("client", ""), row.get("version"), row)


def of_lines(file: IO[bytes], rest: bytes = b"") -> Iterator[tuple[list[Happened], bytes]]:
    """What a file's lines tell from here on, lot by lot, and the bytes of a line that is not whole.

    `rest` are such bytes of an earlier call. Raises `DataError` for a line that is no event.
    """
    while chunk := file.read(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        try:
            found = [of_line(json.loads(line)) for line in lines if line]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file.name} has a line that is no event: {error}") from error
        yield found, rest
