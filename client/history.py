"""What a device remembers of a run's history, so that nobody can take it back to an older or another one.

The newest head that it has seen is on disk, with the server's signature of it. A model comes with a signed
head; a newer one must follow from the remembered one, link by link.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cryptography import x509

from anabranch.core.errors import (
    ClocksDisagree,
    ConfigError,
    HistoryMismatch,
    InvalidSignature,
    NotAuthenticated,
)
from anabranch.core.plain import from_kept
from anabranch.identity.certificates import (
    SET_CLOCK,
    Kind,
    is_issued_by,
    peer_of,
    public_key_of,
    times_text,
)
from anabranch.identity.files import make_private_folder, write_private
from anabranch.identity.heads import HASH_BYTES, follow_links, head_message, restored_message
from anabranch.identity.signatures import check_signature
from anabranch.protos.v1 import devices_pb2 as devices

log = logging.getLogger(__name__)

FILE = "history.json"
RUNS_KEPT = 16

# The links after a version up to another, 32 bytes each.
GetLinks = Callable[[int, int], bytes]


class HistoryRestored(HistoryMismatch):
    """The run goes on from a backup: what this device has of lost versions must go, then it can go on."""


@dataclass(frozen=True)
class SeenHead:
    """The newest head of a run that was seen; what the server signed of it is evidence. Hex but the numbers.

    `restored` is the number of the last restore that the authority attested, 0 for none.
    """

    version: int
    head: str
    message: str
    signature: str
    certificate: str
    restored: int = 0


class SeenHistory:
    """Of one device. `folder` None: it is remembered as long as the process lives."""

    def __init__(self, authority: x509.Certificate, folder: Path | None) -> None:
        self._authority = authority
        self._path = None if folder is None else folder / FILE
        self._seen = {} if self._path is None else _read(self._path)

    def check(self, header: devices.ModelHeader, get_links: GetLinks) -> None:
        """Take a model's header, and remember its head.

        Raises `NotAuthenticated` unless the server has signed it, `ClocksDisagree`, and `HistoryMismatch` for
        a head that is older than one that was seen, or does not follow from it. `HistoryRestored` where the
        authority says that the run goes on from an older one: it is remembered, and the model is not taken
        this time.
        """
        found = self._verified(header)
        known = self._seen.get(header.run_id)
        restored = self._restored(header, 0 if known is None else known.restored)
        if known is not None:
            try:
                self._check_follows(header.run_id, known, found, get_links)
            except HistoryMismatch as error:
                if restored is None:
                    raise
                self._check_follows(header.run_id, restored, found, get_links)
                self._remember(header.run_id, restored)
                raise HistoryRestored(
                    f"{error}; the authority says that the run was restored to version {restored.version}"
                ) from None
        number = max(0 if s is None else s.restored for s in (known, restored))
        if known is None or found.version > known.version or number > known.restored:
            self._remember(header.run_id, replace(found, restored=number))

    def _restored(self, header: devices.ModelHeader, known: int) -> SeenHead | None:
        """Where the run goes on, if the authority attests a restore that was not known. Raises nothing."""
        told = header.restored
        message = restored_message(header.run_id, told.version, told.head.hex(), told.number)
        if told.number <= known:
            return None
        try:
            check_signature(public_key_of(self._authority), told.signature, message)
        except InvalidSignature:
            log.warning("a restore of run %s is attested by somebody else than the authority", header.run_id)
            return None
        return SeenHead(
            version=told.version,
            head=told.head.hex(),
            message=message.hex(),
            signature=told.signature.hex(),
            certificate="",
            restored=told.number,
        )

    def _remember(self, run_id: str, seen: SeenHead) -> None:
        self._seen.pop(run_id, None)
        self._seen[run_id] = seen
        self._write()

    def _verified(self, header: devices.ModelHeader) -> SeenHead:
        message = head_message(
            header.run_id,
            header.version,
            header.head.hex(),
            header.manifest_sha256.hex(),
            header.part.sha256.hex(),
            header.vector_sha256.hex(),
        )
        try:
            peer = peer_of(header.certificate)
            check_signature(peer.key, header.signature, message)
        except (InvalidSignature, NotAuthenticated) as error:
            raise NotAuthenticated(
                f"version {header.version} is not signed by the server: {error}"
            ) from error
        if peer.kind is not Kind.SERVER or not is_issued_by(peer.certificate, self._authority):
            raise NotAuthenticated(f"version {header.version} is signed by somebody else than the server")
        if not peer.not_before <= (now := time.time()) < peer.not_after:
            valid = (peer.not_before, peer.not_after)
            text = times_text("the server's certificate", valid, "this machine's", now)
            raise ClocksDisagree(f"{text}: {SET_CLOCK}")
        return SeenHead(
            version=header.version,
            head=header.head.hex(),
            message=message.hex(),
            signature=header.signature.hex(),
            certificate=header.certificate.hex(),
        )

    def _check_follows(self, run_id: str, known: SeenHead, found: SeenHead, get_links: GetLinks) -> None:
        if found.version < known.version:
            self._refuse(run_id, known, f"the server has gone back to version {found.version}")
        links, count = b"", found.version - known.version
        while len(links) < count * HASH_BYTES:
            more = get_links(known.version + len(links) // HASH_BYTES, found.version)
            if not more or len(more) % HASH_BYTES or len(links) + len(more) > count * HASH_BYTES:
                self._refuse(run_id, known, f"the server cannot show what led to version {found.version}")
            links += more
        if follow_links(known.head, links) != found.head:
            self._refuse(run_id, known, f"the server's version {found.version} has another history")

    def _refuse(self, run_id: str, known: SeenHead, what: str) -> None:
        where = (
            ": if it was restored from a backup, its operator says so by `anabranch admin attest-restore`; "
            f"then start this device again (what it has seen lies in {self._path or 'memory'})"
        )
        raise HistoryMismatch(f"run {run_id}: {what}, this device has seen version {known.version}{where}")

    def _write(self) -> None:
        while len(self._seen) > RUNS_KEPT:
            del self._seen[next(iter(self._seen))]
        if self._path is not None:
            data = {run_id: asdict(seen) for run_id, seen in self._seen.items()}
            make_private_folder(self._path.parent)
            write_private(self._path, json.dumps(data, indent=1).encode())


def _read(path: Path) -> dict[str, SeenHead]:
    if not path.exists():
        return {}
    try:
        return from_kept(json.loads(path.read_bytes()), dict[str, SeenHead], path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}): remove it to start with no memory") from error
