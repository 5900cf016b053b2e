"""Back to where the run stood: the newest snapshot, then every event after it, through the engine."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.core.clock import EventClock, Seconds
from anabranch.core.config.tables import Config, said_in
from anabranch.core.effects import Effect, Published
from anabranch.core.engine.changes import StartSettings
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settable import (
    as_started,
    differences,
    typed,
    value_in_force,
    why_kept,
    with_values,
)
from anabranch.core.engine.shelf import Shelf
from anabranch.core.errors import NOT_ALIKE, ConfigError, LogLost, ReplayMismatch, StoreError
from anabranch.core.journal import Record
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.params import ParamSpec, digest
from anabranch.core.parts import answer_text
from anabranch.host.build import Begin, Blueprint
from anabranch.host.first import check_built
from anabranch.host.journal import Replay
from anabranch.host.parts import or_own
from anabranch.host.rollback import Refolder
from anabranch.host.run import check_finite, check_state
from anabranch.identity.noise_key import NOISE_KEY, kept_key, new_key
from anabranch.server.history import History, history_at, row_of, rows_after
from anabranch.server.manifest import Manifest
from anabranch.server.models import DIGEST_BYTES_MAX
from anabranch.server.saving import SavedPoint
from anabranch.server.store.archive import check_writable
from anabranch.server.store.base import ChainLink, Mark, Projection, RunInfo, Store, VersionRow
from anabranch.server.store.ending import check_end
from anabranch.server.store.rows import check_same_run

log = logging.getLogger(__name__)

PROJECTIONS_AT_ONCE = 256
TOLD_EVERY_S = 10.0
Known = Callable[[int], VersionRow | None]  # what is on record of a version


@dataclass(frozen=True)
class Recovered:
    """An engine that goes on after event `seq`, which happened at `last_now`.

    `blueprint`: what it is made of, and others of the run are; it has the key of a private run's noise.
    """

    info: RunInfo
    blueprint: Blueprint = field(repr=False)
    engine: Engine
    seq: int
    last_now: float
    saved: SavedPoint
    replayed: int
    history: History
    # What the files and flags of this start say otherwise than those of the last one, and which do.
    said: Mapping[str, Any]
    said_by: str


def recover(
    store: Store,
    given: Config,
    manifest: Manifest,
    limits: Limits = DEFAULT_LIMITS,
    wall: Seconds = time.time,
    waited_s: float | None = None,
) -> Recovered:
    """Enter a new run, or find the stored one and replay it. `waited_s`: as a standby, with these settings.

    Raises `ConfigError` where the run was started with other settings that may not change,
    `ManifestMismatch`, `ReplayMismatch` where a version is not the one on record, `LogLost` where the log is
    not the one that was acknowledged, and the store's errors.
    """
    began = time.perf_counter()
    check_built(given, manifest.seed)
    begun = store.info() is not None
    if not begun:  # a run that was entered keeps its settings, those that do not go together as well
        _check_parts(store, given, manifest.spec, limits, new_key(given, None))
    info = _entered(store, _new_run(given, manifest, wall()))
    stored = Config.from_json(info.config)
    config = as_started(stored, given)
    _check_same(stored, config)
    found = store.load()
    key = _noise_key(store, config, begun, info.run_id)
    blueprint = Blueprint.of(config, manifest.spec, limits, key, masks=True, shelf=shelf_of(store))
    begin = partial(blueprint.engine, manifest.tensors)
    replay = Replay(store, begin, found, store.receipt)
    engine = replay.engine
    in_rows = found.snapshot is not None and found.snapshot.rows is not None
    engine.ledger.track(saved=in_rows and not found.mended)
    saved = SavedPoint(found.applied_through_seq, engine.version, engine.counters.applied)
    seq, last_now = found.applied_through_seq, max(info.created_at, found.taken_at)
    history, replayed, mark = history_at(store, info, engine.version, seq), 0, store.mark()
    for projection in _told(_projections(store, replay, history, seq, mark), mark):
        seq, last_now, replayed = projection.seq, projection.now, replayed + 1
    if replayed and found.snapshot is None:  # who started it again may not have read why it ended
        check_state(engine)
    check_end(store.mark(), seq)
    store.acknowledge(history.mark(seq))
    read_at = math.inf if waited_s is None else EventClock(last_now, wall, time.monotonic).now() - waited_s
    said = _said(stored, given, engine, read_at)
    took_s = time.perf_counter() - began
    log.info("recovered version=%d replayed=%d took=%.3fs", engine.version, replayed, took_s)
    return Recovered(
        info=info,
        blueprint=blueprint,
        engine=engine,
        seq=seq,
        last_now=last_now,
        saved=saved,
        replayed=replayed,
        history=history,
        said=said,
        said_by=_sources(given, said),
    )


def _entered(store: Store, run: RunInfo) -> RunInfo:
    """The run that a store has. Raises `StoreError` where one of somebody's own does not say."""
    info = store.start(run)
    if not isinstance(info, RunInfo):
        raise StoreError(f"the store's start must give the RunInfo that is stored, not {answer_text(info)}")
    return info


