"""Proof that a run folder tells the truth: its model comes out again, to the bit.

From the journal and the kept payloads through a fresh engine; or, where a simulated run kept none, by
simulating its configuration once more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from anabranch.core.config.tables import Config
from anabranch.core.engine.engine import Engine
from anabranch.core.errors import DataError
from anabranch.core.model.params import digest
from anabranch.core.snapshot import state_digest
from anabranch.host.build import Blueprint
from anabranch.host.journal import Replay
from anabranch.host.log import WholeLog
from anabranch.identity.noise_key import kept_key
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.result import Result
from anabranch.simulation.parts import REPLAYED, code_digests, is_trace
from anabranch.simulation.run import open_simulation
from anabranch.support.code import changed_code, check_trusted, is_of, let_in
from anabranch.support.shelf import ScratchShelf
from anabranch.workloads.app import App
from anabranch.workloads.registry import check_installed

TOLD_EVERY = 100  # records: to tell takes about as long as one of them


@dataclass(frozen=True)
class ReplayOutcome:
    """What came out, beside what `result.json` says. `way`: through the payloads, or by simulation.

    `changed`: the places of parts of others whose code was another one when the run was made.
    """

    way: Literal["payloads", "simulation"]
    version: int
    model_sha256: str
    state_sha256: str
    journal_sha256: str
    recorded_version: int
    recorded_model_sha256: str
    recorded_journal_sha256: str
    changed: tuple[str, ...] = ()

    @property
    def matches(self) -> bool:
        """Whether version, model and journal are those that were recorded."""
        return (self.version, self.model_sha256, self.journal_sha256) == (
            self.recorded_version,
            self.recorded_model_sha256,
            self.recorded_journal_sha256,
        )


def replay_run(
    folder: Path,
    app: App | None = None,
    workers: int = 0,
    load_code: bool = False,
    tell: Callable[[float], object] = lambda _: None,
) -> ReplayOutcome:
    """Run the folder's history again, live or simulated.

    `app` and `workers` matter only where a simulation has to be repeated. Code that the run names is loaded
    with `load_code` alone: who says so has looked at it. `tell` is told, now and then, which share of the
    versions is there again, 0 to 1. Raises `DataError` for a folder that is no whole run, `ConfigError` where
    it names code, `StoreCorrupt` for payloads that are not those of the journal, `ReplayMismatch` for a
    record that is no event.
    """
    # A part of the run's may change the working directory.
    reader, result = JournalReader(folder.absolute()), Result.read(folder)
    trains = app is None and result.kind == "simulated" and not reader.has_payloads
    _admit(reader.config, folder, load_code, with_app=trains)

    def tell_of(version: int) -> None:
        tell(min(1.0, version / max(1, result.versions)))

    if reader.has_payloads:
        engine, journal_sha256 = _through_payloads(reader, tell_of), reader.sha256()
    elif result.kind == "simulated" and result.status != "finished":
        raise DataError(
            f"{folder} was interrupted and has no updates, and simulated anew it would go on: "
            "give it an out folder of its own, with run.keep_payloads"
        )
    elif result.kind == "simulated":
        key = kept_key(reader.config, folder)
        with open_simulation(
            reader.config, None, app, workers, lambda progress: tell_of(progress.version), noise_key=key
        ) as simulation:
            simulation.run()
            engine, journal_sha256 = simulation.engine, simulation.result(0.0).journal_sha256
    else:
        raise DataError(f"{folder} is a live run without its payloads, so nothing can be replayed from it")
    return ReplayOutcome(
        way="payloads" if reader.has_payloads else "simulation",
        version=engine.version,
        model_sha256=digest(engine.vector),
        state_sha256=state_digest(engine),
        journal_sha256=journal_sha256,
        recorded_version=result.versions,
        recorded_model_sha256=result.model_sha256,
        recorded_journal_sha256=result.journal_sha256,
        changed=tuple(_changed(result, reader.config, app)),
    )


def _changed(result: Result, config: Config, app: App | None) -> list[str]:
    """Parts of others with other code than the run was made with; of the App's, where it is there."""
    followed = {place: known for place, known in result.code.items() if not is_trace(place)}
    known = {p: d for p, d in followed.items() if app is not None or not is_of(p, config.run.workload)}
    return changed_code(known, code_digests(config, app))


def _admit(config: Config, folder: Path, load_code: bool, with_app: bool) -> None:
    """Let in the code that a run names, or raise `ConfigError` for it; `with_app`: its App is needed too."""
    if load_code:
        let_in(config, REPLAYED)
        return
    check_trusted(config, REPLAYED, str(folder))
    if with_app:
        check_installed(config.run.workload, str(folder))


def _through_payloads(reader: JournalReader, tell_of: Callable[[int], None]) -> Engine:
    key = kept_key(reader.config, reader.folder)
    blueprint = Blueprint.of(reader.config, reader.spec, key=key, masks=True, shelf=ScratchShelf())
    begin = partial(blueprint.engine, reader.initial())
    with reader.open_payloads() as payload:
        replay = Replay(WholeLog(reader.records, payload), begin)
        for number, _ in enumerate(replay):
            if number % TOLD_EVERY == 0:
                tell_of(replay.engine.version)
    return replay.engine
