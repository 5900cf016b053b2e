"""What has come of uploads that are not whole: of a task at most one, of a client at most its quota.

A part goes with its task. Large ones are files (`Blobs`), named by client, task and update; what has come of
a small one is kept in memory, as much as there is room for, and is sent again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anabranch.core.errors import Overloaded, TooLarge
from anabranch.core.limits import MIB
from anabranch.server.store.blobs import BETWEEN_IDS, IDS_MAX

SMALL_BYTES_MAX = 16 * MIB  # of small parts in memory; from there on the oldest are sent again


@dataclass(frozen=True, slots=True)
class UploadKey:
    """Whose upload it is, of which task, and its id."""

    client_id: str
    task_id: str
    update_id: str

    @property
    def name(self) -> str:
        """Its name in the spool."""
        return BETWEEN_IDS.join((self.client_id, self.task_id, self.update_id))

    @property
    def task(self) -> tuple[str, str]:
        """Whose, and of which task."""
        return self.client_id, self.task_id

    @classmethod
    def of(cls, name: str) -> UploadKey | None:
        """The inverse of `name`; None for what has no such name, as the parts of older releases."""
        ids = name.split(BETWEEN_IDS)
        return cls(*ids) if len(ids) == IDS_MAX else None


@dataclass(eq=False)
class Part:
    """What there is of an upload: `file_bytes` in the spool, `data` in memory, `coming` of an open stream.

    `at`: when its last stream ended, on the event loop's clock.
    """

    key: UploadKey
    file_bytes: int = 0
    data: bytes = b""
    coming: int = 0
    at: float = 0.0
    wanted: bool = True

    @property
    def size_bytes(self) -> int:
        """What it counts for."""
        return max(self.file_bytes + len(self.data), self.coming)


class Spool:
    """The books of the parts; whoever keeps them sees to the files."""

    def __init__(self, bytes_per_client: int) -> None:
        self._bytes_per_client = bytes_per_client
        self._parts: dict[str, dict[str, Part]] = {}  # by client and task
        self._small: dict[Part, None] = {}  # those with data in memory, the oldest first
        self._small_bytes = 0

    def __iter__(self) -> Iterator[Part]:
        return (part for parts in list(self._parts.values()) for part in list(parts.values()))

    def part(self, client_id: str, update_id: str) -> Part | None:
        """What there is of a client's update."""
        mine = self._parts.get(client_id, {}).values()
        return next((part for part in mine if part.key.update_id == update_id), None)

    def of_task(self, client_id: str, task_id: str) -> Part | None:
        """What there is of the update of a task."""
        return self._parts.get(client_id, {}).get(task_id)

    def check_quota(self, key: UploadKey, size_bytes: int) -> None:
        """Raises `TooLarge`, or `Overloaded` while the client's other uploads leave no room for this one."""
        most = self._bytes_per_client
        if size_bytes > most:
            raise TooLarge(f"an update of {size_bytes} bytes is over server.upload_bytes_per_client, {most}")
        mine = self._parts.get(key.client_id, {})
        others = sum(part.size_bytes for task_id, part in mine.items() if task_id != key.task_id)
        if others + size_bytes > most:
            raise Overloaded(
                f"other uploads of {key.client_id!r} have {others} bytes: with {size_bytes} more it is over "
                f"server.upload_bytes_per_client, {most}: finish them first"
            )

    def enter(self, key: UploadKey) -> tuple[Part, Part | None]:
        """The part of an upload, new or known, and the part of another update that it takes the task of."""
        older = self.of_task(*key.task)
        if older is not None and older.key == key:
            return older, None
        if older is not None:
            self.remove(older)
        part = self._parts.setdefault(key.client_id, {})[key.task_id] = Part(key)
        return part, older

    def keep(self, part: Part, data: bytes) -> None:
        """Have the bytes of a small upload in memory; nothing, where they are not needed any more."""
        self._small_bytes += len(data) - len(part.data)
        part.data = data
        self._small.pop(part, None)
        if data:
            self._small[part] = None
        while self._small_bytes > SMALL_BYTES_MAX:
            oldest = next(iter(self._small))
            self.keep(oldest, b"")
            self.tidy(oldest)

    def tidy(self, part: Part) -> None:
        """Remove a part of which nothing is left."""
        if not part.size_bytes:
            self.remove(part)

    def remove(self, part: Part) -> None:
        """It is not wanted any more."""
        part.wanted = False
        mine = self._parts.get(part.key.client_id, {})
        if mine.get(part.key.task_id) is part:
            del mine[part.key.task_id]
            if not mine:
                del self._parts[part.key.client_id]
        if part.data:
            self.keep(part, b"")

    def keep_only(self, is_wanted: Callable[[Part], bool]) -> None:
        """Remove the parts that are not wanted, but for those that have a stream."""
        for part in self:
            if not part.coming and not is_wanted(part):
                self.remove(part)
