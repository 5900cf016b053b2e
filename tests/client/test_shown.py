"""Asking a server for its certificate: what goes wrong there is an `OSError`, and nothing stays open."""

from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from anabranch.support.shown import shown_certificate

WAIT_S = 600.0
NAME = "server.anabranch.internal"


def cut(connection: socket.socket) -> None:
    """As the kernel does for a process that is killed with bytes unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def ended(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def in_the_clear(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.mark.parametrize("behave", [cut, ended, in_the_clear])
def test_a_server_that_shows_none(behave: Callable[[socket.socket], None], listener: socket.socket) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            behave(connection)

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(OSError) as met:  # noqa: PT011 - whichever it is
        shown_certificate("127.0.0.1", listener.getsockname()[1], WAIT_S, NAME)
    assert met.type is not TimeoutError
    answering.join()
    gc.collect()  # what was left open is a warning, and a warning an error


def test_a_server_that_says_nothing(listener: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        shown_certificate("127.0.0.1", listener.getsockname()[1], 0.1, NAME)


@pytest.mark.parametrize("through_a_proxy", [False, True])
def test_a_server_that_says_a_byte_now_and_then_is_not_waited_for(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, through_a_proxy: bool
) -> None:
    """Every byte is in time, and the whole is not."""
    port = listener.getsockname()[1]
    if through_a_proxy:
        monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{port}")
    stop = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x3f\xff")
            while not stop.wait(0.001):
                connection.sendall(b"\x02")

    answering = threading.Thread(target=answer)
    answering.start()
    host = "example.org" if through_a_proxy else "127.0.0.1"
    try:
        with pytest.raises(TimeoutError):
            shown_certificate(host, port, 0.3, NAME)
    finally:
        stop.set()
        answering.join()


def test_a_server_is_asked_for_by_its_name_whatever_host_it_runs_on(listener: socket.socket) -> None:
    """What routes TLS by names (SNI) sees one name at every step of joining, and afterwards."""
    seen: list[bytes] = []

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            seen.append(connection.recv(4096))
            cut(connection)

    answering = threading.Thread(target=answer)
    answering.start()
    with pytest.raises(OSError):  # noqa: PT011 - whichever it is
        shown_certificate("127.0.0.1", listener.getsockname()[1], WAIT_S, NAME)
    answering.join()
    assert NAME.encode() in seen[0]
