"""Addresses as people type them: taken, or refused with what to write."""

from __future__ import annotations

import pytest

from anabranch.core.errors import ConfigError
from anabranch.identity.addresses import devices_beside, host_and_port, parse_addresses


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("127.0.0.1:7070", ("127.0.0.1", 7070)),
        ("[::]:7070", ("::", 7070)),
        ("[fe80::1%eth0]:0", ("fe80::1%eth0", 0)),
        ("LOCALHOST:07070", ("LOCALHOST", 7070)),
        ("b\u00fccher_1.example.:65535", ("b\u00fccher_1.example.", 65535)),
    ],
)
def test_what_is_an_address(typed: str, parts: tuple[str, int]) -> None:
    assert host_and_port(typed) == parts


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("7070", "write host:port, for"),
        ("127.0.0.1", "write host:port, for"),
        (":7070", "write host:port, for"),
        ("0.0.0.0:70700", "write host:port, for"),
        ("127.0.0.1:\u0667\u0660\u0667\u0660", "write host:port, for"),  # digits of another script
        ("0.0.0.0:7070/", "write host:port, for"),
        ("https://0.0.0.0:7070", "host:port without https://"),
        ("dns:///localhost:7070", "host:port without dns://"),
        ("::1:7070", r"in brackets, as \[::1\]:7070"),
        ("0.0.0.0:7070,[::]:7070", "in brackets, as"),
        ("[127.0.0.1]:7070", "in brackets there is an IPv6 address"),
        ("[[::1]]:7070", "in brackets there is an IPv6 address"),
        ("*:7070", r"0\.0\.0\.0 and \[::\] are all"),
        (" 127.0.0.1:7070", "without blanks"),
        ("me@host:7070", "a name or an address"),
    ],
)
def test_what_is_none_is_told_how_it_is_written(typed: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as met:
        host_and_port(typed)
    assert repr(typed) in str(met.value)


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("host:7070/", "write host:7070 without the /"),
        ("host:0", "nobody is at port 0"),
        ("me@host:7070", "for several servers$"),
        ("::1:7070", r"an IPv6 address in brackets, as \[::1\]:7070$"),
        ("\u00fc..example:7070", "the host is no name"),
    ],
)
def test_what_is_no_server(typed: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        parse_addresses(typed)


def test_a_name_in_letters_of_any_script_is_asked_for_in_ascii() -> None:
    """RFC 3490's own example of ToASCII, and a job's name beside it."""
    assert parse_addresses("b\u00fccher.example:7070/a, [::1]:1") == [
        "xn--bcher-kva.example:7070/a",
        "[::1]:1",
    ]


@pytest.mark.parametrize(
    ("operators", "devices"),
    [
        ("127.0.0.1:7071", "127.0.0.1:7070"),
        ("[::1]:9071/wards", "[::1]:7070/wards"),
        ("a.example:7071, b.example:7071", "a.example:7070,b.example:7070"),
    ],
)
def test_devices_are_served_beside_operators(operators: str, devices: str) -> None:
    assert devices_beside(operators) == devices
