"""From a live server's data to a run's folder: the journal, `result.json`, `events.jsonl` and the report.

The journal is replayed through a fresh engine, so the figures come from the log alone, and a log
that does not replay to the recorded digests is noticed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from anabranch.compress.model import encode_model
from anabranch.compress.registry import make_codec
from anabranch.core.effects import Decided, Effect, Finished, Granted, LeaseEnded, Published
from anabranch.core.engine import Engine
from anabranch.core.events import Payload
from anabranch.core.journal import Record
from anabranch.core.journal import replay as replay_journal
from anabranch.core.params import Vector, digest
from anabranch.core.settings import EngineSettings
from anabranch.reports.html import write_report
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.recorder import EVENTS_FILE, Recorder
from anabranch.reports.result import Result
from anabranch.strategies.registry import make_strategy


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
    strategy = make_strategy(config.strategy.name, config.strategy.params)
    engine = Engine(spec, strategy, EngineSettings.of(config), spec.flatten(initial))
    codec = make_codec(config.downlink.codec)
    model_bytes = len(encode_model(codec, spec, engine.vector, spec.frozen(initial)))
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

        def load_delta(reference: Payload) -> Vector:
            codec = make_codec(reference.codec)
            return codec.decode(payloads(reference), reference.values or spec.size, spec.vector_dtype)

        start = now = None
        for record, effects in replay_journal(engine, journal.records(), load_delta):
            now = float(record["now"])
            start = now if start is None else start
            _record(recorder, now - start, record, effects, model_bytes)
        for version, values in sorted(metrics.items()):
            if "accuracy" in values:
                loss = values.get("loss", float("nan"))
                recorder.evaluated((now or 0.0) - (start or 0.0), version, values["accuracy"], loss)
        wall_s = (now or 0.0) - (start or 0.0)
        return recorder.result(digest(engine.vector), journal.sha256(), wall_s)


def _record(recorder: Recorder, now: float, record: Record, effects: list[Effect], model_bytes: int) -> None:
    for effect in effects:
        match effect:
            case Granted(task, again) if not again:
                recorder.granted(now, task.client_id, task.task_id, task.base_version)
                recorder.downloaded(now, task.client_id, model_bytes)
            case Decided(client, receipt, examples, duplicate) if not duplicate:
                up = int(record["payload"]["size_bytes"])
                recorder.decided(now, client, receipt.version, receipt.decision, up, examples)
            case Published(version):
                recorder.published(now, version)
            case LeaseEnded(task, end):
                recorder.note(now, "lease_ended", client=task.client_id, task=task.task_id, end=end.value)
            case Finished(why):
                recorder.note(now, "finished", why=why)
