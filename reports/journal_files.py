"""A run's journal as files: `journal.jsonl`, `initial.safetensors` and `payloads.zip`.

`journal.jsonl` has one canonical record a line; the first line, kind `run`, holds the configuration
and the model's layout, so the folder replays on its own. `payloads.zip` (stored, not compressed) has
the encoded updates under their SHA-256; it is absent where the run did not keep them.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy.typing as npt
from safetensors.numpy import load_file, save

from anabranch.core.config.tables import Config
from anabranch.core.content import digest_like
from anabranch.core.errors import DataError, ReplayMismatch, StoreCorrupt
from anabranch.core.events import Payload
from anabranch.core.journal import JournalDigest, Record
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.support.folders import check_folder

JOURNAL, INITIAL, PAYLOADS = "journal.jsonl", "initial.safetensors", "payloads.zip"
OTHERWISE = "so it cannot go on: begin in another folder, or have again what it was begun with"
PAYLOAD_FOLDER = "payloads"  # where a run that has not ended keeps each in a file, in the place of PAYLOADS


def run_record(spec: ParamSpec, config: Config) -> Record:
    """The first record of a run's journal."""
    return {"kind": "run", "config": config.to_json(), "layout": spec.to_json()}


@dataclass(frozen=True)
class JournalPosition:
    """How far a journal has come: its bytes, and their digest."""

    size_bytes: int
    digest: JournalDigest


class DigestJournal:
    """The digest of the journal that a `JournalWriter` would write, without the files."""

    def __init__(self, spec: ParamSpec, config: Config) -> None:
        self._digest = JournalDigest()
        self.append(run_record(spec, config))

    def append(self, record: Record, payload: bytes | memoryview | None = None) -> None:  # noqa: ARG002
        """Take one record; the payload is in it by its digest."""
        self._digest.add(record)

    def place(self) -> JournalPosition:
        """Where it stands."""
        return JournalPosition(0, self._digest.copy())

    def go_back(self, place: JournalPosition) -> None:
        """Forget what came after a place."""
        self._digest = place.digest.copy()

    def close(self) -> None:
        """Nothing is held."""

    @property
    def sha256(self) -> str:
        """The digest of the journal so far."""
        return self._digest.hexdigest()


