"""The version that a device holds: what a task starts from, or what is fetched leads from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from anabranch.host.chain import is_base

M = TypeVar("M")


@dataclass(frozen=True, eq=False)
class HeldModel(Generic[M]):
    """The newest version that a device has whole, on its disk; nothing where `version` is None.

    `head` (hex) names it where its number may not do: after a restore another version may have that. `model`:
    what there is of it, of a driver's own kind.
    """

    version: int | None = None
    head: str = ""
    model: M | None = None

    def known_as(self, head: str) -> HeldModel[M]:
        """What is left of it for who speaks of this head: itself, or nothing where that is another version.

        An empty head is of who does not know; then the number has to do.
        """
        return self if is_base(self.head, head) else NOTHING

    def after(self, version: int, head: str, model: M | None, part_only: bool) -> HeldModel[M]:
        """What is held once this was fetched: a part of a model takes no place."""
        return self if part_only else HeldModel(version, head, model)


NOTHING: HeldModel[Any] = HeldModel()
