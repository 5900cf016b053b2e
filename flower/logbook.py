"""The journal of a run on Flower's Grid, in files that outlive the process that writes them.

    journal.jsonl         one record a line, the run's own first; as every run's folder has it
    initial.safetensors   the weights of version 0
    payloads/DIGEST       the updates' bytes, each on disk before the record that speaks of it
    measured.jsonl        what evaluations gave

Flower starts a ServerApp anew after a crash, and keeps nothing of it. So the folder is opened again, a line
that was cut short is cut off, and the records are replayed. At the end the payloads become `payloads.zip`,
and the folder is like any other run's: `anabranch replay` and `anabranch compare` read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from safetensors.numpy import save

from anabranch.core.config.tables import Config
from anabranch.core.engine.buffers import matching
from anabranch.core.errors import ConfigError, StoreLocked
from anabranch.core.journal import JournalDigest, Record
from anabranch.core.model.arrays import plain_tensors
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.host.log import Data, WholeLog
from anabranch.identity.files import sync_folder
from anabranch.reports.folders import has_ended, numbered
from anabranch.reports.journal_files import (
    INITIAL,
    JOURNAL,
    PAYLOAD_FOLDER,
    PAYLOADS,
    JournalReader,
    PayloadReader,
    run_record,
)
from anabranch.reports.settings import told_apart

MEASURED = "measured.jsonl"


def free_folder(folder: Path) -> Path:
    """The folder, or, where a run has ended in it, the next of its name with a number that is free."""
    return next(found for found in numbered(folder) if not has_ended(found))


class Logbook(WholeLog):
    """The log of a run over a Grid, in a folder.

    A context manager, which lets the folder go. What is read is as it lay there then.

    Raises `StoreLocked` where another process writes there, and `ConfigError` where the run that was begun
    there has other settings.
    """

    def __init__(self, folder: Path, config: Config, initial: Tensors) -> None:
        (folder / PAYLOAD_FOLDER).mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._lock = _locked(folder)
        try:
            self.resumed = self._cut_torn_line()
            if not self.resumed:
                self._begin(config, initial)
            self._reader = self._opened(config)
        except BaseException:
            self._lock.close()
            raise
        super().__init__(self._reader.records, PayloadReader(folder))
        self.spec, self.initial = self._reader.spec, self._reader.initial()
        self._digest = JournalDigest()
        self._digest.add(run_record(self.spec, config))
        for _, record in self.records():
            self._digest.add(record)
        self._lines: IO[str] = (folder / JOURNAL).open("a", encoding="utf-8")
        self._synced = True

    def append(self, record: Record, payload: Data | None = None) -> None:
        """Write a record; it is durable after the next `sync`, and at once if it comes with a payload."""
        if payload is not None:
            _write_durably(self.folder / PAYLOAD_FOLDER / record["payload"]["sha256"], payload)
        self._lines.write(self._digest.add(record) + "\n")
        self._synced = False
        if payload is not None:
            self.sync()

    def sync(self) -> None:
        """Make what was appended durable."""
        if not self._synced:
            self._lines.flush()
            os.fsync(self._lines.fileno())
            self._synced = True

    def measured(self, version: int, metrics: dict[str, float]) -> None:
        """Note what an evaluation gave: no part of the journal."""
        with (self.folder / MEASURED).open("a", encoding="utf-8") as file:
            # Away from a line that a crash has cut short.
            file.write("\n" + json.dumps({"version": version, **metrics}) + "\n")

    def measurements(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What earlier evaluations gave, by version."""
        file = self.folder / MEASURED
        for text in file.read_text(encoding="utf-8").split("\n") if file.exists() else ():
            if text.startswith("{") and text.endswith("}"):
                row = json.loads(text)
                yield row.pop("version"), row

    @property
    def sha256(self) -> str:
        """The digest of the journal so far."""
        return self._digest.hexdigest()

    def pack(self) -> None:
        """The run has ended, and its result is there: put the payloads in one file."""
        self.sync()
        folder = self.folder / PAYLOAD_FOLDER
        with _durable(self.folder / PAYLOADS) as packed, zipfile.ZipFile(packed, "w") as file:
            for path in sorted(folder.iterdir()):
                file.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
        # At once out of where payloads are looked for first: half of them would be none.
        shutil.rmtree(folder.rename(folder.with_suffix(".packed")))

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *error: object) -> None:
        self._lines.close()
        self._lock.close()

    def _opened(self, config: Config) -> JournalReader:
        reader = JournalReader(self.folder)
        if differences := told_apart(reader.config.to_json(), config.to_json()):
            raise ConfigError(
                f"{self.folder} has a run with other settings: {'; '.join(differences)}: "
                "give this one another anabranch.out, or have again what it was begun with"
            )
        return reader

    def _begin(self, config: Config, initial: Tensors) -> None:
        _write_durably(self.folder / INITIAL, save(plain_tensors(initial)))
        buffers = matching(initial, config.model.buffer_names)
        digest, spec = JournalDigest(), ParamSpec.of(initial, buffers=buffers)
        line = digest.add(run_record(spec, config)) + "\n"
        _write_durably(self.folder / JOURNAL, line.encode())

    def _cut_torn_line(self) -> bool:
        """Whether there is a journal; what follows its last whole line goes."""
        file = self.folder / JOURNAL
        if not file.exists():
            return False
        data = file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(file, whole)
        return whole > 0


def _locked(folder: Path) -> IO[str]:
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StoreLocked(
            f"{folder}: another ServerApp writes there: give this one another anabranch.out"
        ) from error
    return file


def _write_durably(path: Path, data: Data) -> None:
    with _durable(path) as file:
        file.write(data)


@contextmanager
def _durable(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that is there, and on the disk, once it is whole."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    sync_folder(path.parent)
