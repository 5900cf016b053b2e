"""A server's log as a run's folder, which replays on its own. Read only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.errors import DataError
from anabranch.core.journal import payload_of
from anabranch.reports.journal_files import JournalWriter
from anabranch.server.history import rows_after
from anabranch.server.store.base import Store
from anabranch.server.store.factory import open_data
from anabranch.server.verify import stored_run

Tell = Callable[[int], object]  # the last event that is written


@dataclass(frozen=True)
class Export:
    """What was written. `metrics` are those that followers reported, by version."""

    journal_sha256: str
    events: int
    metrics: Mapping[int, Mapping[str, float]]


def export_run(
    data_dir: Path, database: str, folder: Path, archive: Path | None = None, tell: Tell = lambda _seq: None
) -> Export:
    """Write the journal of a server's run into `folder`. `archive`: of what the log has dropped.

    `tell` hears how far it is.

    Raises `DataError` where there is no run, or its log does not begin with its first event.

    A flawed update has no payload: nothing was computed from its bytes.
    """
    store = open_data(database, data_dir, archive)
    try:
        info, manifest = stored_run(store, data_dir)
        if begins := store.first().applied_through_seq:
            raise DataError(
                f"{data_dir} has the log from event {begins + 1} on (server.keep), reports are of all of it: "
                "name its server.archive (--archive), or have what is here proved by `anabranch verify`"
            )
        config, events = Config.from_json(info.config), 0
        with JournalWriter(folder, manifest.spec, manifest.tensors, config) as journal:
            for events, record in store.records():
                named = payload_of(record) if config.run.keep_payloads else None
                journal.append(record, None if named is None else store.payload(named))
                tell(events)
        metrics = dict(_measured(store))
        return Export(journal.sha256, events, metrics)
    finally:
        store.close()


def _measured(store: Store) -> Iterator[tuple[int, Mapping[str, float]]]:
    """The versions of which something was reported; of those that the log has no more each is asked for."""
    if told := store.metrics(0):
        yield 0, told
    newest = 0
    for row in rows_after(store):
        gone = ((v, store.metrics(v)) for v in range(newest + 1, row.version))
        yield from ((v, told) for v, told in (*gone, (row.version, row.metrics)) if told)
        newest = row.version
