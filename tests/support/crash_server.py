"""A server process for the crash tests.

    python crash_server.py MODEL DATA_DIR DATABASE ADDRESS INLINE_BYTES_MAX \
        [broken] [compressed] [units] [NAME:N]

`broken` puts a store in its place that acknowledges before it commits: the tests must notice. With
`compressed` updates come by an exact chain, so that their sum still is, and models leave by the delta log.
With `units` tasks are of sub-models, chosen by the devices' speed and by what has changed. With `NAME:N` the
process kills itself when it reaches the failpoint for the N-th time; snapshots are frequent then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from wire import server_config

from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.server import failpoints
from anabranch.server.app import serve
from anabranch.server.manifest import read_manifest
from anabranch.server.store.base import Entry, Projection, RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.sql import SqlStore

BATCHES_LATE = 4
COMPRESSED = {"uplink": {"codec": "ef(0.9)|topk(1)|gaps|zstd"}, "downlink": {"codec": "log(1,64)"}}
UNITS = {"strategy": {"name": "asyncdrop"}, "submodel": {"name": "hetero", "coverage_versions": 10}}


class AcknowledgesEarly(SqlStore):
    """Says that events are durable some commits too early."""

    _held: ClassVar[deque[tuple[Sequence[Entry], Sequence[Projection]]]] = deque()
    _told = 0

    def start(self, info: RunInfo) -> RunInfo:
        """As it should be."""
        stored = super().start(info)
        self._told = self._last_seq
        return stored

    def append(self, entries: Sequence[Entry], projections: Sequence[Projection] = ()) -> list[int | None]:
        """Commit an earlier batch, and pretend that this one is."""
        self._held.append((entries, projections))
        if len(self._held) > BATCHES_LATE:
            super().append(*self._held.popleft())
        first, self._told = self._told + 1, self._told + len(entries)
        return list(range(first, self._told + 1))

    def close(self) -> None:
        """Commit what is left, so that only a crash loses anything."""
        while self._held:
            super().append(*self._held.popleft())
        super().close()


def die_at(name: str, nth: int) -> None:
    """Kill this process when it reaches a failpoint for the n-th time."""
    assert name in failpoints.POINTS, name
    reached = itertools.count(1)

    def hook(here: str) -> None:
        if here == name and next(reached) >= nth:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.arm(hook)


def main(model: str, data_dir: str, database: str, address: str, inline: str, *words: str) -> int:
    """Serve until a signal comes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    limits = replace(DEFAULT_LIMITS, inline_bytes_max=int(inline), free_disk_bytes_min=1)
    # No lease ends by itself, however slow the machine is.
    server = {"address": address, "database": database, "snapshot_every_versions": 100, "lease_min_s": 60.0}
    if armed := [word.split(":") for word in words if ":" in word]:
        server["snapshot_every_versions"] = 5
        die_at(armed[0][0], int(armed[0][1]))
    tables = (COMPRESSED if "compressed" in words else {}) | (UNITS if "units" in words else {})
    config = server_config(Path(data_dir), server=server, **tables)
    store = open_store(database, Path(data_dir), limits)
    if "broken" in words:
        assert isinstance(store, SqlStore)
        store.__class__ = AcknowledgesEarly
    return asyncio.run(serve(config, read_manifest(Path(model)), limits=limits, store=store))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
