"""What a server asks a keeper, over TLS that is pinned to the keeper's name.

The name is the SHA-256 of the certificate that the keeper shows; no authority vouches for it. What it answers
is checked: the digest, the size, and its signature over both.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from anabranch.core.errors import (
    ERROR_KEY,
    ERRORS_BY_NAME,
    AnabranchError,
    InvalidSignature,
    NotAuthenticated,
    Unavailable,
)
from anabranch.core.limits import MIB
from anabranch.core.secagg.cohort import Cohort
from anabranch.core.secagg.ring import Numbers
from anabranch.identity.addresses import SERVER_NAME, host_and_port
from anabranch.identity.certificates import (
    certificate_pem,
    fingerprint,
    public_key_of,
    read_certificate,
)
from anabranch.identity.keepers import KeeperKey, sum_message
from anabranch.identity.signatures import check_signature
from anabranch.protos.convert import cohort_to_proto
from anabranch.protos.v1 import keepers_pb2 as keepers
from anabranch.protos.v1.keepers_pb2_grpc import KeepersStub
from anabranch.support.proxies import options_to
from anabranch.support.shown import shown_certificate

CONNECT_S, UNMASK_S = 10.0, 300.0
OPTIONS = (
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 4 * MIB),
)


@dataclass(frozen=True)
class KeeperRefusal:
    """A keeper's no: docs/privacy.md has the reasons."""

    reason: str
    detail: str


class KeeperLink:
    """A connection to a keeper, one of those named; a context manager. For threads, one call at a time each.

    Raises `Unavailable` where nobody answers, `NotAuthenticated` for any other keeper.
    """

    def __init__(self, address: str, *keepers: str) -> None:
        self.address = address
        host, port = host_and_port(address)
        try:
            shown = shown_certificate(host, port, CONNECT_S, SERVER_NAME)
        except OSError as error:
            raise Unavailable(f"no keeper at {address}: {error}") from error
        self._certificate = read_certificate(shown.encode(), address)
        self.keeper = fingerprint(self._certificate)
        if not any(hmac.compare_digest(self.keeper, keeper) for keeper in keepers):
            raise NotAuthenticated(f"the keeper at {address} is {self.keeper}, not {' or '.join(keepers)}")
        credentials = grpc.ssl_channel_credentials(certificate_pem(self._certificate))
        self._channel = grpc.secure_channel(address, credentials, [*OPTIONS, *options_to(host)])
        self._stub = KeepersStub(self._channel)

    def __enter__(self) -> KeeperLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def key(self) -> KeeperKey:
        """What the keeper says of itself, checked: for devices, which check it again. `InvalidSignature`."""
        with self._errors():
            said = self._stub.GetKey(keepers.GetKeyRequest(), timeout=CONNECT_S).key
        key = KeeperKey(said.certificate, said.public_key, said.signature)
        key.check(self.keeper)
        return key

    def unmask(self, cohort: Cohort) -> Numbers | KeeperRefusal:
        """The sum of a cohort's masks. May be repeated. Raises `InvalidSignature` for a damaged answer."""
        head, data, size = None, bytearray(), cohort.terms.ring.empty().nbytes
        with self._errors():
            for answer in self._stub.Unmask(cohort_to_proto(cohort), timeout=UNMASK_S):
                if answer.HasField("refusal"):
                    return KeeperRefusal(answer.refusal.reason, answer.refusal.detail)
                head = answer.sum if answer.HasField("sum") else head
                data += answer.data
                if len(data) > size:
                    break
        if head is None or len(data) != size:
            raise InvalidSignature(f"the keeper at {self.address} sent {len(data)} bytes of a sum of {size}")
        self._check(cohort, head, bytes(data))
        return np.frombuffer(bytes(data), cohort.terms.ring.dtype)

    def _check(self, cohort: Cohort, head: keepers.MaskSum, data: bytes) -> None:
        sha256 = hashlib.sha256(data).hexdigest()
        message = sum_message(cohort.run_id, cohort.number, self.keeper, cohort.digest, sha256)
        check_signature(public_key_of(self._certificate), head.signature, message)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise _error_of(error, self.address) from error


def _error_of(error: grpc.RpcError, address: str) -> AnabranchError:
    """What the keeper raised; a connection that failed is `Unavailable`."""
    call: Any = error  # every error of a call is the call as well
    said = {key: str(value) for key, value in call.trailing_metadata() or ()}
    kind = ERRORS_BY_NAME.get(said.get(ERROR_KEY, ""), Unavailable)
    return kind(f"keeper {address}: {call.details()}")