class JournalWriter:
    """Writes the journal of one run into `folder`, which has none yet; use it as a context manager.

    With `retraces` there may be one, and what is appended must be what it has, record by record, until it
    ends: none of it is written anew. Raises `ReplayMismatch` for other first weights, and `append` for any
    other record.
    """

    def __init__(
        self,
        folder: Path,
        spec: ParamSpec,
        initial: Tensors,
        config: Config,
        keep_payloads: bool = True,
        retraces: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._retraces = folder / JOURNAL, retraces and (folder / JOURNAL).exists()
        self._begin(folder / INITIAL, save(plain_tensors(initial)))
        self._digest = JournalDigest()
        self._lines: IO[str] = self._path.open("r+" if self._retraces else "w", encoding="utf-8")
        self._payloads: zipfile.ZipFile | None = None
        self._kept: set[str] = set()
        self._size_bytes = 0
        self.append(run_record(spec, config))
        if config.run.keep_payloads and keep_payloads:  # now: a run of other settings has ended here
            self._payloads = zipfile.ZipFile(folder / PAYLOADS, "w", zipfile.ZIP_STORED)

    def append(self, record: Record, payload: bytes | memoryview | None = None) -> None:
        """Write one record, and its payload unless it is there already."""
        text = self._digest.add(record) + "\n"
        if not (self._retraces and self._is_there(text)):
            self._lines.write(text)
        self._size_bytes += len(text.encode())
        if payload is None or self._payloads is None:
            return
        sha256 = record["payload"]["sha256"]
        if sha256 not in self._kept:
            self._kept.add(sha256)
            self._payloads.writestr(zipfile.ZipInfo(sha256), payload)

    def has_retraced(self) -> bool:
        """Whether all that was there before has come again; so it is of a run that begins."""
        return not self._retraces

    def _begin(self, path: Path, first: bytes) -> None:
        """Write the first weights."""
        if self._retraces and path.exists() and path.read_bytes() != first:
            raise ReplayMismatch(f"{path}: the App's first weights are other ones now; {OTHERWISE}")
        path.write_bytes(first)

    def _is_there(self, text: str) -> bool:
        """Whether the journal has this record next; from where it ends, or is torn, it is written on."""
        known = self._lines.readline()
        if known == text:
            return True
        if known.endswith("\n"):
            raise ReplayMismatch(
                f"{self._path} has another record after {self._size_bytes} bytes: the App, its data, their "
                f"arithmetic or the run's name and places are not what it was begun with; {OTHERWISE}"
            )
        self._retraces = False
        self._lines.seek(self._size_bytes)
        self._lines.truncate()
        return False

    def place(self) -> JournalPosition:
        """Where it stands."""
        return JournalPosition(self._size_bytes, self._digest.copy())

    def go_back(self, place: JournalPosition) -> None:
        """Forget the records after a place, as a log does that was restored from a backup."""
        self._lines.flush()
        self._lines.seek(place.size_bytes)
        self._lines.truncate()
        self._size_bytes, self._digest = place.size_bytes, place.digest.copy()

    @property
    def sha256(self) -> str:
        """The digest of the journal so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """What was appended is in the files, whole; nothing is appended any more."""
        self._lines.close()
        if self._payloads is not None:
            self._payloads.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


class JournalReader:
    """Reads what `JournalWriter` wrote. Raises `DataError` where the folder holds no journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_folder(folder, "name the folder of a run")
        if not (folder / JOURNAL).is_file():
            raise DataError(f"{folder} has no {JOURNAL}: name the folder of a run")
        head = next(self._lines(), None)
        if head is None or head.get("kind") != "run":
            raise DataError(f"{folder / JOURNAL}: the first line is not the record of a run")
        self.config = Config.from_json(head["config"])
        self.spec = ParamSpec.from_json(head["layout"])

    def initial(self) -> dict[str, npt.NDArray[Any]]:
        """The weights of version 0, in the spec's order."""
        found = load_file(self.folder / INITIAL)
        self.spec.check(found)
        return {t.name: found[t.name] for t in self.spec.tensors}

    @property
    def has_payloads(self) -> bool:
        """Whether the updates' bytes were kept, so that the journal replays by itself."""
        return (self.folder / PAYLOADS).is_file() or (self.folder / PAYLOAD_FOLDER).is_dir()

    def records(self, after: int = 0) -> Iterator[tuple[int, Record]]:
        """The records after a place, with their places: the run's own has none, the next is 1."""
        return islice(enumerate(self._lines()), 1 + after, None)

    def sha256(self) -> str:
        """The digest of the journal as it lies there."""
        with (self.folder / JOURNAL).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def open_payloads(self) -> PayloadReader:
        """The kept payloads; raises `DataError` where there are none."""
        if not self.has_payloads:
            raise DataError(
                f"{self.folder} has no {PAYLOADS}: the run was made with run.keep_payloads = false"
            )
        return PayloadReader(self.folder)

    def _lines(self) -> Iterator[Record]:
        with (self.folder / JOURNAL).open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise DataError(f"{self.folder / JOURNAL}, line {number}: not JSON: {error}") from error


class PayloadReader:
    """The payloads of a run by reference; use it as a context manager. Raises `DataError` for a torn file."""

    def __init__(self, folder: Path) -> None:
        self._files, self._zip = folder / PAYLOAD_FOLDER, None
        if self._files.is_dir():
            return
        try:
            self._zip = zipfile.ZipFile(folder / PAYLOADS)
        except zipfile.BadZipFile as error:
            raise DataError(
                f"{folder / PAYLOADS} is not whole, so nothing replays from it: the run was killed, or is "
                "still under way"
            ) from error

    def __call__(self, reference: Payload) -> bytes:
        """The bytes. Raises `StoreCorrupt` if their digest differs or they are absent."""
        try:
            data = self._read(reference.sha256)
        except (KeyError, FileNotFoundError):
            raise StoreCorrupt(f"payload {reference.sha256} is not in the run's folder") from None
        if digest_like(data, reference.sha256) != reference.sha256:
            raise StoreCorrupt(f"payload {reference.sha256} has other bytes than were journalled")
        return data

    def _read(self, sha256: str) -> bytes:
        return (self._files / sha256).read_bytes() if self._zip is None else self._zip.read(sha256)

    def __enter__(self) -> PayloadReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._zip is not None:
            self._zip.close()
