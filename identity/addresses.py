"""Addresses of servers: what they look like, and which of them only this machine reaches.

Where a server serves several runs, `host:port/JOB` is the address of one of them.
"""

from __future__ import annotations

import ipaddress
import re

from anabranch.core.errors import ConfigError
from anabranch.core.ids import typed_id
from anabranch.support.proxies import is_this_machine

# What every server is called in TLS; the TLD is reserved for private use: it is nobody's host.
SERVER_NAME = "server.anabranch.internal"
DEVICES_PORT = 7070  # unless `server.address` says otherwise
JOIN_PORT_AFTER = 2  # so much further devices join, unless `identity.join_address` says otherwise
JOB_KEY = "anabranch-job"  # metadata of a call: the job that it is of
JOB_HEALTH = "job/"  # before a job's name: the service that the health protocol knows it as
HOST = re.compile(r"[\w.-]+")  # letters of any script: see `_in_ascii`


def checked_job(name: str) -> str:
    """A job's name. Raises `ConfigError`."""
    return typed_id(name, "job")


def split_job(address: str) -> tuple[str, str]:
    """`host:port/JOB` as `host:port` and the job, empty where none is named. Raises `ConfigError`."""
    where, slash, job = address.partition("/")
    host_and_port(where)
    return where, checked_job(job) if slash else ""


def host_and_port(address: str) -> tuple[str, int]:
    """`host:port` in its parts, the host without brackets. Raises `ConfigError`, with the fix."""
    if not isinstance(address, str):
        raise _malformed(address, "write host:port as text, for example '127.0.0.1:7070'")
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise _malformed(address, f"write host:port without {address.partition('://')[0]}://")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise _malformed(address, "write host:port, for example 127.0.0.1:7070")
    in_brackets = host.startswith("[") and host.endswith("]")
    if ":" in host and not in_brackets:
        raise _malformed(address, "an IPv6 address is written in brackets, as [::1]:7070")
    bare = host[1:-1] if in_brackets else host
    if in_brackets and not _is_ipv6(bare):
        raise _malformed(address, "in brackets there is an IPv6 address, as [::1]:7070")
    if not in_brackets and not HOST.fullmatch(bare):
        raise _malformed(
            address,
            "the host is a name or an address, without blanks; 0.0.0.0 and [::] are all of this machine",
        )
    return bare, int(port)


def _malformed(address: object, fix: str) -> ConfigError:
    return ConfigError(f"address {address!r}: {fix}")


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def parse_addresses(text: str) -> list[str]:
    """`host:port`, or several with commas between them, each with its job if it has any.

    Raises `ConfigError`. What comes back is in ASCII.
    """
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        where, slash, job = address.partition("/")
        try:
            _, port = host_and_port(where)
        except ConfigError:
            brackets = ", an IPv6 address in brackets, as [::1]:7070" * (where.count(":") > 1)
            raise ConfigError(
                f"server {text!r}: write HOST:PORT, or HOST:PORT,HOST:PORT for several servers{brackets}"
            ) from None
        if slash and not job:
            raise ConfigError(f"server {text!r}: write {where} without the / at its end")
        if not port:
            raise ConfigError(f"server {text!r}: nobody is at port 0; a server says its own when it serves")
        split_job(address)
    return [_in_ascii(address) for address in addresses]


def devices_beside(operators: str) -> str:
    """Where devices are served, by default, beside these operators' ports. Raises `ConfigError`."""
    found = []
    for address in parse_addresses(operators):
        where, slash, job = address.partition("/")
        found.append(f"{where.rpartition(':')[0]}:{DEVICES_PORT}{slash}{job}")
    return ",".join(found)


def _in_ascii(address: str) -> str:
    """The address with its host as names are asked for (IDNA), which gRPC does not do by itself."""
    if address.isascii():
        return address
    host, colon, rest = address.rpartition(":")
    try:
        return host.encode("idna").decode() + colon + rest
    except UnicodeError as error:
        raise _malformed(address, f"the host is no name: {error}") from None


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `host:port`. Raises `ConfigError` for a malformed one."""
    return is_this_machine(host_and_port(address)[0])