def _told(projections: Iterable[Projection], mark: Mark | None) -> Iterator[Projection]:
    """A line now and then of how far a replay is that lasts: nobody can ask a server that has not started."""
    due = time.monotonic() + TOLD_EVERY_S
    for projection in projections:
        yield projection
        if time.monotonic() >= due:
            due = time.monotonic() + TOLD_EVERY_S
            end = "" if mark is None else f" of {mark.seq}"
            log.info("recovering: replayed up to event %d%s", projection.seq, end)


def _projections(
    store: Store, replay: Replay, history: History, seq: int, mark: Mark | None
) -> Iterator[Projection]:
    """Replay what follows event `seq`: what each event comes to, once it is proved, for the rows.

    To be read to its end: they are written behind it, many at once.
    """
    check_mark(mark, history, seq)
    known = {row.version: row for row in rows_after(store, replay.engine.version)}.get
    proved: list[Projection] = []
    for at, record, effects in replay:
        digests = check_versions(effects, known)
        unseen = [e for e in effects if isinstance(e, Published) and known(e.version) is None]
        check_finite(replay.engine, unseen)  # those on record were served, and are an operator's to roll back
        links = check_links(history, record, effects, known)
        check_mark(mark, history, at)
        proved.append(Projection(at, record["now"], effects, digests, links))
        yield proved[-1]
        if len(proved) >= PROJECTIONS_AT_ONCE:
            store.append((), proved)
            proved = []
    if proved:
        store.append((), proved)


