"""The signatures that are kept with the updates: by which authorities, and whether they still hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509

from anabranch.core.errors import ConfigError
from anabranch.core.journal import Record
from anabranch.identity.authority import Authority
from anabranch.identity.certificates import fingerprint
from anabranch.identity.files import write_private
from anabranch.identity.signatures import proof_problem

log = logging.getLogger(__name__)

AUTHORITIES = "authorities.pem"


def keep_authority(data_dir: Path, authority: Authority) -> None:
    """Keep the authority's certificate beside the data: what the signatures are checked by, ever after.

    One that another has followed here may be one whose key has leaked: that is said.
    """
    known = [fingerprint(c) for c in read_authorities(data_dir)]
    if authority.sha256 not in known:
        path = data_dir / AUTHORITIES
        before = path.read_bytes() if path.exists() else b""
        write_private(path, before + authority.pem)
    elif authority.sha256 != known[-1]:
        log.warning(
            "%s has the authority %s, and this run has gone on to %s: if that was as the older one's key may "
            "have leaked, whoever has it is let in again; set identity.folder to the newer one's folder",
            *(authority.folder, authority.sha256, known[-1]),
        )


def read_authorities(data_dir: Path) -> list[x509.Certificate]:
    """All authorities whose members ever sent updates. Raises `ConfigError` for a damaged file."""
    path = data_dir / AUTHORITIES
    if not path.exists():
        return []
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it from a backup") from error


class Proofs:
    """Checks the updates of a run, one record after the other. `ca_sha256`: only that authority counts.

    Or those, with a comma between: a run may have had one after the other.
    """

    def __init__(self, run_id: str, authorities: Sequence[x509.Certificate], ca_sha256: str = "") -> None:
        wanted = {text for text in ca_sha256.replace(":", "").lower().split(",") if text}
        self._run_id, self._must_sign = run_id, bool(wanted)
        self._authorities = [c for c in authorities if not wanted or fingerprint(c) in wanted]
        self.signed = 0

    def problem(self, record: Record) -> str | None:
        """What is wrong with the signature in a record of the log; None: nothing."""
        if record["kind"] != "update":
            return None
        if "proof" not in record:
            return self._said(record, "is not signed") if self._must_sign else None
        self.signed += 1
        found = proof_problem(self._run_id, record, self._authorities)
        return self._said(record, f"is not proved: {found}") if found else None

    def _said(self, record: Record, what: str) -> str:
        return f"update {record['update_id']} of {record['client_id']} {what}"
