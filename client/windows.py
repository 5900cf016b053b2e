"""When a server says that a device should come again: a window of seconds from now, as it is believed."""

from __future__ import annotations

from anabranch.core.errors import Window
from anabranch.protos.v1 import model_pb2 as model

LATEST_S = 86400.0  # nobody waits for longer, whatever a server says


def window_of(earliest_s: float, latest_s: float) -> Window | None:
    """(earliest, latest), in order and within a day; None for what is no window, such as 0 for both.

    A device that took that at its word would ask without end, or never again.
    """
    if not (0 <= earliest_s <= latest_s < float("inf") and latest_s > 0):
        return None
    return min(earliest_s, LATEST_S), min(latest_s, LATEST_S)


def window_from_proto(message: model.RetryWindow, otherwise: Window) -> Window:
    """That of a message, or what goes where it has none."""
    return window_of(message.earliest_s, message.latest_s) or otherwise
