"""A server process for the crash tests.

    python crash_server.py MODEL DATA_DIR DATABASE ADDRESS INLINE_BYTES_MAX \
        [broken] [compressed] [units] [mixing] [private] [averaged] [remembering] [blake3] [saving] \
        [keeping] [standby] [unlogged] [unsynced] [NAME:N[:stop]] [LIMITS]

`broken` puts a store in its place that acknowledges before it commits: the tests must notice. With
`compressed` updates come by an exact chain, so that their sum still is, and models leave by the delta log.
With `units` tasks are of sub-models, chosen by the devices' speed and by what has changed. With `mixing`
whole models are mixed. With `private` every version has noise of deviation 1. With `averaged` the server's
steps are schedule-free. With `remembering` it has every device's last update on the disk. With `blake3`
devices may name their updates by that. With `saving` snapshots are frequent. With `keeping` they are more
so, and the log drops what is older. With `standby` it waits while another server leads; the lease is short
then. With `NAME:N` the process kills itself when it reaches the failpoint for the N-th time; snapshots
are frequent then. The machine's clock is ahead by as many seconds as the file `clock` beside the data says,
if it is there. Two flaws that only a power cut shows: `unlogged` does not flush the log, `unsynced` leaves
out the flushes of files. LIMITS are those of `core/limits.py` that are other than usual, as a JSON object.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from wire import SUM, Tables, server_config

from anabranch.core.errors import LeadershipLost, outcome_of
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.server import failpoints, saving
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import read_manifest
from anabranch.server.store import segments
from anabranch.server.store.base import Entry, Projection, RunInfo
from anabranch.server.store.factory import open_store
from anabranch.server.store.postgresql_store import PostgresqlStore
from anabranch.server.store.sql import SqlStore
from anabranch.server.store.sqlite_store import SqliteStore

BATCHES_LATE = 4
FAILPOINT = re.compile(r"\w+:\d+(:stop)?")
LEASE_S = 2.0
KEPT = 5
ADMIN = "admin_address"  # a file beside the data, with the operators' address
CLOCK = "clock"  # another, with the seconds by which the machine's clock is wrong
COMPRESSED: Tables = {"uplink": {"codec": "ef(0.9)|topk(1)|gaps|zstd"}, "downlink": {"codec": "log(1,64)"}}
MIXING: Tables = {"strategy": {"name": "fedasync", "alpha": 0.5, "staleness": {"name": "constant"}}}
UNITS: Tables = {"strategy": {"name": "asyncdrop"}, "submodel": {"name": "hetero", "coverage_versions": 10}}

ROUND = {
    "strategy": "fedavg",
    "clients_per_round": 2,
    "over_selection": 1.5,
    "until_updates": 2,
    "deadline_s": 0.0,
}
AVERAGED: Tables = {"strategy": {**SUM, "outer": {"name": "schedule_free", "lr": 1.0, "momentum": 0.5}}}
REMEMBERING: Tables = {"strategy": {"name": "ace", "memory": "disk"}}
PRIVATE: Tables = {"privacy": {"clip": 2.0**20, "noise": 2.0**-20, "participations": 1 << 30}}
PHASES: Tables = {
    "strategy": {"name": "phased", "phases": [ROUND, {"strategy": "fedbuff", "buffer_size": 2}]}
}


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
            super().append(*self._held.popleft())  # type: ignore[safe-super] # of a kind below
        first, self._told = self._told + 1, self._told + len(entries)
        return list(range(first, self._told + 1))

    def close(self) -> None:
        """Commit what is left, so that only a crash loses anything."""
        while self._held:
            super().append(*self._held.popleft())  # type: ignore[safe-super] # of a kind below
        super().close()


class EarlyOnSqlite(AcknowledgesEarly, SqliteStore):
    """In its log."""


class EarlyOnPostgresql(AcknowledgesEarly, PostgresqlStore):
    """In its rows."""


def die_at(name: str, nth: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill this process when it reaches a failpoint for the n-th time, or stop it."""
    of_some_runs = (*failpoints.SHELF_POINTS, *failpoints.SHARED_SHELF_POINTS, *failpoints.MASKED_POINTS)
    assert name in (*failpoints.POINTS, *of_some_runs), name
    reached = itertools.count(1)

    def hook(here: str) -> None:
        if here == name and ((count := next(reached)) == nth or (count > nth and number == signal.SIGKILL)):
            os.kill(os.getpid(), number)

    failpoints.arm(hook)


def main(model: str, data_dir: str, database: str, address: str, inline: str, *words: str) -> int:
    """Serve until a signal comes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    given = {k: v for word in words if word.startswith("{") for k, v in json.loads(word).items()}
    limits = replace(DEFAULT_LIMITS, inline_bytes_max=int(inline), **{"free_disk_bytes_min": 1, **given})
    # No lease ends by itself, however slow the machine is.
    server: dict[str, Any] = {
        "address": address,
        "database": database,
        "snapshot_every_versions": 20 if "saving" in words else 100,
        "lease_min_s": 60.0,
    }
    if "keeping" in words:
        server |= {"snapshot_every_versions": KEPT, "keep": f"versions:{KEPT}"}
        saving.SAVING_SHARE, segments.TRIMMED_BYTES = 0, 1  # however slow the machine is, and little there is
    if armed := [word.split(":") for word in words if FAILPOINT.fullmatch(word)]:
        server["snapshot_every_versions"] = 5
        saving.SAVING_SHARE = 0  # however slow the machine is: the log that grows meanwhile proves no more
        name, nth, *stop = armed[0]
        die_at(name, int(nth), signal.SIGSTOP if stop else signal.SIGKILL)
    if "unlogged" in words:
        vars(os).update(fdatasync=lambda descriptor: None)
    if "unsynced" in words:
        vars(os).update(fsync=lambda descriptor: None, fdatasync=lambda descriptor: None)
    if "standby" in words:
        server |= {"standby": True, "leader_lease_s": LEASE_S}
    wanted = {"compressed": COMPRESSED, "units": UNITS, "phases": PHASES, "private": PRIVATE}
    wanted |= {"averaged": AVERAGED, "remembering": REMEMBERING, "mixing": MIXING}
    wanted["blake3"] = {"run": {"payload_digest": "blake3"}}
    tables: Tables = {name: table for word in wanted if word in words for name, table in wanted[word].items()}
    config = server_config(Path(data_dir), server=server, **tables)
    store = open_store(database, Path(data_dir), limits, config.server.leader_lease_s)
    if "broken" in words:
        store.__class__ = EarlyOnPostgresql if database else EarlyOnSqlite

    def tell(info: ServerInfo) -> None:
        Path(data_dir).with_name(ADMIN).write_text(info.admin_address)

    def wall() -> float:
        clock = Path(data_dir).with_name(CLOCK)
        return time.time() + (float(clock.read_text()) if clock.exists() else 0.0)

    manifest = read_manifest(Path(model))
    try:
        return asyncio.run(serve(config, manifest, ready=tell, limits=limits, store=store, wall=wall))
    except LeadershipLost as lost:
        logging.error("%s", lost)  # noqa: TRY400 - as the command line says it
        return outcome_of(lost).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
