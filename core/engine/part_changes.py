"""Which tensors each version has changed: what an update of some tensors is late by.

With P parts in turn a version changes one of them, so the lag of a device counts P times as many versions as
have touched what it sends. At version v the staleness of an update of a `TensorSet` T from version b is

    tau = the number of the versions b+1, ..., v that changed a tensor of T          (all others: v - b)

A version changes what the updates cover that were folded since the one before; one with a whole update or
units all there is. Of versions further back than `KEPT` nothing is remembered: they count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anabranch.core.model.submodels import Submodel, TensorSet

KEPT = 1024  # versions
ALL = ""  # in the place of some tensors' bits, in hexadecimal


@dataclass(frozen=True)
class PartChanges:
    """Never changed in place.

    `of`: what each of the newest versions has changed, the oldest first, as `TensorSet.bits` in hexadecimal;
    empty as long as every version has changed all. `held`: what updates cover that wait for their version.
    """

    of: tuple[str, ...] = ()
    held: tuple[str, ...] = ()

    def taken(self, submodel: Submodel | None) -> PartChanges:
        """An update of this was folded."""
        bits = submodel.bits.hex() if isinstance(submodel, TensorSet) else ALL
        return self if bits in self.held else PartChanges(self.of, (*self.held, bits))

    def published(self) -> PartChanges:
        """A version was made of what was folded."""
        changed = _union(self.held)
        if changed == ALL and not self.of:
            return PartChanges()
        return PartChanges((*self.of, changed)[-KEPT:])

    def staleness(self, submodel: Submodel | None, lag: int) -> int:
        """By how much an update is late whose base is `lag` versions back."""
        if not isinstance(submodel, TensorSet) or lag <= 0:
            return lag
        ours, newest = _number(submodel.bits.hex()), self.of[-lag:]
        return lag - sum(changed != ALL and not _number(changed) & ours for changed in newest)


def _union(found: Iterable[str]) -> str:
    """The bits that any has; all of what nothing is said of."""
    found = list(found)
    if not found or ALL in found:
        return ALL
    bits = 0
    for changed in found:
        bits |= _number(changed)
    return bits.to_bytes(len(found[0]) // 2).hex()


def _number(bits: str) -> int:
    return int(bits, 16)
