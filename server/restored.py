"""That a run was restored from a backup, beside its data: the authority's word for the devices.

A device remembers the newest version that it has seen and takes no older history. Where the authority attests
that the run goes on from a version, it forgets those that were lost. Without an authority there is nobody to
attest: the note then says only that version numbers may have been used before.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, InvalidSignature, on_disk
from anabranch.core.plain import from_kept
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import public_key_of
from anabranch.identity.files import check_owner, make_private_folder, write_private
from anabranch.identity.heads import restored_message
from anabranch.identity.signatures import check_signature
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.server.history import head_at, history_at, rows_after
from anabranch.server.store.base import RunInfo, Store
from anabranch.server.store.ending import check_own
from anabranch.server.store.factory import open_store
from anabranch.server.store.files import FolderLock
from anabranch.server.store.mark import FILE as MARK
from anabranch.server.verify import stored_info

FILE = "restored.json"
BACKUP = "backup.json"  # what a backup says of itself: until it is attested, no server starts on it


@dataclass(frozen=True)
class Restored:
    """The backup's newest version and its head; `signature` is the authority's. Hex but the numbers."""

    run_id: str
    version: int
    head: str
    number: int
    signature: str

    @property
    def message(self) -> bytes:
        """What is signed."""
        return restored_message(self.run_id, self.version, self.head, self.number)

    def to_proto(self) -> devices.Restored:
        """As devices are told."""
        head, signature = bytes.fromhex(self.head), bytes.fromhex(self.signature)
        return devices.Restored(version=self.version, head=head, number=self.number, signature=signature)


def attest(data_dir: Path, database: str, authority: Authority | None) -> Restored:
    """Write down that the run in a data directory goes on from where it stands: it is no backup any more.

    Raises `DataError`, `StoreLocked` where a server is at work there, and `ConfigError` for a run that must
    not go on from a backup, where another one lies there, and for another user's directory.
    """
    check_owner(data_dir / MARK)
    store, lock = open_store(database, data_dir), None
    try:
        if database:
            make_private_folder(data_dir)  # on another machine no server has made it yet
        info = stored_info(store, data_dir)
        lock = FolderLock(data_dir)
        if database:
            check_own(data_dir, info.run_id)
        refuse_private(Config.from_json(info.config))
        version, seq = _newest(store)
        head = history_at(store, info, version, seq).head
        number = time.time_ns() // 1_000_000 if authority is None else authority.number_restore()
        made = Restored(info.run_id, version, head, number, "")
        if authority is not None:
            made = replace(made, signature=authority.sign(made.message).hex())
        write_private(data_dir / FILE, json.dumps(asdict(made), indent=1).encode())
        store.disown()  # now: a log that ends too early is refused until the devices will be told
        (data_dir / BACKUP).unlink(missing_ok=True)  # last: what is a backup still is not served
    finally:
        store.close()
        if lock is not None:
            lock.release()
    return made


def refuse_private(config: Config) -> None:
    """Raises `ConfigError` for a run whose noise, or whose masked updates, must not come twice."""
    if config.secagg.on:
        raise ConfigError(
            "a run with masked sums cannot go on from a backup: its keepers have answered cohorts that were "
            "lost since, and answer none of these twice; start another run from its newest model"
        )
    if config.privacy.on:
        raise ConfigError(
            "a private run cannot go on from a backup: versions that were published since would come "
            "again with the same noise and other sums; start another run from its newest model"
        )


def read_restored(
    data_dir: Path, database: str, store: Store, info: RunInfo, authority: Authority | None
) -> Restored | None:
    """What `attest` wrote, None where nothing was. Raises `ConfigError` unless it is of this history."""
    path = data_dir / FILE
    whose = ("--insecure",) if authority is None else ("--folder", str(authority.folder))
    place = ["--data-dir", str(data_dir), *(["--database", "URL"] if database else [])]
    command = shlex.join(["anabranch", "admin", "attest-restore", *place, *whose])
    again = f"run `{command}` again"
    try:
        with on_disk(path):
            if not path.exists():
                return None
            found = from_kept(json.loads(path.read_bytes()), Restored, path)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): {again}") from error
    if found.run_id != info.run_id:
        raise ConfigError(f"{path} is of another run: remove it")
    if found.version and head_at(store, found.version) != found.head:
        raise ConfigError(f"{path} is of a history that was lost since: {again}")
    if authority is not None:
        try:
            key = public_key_of(authority.certificate)
            check_signature(key, bytes.fromhex(found.signature), found.message)
        except (InvalidSignature, ValueError) as error:
            raise ConfigError(f"{path} is not signed by {authority.folder}: {again}") from error
    return found


def _newest(store: Store) -> tuple[int, int]:
    """The newest version on record, and the event that published it; (0, 0) for the first weights."""
    version, seq = 0, 0
    for row in rows_after(store):
        version, seq = row.version, row.seq
    return version, seq
