"""Keys and X.509 certificates. All keys are ECDSA on P-256: what every TLS stack takes.

A certificate says what its holder is in a URI, `anabranch:device:NAME` or `anabranch:operator:NAME`, and what
it may be used for: devices and operators as clients only, the server as a server only. The server's name is
the same in every federation, as its authority signs for nobody else: no host name need be known beforehand.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature as BadSignature
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from anabranch.core.errors import ConfigError, NotAuthenticated
from anabranch.core.ids import checked_id
from anabranch.identity.addresses import SERVER_NAME

URI = "anabranch"
SET_CLOCK = "set the clock that is wrong"
SERVERS_CLOCK = "by the server's clock"
TOLD_BEFORE_S = 180 * 86400.0  # so long before an authority ends it is said
SKEW_S = 300.0  # a certificate is valid a little before it is made: clocks differ
SKEW_SHARE = 1 / 4  # of its life, for one of a short life
RENEW_AT = 2 / 3  # of its life, a certificate is due for renewal
REQUEST_BYTES_MAX = 4096

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


class Kind(StrEnum):
    """What a certificate's holder is."""

    DEVICE = "device"
    OPERATOR = "operator"
    SERVER = "server"


@dataclass(frozen=True)
class Peer:
    """Who has shown a certificate. Times in seconds since 1970."""

    kind: Kind
    name: str
    serial: str
    not_before: float
    not_after: float
    certificate: x509.Certificate = field(repr=False)

    @property
    def key(self) -> PublicKey:
        """The key that the certificate is of."""
        return public_key_of(self.certificate)


def new_key() -> Key:
    """A fresh key."""
    return ec.generate_private_key(ec.SECP256R1())


END_KEY = b"-----END PRIVATE KEY-----\n"  # of `key_pem`


def key_pem(key: Key | Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    """A private key as PEM (PKCS #8, not encrypted: the file's mode protects it)."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def new_papers(kind: Kind) -> str:
    """How who has this kind of certificate gets another."""
    if kind is Kind.OPERATOR:
        return "have others made by `anabranch admin operator`"
    return "join again with a new token"


def papers_of_next(kind: Kind) -> str:
    """How who has this kind gets one of the authority that takes the place of an ended or replaced one."""
    return f"{new_papers(kind)} of the authority that takes its place"


def read_key(pem: bytes, where: str) -> Key:
    """The inverse of `key_pem`. Raises `ConfigError`, naming `where` it was read."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = str(error).partition(".")[0]  # the rest is of a page for who writes programs
        raise ConfigError(
            f"{where}: the private key cannot be read: {why}; restore it from a backup"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{where}: the private key is not of P-256")
    return key


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def certificate_der(certificate: x509.Certificate) -> bytes:
    """A certificate as DER."""
    return certificate.public_bytes(serialization.Encoding.DER)


def read_certificate(data: bytes, where: str) -> x509.Certificate:
    """A certificate of PEM or DER. Raises `ConfigError`, naming `where` it was read."""
    is_pem = data.lstrip().startswith(b"-----")
    try:
        certificate = (x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate)(data)
        certificate.public_key()  # it is read when it is asked for, and may be damaged where all else is not
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
        raise ConfigError(f"{where}: the certificate cannot be read: {error}") from error
    return certificate


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 (hex) of a certificate."""
    return hashlib.sha256(certificate_der(certificate)).hexdigest()


def key_sha256(key: PublicKey) -> str:
    """SHA-256 (hex) of a public key."""
    info = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(info).hexdigest()


def public_key_of(certificate: x509.Certificate) -> PublicKey:
    """The key of a certificate. Raises `NotAuthenticated` for one of another algorithm."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise NotAuthenticated("the certificate's key is not of P-256: join again")
    return key


# --- asking for one ------------------------------------------------------------------------------


def signing_request(key: Key) -> bytes:
    """A request (PKCS #10, DER) for a certificate of a key; its holder proves that it has the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, URI)])  # the authority knows the name
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.DER)


def requested_key(der: bytes) -> PublicKey:
    """The key of a signing request. Raises `NotAuthenticated` for one that is malformed or not signed."""
    if len(der) > REQUEST_BYTES_MAX:
        raise NotAuthenticated(f"the signing request has {len(der)} bytes, {REQUEST_BYTES_MAX} are the most")
    try:
        request = x509.load_der_x509_csr(der)
        key = request.public_key()
        good = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise NotAuthenticated(f"the signing request cannot be read: {error}") from error
    if not good or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise NotAuthenticated("the signing request must be signed by its own key, of P-256")
    return key


# --- making them ---------------------------------------------------------------------------------


def make_authority(key: Key, name: str, now: float, life_s: float) -> x509.Certificate:
    """A self-signed certificate that may sign others, and those no others."""
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(subject, subject, key.public_key(), now, life_s)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def make_certificate(
    issuer: x509.Certificate,
    issuer_key: Key,
    kind: Kind,
    name: str,
    key: PublicKey,
    now: float,
    life_s: float,
) -> x509.Certificate:
    """A certificate of `key` for a device, an operator or the server, valid for `life_s` seconds."""
    server = kind is Kind.SERVER
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{URI}:{kind.value}:{name}")]
    if server:
        names.append(x509.DNSName(SERVER_NAME))
    usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
    return (
        _builder(subject, issuer.subject, key, now, life_s)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def make_keeper(key: Key, now: float, life_s: float) -> x509.Certificate:
    """A keeper's, which signs itself, for a server's use: who calls the keeper has its digest."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{URI} keeper")])
    return (
        _builder(subject, subject, key.public_key(), now, life_s)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, now: float, life_s: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - min(SKEW_S, life_s * SKEW_SHARE)))
        .not_valid_after(_time(now + life_s))
    )