def check_takeover(store: Store, given: Config, manifest: Manifest, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raises what a standby would meet at its turn, as far as that can be seen while another server leads.

    That its settings, model, code or folders are not those of the run, or that the key of its noise is not
    here. Nothing is written.
    """
    if (info := store.info()) is None:
        return  # whoever leads it has yet to begin
    stored = Config.from_json(info.config)
    config = as_started(stored, given)
    _check_same(stored, config)
    check_same_run(info, _new_run(given, manifest, info.created_at), "the database")
    key = kept_key(config, Path(config.server.data_dir), info.run_id)
    _check_parts(store, config, manifest.spec, limits, key)
    if config.server.archive:
        check_writable(Path(config.server.archive))


def _check_parts(store: Store, config: Config, spec: ParamSpec, limits: Limits, key: bytes | None) -> None:
    """Raises `ConfigError` where a run cannot be of these settings. `key`: that of a private run's noise."""
    blueprint = Blueprint.of(config, spec, limits, key, masks=True, shelf=shelf_of(store))
    blueprint.check_shelf()
    blueprint.parts()


def _noise_key(store: Store, config: Config, begun: bool, run_id: str) -> bytes | None:
    """The key of a private run: made before its first event, and only then. Raises `DataError`."""
    folder = Path(config.server.data_dir)
    if begun and ((folder / NOISE_KEY).exists() or next(store.records(), None) is not None):
        return kept_key(config, folder, run_id)
    return new_key(config, folder, run_id)


def _said(stored: Config, given: Config, engine: Engine, read_at: float) -> Mapping[str, Any]:
    """What a start has said that is new. Raises `ConfigError` where the run cannot have it."""
    said = StartSettings.of(stored, given, engine.changes, read_at)
    for path, value in said.passed_over.items():
        stays = value_in_force(engine.settings, path)
        change = engine.changes.made.get(path)
        by = f", as set by {change.by}" if change is not None else ""
        log.info("%s stays %r%s: %r is what was said before", path, stays, by, value)
    if "run.name" in given.sources and given.run.name != stored.run.name:
        log.info("run.name stays %r, which the run was begun as", stored.run.name)
    if said.new:  # what is in force already is no reason not to start
        typed(with_values(as_started(stored, given), engine.changes.values), said.new)
    return said.new


def _sources(given: Config, said: Mapping[str, Any]) -> str:
    sources = dict.fromkeys(given.sources.get(path, "its settings") for path in said)
    return f"the server's start ({', '.join(sources)})"


def shelf_of(store: Store) -> Shelf | None:
    """Where a store keeps what a strategy remembers; older ones of others have no such place."""
    found: Shelf | None = getattr(store, "shelf", None)
    return found


def refolder(store: Store, begin: Begin) -> Refolder:
    """What makes the states of rollbacks, of a store's log, from where that begins."""

    def published(version: int) -> int | None:
        return None if (row := row_of(store, version)) is None else row.seq

    return Refolder(store, begin, store.receipt, published)


def check_mark(mark: Mark | None, history: History, seq: int) -> None:
    """Raises `LogLost` if the log up to event `seq`, where the mark is, is not the one that was acknowledged.

    A mark of before the newest snapshot is a server's that has not led since: `verify` gets to it.
    """
    if mark is not None and mark.contradicts(history, seq):
        raise LogLost(
            f"the run's row, or the log up to event {seq}, is not what was acknowledged (`anabranch verify` "
            "says more): restore a backup, or go on from here after `anabranch admin attest-restore` (with "
            "--database URL where it is in PostgreSQL)" + or_own()
        )


def check_links(
    history: History, record: Record, effects: list[Effect], known: Known
) -> dict[int, ChainLink]:
    """The chain goes on with an event: the links of the versions that it published.

    Raises `ReplayMismatch` if one is not what the record says: an event before it was changed.
    """
    links = history.follow(record, effects)
    for version, link in links.items():
        row = known(version)
        if row is not None and row.head not in (None, link.head):
            raise ReplayMismatch(f"version {version} has another history than the one on record")
    return links


def check_versions(effects: list[Effect], known: Known) -> dict[int, str]:
    """The digests of new versions that are small, or whose digest is on record.

    Raises `ReplayMismatch` if one is not what the record says.
    To be called before the next event: the engine may write on the vector of a `Published`.
    """
    digests = {}
    for effect in effects:
        if not isinstance(effect, Published):
            continue
        row = known(effect.version)
        recorded = None if row is None else row.sha256
        if recorded or effect.vector.nbytes <= DIGEST_BYTES_MAX:
            digests[effect.version] = digest(effect.vector)
            if recorded and digests[effect.version] != recorded:
                raise ReplayMismatch(
                    f"version {effect.version} has the digest {digests[effect.version][:16]} in the replay "
                    f"and {recorded[:16]} on record: run `anabranch verify`; {NOT_ALIKE}"
                )
    return digests


def _new_run(config: Config, manifest: Manifest, now: float) -> RunInfo:
    return RunInfo(
        run_id=str(uuid.uuid4()),
        name=config.run.name,
        config=config.to_json(),
        layout=manifest.spec.to_json(),
        initial_sha256=manifest.initial_sha256,
        created_at=now,
    )


def _check_same(stored: Config, given: Config) -> None:
    """The history of a run is a function of these settings, so they are fixed at its start."""
    for path, was, now in differences(stored, given):
        where = said_in(given.sources.get(path, ""))
        raise ConfigError(
            f"{path} is {now!r}{where}, but this run was started with {was!r}, and {why_kept(path)}: "
            "keep that, or start another run with another server.data_dir"
        )
