"""Addresses of servers: what they look like, and which of them only this machine reaches."""

from __future__ import annotations

import ipaddress

from anabranch.core.errors import ConfigError


def host_and_port(address: str) -> tuple[str, int]:
    """`host:port` in its parts, the host without brackets. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"address {address!r}: write host:port, for example 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def parse_addresses(text: str) -> list[str]:
    """`host:port`, or several with commas between them. Raises `ConfigError`."""
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        try:
            host_and_port(address)
        except ConfigError:
            raise ConfigError(
                f"server {text!r}: write HOST:PORT, or HOST:PORT,HOST:PORT for several servers"
            ) from None
    return addresses


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `host:port`. Raises `ConfigError` for a malformed one."""
    host, _ = host_and_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
