"""`[limits]`: which caps may be what, and those that devices go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from anabranch.core.errors import ConfigError
from anabranch.core.limits import CHUNK_BYTES, DEFAULT_LIMITS, KIB, MIB, Limits

# A cap of 0 lets nothing through, but for these: what they say is done at once, or not done at all.
MAY_BE_ZERO = frozenset(
    {
        *("upload_yields_s", "early_calls_at_once", "waiting_max", "inline_bytes_max", "commit_wait_s"),
        "free_disk_bytes_min",
    }
)
HEADER_BYTES = 64 * KIB  # of a message beside the chunk in it
# What a device takes and what the tables have place for, so that no server may go beyond it.
MOST = {"chunk_bytes_max": 1 * MIB, "id_chars_max": DEFAULT_LIMITS.id_chars_max}
LEAST = {"message_bytes_max": HEADER_BYTES + 1, "id_chars_max": 32, "metadata_bytes_max": 4 * KIB}
OF_DEVICES = ("chunk_bytes_max", "payload_bytes_max", "frozen_bytes_max")
# What a device is told of chunks over `CHUNK_BYTES`. Those of older releases send what they are told as
# `chunk_bytes_max` over any link, and do not know this name.
QUICK = "quick_chunk_bytes_max"


def fitted(limits: Limits, said: Mapping[str, Any]) -> Limits:
    """The caps of a table in which this was `said`: chunks that it says nothing of go into its messages."""
    if "chunk_bytes_max" in said:
        return limits
    room = max(1, limits.message_bytes_max - HEADER_BYTES)  # a cap that cannot be is named by `check_limits`
    return replace(limits, chunk_bytes_max=min(limits.chunk_bytes_max, room))


def check_limits(limits: Limits) -> None:
    """Raises `ConfigError`, naming the cap and what it may be."""
    for field in fields(limits):
        name, value = field.name, getattr(limits, field.name)
        if value == 0 and name not in MAY_BE_ZERO:
            raise ConfigError(f"limits.{name} must be greater than 0, not {value!r}")
        if name in MOST and value > MOST[name]:
            raise ConfigError(f"limits.{name} must be at most {MOST[name]}, not {value!r}")
        if name in LEAST and value < LEAST[name]:
            raise ConfigError(f"limits.{name} must be at least {LEAST[name]}, not {value!r}")
    if limits.chunk_bytes_max + HEADER_BYTES > limits.message_bytes_max:
        raise ConfigError(
            f"limits.message_bytes_max must be at least {limits.chunk_bytes_max + HEADER_BYTES}: "
            f"a message has limits.chunk_bytes_max and {HEADER_BYTES} bytes beside; "
            f"or set limits.chunk_bytes_max, now {limits.chunk_bytes_max}, to so much less"
        )


def told_to_devices(limits: Limits) -> dict[str, Any]:
    """The caps that a device goes by, as far as they are not the default ones."""
    told, known = asdict(limits), asdict(DEFAULT_LIMITS)
    told["chunk_bytes_max"], known["chunk_bytes_max"] = limits.sent_chunk_bytes, CHUNK_BYTES
    quick = {QUICK: limits.chunk_bytes_max} if limits.chunk_bytes_max > CHUNK_BYTES else {}
    return {name: told[name] for name in OF_DEVICES if told[name] != known[name]} | quick


def heard_by_device(limits: Limits, config: Mapping[str, Any]) -> Limits:
    """The caps that its server has told a device; of its own `limits` those that are smaller.

    Raises `ConfigError` for what is no cap.
    """
    table = {"chunk_bytes_max": CHUNK_BYTES, **config.get("limits", {})}
    if QUICK in table:
        table["chunk_bytes_max"] = table[QUICK]
    heard = {}
    for name in OF_DEVICES:
        if name in table:
            own, told = getattr(limits, name), table[name]
            if type(told) is not int or told < 1:
                raise ConfigError(
                    f"the server says limits.{name} = {told!r}: a cap is a whole number above 0"
                )
            # The default is nobody's word, and a server may go beyond it.
            heard[name] = told if own == getattr(DEFAULT_LIMITS, name) else min(own, told)
    return replace(limits, **heard)
