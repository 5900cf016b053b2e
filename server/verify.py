"""Is the data of a server sound? Every invariant of the store, and a replay of the whole log. Read only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from anabranch.core.config.tables import Config
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.errors import AnabranchError, DataError, LogLost, ReplayMismatch
from anabranch.core.model.params import digest
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Begin, Blueprint
from anabranch.host.journal import Replay
from anabranch.host.parts import or_own
from anabranch.identity.heads import follow_links
from anabranch.identity.noise_key import kept_key
from anabranch.server.history import History, history_at, row_of
from anabranch.server.job_folder import DATA
from anabranch.server.manifest import Manifest, kept_manifest, read_manifest
from anabranch.server.proofbook import Proofbook
from anabranch.server.proofs import Proofs, read_authorities
from anabranch.server.recovery import check_links, check_mark, check_versions
from anabranch.server.store.base import Mark, Recovery, RunInfo, Store, VersionRow
from anabranch.server.store.ending import check_end
from anabranch.server.store.factory import open_data
from anabranch.server.store.sqlite_store import SqliteStore
from anabranch.support.folders import check_folder, from_root
from anabranch.support.shelf import ScratchShelf

LISTED = 20  # problems in a message
LINKS_AT_ONCE = 10_000
TRIES = 3  # of a log whose beginning its server drops meanwhile
MOVED = (
    "the server dropped the beginning of its log (server.keep) while that was read, whenever it was: what "
    "follows may come of that; verify a backup, or the data once the server is stopped"
)


@dataclass(frozen=True)
class VerifyReport:
    """What was found. `problems` in words, empty when all is sound; digests are SHA-256 in hex.

    `signed`: how many of the updates carry a signature, which was checked. `proved_from`: the event
    before the first that was replayed, 0 where that was the first of all; `proved_at`: when what comes
    before was proved, seconds since 1970, 0 where the log does not have it.
    """

    problems: tuple[str, ...]
    run_id: str
    version: int
    events: int
    updates: int
    model_sha256: str
    state_sha256: str
    signed: int = 0
    proved_from: int = 0
    proved_at: float = 0.0

    @property
    def listed(self) -> list[str]:
        """The first `LISTED` problems, a line each: a long log may have as many as updates."""
        return [f"- {problem}" for problem in self.problems[:LISTED]]


Tell = Callable[[int], None]  # the last event that is replayed


def stored_run(store: Store, data_dir: Path) -> tuple[RunInfo, Manifest]:
    """The run in a store that was not started, and what it started from. Raises `DataError`."""
    return stored_info(store, data_dir), read_manifest(kept_manifest(data_dir))


def stored_info(store: Store, data_dir: Path) -> RunInfo:
    """The run in a store that was not started. Raises `DataError`."""
    check_folder(data_dir, "name the data_dir (and the database) of a server")
    info = store.info()
    if info is None:
        raise no_run(data_dir)
    return info


def no_run(data_dir: Path) -> DataError:
    """The error of a folder without one. A job's folder, and that of a `Server`, have it in one below."""
    below, hint = data_dir / DATA, "name the data_dir (and the database) of a server"
    if kept_manifest(below).exists():
        hint = f"it is in {below}"
    return DataError(f"{data_dir} holds no run: {hint}")


def stored_config(data_dir: Path, database: str = "") -> Config:
    """The settings of the run in a server's data. Raises `DataError`."""
    store = open_data(database, data_dir)
    try:
        return Config.from_json(stored_run(store, data_dir)[0].config)
    finally:
        store.close()


def verify(
    data_dir: Path,
    database: str = "",
    ca_sha256: str = "",
    whole: bool = False,
    archive: Path | None = None,
    key_folder: Path | None = None,
    tell: Tell | None = None,
) -> VerifyReport:
    """Check a server's data, from where it was proved last to the last event, and note how far it is proved.

    `whole`, and where that finds a problem: from the first event that is kept; with an `archive` from the
    first of all. With `ca_sha256` every update must be signed by a device of that authority, or of those with
    a comma between. The noise key of a private run is in `key_folder`, or else with the data. `tell` hears up
    to which event it is replayed.
    Raises `DataError` where there are no data, `StoreCorrupt` where their beginning is lost.
    """
    asked = _Asked(database, ca_sha256, whole, archive, key_folder or data_dir, tell or _quiet)
    data_dir = from_root(data_dir)
    for _ in range(TRIES):
        report, moved = _verified(data_dir, asked)
        if report.problems and report.proved_at and not moved:
            # What was proved may have a receipt that every snapshot has lost since (`ledger_rows`).
            report, moved = _verified(data_dir, replace(asked, whole=True))
        if not moved:
            return report
    return replace(report, problems=(MOVED, *report.problems))


@dataclass(frozen=True)
class _Asked:
    """See `verify`."""

    database: str
    ca_sha256: str
    whole: bool
    archive: Path | None
    key_folder: Path
    tell: Tell


def _quiet(_: int) -> None:
    """Tell nobody."""


