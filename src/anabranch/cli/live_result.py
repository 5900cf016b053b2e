"""From a live server's data to a run's folder: the journal, `result.json`, `events.jsonl` and the report.

The journal is replayed through a fresh engine, so the figures come from the log alone, and a log
that does not replay to the recorded digests is noticed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from anabranch.compress.broadcast import downlink_at, make_broadcast
from anabranch.compress.downloads import Downloads
from anabranch.compress.layout import Layout
from anabranch.compress.model import full_bytes
from anabranch.compress.registry import STAGES, make_codec
from anabranch.core.chains import RAW
from anabranch.core.effects import Decided, Effect, Finished, Granted, LeaseEnded, Published
from anabranch.core.engine import Engine
from anabranch.core.events import Payload
from anabranch.core.journal import Record
from anabranch.core.journal import replay as replay_journal
from anabranch.core.params import Delta, Tensors, digest
from anabranch.core.rollback import Refolder
from anabranch.core.settings import EngineSettings
from anabranch.core.submodels import Submodel, UnitMap, submodel_from_json
from anabranch.core.updates import Receipt, Task, Verdict
from anabranch.reports.html import write_report
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.recorder import EVENTS_FILE, Recorder
from anabranch.reports.result import Result
from anabranch.strategies.registry import strategy_of
from anabranch.strategies.submodels.registry import make_planner


def report_of_data(data_dir: Path, database: str, folder: Path) -> Result:
    """Write the folder of a stopped server's run. Raises `StoreLocked` while the server runs."""
    from anabranch.server.export import export_run

    exported = export_run(data_dir, database, folder)
    result = result_of_journal(folder, exported.metrics)
    result.write(folder)
    write_report(result, folder)
    return result


def result_of_journal(folder: Path, metrics: Mapping[int, Mapping[str, float]]) -> Result:
    """Replay a live run's journal; `metrics` are those of its versions. Times count from the first event."""
    journal = JournalReader(folder)
    config, spec, initial = journal.config, journal.spec, journal.initial()
    strategy = strategy_of(config)

    def fresh() -> Engine:
        broadcast = make_broadcast(spec, strategy, config.downlink.codec)
        planner = make_planner(spec, strategy, config)
        return Engine(spec, strategy, EngineSettings.of(config), spec.flatten(initial), broadcast, planner)

    engine = fresh()
    recorder = Recorder(
        strategy=config.strategy.name,
        workload=config.run.workload,
        seed=config.run.seed,
        target_accuracy=config.run.target_accuracy,
        config=config.to_json(),
        kind="live",
        events_path=folder / EVENTS_FILE,
    )
    with recorder, journal.open_payloads() as payloads:

        def load_delta(reference: Payload, submodel: Submodel | None) -> Delta:
            return make_codec(reference.codec).decode(payloads(reference), Layout.of(spec, submodel))

        def numbered(after: int) -> Iterator[tuple[int, Record]]:
            return islice(enumerate(journal.records(), 1), after, None)

        teller = _Teller(recorder, engine, spec.frozen(initial), downlink_at(strategy, config.downlink.codec))
        start = now = None
        told: dict[str, Receipt] = {}  # the engine forgets the oldest
        refold = Refolder(fresh, numbered, load_delta, told.get)
        for record, effects in replay_journal(engine, journal.records(), load_delta, refold):
            told |= {e.receipt.update_id: e.receipt for e in effects if isinstance(e, Decided)}
            now = float(record["now"])
            start = now if start is None else start
            teller.tell(now - start, record, effects)
        for version, values in sorted(metrics.items()):
            if "accuracy" in values:
                loss = values.get("loss", float("nan"))
                recorder.evaluated((now or 0.0) - (start or 0.0), version, values["accuracy"], loss)
        wall_s = (now or 0.0) - (start or 0.0)
        return recorder.result(digest(engine.vector), journal.sha256(), wall_s)


class _Teller:
    """Tells the recorder what happened, with the bytes that the replayed engine would send."""

    def __init__(
        self, recorder: Recorder, engine: Engine, frozen: Tensors, codec_at: Callable[[int], str]
    ) -> None:
        self._recorder, self._engine, self._codec_at = recorder, engine, codec_at
        self._downloads = Downloads(engine.spec, frozen)
        self._full_bytes = full_bytes(engine.spec)

    def tell(self, now: float, record: Record, effects: list[Effect]) -> None:
        """One event of the journal, after the engine has handled it."""
        for effect in effects:
            match effect:
                case Granted(task, again) if not again:
                    self._granted(now, task, record["holds_version"])
                case Decided(client, receipt, examples, duplicate) if not duplicate:
                    self._decided(now, client, receipt, examples, record)
                case Published(version):
                    self._recorder.published(now, version)
                case LeaseEnded(task, end):
                    self._recorder.note(
                        now, "lease_ended", client=task.client_id, task=task.task_id, end=end.value
                    )
                case Finished(why, given_up):
                    self._recorder.finished(now, why, given_up)

    def _granted(self, now: float, task: Task, holds: int | None) -> None:
        recorder, engine, version = self._recorder, self._engine, task.base_version
        recorder.granted(now, task.client_id, task.task_id, version)
        codecs = engine.ledger.clients[task.client_id].capability.codecs
        if task.uplink != RAW or set(STAGES) <= set(codecs):  # raw may be all that the device can do
            recorder.compressed(now, version, task.uplink, self._codec_at(version))
        if holds == version:  # nothing to fetch
            return
        part = task.submodel if isinstance(task.submodel, UnitMap) else None
        make = self._downloads.offer(engine, version, holds, codecs, part)
        assert make is not None, "the current version is always held"
        recorder.downloaded(now, task.client_id, len(make().data), self._full_bytes)

    def _decided(self, now: float, client: str, receipt: Receipt, examples: int, record: Record) -> None:
        spec, payload = self._engine.spec, record["payload"]
        raw_bytes = (payload["values"] or spec.size) * spec.vector_dtype.itemsize
        up = int(payload["size_bytes"])
        self._recorder.decided(now, client, receipt.version, receipt.decision, up, examples, raw_bytes)
        if self._engine.planner is not None and receipt.decision.verdict is not Verdict.REJECTED:
            packed = record["submodel"]
            submodel = None if packed is None else submodel_from_json(packed, spec)
            self._recorder.trained(now, client, spec, submodel)
