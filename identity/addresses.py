"""Addresses of servers: what they look like, and which of them only this machine reaches.

Where a server serves several runs, `host:port/JOB` is the address of one of them.
"""

from __future__ import annotations

import re

from anabranch.core.errors import ConfigError
from anabranch.support.proxies import is_this_machine

JOB_KEY = "anabranch-job"  # metadata of a call: the job that it is of
JOB_HEALTH = "job/"  # before a job's name: the service that the health protocol knows it as
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def checked_job(name: str) -> str:
    """A job's name. Raises `ConfigError`."""
    if not JOB_NAME.fullmatch(name):
        raise ConfigError(
            f"job {name!r}: write 1 to 64 letters, digits, '.', '_' and '-', the first a letter or a digit"
        )
    return name


def split_job(address: str) -> tuple[str, str]:
    """`host:port/JOB` as `host:port` and the job, empty where none is named. Raises `ConfigError`."""
    where, slash, job = address.partition("/")
    host_and_port(where)
    return where, checked_job(job) if slash else ""


def host_and_port(address: str) -> tuple[str, int]:
    """`host:port` in its parts, the host without brackets. Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"address {address!r}: write host:port, for example 127.0.0.1:7070")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"address {address!r}: an IPv6 address is written in brackets, as [::1]:7070")
    return host.strip("[]"), int(port)


def parse_addresses(text: str) -> list[str]:
    """`host:port`, or several with commas between them, each with its job if it has any.

    Raises `ConfigError`.
    """
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        try:
            host_and_port(address.partition("/")[0])
        except ConfigError:
            raise ConfigError(
                f"server {text!r}: write HOST:PORT, or HOST:PORT,HOST:PORT for several servers"
            ) from None
        split_job(address)
    return addresses


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches `host:port`. Raises `ConfigError` for a malformed one."""
    return is_this_machine(host_and_port(address)[0])
