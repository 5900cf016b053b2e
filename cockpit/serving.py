"""Serves the cockpit: where it listens, under which names, and the one-time links that it prints."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from cryptography import x509

from anabranch.cockpit.app import Cockpit
from anabranch.cockpit.doorkeeper import Doorkeeper
from anabranch.cockpit.runs import Runs
from anabranch.cockpit.visitors import Visitors
from anabranch.core.errors import ConfigError, PortInUse
from anabranch.identity.addresses import host_and_port, is_loopback
from anabranch.support.stop_signals import call_on_signals, stop_signals

LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")
GRACE_S = 2


@dataclass(frozen=True)
class Papers:
    """Of TLS, PEM. Every browser needs a certificate of the `authority`, where one is named."""

    certificate: Path
    key: Path
    authority: Path | None = None


def papers_of(certificate: Path | None, key: Path | None, authority: Path | None) -> Papers | None:
    """Those that were named, None where none was. Raises `ConfigError`."""
    if certificate is None and key is None and authority is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key go together: name both")
    return Papers(certificate, key, authority)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    runs: Runs,
    listen: str,
    papers: Papers | None,
    opened: Callable[[str], None],
    stop: threading.Event | None = None,
) -> None:
    """Serve until one of `stop_signals` or `stop`. `opened` is told each one-time link.

    Raises `ConfigError` for an address that others reach without TLS, and `PortInUse`.
    """
    if papers is None and not is_loopback(listen):
        raise ConfigError(
            f"--listen {listen}: other machines would reach it in the clear: give --tls-certificate "
            "and --tls-key, or listen on 127.0.0.1"
        )
    with _listening(listen) as bound:
        sessions = Visitors()
        address = _address(listen, bound, papers)

        def tell() -> None:
            opened(f"{address}/login?token={sessions.link()}")

        server: _Uvicorn | None = None
        cockpit = Cockpit(
            runs,
            sessions,
            papers is not None,
            tell,
            lambda: server is not None and server.should_exit,
        )
        guard = Doorkeeper(cockpit.app(), _names(listen, papers), sessions, papers is not None)
        server = _Uvicorn(_settings(guard, papers))
        with _ending(server, stop, runs):
            tell()
            await server.serve([bound])


def _settings(guard: Doorkeeper, papers: Papers | None) -> uvicorn.Config:
    config = uvicorn.Config(
        guard,
        log_config=None,  # its log is ours
        log_level="warning",
        access_log=False,  # a link's secret is in its address
        server_header=False,
        date_header=True,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        loop="asyncio",
        http="h11",
        timeout_graceful_shutdown=GRACE_S,
        limit_concurrency=512,
    )
    if papers is not None:
        config.ssl_certfile, config.ssl_keyfile = str(papers.certificate), str(papers.key)
        if papers.authority is not None:
            config.ssl_ca_certs, config.ssl_cert_reqs = str(papers.authority), ssl.CERT_REQUIRED
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"{papers.certificate} and {papers.key} cannot be used for TLS: {error}"
            ) from error
    return config


@contextlib.contextmanager
def _listening(listen: str) -> Iterator[socket.socket]:
    host, port = host_and_port(listen)
    try:
        families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        of_ipv6 = socket.AF_INET not in families
        family = socket.AF_INET6 if of_ipv6 else socket.AF_INET
        both = of_ipv6 and socket.has_dualstack_ipv6()  # [::] is all of this machine, as at a server's ports
        bound = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise PortInUse(
            f"{listen} cannot be listened on: {error.strerror or error}: name another --listen"
        ) from error
    with bound:
        # Each line inherits it: else the end of an answer waits for word of its beginning, 40 ms or more.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield bound


@contextlib.contextmanager
def _ending(server: _Uvicorn, stop: threading.Event | None, runs: Runs) -> Iterator[None]:
    """Signals, and whoever sets `stop`, end the server."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.should_exit = True
        runs.leave()

    call_on_signals(end, *stop_signals())
    if stop is not None:
        waiting = threading.Thread(target=_await, args=(stop, loop, end), daemon=True)
        waiting.start()
    yield


def _await(stop: threading.Event, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # it has ended already
        loop.call_soon_threadsafe(end)


def _address(listen: str, bound: socket.socket, papers: Papers | None) -> str:
    host, _ = host_and_port(listen)
    names = [] if papers is None else _certified(papers.certificate)
    shown = names[0] if names else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"{'http' if papers is None else 'https'}://{shown}:{bound.getsockname()[1]}"


def _names(listen: str, papers: Papers | None) -> set[str]:
    """By which names it may be called: those of this machine to itself, its own, those of its certificate."""
    names = {host_and_port(listen)[0].lower(), *LOCAL_NAMES}
    return names if papers is None else names | {name.lower() for name in _certified(papers.certificate)}


def _certified(certificate: Path) -> list[str]:
    """The names in a certificate. Raises `ConfigError`."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate} is no certificate (PEM): {error}") from error
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    addresses += names.get_values_for_type(x509.IPAddress)  # type: ignore[arg-type]
    return [*names.get_values_for_type(x509.DNSName), *map(str, addresses)]
