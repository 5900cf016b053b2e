"""How a call over gRPC failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest


@dataclass(frozen=True)
class Refusal:
    """The name of the status, the class of the error, the words, and when to come again: earliest, latest."""

    status: str
    error: str
    details: str
    retry_after_s: tuple[float, ...] = ()

    @property
    def kind(self) -> tuple[str, str]:
        """What a client goes by."""
        return self.status, self.error


def refusal_of(call: Callable[[], Any]) -> Refusal:
    """Of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    told = dict(error.trailing_metadata() or ())
    window = told.get("retry-after-s", "")
    retry_after_s = tuple(map(float, window.split(","))) if window else ()
    return Refusal(error.code().name, told.get("anabranch-error", ""), error.details(), retry_after_s)
