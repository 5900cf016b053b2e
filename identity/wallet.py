"""What a member has: its key, its certificate and the authority's, in one file that only it can read.

One file, so that key and certificate always fit each other. A device's key is made on the device and never
leaves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography import x509

from anabranch.core.errors import ClocksDisagree, ConfigError, NotAuthenticated
from anabranch.identity.certificates import (
    END_KEY,
    SET_CLOCK,
    SKEW_S,
    Key,
    Peer,
    certificate_der,
    certificate_pem,
    check_lasts,
    is_issued_by,
    key_pem,
    lifetime,
    made_at,
    new_key,
    new_papers,
    peer_of,
    read_certificate,
    read_key,
    renewal_due,
    signing_request,
    time_text,
    times_text,
)
from anabranch.identity.files import make_private_folder, tighten, write_private
from anabranch.identity.signatures import sign

IDENTITY, JOINING = "identity.pem", "joining.pem"
END_CERTIFICATE = b"-----END CERTIFICATE-----\n"


@dataclass(frozen=True)
class Wallet:
    """A member's papers, in `folder`."""

    folder: Path
    key: Key = field(repr=False)
    certificate: x509.Certificate
    authority: x509.Certificate

    @property
    def peer(self) -> Peer:
        """Whom the certificate names."""
        return peer_of(certificate_der(self.certificate))

    @property
    def name(self) -> str:
        """The name in the certificate."""
        return self.peer.name

    def credentials(self) -> tuple[bytes, bytes, bytes]:
        """The authority's certificate, the key and the certificate, as PEM: what TLS needs."""
        return certificate_pem(self.authority), key_pem(self.key), certificate_pem(self.certificate)

    def is_due(self, now: float) -> bool:
        """Whether it is time to renew; none outlives the authority's."""
        lasts_longer = lifetime(self.certificate)[1] < lifetime(self.authority)[1]
        return lasts_longer and now >= renewal_due(self.certificate)

    def check(self, now: float) -> None:
        """Raises `NotAuthenticated` once the certificate, or the authority's, has expired."""
        self.check_authority(now)
        if now >= (end := lifetime(self.certificate)[1]):
            raise NotAuthenticated(
                f"the certificate in {self.folder / IDENTITY} expired at {time_text(end)}, and by this "
                f"machine's clock it is {time_text(now)}: if that is right, {new_papers(self.peer.kind)}"
            )

    def check_authority(self, now: float) -> None:
        """Raises `NotAuthenticated` once the authority has ended."""
        check_lasts(self.authority, now, self.peer.kind)

    def request(self) -> bytes:
        """A signing request (DER) for the same key."""
        return signing_request(self.key)

    def sign(self, message: bytes) -> bytes:
        """The key's signature of a message: ECDSA with SHA-256, DER."""
        return sign(self.key, message)

    def renewed(self, certificate: bytes, now: float) -> Wallet:
        """The same papers with a newer certificate (DER), saved.

        Raises `NotAuthenticated` for one that is not of this key, this name and this authority, and
        `ClocksDisagree` for one of a server whose clock is wrong: it would take the place of one that counts.
        Ends are not compared: one of a shorter life may end before, where the server's setting was changed.
        """
        found = replace(self, certificate=read_certificate(certificate, "the server's answer"))
        if found.name != self.name:
            raise NotAuthenticated(f"the server sent a certificate of {found.name!r}, not of {self.name!r}")
        begin, end = lifetime(found.certificate)
        if not begin - SKEW_S <= now < end or made_at(found.certificate) < made_at(self.certificate):
            text = times_text("the certificate that the server sent", (begin, end), "this machine's", now)
            raise ClocksDisagree(f"{text}: {SET_CLOCK}")
        found.save()
        return found

    def save(self) -> None:
        """Write the file. Raises `NotAuthenticated` where the parts do not fit, `StoreError`."""
        if self.certificate.public_key() != self.key.public_key():
            raise NotAuthenticated("the certificate is of another key than the device's")
        if not is_issued_by(self.certificate, self.authority):
            raise NotAuthenticated("the certificate is not signed by the federation's authority")
        make_private_folder(self.folder)
        ca, key, own = self.credentials()
        write_private(self.folder / IDENTITY, key + own + ca)


def read_wallet(folder: Path) -> Wallet | None:
    """The papers in a folder, None where there are none. Raises `ConfigError` for damaged ones."""
    path = folder / IDENTITY
    if not path.exists():
        return None
    tighten(folder, path)
    try:
        key, _, rest = path.read_bytes().partition(END_KEY)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    own, _, ca = rest.partition(END_CERTIFICATE)
    try:
        return Wallet(
            folder,
            read_key(key + END_KEY, str(path)),
            read_certificate(own + END_CERTIFICATE, str(path)),
            read_certificate(ca, str(path)),
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}; or remove it: a device joins again with a new token, an operator's others are made by "
            "`anabranch admin operator`"
        ) from error


def joining_key(folder: Path) -> Key:
    """The key to join with: made once, so that a join whose answer was lost can be repeated."""
    path = folder / JOINING
    if path.exists():
        try:
            return read_key(path.read_bytes(), str(path))
        except ConfigError as error:
            raise ConfigError(f"{error}; or remove it, and join with a new token") from error
    key = new_key()
    make_private_folder(folder)
    write_private(path, key_pem(key))
    return key
