"""The version that a device holds: what a task starts from, or what is fetched leads from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from anabranch.core.model.holdings import HeldPart, Holdings, joined
from anabranch.core.unwritten import dataclass
from anabranch.host.chain import is_base

M = TypeVar("M")


@dataclass(frozen=True, eq=False)
class HeldModel(Generic[M]):
    """The newest version that a device has whole, on its disk; nothing where `version` is None.

    `head` (hex) names it where its number may not do: after a restore another version may have that. `model`:
    what there is of it, of a driver's own kind. With `parts` it has these and no version whole
    (`holdings.py`); `version` and `head` are the newest one's.
    """

    version: int | None = None
    head: str = ""
    model: M | None = None
    parts: tuple[HeldPart, ...] = ()

    @property
    def holds(self) -> Holdings:
        """What a server is told of it."""
        return self.parts or self.version

    @property
    def heads(self) -> str:
        """The head, or those of all parts."""
        return heads_of(self.holds, lambda held: held.head) if self.parts else self.head

    def leading_from(self, heads: str) -> HeldModel[M]:
        """As `known_as`, for who speaks of all that something leads from."""
        return self if is_base(self.heads, heads) else NOTHING

    def known_as(self, head: str) -> HeldModel[M]:
        """What is left of it for who speaks of this head: itself, or nothing where that is another version.

        An empty head is of who does not know; then the number has to do.
        """
        return self if is_base(self.head, head) else NOTHING

    def after(self, version: int, head: str, model: M | None, part_only: bool) -> HeldModel[M]:
        """What is held once this was fetched: a part of a model takes no place."""
        return self if part_only else HeldModel(version, head, model)

    def with_part(self, came: HeldPart, model: M | None) -> HeldModel[M]:
        """What is held once a part of a delta log was fetched; `model`: what there is of all of it."""
        parts = joined(self.holds, came, self.head)
        return replace(self, version=came.version, head=came.head, model=model, parts=parts)


def heads_of(holdings: Holdings, head_of: Callable[[HeldPart], str]) -> str:
    """The heads of what is held, in one."""
    parts = (HeldPart(holdings),) if isinstance(holdings, int) else holdings or ()
    return "+".join(head_of(held) for held in parts)


NOTHING: HeldModel[Any] = HeldModel()
