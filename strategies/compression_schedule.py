"""Compression that changes over versions: a kept fraction and bits, one list step after the other."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.core.model.chains import RAW

KEPT = (1.0, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01)
BITS = (32, 16, 8, 4)
DIRECTIONS = ("milder", "stronger")
GAPS_MAX = 0.1  # kept fractions up to here have their indices as gaps, larger ones as a bitmap


@dataclass(frozen=True)
class Strength:
    """`kept`: p_s, the fraction of values that travel; `bits`: p_q, of each of them (32: as it is)."""

    kept: float
    bits: int

    @property
    def chain(self) -> str:
        """The codec chain of this strength."""
        values = {32: "f32", 16: "bf16"}.get(self.bits, f"int{self.bits}(256)")
        if self.kept >= 1.0:
            return RAW if self.bits == 32 else f"{values}|zstd"
        indices = "gaps" if self.kept <= GAPS_MAX else "bitmap"
        return f"topk({self.kept:g})|{values}|{indices}|zstd"


@dataclass(frozen=True)
class Schedule:
    """From `start`, one list step every `every` versions (0: never), until `steps` are taken or a list ends.

    `milder` first gives more values, then more bits back; `stronger` takes bits, then values.
    """

    start: Strength
    every: int = 0
    direction: str = "milder"
    steps: int = 2

    def at(self, version: int) -> Strength:
        """The strength of a version."""
        strength = self.start
        for _ in range(min(self.steps, version // self.every) if self.every else 0):
            strength = _milder(strength) if self.direction == "milder" else _stronger(strength)
        return strength


def _milder(s: Strength) -> Strength:
    more = [kept for kept in KEPT if kept > s.kept]
    if more and s.kept < 1.0:
        return Strength(min(more), s.bits)
    wider = [bits for bits in BITS if bits > s.bits]
    return Strength(s.kept, min(wider)) if wider else s


def _stronger(s: Strength) -> Strength:
    narrower = [bits for bits in BITS if bits < s.bits]
    if narrower and s.bits < 32:
        return Strength(s.kept, max(narrower))
    fewer = [kept for kept in KEPT if kept < s.kept]
    return Strength(max(fewer), s.bits) if fewer and s.kept < 1.0 else s
