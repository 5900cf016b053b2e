"""A gRPC channel as a device needs it: its options, its errors, and streams that may not stall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from anabranch.client.guarded import check_not_guarded
from anabranch.client.metadata import saying
from anabranch.client.windows import window_of
from anabranch.core.errors import (
    ERROR_KEY,
    ERRORS_BY_NAME,
    OUTCOMES,
    RETRY_KEY,
    AnabranchError,
    ConfigError,
    IdentityError,
    Overloaded,
    ProtocolError,
    Unavailable,
    Window,
    WireError,
)
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.identity.addresses import (
    JOB_KEY,
    SERVER_NAME,
    host_and_port,
    is_loopback,
    parse_addresses,
    split_job,
)
from anabranch.identity.wallet import Wallet
from anabranch.support.proxies import options_to, proxy_to

T = TypeVar("T")
M = TypeVar("M", bound=Message)
P = ParamSpec("P")

CONTROL_S = 10.0  # the deadline of every call that is no stream
RECONNECT_MAX_S = 20.0
CONNECT_S = 2.0  # how long an attempt to connect may take: a lost packet of it goes again after a second
CONNECT_S_MAX = 16.0  # over a long link TLS takes three round trips; a call may end first: the next waits on
NO_CONNECTION = "failed to connect to all addresses"
HUNG_UP = "the connection was closed in TLS's handshake"  # of which gRPC says that it is OK
HTTP_STATUS = "Received http2 header with status: "  # gRPC's words where no gRPC has answered
OTHER_PORT = (
    "does not know this call: devices reach a server at its server.address (port 7070 unless it is set), "
    "operators at its server.admin_address (7071); or it is of another release"
)
TOO_LATE = "no answer in time: the server hangs or is very busy, as its log says, or the link is slow"

# What a status means when no class came with it: what comes from gRPC itself, or from a proxy.
_BY_STATUS: dict[str, type[AnabranchError]] = {
    outcome.grpc_status: cls
    for cls, outcome in reversed(OUTCOMES.items())
    if issubclass(cls, WireError | ProtocolError | Overloaded | IdentityError)
}
_BY_STATUS["FAILED_PRECONDITION"] = ProtocolError
_BY_STATUS["UNIMPLEMENTED"] = ProtocolError
# A device outlives a bad link, a restart, and a bug that the server will have mended tomorrow.
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "INTERNAL", "UNKNOWN")
_BY_STATUS |= dict.fromkeys(_PASSING, Unavailable)


def check_plain(addresses: str, insecure: bool) -> None:
    """Raises `ConfigError` where speaking in the clear would go out to a network without need."""
    others = [address for address in parse_addresses(addresses) if not is_loopback(split_job(address)[0])]
    if others and not insecure:
        raise ConfigError(
            f"{others[0]} is another machine, and nothing says who this one is: join with --token and "
            "--ca-sha256 (an operator: --identity), or say --insecure; in Python token=, ca_sha256=, "
            "identity=, insecure=True"
        )


def open_channel(
    address: str,
    limits: Limits = DEFAULT_LIMITS,
    reconnect_max_s: float = RECONNECT_MAX_S,
    wallet: Wallet | None = None,
    connect_s: float = CONNECT_S,
) -> grpc.Channel:
    """A channel to `host:port`, or to its job `host:port/JOB`; nothing is connected before the first call.

    With a `wallet` it is mutual TLS or nothing: there is no falling back to plain text. `connect_s`: how long
    an attempt to connect may take; after failures gRPC gives one more.
    """
    where, job = split_job(address)
    reconnect_max_ms = max(250, round(1000 * reconnect_max_s))
    options = [
        # Besides the chunks, a manifest may come in one message.
        ("grpc.max_receive_message_length", limits.message_bytes_max + limits.manifest_bytes_max),
        ("grpc.max_metadata_size", limits.metadata_bytes_max),
        # A dead link is noticed after 10 s without an acknowledgement of TCP's (TCP_USER_TIMEOUT), or of a
        # ping, which leaves after 5 s of silence. No sooner: a slow or lossy one looks like that for seconds.
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", min(1_000, reconnect_max_ms)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * connect_s)),
        ("grpc.max_reconnect_backoff_ms", reconnect_max_ms),
        # Devices on one host must not share a connection's limits.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if wallet is None:
        channel = grpc.insecure_channel(where, [*options, *options_to(host_and_port(where)[0])])
    else:
        channel = secure_channel(where, options, *wallet.credentials())
    return saying(channel, lambda: [(JOB_KEY, job)]) if job else channel


def secure_channel(
    address: str,
    options: Sequence[tuple[str, int]],
    authority: bytes,
    key: bytes | None = None,
    certificate: bytes | None = None,
) -> grpc.Channel:
    """A channel over TLS to a server of this authority. All three are PEM."""
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    # The authority signs for one server alone, so its name is known, whatever host it runs on.
    to_host = options_to(host_and_port(address)[0])
    return grpc.secure_channel(
        address, credentials, [*options, *to_host, ("grpc.ssl_target_name_override", SERVER_NAME)]
    )


def error_of(error: grpc.RpcError, address: str) -> AnabranchError:
    """The error of the tree that the peer raised, or that its status stands for."""
    call: Any = error  # every error of a call is the call as well
    code = call.code()
    status = "UNKNOWN" if code is None else code.name
    text = _in_short(call.details() or status)
    metadata = {k: str(v) for k, v in call.trailing_metadata() or ()}
    name = metadata.get(ERROR_KEY, "")
    cls = ERRORS_BY_NAME.get(name) or _BY_STATUS.get(status, ProtocolError)
    if not name and text.startswith(HTTP_STATUS):
        # A proxy's page says nothing of the server behind, whose route may be back in a minute.
        cls, http = Unavailable, text.removeprefix(HTTP_STATUS)
        text = f"{address}: HTTP {http}, not of a server: a proxy or a captive portal answers in its place"
        text += _through(address)
    elif not name and status == "UNIMPLEMENTED":
        text = f"{address} {OTHER_PORT}"
    elif not name and status == "DEADLINE_EXCEEDED":
        text = f"{address}: {TOO_LATE}"
    elif not name:
        said = text if text.startswith("nobody answers") else f"{status}: {text}"
        text = f"{address}: {said}{_through(address) if status == 'UNAVAILABLE' else ''}"
    found = cls(text)
    if isinstance(found, Unavailable):
        found.reached = not text.startswith(f"{address}: nobody answers")
        found.unanswered = found.reached and not name
    if (window := _window(metadata.get(RETRY_KEY, ""))) is not None:
        found.retry_after_s = window
    return found


def _in_short(details: str) -> str:
    """What gRPC says of a call; of attempts to connect, to one address after the other, the last reason."""
    if not details.startswith(NO_CONNECTION):
        return details
    why = details.rpartition(": ")[2]
    return f"nobody answers ({HUNG_UP if why == 'OK' else why})"


def _through(address: str) -> str:
    """Where a call went instead, which a variable that was set for something else may decide."""
    proxy = proxy_to(host_and_port(split_job(address)[0])[0])
    return "" if proxy is None else f", through {proxy}"


@contextmanager
def mapped_errors(address: str, plain: bool = False) -> Iterator[None]:
    """Inside, what gRPC raises becomes an error of the tree.

    `plain`: the channel is in the clear. Raises `NotAuthenticated` where it fails as the port is guarded.
    """
    try:
        yield
    except grpc.RpcError as error:
        found = error_of(error, address)
        if plain and isinstance(found, Unavailable):
            check_not_guarded(address)
        raise found from error
    except (grpc.FutureCancelledError, ValueError) as error:
        raise Unavailable(f"{address}: the call was cut off, as its connection was closed") from error


def request_of(kind: Callable[P, M], *said: P.args, **fields: P.kwargs) -> M:
    """A message with these fields. Raises `ConfigError` for a number that its field does not hold."""
    known = cast("type[Message]", kind).DESCRIPTOR.fields_by_name
    for name, value in fields.items():
        if isinstance(value, int):
            is_short = known[name].cpp_type == FieldDescriptor.CPPTYPE_UINT32
            most = (1 << (32 if is_short else 64)) - 1
            if not 0 <= value <= most:
                raise ConfigError(f"{name} must be 0 to {most}, not {value}")
    return kind(*said, **fields)


class StallGuard:
    """Cancels a stream on which nothing has moved for `idle_s` seconds.

    In the place of gRPC's deadline, which bounds the whole call: a large model over a slow link takes long.
    """

    def __init__(self, cancel: Callable[[], Any], idle_s: float) -> None:
        self._cancel, self._idle_s = cancel, idle_s
        self._moved_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="anabranch-stall-guard", daemon=True)

    def __enter__(self) -> StallGuard:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def moved(self) -> None:
        """Something went through."""
        self._moved_at = time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(max(0.0, self._moved_at + self._idle_s - time.monotonic())):
            if time.monotonic() - self._moved_at >= self._idle_s:
                self._cancel()
                return


def _window(text: str) -> Window | None:
    earliest, comma, latest = text.partition(",")
    try:
        return window_of(float(earliest), float(latest)) if comma else None
    except ValueError:
        return None
