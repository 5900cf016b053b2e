"""Codec chains as objects: `topk(0.1) | int8() | gaps() | zstd()`, an argument of `uplink` and `downlink`.

A chain is its text, as a setting has it, and what is wrong with it is said when it is used. What each stage
does: docs/compression.md.
"""

from __future__ import annotations

from anabranch.core.errors import ConfigError

BLOCK = 256  # values with a scale of their own


class CodecText(str):
    """The text of a chain, or of a part of one; `|` puts another behind it."""

    __slots__ = ()

    def __or__(self, other: str) -> CodecText:
        return CodecText(f"{self}|{other}")

    def __ror__(self, other: str) -> CodecText:
        return CodecText(f"{other}|{self}")

    def __repr__(self) -> str:
        return f"CodecText({str(self)!r})"


def raw() -> CodecText:
    """Values as they are."""
    return CodecText("raw")


def ef(decay: float = 0.9) -> CodecText:
    """Error feedback before a chain: devices remember what it left out, a share `decay` of it."""
    return _stage("ef", decay)


def momentum(share: float = 0.5) -> CodecText:
    """Momentum before a chain, or alone: a share `share` of what a device sends is what it sent last."""
    return _stage("momentum", share)


def log(step: float = 1.0) -> CodecText:
    """The shared delta log, for `downlink` alone."""
    return _stage("log", step)


def topk(kept: float) -> CodecText:
    """The fraction `kept` of the values, those of greatest magnitude."""
    return _stage("topk", kept)


def threshold(kept: float, every: int = 0) -> CodecText:
    """About as many, by a threshold that is found anew every so many versions (0: as it does itself)."""
    return _stage("threshold", kept, *([every] if every else []))


def mask(kept: float) -> CodecText:
    """A fraction of the values that is drawn from a seed: no indices travel."""
    return _stage("mask", kept)


def deadzone(kept: float | None = None, *, step: float | None = None) -> CodecText:
    """Selection and values in one: a grid with a dead zone, by the fraction that is kept or by its step.

    Raises `ConfigError` where both are given.
    """
    if kept is not None and step is not None:
        raise ConfigError(f"deadzone({kept!r}, step={step!r}): give the fraction that is kept, or the step")
    return _stage("deadzone", *(["step", step] if step is not None else [kept]))


def f32() -> CodecText:
    """Values of 32 bits."""
    return _stage("f32")


def bf16() -> CodecText:
    """Values of 16 bits."""
    return _stage("bf16")


def int8(block: int = BLOCK, stochastic: bool = False) -> CodecText:
    """Values of 8 bits, with a scale for each block of them; rounded at random where `stochastic`."""
    return _stage("int8", block, *(["sr"] if stochastic else []))


def int4(block: int = BLOCK, stochastic: bool = False) -> CodecText:
    """The same of 4 bits."""
    return _stage("int4", block, *(["sr"] if stochastic else []))


def e3m0(block: int = BLOCK) -> CodecText:
    """Values of 4 bits too, as powers of two of the largest of their block."""
    return _stage("e3m0", block)


def u32() -> CodecText:
    """Indices as they are."""
    return _stage("u32")


def gaps() -> CodecText:
    """Indices by their distances."""
    return _stage("gaps")


def bitmap() -> CodecText:
    """Indices as a bit for each value."""
    return _stage("bitmap")


def zstd(level: int = 0) -> CodecText:
    """An entropy coder, at a level of 1 to 19 (0: its own)."""
    return _stage("zstd", *([level] if level else []))


def huffman() -> CodecText:
    """Another, for few different bytes."""
    return _stage("huffman")


def _stage(name: str, *arguments: float | str | None) -> CodecText:
    said = ",".join(_number(a) if isinstance(a, float) else str(a) for a in arguments if a is not None)
    return CodecText(f"{name}({said})" if said else name)


def _number(value: float) -> str:
    """As short as it can be, and not another number: `1`, `0.1`, `1e-05`. One of numpy's is a float too."""
    return str(int(value)) if value.is_integer() else repr(float(value))
