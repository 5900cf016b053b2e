"""How a device gets its certificate: with a token that is good for once, and the authority's fingerprint.

1. The certificate that the server shows is looked at, unverified.
2. Over a connection to whoever holds its key, the authority's certificate is fetched: that it hashes to the
   fingerprint is all that is believed.
3. Over a connection that the authority's certificate verifies, the token and a signing request are sent. The
   key is on the disk before: a join whose answer was lost is repeated with the same one.
"""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

from anabranch.client.channel import mapped_errors, secure_channel
from anabranch.client.clocks import check_valid
from anabranch.client.strangers import check_is_server
from anabranch.core.errors import ConfigError, NotAuthenticated, Unavailable
from anabranch.identity.addresses import (
    JOIN_PORT_AFTER,
    SERVER_NAME,
    host_and_port,
    parse_addresses,
    split_job,
)
from anabranch.identity.certificates import (
    SERVERS_CLOCK,
    Kind,
    certificate_pem,
    check_lasts,
    fingerprint,
    read_certificate,
    signing_request,
    time_text,
)
from anabranch.identity.files import write_private
from anabranch.identity.tokens import check_token
from anabranch.identity.wallet import JOINING, Wallet, joining_key, read_wallet
from anabranch.protos.v1 import identity_pb2 as identity
from anabranch.protos.v1.identity_pb2_grpc import JoiningStub
from anabranch.support.shown import shown_certificate

JOIN_S = 30.0  # of each of the three steps; connecting is a part of it, which takes three round trips
ON_THE_SERVER = "`anabranch admin ca show`"
SHA256 = re.compile("[0-9a-f]{64}")
TOKEN_ID = "token_id"  # noqa: S105 - the name of a file, with the part of a token that is no secret
OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def join_addresses(servers: str, given: str = "") -> list[str]:
    """Where to join: as given, or on each server's host two ports further, where it is unless configured."""
    if given:
        return parse_addresses(given)
    return [_two_further(server) for server in parse_addresses(servers)]


def _two_further(server: str) -> str:
    host, port = host_and_port(split_job(server)[0])
    return f"[{host}]:{port + JOIN_PORT_AFTER}" if ":" in host else f"{host}:{port + JOIN_PORT_AFTER}"


def joined_wallet(
    folder: Path, addresses: Sequence[str], token: str, ca_sha256: str, client_id: str = ""
) -> Wallet:
    """The device's papers: those in `folder`, or, for a token that they did not come of, new ones.

    `addresses` are the servers' for joining, of which the first that answers is taken: one that stands by
    does not. `client_id`: whose token it must be, if that is known.

    Raises `NotAuthenticated`, `ConfigError`, and `Unavailable` or `ClocksDisagree`, after which it may be
    repeated.
    """
    known, used = read_wallet(folder), folder / TOKEN_ID
    token_id = token.partition(".")[0]
    if known is None or not used.exists() or used.read_text(encoding="utf-8") != token_id:
        known = _join_first(folder, addresses, token, ca_sha256, client_id)
        write_private(used, token_id.encode())
    # Not before: whoever is killed until then joins with the same key again, which the token takes.
    (folder / JOINING).unlink(missing_ok=True)
    return known


def _join_first(folder: Path, addresses: Sequence[str], token: str, ca_sha256: str, client_id: str) -> Wallet:
    failed: list[Unavailable] = []
    for address in addresses:
        try:
            return join(folder, address, token, ca_sha256, client_id)
        except Unavailable as error:
            failed.append(error)
    raise Unavailable("; ".join(map(str, failed))) from failed[-1]


def join(folder: Path, address: str, token: str, ca_sha256: str, client_id: str = "") -> Wallet:
    """Join a federation; see the module. Errors as for `joined_wallet`."""
    check_token(token)
    wanted = ca_sha256.replace(":", "").strip().lower()
    if not SHA256.fullmatch(wanted):
        raise ConfigError(
            f"--ca-sha256 must be the 64 hexadecimal digits that {ON_THE_SERVER} prints, not {ca_sha256!r}"
        )
    authority = _fetch_authority(address)
    certificate = read_certificate(authority, f"{address}: the authority")
    if not hmac.compare_digest(fingerprint(certificate), wanted):
        raise NotAuthenticated(
            f"{address} is not the server of this federation, or --ca-sha256 is mistyped: its authority has "
            f"the SHA-256 {fingerprint(certificate)}, and this device was told {wanted}. {ON_THE_SERVER} "
            "prints the right one, on the machine with the authority's folder"
        )
    check_lasts(certificate, time.time(), Kind.DEVICE)
    key = joining_key(folder)
    with secure_channel(address, OPTIONS, certificate_pem(certificate)) as channel:
        request = identity.JoinRequest(token=token, signing_request=signing_request(key), client_id=client_id)
        answer = _ask_to_join(channel, address, request)
    own = read_certificate(answer.certificate, f"{address}: the answer")
    wallet = Wallet(folder, key, own, certificate)
    if wallet.name != answer.client_id:
        raise NotAuthenticated(f"{address}: the certificate is of {wallet.name!r}, not {answer.client_id!r}")
    wallet.save()
    return wallet


def _ask_to_join(channel: grpc.Channel, address: str, request: identity.JoinRequest) -> identity.JoinResponse:
    """The answer. Where a token has expired by the server's clock, this machine's is told as well."""
    try:
        with mapped_errors(address):
            answer: identity.JoinResponse = JoiningStub(channel).Join(request, timeout=JOIN_S)
            return answer
    except NotAuthenticated as error:
        if SERVERS_CLOCK not in str(error):
            raise
        raise NotAuthenticated(f"{error} (by this machine's clock it is {time_text(time.time())})") from error


def _fetch_authority(address: str) -> bytes:
    """The certificate (DER) that the server says is its authority's. Nothing is believed yet."""
    host, port = host_and_port(address)
    try:
        shown = shown_certificate(host, port, JOIN_S, SERVER_NAME)
    except OSError as error:  # TLS errors are among them
        raise Unavailable(f"{address}: nobody answers there as a server to join: {error}") from error
    certificate = read_certificate(shown.encode(), address)
    check_is_server(certificate, address)
    check_valid(certificate, address, time.time())
    with secure_channel(address, OPTIONS, shown.encode()) as channel, mapped_errors(address):
        answer = JoiningStub(channel).GetAuthority(identity.GetAuthorityRequest(), timeout=JOIN_S)
    authority: bytes = answer.certificate
    return authority
