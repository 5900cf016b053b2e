"""From a live server's data to a run's folder: the journal, the result, the report and the models.

The journal is replayed through a fresh engine, so the figures come from the log alone, and a log
that does not replay to the recorded digests is noticed here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path

from anabranch.compress.downloads import Downloads
from anabranch.compress.model import frozen_size_bytes, full_bytes
from anabranch.core.config.goal import Goal
from anabranch.core.config.ranges import OWN
from anabranch.core.config.tables import Config
from anabranch.core.effects import Granted
from anabranch.core.engine.engine import Engine
from anabranch.core.journal import Record
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import HeldPart, Holdings, has
from anabranch.core.model.params import ParamSpec, Tensors, Vector, digest
from anabranch.core.model.submodels import Coordinates, Submodel, submodel_from_json
from anabranch.core.model.updates import Task
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.host.log import WholeLog
from anabranch.host.records import RunReporter
from anabranch.identity.noise_key import kept_key
from anabranch.reports.folders import numbered
from anabranch.reports.html import write_report
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.models import BEST, FINAL, Best, write_model
from anabranch.reports.origin import moment
from anabranch.reports.recorder import Recorder
from anabranch.reports.result import RESULT_FILE, Result, Status
from anabranch.support.shelf import ScratchShelf

Tell = Callable[[str, int], object]  # what is being done, and up to which event


def report_of_data(
    data_dir: Path,
    database: str,
    folder: Path,
    archive: Path | None = None,
    tell: Tell = lambda _doing, _seq: None,
) -> Result:
    """Write the folder of a stopped server's run. `tell` hears how far it is.

    Raises `StoreLocked` while the server runs.
    """
    from anabranch.server.export import export_run

    exported = export_run(data_dir, database, folder, archive, partial(tell, "copying its log"))
    replayed = partial(tell, "replaying it")
    result = result_of_journal(folder, exported.metrics, data_dir, replayed)
    result.write(folder)
    write_report(result, folder)
    return result


def same_before(folder: Path, base: Path, result: Result) -> Path | None:
    """An earlier folder of this name that tells the same of the same log; then this one is removed."""
    earlier = takewhile(lambda other: other != folder, numbered(base))
    for other in (path for path in earlier if (path / RESULT_FILE).is_file()):
        known = Result.read(other)
        if (known.journal_sha256, known.history) == (result.journal_sha256, result.history):
            write_report(result, other)
            shutil.rmtree(folder)
            return other
    return None


def result_of_journal(
    folder: Path,
    metrics: Mapping[int, Mapping[str, float]],
    data_dir: Path | None = None,
    tell: Callable[[int], object] = lambda _seq: None,
) -> Result:
    """Replay a live run's journal, and write its models; `metrics` are those of its versions.

    The noise key of a private run is in `data_dir`, or else in the folder. `tell` hears which event was the
    last one.

    Times count from the first event.
    """
    journal = JournalReader(folder)
    config, spec, initial = journal.config, journal.spec, journal.initial()
    blueprint = Blueprint.of(
        config, spec, key=kept_key(config, data_dir or folder), masks=True, shelf=ScratchShelf()
    )
    recorder = Recorder.of(config, folder, spec)
    with recorder, journal.open_payloads() as payload:
        replay = Replay(WholeLog(journal.records, payload), partial(blueprint.engine, initial))
        engine, models = replay.engine, _Models(metrics, replay.engine, recorder.goal)
        teller = RunReporter(recorder, blueprint.codec_at)
        downloads = _Downloads(recorder, engine, spec.frozen(initial), config)
        start = now = None
        for seq, record, effects in replay:
            now = float(record["now"])
            start = now if start is None else start
            teller.tell(now - start, engine, effects, _part(record, spec))
            for effect in effects:
                if isinstance(effect, Granted) and not effect.again:
                    downloads.tell(now - start, effect.task, _holdings(record, spec))
            models.look()
            tell(seq)
        wall_s = (now or 0.0) - (start or 0.0)
        for version, values in sorted(metrics.items()):
            recorder.evaluated(wall_s, version, values)
        recorder.started_at = "" if start is None else moment(start)
        models.write(folder, spec.frozen(initial))
        endless = not (engine.settings.versions_max or engine.settings.updates_max)
        ended = bool(engine.finished) or endless
        status: Status = "finished" if ended else "interrupted"
        why = "" if ended else "the server was stopped before the end"
        return recorder.result(digest(engine.vector), journal.sha256(), wall_s, status, why)


class _Models:
    """The last version and the best one, as the replay comes by them."""

    def __init__(self, metrics: Mapping[int, Mapping[str, float]], engine: Engine, goal: Goal) -> None:
        self._metrics, self._engine = metrics, engine
        self._best: Best[None] = Best(goal)
        for version, values in sorted(metrics.items()):
            self._best.offer(version, values, lambda: None)
        self._vector: Vector | None = None
        self.look()

    def look(self) -> None:
        """The engine may have come to the best version."""
        if self._vector is None and self._engine.version == self._best.version:
            self._vector = self._engine.vector.copy()

    def write(self, folder: Path, frozen: Tensors) -> None:
        """Write both; no best one where nothing was measured."""
        engine, best = self._engine, self._best
        named = engine.spec.unflatten(engine.vector, frozen)
        write_model(folder / FINAL, named, engine.version, self._metrics.get(engine.version))
        if self._vector is not None and best.version is not None:
            write_model(
                folder / BEST, engine.spec.unflatten(self._vector, frozen), best.version, best.metrics
            )


class _Downloads:
    """Tells the recorder the bytes of models that the replayed engine would send.

    What is frozen is told of every device, though one may have had it: that the journal does not know.
    """

    def __init__(self, recorder: Recorder, engine: Engine, frozen: Tensors, config: Config) -> None:
        self._recorder, self._engine, sent = recorder, engine, config.run.frozen
        self._downloads = Downloads(engine.spec, frozen, config.downlink.parts == OWN)
        self._full_bytes, self._frozen_bytes = full_bytes(engine.spec), frozen_size_bytes(engine.spec, sent)
        self._had: set[str] = set()

    def tell(self, now: float, task: Task, holds: Holdings) -> None:
        """A task was granted to a device that holds this."""
        engine, version, part = self._engine, task.base_version, needed_for(task.submodel)
        if has(holds, version, part):  # nothing to fetch
            return
        codecs = engine.ledger.clients[task.client_id].capability.codecs
        make = self._downloads.offer(engine, version, holds, codecs, part)
        assert make is not None, "the current version is always held"
        apart = 0 if task.client_id in self._had else self._frozen_bytes
        self._had.add(task.client_id)
        self._recorder.downloaded(now, task.client_id, len(make().data) + apart, self._full_bytes + apart)


def _holdings(record: Record, spec: ParamSpec) -> Holdings:
    """What the device of an ask has."""
    pairs = ((v, submodel_from_json(part, spec)) for v, part in record.get("holds_parts", ()))
    parts = tuple(HeldPart(v, part) for v, part in pairs if not isinstance(part, Coordinates))
    whole: int | None = record["holds_version"]
    return parts or whole


def _part(record: Record, spec: ParamSpec) -> Submodel | None:
    """Of an update its part of the model."""
    return submodel_from_json(record["submodel"], spec) if record["kind"] == "update" else None
