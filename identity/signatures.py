"""What a device signs of an update, and how it is checked: when it comes, and again by `anabranch verify`.

The key is that of the device's certificate (ECDSA on P-256 with SHA-256), not one of its own: so nothing has
to bind two keys to one name, and enrolling, renewing and revoking go for both.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature as BadSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from anabranch.core.canonical import canonical
from anabranch.core.errors import InvalidSignature, NotAuthenticated
from anabranch.core.events import Proof
from anabranch.identity.certificates import Key, Kind, PublicKey, certificate_der, is_issued_by, peer_of

DOMAIN = b"anabranch update 1\n"  # so that no signature for another purpose can stand for an update's
FIELDS = ("base_version", "client_id", "examples", "local_steps", "submodel", "task_id", "update_id")
PAYLOAD_FIELDS = ("codec", "sha256", "size_bytes")


def update_message(run_id: str, record: Mapping[str, Any]) -> bytes:
    """What is signed of an update: a line of text, then canonical JSON (sorted keys, no spaces).

    `record` is the update's in the journal; only what is signed is read of it. The metrics are not: they
    decide nothing about the model. `seals` are there where the update is masked: keepers to boxes, base64.
    """
    signed = {name: record[name] for name in FIELDS}
    if seals := record.get("seals"):
        signed["seals"] = seals
    payload = {name: record["payload"][name] for name in PAYLOAD_FIELDS}
    data = {**signed, "payload": payload, "run_id": run_id}
    return DOMAIN + canonical(data)


def sign(key: Key, message: bytes) -> bytes:
    """A key's signature of a message: ECDSA with SHA-256, DER."""
    return key.sign(message, ec.ECDSA(hashes.SHA256()))


def check_signature(key: PublicKey, signature: bytes, message: bytes) -> None:
    """Raises `InvalidSignature` unless the key has signed the message."""
    try:
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except BadSignature:
        raise InvalidSignature("the signature is not of what came, by the key of the certificate") from None


def make_proof(certificate: x509.Certificate, signature: bytes, at: float) -> Proof:
    """What is kept with an update: enough to check it again without this server. `at`: the time of day."""
    der = certificate_der(certificate)
    return Proof(base64.b64encode(der).decode(), base64.b64encode(signature).decode(), at)


def proof_problem(
    run_id: str, record: Mapping[str, Any], authorities: Sequence[x509.Certificate]
) -> str | None:
    """What is wrong with the proof in the record of an update, in words; None: nothing.

    The certificate must be signed by one of the authorities, be the client's, and have been valid then.
    """
    try:
        der = base64.b64decode(record["proof"]["certificate"], validate=True)
        peer = peer_of(der)
        if not any(is_issued_by(peer.certificate, authority) for authority in authorities):
            return "its device's certificate is not signed by the authority"
        if (peer.kind, peer.name) != (Kind.DEVICE, record["client_id"]):
            return f"it is signed by {peer.kind} {peer.name!r}"
        if not peer.not_before <= (record["proof"].get("at") or record["now"]) <= peer.not_after:
            return "its device's certificate was not valid then"
        signature = base64.b64decode(record["proof"]["signature"], validate=True)
        check_signature(peer.key, signature, update_message(run_id, record))
    except (InvalidSignature, NotAuthenticated) as error:
        return str(error)
    except (KeyError, TypeError, ValueError) as error:
        return f"its proof is damaged: {error!r}"
    return None
