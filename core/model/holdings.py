"""What a device holds of the versions of a delta log: one of them whole, or parts of several.

A device of sub-models fetches the part that its task needs and keeps what it had beside it. So it has each
coordinate as the newest part that covers it had it, and the part's number says as of which version: a mosaic.
Whoever knows the parts in their order knows the mosaic to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.core.model.submodels import SubmodelJson, TensorSet, UnitMap, submodel_json

PARTS_MAX = 8  # that a device keeps: each is named in every request


@dataclass(frozen=True)
class HeldPart:
    """`part` of `version`, the whole of it where that is None; `head` (hex) names it on the device alone."""

    version: int
    part: UnitMap | TensorSet | None = None
    head: str = field(default="", compare=False)

    def to_json(self) -> tuple[int, SubmodelJson | None]:
        """[version, part]."""
        return self.version, submodel_json(self.part)


# A version that is held whole, or parts of several, in the order in which they came: where two overlap the
# later one counts. No version is below one before it.
Holdings = int | tuple[HeldPart, ...] | None


def covers(part: UnitMap | TensorSet | None, other: UnitMap | TensorSet | None) -> bool:
    """Whether all of the other part is in this one. None is the whole model; both are of one model."""
    if part is None:
        return True
    if isinstance(part, UnitMap) and isinstance(other, UnitMap):
        return all(set(a) >= set(b) for a, b in zip(part.kept, other.kept, strict=True))
    if isinstance(part, TensorSet) and isinstance(other, TensorSet):
        return set(part.tensors) >= set(other.tensors)
    return False


def has(holdings: Holdings, version: int, part: UnitMap | TensorSet | None) -> bool:
    """Whether a part of a version is there and need not be fetched."""
    if isinstance(holdings, tuple):
        newest = holdings[-1]
        return newest.version == version and covers(newest.part, part)
    return holdings == version


def joined(holdings: Holdings, came: HeldPart, head: str = "") -> tuple[HeldPart, ...]:
    """What is held once a part has come; `head` names a version that was held whole.

    What it covers is not counted any more, nor the oldest of too many, nor anything where a version before
    the newest comes: that is of another history.
    """
    before = (HeldPart(holdings, None, head),) if isinstance(holdings, int) else holdings or ()
    if before and came.version < before[-1].version:
        before = ()
    kept = [held for held in before if not covers(came.part, held.part)]
    return (*kept, came)[-PARTS_MAX:]


def usable(holdings: Holdings, is_known: Callable[[int], bool]) -> Holdings:
    """What of it can be led from: the newest parts up to the first of a version that is not known."""
    if not isinstance(holdings, tuple):
        return holdings if holdings is not None and is_known(holdings) else None
    unknown = [n for n, held in enumerate(holdings) if not is_known(held.version)]
    found = holdings[unknown[-1] + 1 if unknown else 0 :]
    return found[0].version if len(found) == 1 and found[0].part is None else found or None


def since(holdings: Holdings, version: int | None) -> tuple[HeldPart, ...]:
    """The parts from a version on: what a payload leads from that says so. None: nothing."""
    if version is None or holdings is None:
        return ()
    parts = (HeldPart(holdings),) if isinstance(holdings, int) else holdings
    return tuple(held for held in parts if held.version >= version)
