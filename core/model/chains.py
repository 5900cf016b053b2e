"""The text of a codec chain, read: `topk(0.1)|int8(256,sr)|gaps|zstd` is stages with arguments.

What the stages do is known to `compress/`; here is only the grammar, and who can do what.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from anabranch.core.errors import UnknownCodec

AUTO = "auto"  # the strategy's own choice, else raw
RAW = "raw"
FEEDBACK = "ef"
MOMENTUM = "momentum"
STEP_WORD = "step"  # of a dead zone that is told how large values are that stay, and not how many
TEXT_CHARS_MAX = 200
_STAGE = re.compile(r"([a-z][a-z0-9]*)(?:\(([a-z0-9.,-]*)\))?\Z")


@dataclass(frozen=True)
class StageText:
    """One stage: its name and its arguments, not interpreted."""

    name: str
    arguments: tuple[str, ...] = ()


def parse_chain(text: str) -> tuple[StageText, ...]:
    """The stages of a chain, in the order in which they encode. Raises `UnknownCodec`."""
    if len(text) > TEXT_CHARS_MAX:
        raise UnknownCodec(f"codec of {len(text)} letters: a chain has at most {TEXT_CHARS_MAX}")
    stages = []
    for part in text.split("|"):
        found = _STAGE.match(part)
        if found is None:
            raise UnknownCodec(f"codec {text!r}: write stages as name or name(argument,...), joined by |")
        stages.append(StageText(found[1], tuple(found[2].split(",")) if found[2] else ()))
    return tuple(stages)


def payload_codec(uplink: str) -> str:
    """The chain that a task's update is encoded by: its uplink without what stays on the device."""
    first, _, rest = uplink.partition("|")
    return rest or RAW if first.partition("(")[0] in (FEEDBACK, MOMENTUM) else uplink


def chain_for(codecs: Collection[str], configured: str, wanted: str) -> str:
    """The chain of a task's update: `wanted` by the strategy where the configuration leaves that to it.

    Raw for a device that lacks one of the stages.
    """
    text = wanted if configured == AUTO else configured
    return RAW if lacks(codecs, text) else text


def lacks(codecs: Collection[str], text: str) -> list[str]:
    """The stages of a chain that are not among `codecs` (stage names; `name:version` counts too)."""
    return [] if text == RAW else list(_lacking(tuple(codecs), text))


@lru_cache(maxsize=256)  # a fleet announces the same few, and each task asks
def _lacking(codecs: tuple[str, ...], text: str) -> tuple[str, ...]:
    known = {RAW, *(codec.partition(":")[0] for codec in codecs)}
    return tuple(stage.name for stage in parse_chain(text) if stage.name not in known)
