"""What a device tells whoever runs it, as it happens."""

from __future__ import annotations

from typing import Any, Protocol

from anabranch.core.errors import AnabranchError


class OnEvent(Protocol):
    """Hears what happens: a kind, such as `granted`, `trained` or `pushed`, and its data.

    Called from the agent's thread, from the heartbeats' and from the sync thread.
    """

    def __call__(self, kind: str, **data: Any) -> None:
        """`data` is plain: numbers, text, and a dict of metrics."""
        ...


def tell_failed(tell: OnEvent, call: str, error: AnabranchError, **more: Any) -> None:
    """A call has failed; `again` in `more`: whether it is tried again."""
    tell("failed", call=call, error=type(error).__name__, detail=str(error), **more)