LAST_S = dt.datetime.max.replace(microsecond=0, tzinfo=dt.UTC).timestamp()


def _time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def time_text(seconds: float) -> str:
    """`2026-11-21 22:07:35 UTC`, of seconds since 1970; the last day that has a name for all after it."""
    return f"{_time(min(seconds, LAST_S)):%Y-%m-%d %H:%M:%S} UTC"


# --- reading them --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)  # a device shows the same one at every call
def peer_of(pem: bytes) -> Peer:
    """Who a certificate (PEM or DER) is of. It is not verified here. Raises `NotAuthenticated`."""
    try:
        certificate = read_certificate(pem, "the peer")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        kind, name = uri.removeprefix(f"{URI}:").split(":")
        not_before, not_after = lifetime(certificate)
        serial = f"{certificate.serial_number:x}"
        return Peer(Kind(kind), checked_id(name, "name"), serial, not_before, not_after, certificate)
    except Exception as error:
        raise NotAuthenticated(f"the certificate is not one of a federation: {error}") from error


def lifetime(certificate: x509.Certificate) -> tuple[float, float]:
    """When it begins and ends to be valid, in seconds since 1970."""
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def made_at(certificate: x509.Certificate) -> float:
    """When it was made, by the clock of who made it, to the second: it is valid from a little before."""
    begin, end = lifetime(certificate)
    return begin + min(SKEW_S, (end - begin) * SKEW_SHARE / (1 + SKEW_SHARE))


def times_text(what: str, valid: tuple[float, float], clock: str, now: float) -> str:
    """`X is valid from .. to .., and by Y's clock it is ..`: for whom it does not count."""
    begin, end = map(time_text, valid)
    return f"{what} is valid from {begin} to {end}, and by {clock} clock it is {time_text(now)}"


def check_lasts(authority: x509.Certificate, now: float, kind: Kind) -> None:
    """Raises `NotAuthenticated` once the authority of a member of this kind has ended: all it signed has."""
    if now >= (end := lifetime(authority)[1]):
        raise NotAuthenticated(
            f"the federation's authority ended on {time_text(end)}, and by this machine's clock it is "
            f"{time_text(now)}: if that is right, {papers_of_next(kind)}"
        )


def renewal_due(certificate: x509.Certificate) -> float:
    """When a certificate should be renewed, in seconds since 1970."""
    begin, end = lifetime(certificate)
    return begin + RENEW_AT * (end - begin)


def is_for_server(certificate: x509.Certificate) -> bool:
    """Whether a certificate has the name of a federation's server, whoever signed it.

    One whose names cannot be read has not: what a stranger shows is anything.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return SERVER_NAME in names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError):
        return False


@lru_cache(maxsize=4096)  # signed once is signed for good; until when, and if revoked, is asked elsewhere
def is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether an authority's key has signed a certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, BadSignature, UnsupportedAlgorithm):
        return False
    return True
