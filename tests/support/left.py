"""What a test must leave as it found it, for those that follow in its process."""

from __future__ import annotations

import logging

GRPC = logging.getLogger("grpc._cython.cygrpc")


class FreedServers(logging.Filter):
    """Hears of gRPC's servers that are freed but were never stopped, and keeps their records from all others.

    Such a record has the object that is just being freed: see `anabranch.support.grpc_ports`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """None of gRPC's for debugging goes further."""
        if "__dealloc__" in str(record.msg):
            self._told.append(record.getMessage())
        return record.levelno > logging.DEBUG

    def taken(self) -> list[str]:
        """What was heard since this was asked last."""
        found, self._told = self._told, []
        return found


FREED = FreedServers()
GRPC.addFilter(FREED)
GRPC.setLevel(logging.DEBUG)  # it tells of them at no other level