def _verified(data_dir: Path, asked: _Asked) -> tuple[VerifyReport, bool]:
    """What `verify` finds, and whether that may be because the log has lost its beginning meanwhile."""
    store, ca_sha256 = open_data(asked.database, data_dir, asked.archive), asked.ca_sha256
    try:
        info, manifest = stored_run(store, data_dir)
        config = Config.from_json(info.config)
        key = kept_key(config, asked.key_folder, info.run_id)
        shelf = ScratchShelf(getattr(store, "shelf", None))  # what is read stays as it is
        blueprint = Blueprint.of(config, manifest.spec, key=key, masks=True, shelf=shelf)
        begin = partial(blueprint.engine, manifest.tensors)
        first = store.first()
        begins = first.applied_through_seq
        book = Proofbook(data_dir)
        anew = asked.whole or asked.archive is not None
        known = None if anew else book.read(store, info, ca_sha256, first)
        proved_at = 0.0
        if known is not None:
            first, proved_at = Recovery(known.snapshot, known.seq, store.records(known.seq)), known.at
        replayed, events = Replay(store, begin, first, store.receipt), first.applied_through_seq
        engine = replayed.engine
        problems = [*store.problems(events if known else 0), *_first_weights(info, manifest)]
        problems += _old_links(store, info, engine.version)
        proofs = Proofs(info.run_id, read_authorities(data_dir), ca_sha256)
        history = history_at(store, info, engine.version, events)
        try:
            for seq, found in _replayed(store, replayed, begin, proofs, history, events):
                events = seq
                problems += found
                asked.tell(seq)
        except AnabranchError as error:
            problems.append(f"the log does not replay: {error}")
        problems += violations(engine)
        moved = bool(problems) and store.first().applied_through_seq != begins
        if not problems:
            book.note(info, events, history.mark(events).head, engine, ca_sha256)
    finally:
        store.close()
    report = VerifyReport(
        problems=tuple(problems),
        run_id=info.run_id,
        version=engine.version,
        events=events,
        updates=engine.counters.applied + engine.counters.rejected,
        model_sha256=digest(engine.vector),
        state_sha256=state_digest(engine),
        signed=proofs.signed,
        proved_from=first.applied_through_seq,
        proved_at=proved_at,
    )
    return report, moved


def _ahead(snapshots: Mapping[Path, int], version: int) -> list[str]:
    return [
        f"{path} is of version {its}, and the log comes to version {version}: events are lost"
        for path, its in snapshots.items()
        if its > version
    ]


def _first_weights(info: RunInfo, manifest: Manifest) -> list[str]:
    if manifest.initial_sha256 == info.initial_sha256:
        return []
    return ["the first weights beside the data are not those that the run started from"]


def _old_links(store: Store, info: RunInfo, version: int) -> list[str]:
    """Of versions before the first that is replayed: by their links, devices follow the chain."""
    row, at, head = row_of(store, version), 0, History(info).head
    if row is None or row.head is None:
        return []
    while at < version and (links := store.links(at, min(LINKS_AT_ONCE, version - at))):
        head, at = follow_links(head, bytes.fromhex("".join(links))), at + len(links)
    if not at or head == row.head:  # a run of before there was a chain has no link of its first versions
        return []
    words = f"the links of versions 1 to {at} do not lead to the head of version {version}"
    return [f"{words}: to a device that knows an earlier one this is another history (HistoryMismatch)"]


def _replayed(
    store: Store, replayed: Replay, begin: Begin, proofs: Proofs, history: History, seq: int
) -> Iterator[tuple[int, list[str]]]:
    """Every event's number with what is wrong after it; `seq`: of the one before the first."""
    # Before the replay: a server that goes on has a version in its log before there is a file of it.
    ahead = store.unproved_snapshots() if isinstance(store, SqliteStore) else {}
    recovery, mark, engine = store.load(), store.mark(), replayed.engine
    known = _KnownVersions(store).get
    for seq, record, effects in replayed:
        found = [] if (unproved := proofs.problem(record)) is None else [unproved]
        for check in (
            partial(check_links, history, record, effects, known),
            partial(check_versions, effects, known),
            partial(check_mark, mark, history, seq),  # of a history that has the event
        ):
            try:
                check()
            except (LogLost, ReplayMismatch) as error:
                found.append(str(error))
        if recovery.snapshot is not None and seq == recovery.applied_through_seq:
            found += _snapshot_differs(begin(recovery.snapshot), engine)
        yield seq, found
    yield seq, [*_ahead(ahead, engine.version), *_ended(store, mark, seq)]


def _ended(store: Store, mark: Mark | None, seq: int) -> list[str]:
    """A log that ends before its mark; ours say so themselves, when they are read."""
    if next(store.records(seq), None) is None:  # a server at work may have gone on
        try:
            check_end(mark, seq)
        except LogLost as error:
            return [str(error)]
    return []


class _KnownVersions:
    """The versions on record, asked for one after the other: a page of them is in memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._page: dict[int, VersionRow] = {}
        self._last = -1  # of them

    def get(self, version: int) -> VersionRow | None:
        """What is on record of a version, none where it has no row, or none yet."""
        if version > self._last and (page := self._store.versions(version - 1)):
            self._page, self._last = {row.version: row for row in page}, page[-1].version
        return self._page.get(version)


def _snapshot_differs(kept: Engine, engine: Engine) -> list[str]:
    if state_digest(kept) == state_digest(engine):
        return []
    return [f"the newest snapshot, of version {kept.version}, is not what the log replays to{or_own()}"]
