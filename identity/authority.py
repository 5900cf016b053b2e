"""The federation's own certificate authority: a folder with its key, its certificate and its register.

    ca.key        the private key, mode 0600: whoever has it can make anybody a member
    ca.pem        the certificate
    register.db   tokens (as digests) and certificates

The server opens it to let devices join, to renew and to check; the command line to invite and to revoke. Both
may do so at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from anabranch.core.errors import ClocksDisagree, ConfigError, NotAuthenticated, NotPermitted
from anabranch.core.ids import typed_id
from anabranch.identity.certificates import (
    TOLD_BEFORE_S,
    Key,
    Kind,
    Peer,
    PublicKey,
    certificate_pem,
    fingerprint,
    is_issued_by,
    key_pem,
    key_sha256,
    lifetime,
    make_authority,
    make_certificate,
    new_key,
    new_papers,
    read_certificate,
    read_key,
    requested_key,
    time_text,
    times_text,
)
from anabranch.identity.files import make_private_folder, tighten, write_private
from anabranch.identity.register import Basis, Invitation, Membership, Register, RegisterPoint
from anabranch.identity.signatures import sign
from anabranch.identity.tokens import new_token

KEY, CERTIFICATE, REGISTER = "ca.key", "ca.pem", "register.db"
DAY_S = 86400.0
AUTHORITY_LIFE_S = 3650 * DAY_S
FIX = (
    "name the folder that has the federation's (--folder, identity.folder), or put your copy of it back; "
    "where there never was one, `anabranch admin ca init` makes it"
)
NEXT = "make another one, as where ca.key has leaked (docs/deploying.md)"


def authority_exists(folder: Path) -> bool:
    """Whether there is an authority in a folder."""
    return (folder / KEY).exists()


class Authority:
    """A federation's certificate authority, in a folder: invites, signs, revokes and checks.

    `now` is a clock of seconds since 1970. Methods may be called from any thread.
    """

    def __init__(
        self,
        folder: Path,
        key: Key,
        certificate: x509.Certificate,
        register: Register,
        now: Callable[[], float],
    ) -> None:
        self.folder, self.certificate = folder, certificate
        self._key, self._register, self._now = key, register, now

    @classmethod
    def create(cls, folder: Path, now: Callable[[], float] = time.time) -> Authority:
        """A new authority. Raises `ConfigError` if there is one: its members would be lost."""
        if authority_exists(folder):
            raise ConfigError(f"{folder} has an authority already: name another folder")
        _check_key_lost(folder)
        make_private_folder(folder)
        key = new_key()
        certificate = make_authority(key, "anabranch", now(), AUTHORITY_LIFE_S)
        register = Register.create(folder / REGISTER)
        try:
            write_private(folder / CERTIFICATE, certificate_pem(certificate))
            write_private(folder / KEY, key_pem(key))  # last: with it the authority is there
        except BaseException:  # the rest of one would be in the way of the next try
            register.close()
            for name in (REGISTER, CERTIFICATE):
                (folder / name).unlink(missing_ok=True)
            raise
        return cls(folder, key, certificate, register, now)

    @classmethod
    def open(cls, folder: Path, now: Callable[[], float] = time.time) -> Authority:
        """The authority in a folder. Raises `ConfigError` where there is none, or it is damaged."""
        if not authority_exists(folder):
            _check_key_lost(folder)
            raise ConfigError(f"{folder} {'has no authority' if folder.exists() else 'is not there'}: {FIX}")
        tighten(
            folder,
            folder / KEY,
            folder / CERTIFICATE,
            *(folder / f"{REGISTER}{end}" for end in ("", "-wal", "-shm")),
        )
        try:
            key = read_key((folder / KEY).read_bytes(), str(folder / KEY))
            certificate = read_certificate((folder / CERTIFICATE).read_bytes(), str(folder / CERTIFICATE))
        except OSError as error:
            raise ConfigError(
                f"the authority's {error.filename} cannot be read: {error.strerror}; restore it from a backup"
            ) from error
        # It signs itself: a bit that has flipped leaves what can be read, or cannot be once it is asked for.
        if certificate.public_key() != key.public_key() or not is_issued_by(certificate, certificate):
            raise ConfigError(
                f"{folder}: {CERTIFICATE} is not of {KEY}, or is damaged: restore both from one backup"
            )
        return cls(folder, key, certificate, Register(folder / REGISTER), now)

    def copy(self, target: Path) -> None:
        """Copy the authority into a folder that is empty or not there, while others write to the register.

        Raises `ConfigError` unless it is, and `StoreError`.
        """
        make_private_folder(target)
        if any(target.iterdir()):
            raise ConfigError(f"{target} is not empty: a copy of the authority wants a folder of its own")
        self._register.copy(target / REGISTER)
        write_private(target / CERTIFICATE, self.pem)
        write_private(target / KEY, key_pem(self._key))  # last: with it the authority is there

    def __enter__(self) -> Authority:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the register."""
        self._register.close()

    def now(self) -> float:
        """The authority's clock."""
        return self._now()

    @property
    def pem(self) -> bytes:
        """The certificate as PEM."""
        return certificate_pem(self.certificate)

    @property
    def sha256(self) -> str:
        """The certificate's SHA-256 (hex): what a device needs to know of it."""
        return fingerprint(self.certificate)

    @property
    def ends_at(self) -> float:
        """When it ends, and with it whatever it has signed."""
        return lifetime(self.certificate)[1]

    def ending(self) -> str:
        """That it has ended, or does so within half a year; empty before. Nobody renews it."""
        if self.ends_at - (now := self._now()) >= TOLD_BEFORE_S:
            return ""
        ends = "ends on" if now < self.ends_at else "has ended, on"
        who = f"the authority in {self.folder} {ends} {time_text(self.ends_at)}"
        return f"{who}: then no device and no operator can connect; {NEXT}"

    def _check_lasts(self) -> None:
        """Raises `ConfigError` once it has ended: who is let in could not connect."""
        if (now := self._now()) >= self.ends_at:
            raise ConfigError(f"{self.ending()}. By this machine's clock it is {time_text(now)}")

    # --- letting in --------------------------------------------------------------------------

    def invite(self, name: str, life_s: float) -> str:
        """A token with which a device may join once, under this name, within `life_s` seconds."""
        (token,) = self.invite_all([name], life_s)
        return token

    def invite_all(self, names: Sequence[str], life_s: float) -> list[str]:
        """A token for each of some names, all or none.

        Raises `ConfigError` for a name that is none, and where the authority has ended.
        """
        self._check_lasts()
        for name in names:
            typed_id(name, "name")
        made = [(*new_token(), name) for name in names]
        until = self.until(life_s)
        self._register.add_tokens([(*token, until) for token in made])
        return [f"{token_id}.{secret}" for token_id, secret, _ in made]

    def until(self, life_s: float) -> float:
        """When what it gives out now for so long ends: with the authority at the latest."""
        return min(self._now() + life_s, self.ends_at)

    def invitations(self) -> list[Invitation]:
        """The tokens that nobody has used and nobody has withdrawn, by name; some may have expired."""
        found = self._register.invitations()
        return [replace(i, expires_at=min(i.expires_at, self.ends_at)) for i in found]

    def withdraw(self, invitations: Iterable[Invitation]) -> int:
        """Let tokens count no more, unless they were used meanwhile; returns how many."""
        return self._register.withdraw([invitation.token_id for invitation in invitations])

    def admit(
        self, token: str, request: bytes, life_s: float, whose: str = ""
    ) -> tuple[str, x509.Certificate]:
        """The name and the certificate for a token and a signing request (DER).

        The name's earlier certificates of other keys are revoked. Raises `NotAuthenticated`, and, with which
        the token stays good, `ConfigError` where it was made out to another than `whose`, `ClocksDisagree`
        where the authority has ended: by the clock of who is here it has not.
        """
        self._left_s(self._now())
        key = requested_key(request)
        name, basis = self._register.use_token(token, key_sha256(key), self._now(), whose)
        return name, self._issue(Kind.DEVICE, name, key, life_s, basis)

    def renew(self, peer: Peer, request: bytes, life_s: float) -> x509.Certificate:
        """A newer certificate for a device, of the same key.

        Raises `NotAuthenticated`, `NotPermitted`, and `ClocksDisagree` as `check` and `admit`.
        """
        self.check(peer)
        key = requested_key(request)
        if peer.kind is not Kind.DEVICE or key != peer.key:
            raise NotPermitted("a certificate is renewed for its own device and its own key: else join again")
        return self._issue(Kind.DEVICE, peer.name, key, life_s, Basis(serial=peer.serial))

    def operator(self, name: str, key: PublicKey, life_s: float) -> x509.Certificate:
        """A certificate for an operator. Raises `ConfigError` where the authority has ended."""
        self._check_lasts()
        return self._issue(Kind.OPERATOR, typed_id(name, "name"), key, life_s)

    def server(self, key: PublicKey, life_s: float) -> x509.Certificate:
        """A certificate for the server, which is on no list: its key never leaves the process.

        It may outlive the authority: so that who comes then is told of that end, and not of a wrong clock.
        """
        args = (Kind.SERVER, "server", key, self._now(), life_s)
        return make_certificate(self.certificate, self._key, *args)

    def _issue(
        self, kind: Kind, name: str, key: PublicKey, life_s: float, basis: Basis | None = None
    ) -> x509.Certificate:
        now = self._now()
        life_s = min(life_s, self._left_s(now))
        made = make_certificate(self.certificate, self._key, kind, name, key, now, life_s)
        times = (now, lifetime(made)[1])
        alone = kind is Kind.DEVICE
        serial, digest = f"{made.serial_number:x}", key_sha256(key)
        self._register.add_certificate(serial, kind, name, digest, times, alone, basis)
        return made

    def _left_s(self, now: float) -> float:
        """Until the authority ends. Raises `ClocksDisagree` where it has."""
        if now >= self.ends_at:
            valid = lifetime(self.certificate)
            raise ClocksDisagree(times_text("the federation's authority", valid, "the server's", now))
        return self.ends_at - now

    # --- keeping out -------------------------------------------------------------------------

    def check(self, peer: Peer) -> None:
        """Raises unless a certificate that TLS has verified counts at this moment.

        `NotAuthenticated` where it will not count again, `ClocksDisagree` where by another clock it may.
        """
        self.check_as(peer, self._register.standing(peer.serial))

    def check_as(self, peer: Peer, standing: str) -> None:
        """`check`, of a certificate whose standing in the register is known."""
        who, now = f"the certificate of {peer.kind} {peer.name!r}", self._now()
        if standing != "good":
            raise NotAuthenticated(f"{who} is {standing}: {new_papers(peer.kind)}")
        if not peer.not_before <= now < peer.not_after:
            raise ClocksDisagree(times_text(who, (peer.not_before, peer.not_after), "the server's", now))

    def revoke(self, name: str) -> int:
        """Nothing that a name was given counts any more; returns how much that was."""
        return self._register.revoke(typed_id(name, "name"), self._now())

    @property
    def point(self) -> RegisterPoint:
        """How far the register has come."""
        return self._register.point()

    def lost(self, before: RegisterPoint) -> str:
        """Why the register has not come from where it was; empty where it has, or that is declared."""
        return self._register.lost(before)

    def declare_restored(self) -> None:
        """The folder came from a backup, and that is known: tokens of before count no more."""
        self._register.begin_age()

    def sign(self, message: bytes) -> bytes:
        """The authority's own signature, for what the server alone cannot vouch for."""
        return sign(self._key, message)

    def number_restore(self) -> int:
        """The number of a restore that is attested now: ms since 1970, and above every one before.

        A device believes no lower one, and a clock may have been set back.
        """
        return self._register.number_restore(int(self._now() * 1000))

    def members(self) -> list[Membership]:
        """Everybody who has had a certificate. One of an earlier release may outlive the authority's."""
        found = self._register.members()
        return [replace(m, expires_at=min(m.expires_at, self.ends_at)) for m in found]


def _check_key_lost(folder: Path) -> None:
    """Raises `ConfigError` where there is the rest of an authority."""
    if (folder / REGISTER).exists() and (folder / CERTIFICATE).exists():
        raise ConfigError(
            f"{folder / KEY} is missing, and the rest of the authority is there: put it back from your copy "
            "of the folder. If there is none, make another authority in another folder: all members join anew"
        )
