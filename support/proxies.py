"""The HTTP proxy that the environment names, by the rules of gRPC, for a socket of our own.

gRPC goes by `grpc_proxy`, `https_proxy` or `http_proxy`, the first that is there (an empty one: no proxy),
except to hosts of `no_grpc_proxy` or `no_proxy`: ends of names and networks, with commas between them. Its
own rules, and not those of `urllib`, so that one connection does not go where a device's next one cannot.
To this machine itself no proxy leads: channels are told so by `options_to`.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from urllib.parse import unquote, urlsplit

NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
HEAD_BYTES_MAX = 64 * 1024
PORT = 80


@dataclass(frozen=True)
class Proxy:
    """Where to ask for a way through; `variable` of the environment names it.

    `user`: `name:password`, or empty.
    """

    host: str
    port: int
    variable: str
    user: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"the proxy {host}:{self.port} ({self.variable})"


def is_this_machine(host: str) -> bool:
    """Whether a host is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def options_to(host: str) -> list[tuple[str, int]]:
    """Options of a channel to a host."""
    return [("grpc.enable_http_proxy", 0)] if is_this_machine(host) else []


def proxy_to(host: str) -> Proxy | None:
    """The proxy through which a host is reached, if any. What cannot be used is none, as it is for gRPC."""
    variable, text = _first(PROXIES)
    if not text or is_this_machine(host) or _is_excepted(host, _first(EXCEPTIONS)[1]):
        return None
    try:
        url = urlsplit(text)
        port = url.port or PORT
    except ValueError:
        return None
    if url.scheme != "http" or not url.hostname:
        return None
    user = "" if url.username is None else f"{unquote(url.username)}:{unquote(url.password or '')}"
    return Proxy(url.hostname, port, variable, user)


def seconds_to(until: float) -> float:
    """How many are left until then, by `time.monotonic`. Raises `TimeoutError` where none are."""
    if (left_s := until - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left_s


def connected(host: str, port: int, until: float) -> socket.socket:
    """A connection, through the proxy if there is one, by then (`time.monotonic`).

    Raises `OSError`, which names the proxy.
    """
    proxy = proxy_to(host)
    if proxy is None:
        return _reached(host, port, until)
    try:
        connection = _reached(proxy.host, proxy.port, until)
    except OSError as error:
        raise OSError(f"{proxy}: {error}") from error
    try:
        _ask_through(connection, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", until)
    except BaseException:
        connection.close()
        raise
    return connection


def _reached(host: str, port: int, until: float) -> socket.socket:
    """A connection to any address of the host: one that is silent leaves the next its part of the time."""
    failure = OSError(f"{host} has no address")
    addresses = _looked_up(host, port, until)
    for left in range(len(addresses), 0, -1):
        try:
            return socket.create_connection(addresses[-left], seconds_to(until) / left)
        except OSError as error:
            failure = error
    raise failure


def _looked_up(host: str, port: int, until: float) -> list[tuple[str, int]]:
    """The addresses of a host.

    Where no name server answers, a look-up takes long and hears no signal: it has a thread of its own.
    """
    answers: SimpleQueue[list[tuple[str, int]] | OSError] = SimpleQueue()

    def look() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            # With its zone, without which nobody gets to an address of the link.
            answers.put([(socket.getnameinfo(where, NUMERIC)[0], port) for *_, where in found])
        except OSError as error:
            answers.put(error)

    threading.Thread(target=look, name="anabranch-look-up", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds_to(until))
    except Empty:
        raise TimeoutError(f"no name server says where {host} is") from None
    if isinstance(answer, OSError):
        raise answer
    return answer


def _ask_through(connection: socket.socket, proxy: Proxy, where: str, until: float) -> None:
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.user:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(proxy.user.encode()).decode()}")
    connection.sendall("\r\n".join([*lines, "", ""]).encode())
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < HEAD_BYTES_MAX:
        connection.settimeout(seconds_to(until))
        # One by one: what follows the head is of the server behind.
        if not (byte := connection.recv(1)):
            raise OSError(f"{proxy} closed the connection instead of passing {where} on")
        head += byte
    status = head.split(b"\r\n", 1)[0].decode("latin-1")
    if status.split(" ")[1:2] != ["200"]:
        raise OSError(f"{proxy} does not pass {where} on: {status}")


def _first(variables: Sequence[str]) -> tuple[str, str]:
    for variable in variables:
        if (value := os.environ.get(variable)) is not None:
            return variable, value.strip()
    return "", ""


def _is_excepted(host: str, exceptions: str) -> bool:
    entries = [entry.strip() for entry in exceptions.split(",") if entry.strip()]
    return any(_is_in(host, entry) or host.lower().endswith(entry.lower()) for entry in entries)


def _is_in(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
