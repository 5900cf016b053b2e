"""What lets a simulation go on after whatever ended it: the results of its work, in one file of its folder.

All else in a run follows from its configuration and these, and costs little. So a run that goes on is done
again from its beginning, with results on record in the place of trainings and measurements: its digests and
files are those of a run that was never broken, and a checkpoint may be old, but never wrong.

What an uplink remembers is as large as the model. Of those memories the file has the ones that a device still
held when it was written: no other is asked for again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version as installed_version
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np

from anabranch.compress.feedback import Memory
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, DataError, InvalidUpdate, ReplayMismatch, StoreNewer
from anabranch.core.model.params import digest
from anabranch.core.parts import is_code
from anabranch.core.plain import from_kept
from anabranch.reports.folders import CHECKPOINT, locked, need_free
from anabranch.reports.journal_files import JOURNAL, JournalReader
from anabranch.reports.origin import started_now
from anabranch.reports.result import Result
from anabranch.reports.settings import told_apart
from anabranch.simulation.executors.base import LocalResult
from anabranch.simulation.executors.choice import settled
from anabranch.simulation.parts import PARTS, code_digests, is_trace, trace_digest
from anabranch.simulation.problem import Problem
from anabranch.support.code import changed_code, let_in
from anabranch.workloads.app import App, load_app

log = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0  # of real time, where nobody says how many virtual seconds
UNSAVED_BYTES_MAX = 64 << 20
FORGOTTEN = Memory(np.empty(0, np.float32), -1)  # one that no device held any more
TABLES = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE results (number INTEGER PRIMARY KEY, work TEXT, facts TEXT, payload BLOB, kept BLOB, own BLOB);
CREATE TABLE memories (number INTEGER PRIMARY KEY, facts TEXT, residual BLOB);
"""

# Of a training, or of a measurement; None: nobody wanted it any more.
Outcome = LocalResult | InvalidUpdate | Mapping[str, Any] | None


@dataclass(frozen=True)
class RunOrigin:
    """What a run's results follow from: its settings, the code of its parts, its first weights.

    Its trace is beside the code.
    """

    config: Mapping[str, Any]
    code: Mapping[str, str]  # place -> digest
    initial: str
    release: str
    started_at: str
    beside: Mapping[str, str] = field(default_factory=dict)  # what else is read, in words -> digest

    @classmethod
    def of(cls, config: Config, problem: Problem) -> RunOrigin:
        """That of a run which begins now."""
        initial, code = digest(problem.spec.flatten(problem.initial)), code_of(config, problem.app)
        release, began = installed_version("anabranch"), started_now()
        return cls(config.to_json(), code, initial, release, began, _beside(problem))

    def differences(self, now: RunOrigin) -> list[str]:
        """In words, what is not the same now."""
        found = told_apart(self.config, now.config)
        found += _changed_code(self.code, now.code)
        found += [
            f"{name} changed" for name, known in self.beside.items() if now.beside.get(name, known) != known
        ]
        if self.release != now.release:
            found.append(f"it was begun with anabranch {self.release}, and this is {now.release}")
        if not found and self.initial != now.initial:
            found.append("the App's first weights are other ones")
        return found


def code_of(config: Config, app: App | None) -> dict[str, str]:
    """The digests of the code that a run's results follow from, by its places, and that of its trace.

    `app` None: as it names it.
    """
    let_in(config, PARTS)
    app = app or load_app(config.run.workload, config.run.data_path)
    return code_digests(config, app) | trace_digest(config)


def _changed_code(known: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    changed = changed_code(known, now)
    return [f"{place if is_trace(place) else f'the code of {place}'} has changed" for place in changed]


def _beside(problem: Problem) -> dict[str, str]:
    """What results follow from and neither settings nor code nor the trained weights have."""
    found = {}
    if problem.frozen:
        parts = (f"{name} {digest(array)}" for name, array in sorted(problem.frozen.items()))
        found["the App's frozen weights have"] = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return found


class Checkpoint:
    """The results of one run in `folder`, of which nobody else has a run under way; a context manager.

    `every_s`: virtual seconds after which it is written; None: after a minute of real time; 0: never. What an
    earlier process has left counts with `resume`: `wall_s` is the real time that it took, and `origin` is
    what it began from. Entering raises `ConfigError` where that is not `origin`, or where another process
    has the folder.
    """

    def __init__(self, folder: Path, origin: RunOrigin, every_s: float | None, resume: bool) -> None:
        self.folder, self.origin, self.wall_s = folder, origin, 0.0
        self._path, self._every_s, self._resume = folder / CHECKPOINT, every_s, resume
        self._saved_at, self._due_s = time.monotonic(), every_s or 0.0
        self._database: sqlite3.Connection | None = None
        self._works: dict[int, str] = {}  # of the results on record
        self._unsaved: dict[int, tuple[str, Outcome]] = {}
        self._unsaved_bytes = 0
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._written: set[int] = set()  # memories in the file
        self._newest: Outcome | None = None  # so that its memory is there until a device has it
        self.is_proven: Callable[[], bool] = lambda: True  # that this is the run which the folder has
        self.check_folder: Callable[[], None] = lambda: None  # raises `FolderMissing` where it was taken away
        self._held = ExitStack()

    # --- what is on record ---------------------------------------------------------------------

    def has(self, number: int, work: str) -> bool:
        """Whether the result of this piece of work is on record. Raises `ReplayMismatch` if of another."""
        known = self._works.get(number)
        if known is not None and known != work:
            raise ReplayMismatch(
                f"{self._path}: piece of work {number} was {known}, and now it is {work}: the App or its "
                "data do not give the same twice; begin in another folder"
            )
        return known is not None

    def recall(self, number: int) -> Outcome:
        """A result on record."""
        assert self._database is not None, "something is on record"
        query = "SELECT facts, payload, kept, own FROM results WHERE number = ?"
        text, payload, kept, own = self._database.execute(query, (number,)).fetchone()
        facts = json.loads(text)
        if "measured" in facts:
            return dict(facts["measured"])
        if "diverged" in facts:
            return InvalidUpdate(facts["diverged"])
        assert facts, "what was cancelled is not asked for"
        memory = self._memory(number) if facts.pop("remembers") else None
        return LocalResult(payload=payload, kept=kept, own=own, memory=memory, **facts)

    def keep(self, number: int, work: str, outcome: Outcome) -> None:
        """A result is there, or will not be asked for."""
        if self._every_s == 0.0:
            return
        if isinstance(outcome, LocalResult):
            self._newest = outcome
            self._unsaved_bytes += len(outcome.payload) + len(outcome.kept) + len(outcome.own)
            if outcome.memory is not None:
                self._memories[number] = outcome.memory
                outcome = replace(outcome, memory=FORGOTTEN)  # to hold it is the devices' affair
        self._unsaved[number] = work, outcome

    # --- the file --------------------------------------------------------------------------------

    def save_if_due(self, now: float) -> None:
        """An event was handled, at this virtual time. Raises `FolderMissing`."""
        if self._every_s is None:
            due = time.monotonic() >= self._saved_at + SAVE_EVERY_S
        elif due := self._every_s > 0.0 and now >= self._due_s:
            self._due_s = self._every_s * (1 + now // self._every_s)
        if due or self._unsaved_bytes >= UNSAVED_BYTES_MAX:
            self.check_folder()
            self.save()

    def save(self) -> None:
        """Write what is new. Where that fails the run goes on, and a line in the log says so.

        Until it `is_proven` nothing is written: results of a run that turns out to be another's would stand
        in the way of the one that the folder has.
        """
        self._saved_at = time.monotonic()
        if not self.is_proven():
            if self._unsaved_bytes >= UNSAVED_BYTES_MAX:
                self._give_up("too much of what it had is trained again")
            return
        if not self._unsaved:
            return
        try:
            self._write()
        except (sqlite3.Error, OverflowError) as error:
            self._give_up(str(error))
        self._clear()

    def _give_up(self, why: str) -> None:
        log.warning("%s cannot be written (%s): the run has no more checkpoints", self._path, why)
        self._every_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._unsaved.clear()
        self._unsaved_bytes = 0

    def remove(self) -> None:
        """The run has ended."""
        self._unsaved.clear()
        self._close()
        remove_checkpoint(self.folder)

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self.check_folder = held.enter_context(locked(self.folder, "a run"))
            held.callback(self._close)
            if self._resume:
                self._go_on()
            self._began = time.monotonic() - self.wall_s
            self._held = held.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.close()

    def _go_on(self) -> None:
        """From what an earlier process has left, whether that came to a checkpoint or not."""
        known = self._read() if self._path.is_file() else None
        if known is None:
            differences = told_apart(_settings_in(self.folder), self.origin.config)
        else:
            differences = known.differences(self.origin)
        if differences:
            raise ConfigError(
                f"{self.folder} has a run that cannot go on as this one: {'; '.join(differences)}; "
                "name another folder, or have again what it was begun with"
            )
        self.origin = known or self.origin

    def _read(self) -> RunOrigin | None:
        """What the file says; a damaged one is removed. Raises `StoreNewer`."""
        self._database = sqlite3.connect(self._path)
        ask = self._database.execute
        try:
            if (found := ask("PRAGMA quick_check").fetchone()) != ("ok",):
                raise sqlite3.DatabaseError(found[0])
            if ask("SELECT name FROM sqlite_master").fetchone() is None:
                raise sqlite3.DatabaseError("it is empty")
            facts = dict(ask("SELECT name, value FROM facts"))
            self._works = dict(ask("SELECT number, work FROM results"))
            self._written = {number for (number,) in ask("SELECT number FROM memories")}
            self.wall_s = float(facts["wall_s"])
            return from_kept(json.loads(facts["origin"]), RunOrigin, self._path)
        except StoreNewer:
            self._close()
            raise
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            log.warning("%s is damaged (%s): the run begins anew", self._path, error)
            self._close()
            remove_checkpoint(self.folder)
            self._works, self._written, self.wall_s = {}, set(), 0.0
            return None

    def _write(self) -> None:
        if self._database is None:
            self._database = sqlite3.connect(self._path)
            self._database.executescript(f"BEGIN; {TABLES}")  # they are there with what is put in first
        held = dict(self._memories)
        facts = {"origin": json.dumps(asdict(self.origin)), "wall_s": str(time.monotonic() - self._began)}
        results = [_result_row(number, *known) for number, known in self._unsaved.items()]
        memories = [_memory_row(n, memory) for n, memory in held.items() if n not in self._written]
        gone = [(number,) for number in self._written - {*held}]
        with self._database as file:  # all of it, or nothing
            file.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
            file.executemany("INSERT INTO results VALUES (?, ?, ?, ?, ?, ?)", results)
            file.executemany("INSERT INTO memories VALUES (?, ?, ?)", memories)
            file.executemany("DELETE FROM memories WHERE number = ?", gone)
        self._written = {*held}

    def _memory(self, number: int) -> Memory:
        assert self._database is not None, "something is on record"
        query = "SELECT facts, residual FROM memories WHERE number = ?"
        row = self._database.execute(query, (number,)).fetchone()
        if row is None:
            return FORGOTTEN
        found = Memory(residual=np.frombuffer(row[1], np.float32), **json.loads(row[0]))
        self._memories[number] = found
        return found

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def remove_checkpoint(folder: Path) -> None:
    """That of a run which has ended, and what SQLite has left beside it where it was killed in a write."""
    for name in (CHECKPOINT, f"{CHECKPOINT}-journal"):
        (folder / name).unlink(missing_ok=True)


def check_same(folder: Path, ended: Result, config: Config, app: App | None) -> None:
    """Raises `ConfigError` where the run that has ended in the folder was of other settings or other code."""
    let_in(config, PARTS)
    asked = settled(config, config.fleet.executor)  # as the record has it: where the work is done, it is not
    if differences := told_apart(ended.config, asked.to_json()):
        raise ConfigError(
            f"{folder} has a run of other settings, which has ended: {'; '.join(differences)}; "
            "name another folder"
        )
    check_code(folder, ended, config, app)


def check_code(folder: Path, ended: Result, config: Config, app: App | None) -> None:
    """Raises `ConfigError` where the run that has ended in the folder was of other code than this one is.

    A trace that is another one counts as other code. Nothing is said where that is not known, or the trace
    gone, nor of our own code once it is another release's.
    """
    if not ended.code:
        return
    now = {place: known for place, known in ended.code.items() if is_trace(place)} | code_of(config, app)
    if ended.anabranch_version != installed_version("anabranch"):
        now = {p: known if is_code(p) or is_trace(p) else ended.code.get(p, "") for p, known in now.items()}
    if changed := _changed_code(ended.code, now):
        raise ConfigError(
            f"{folder} has a run of other code, which has ended: {'; '.join(changed)}; name another folder, "
            "or move that one away"
        )


def _settings_in(folder: Path) -> Mapping[str, Any] | None:
    """Those of a run that came to no checkpoint; None where it did not even come to them."""
    if not (folder / JOURNAL).exists():
        need_free(folder)  # something else is there
        return None
    try:
        return JournalReader(folder).config.to_json()
    except DataError:
        return None


def _result_row(number: int, work: str, outcome: Outcome) -> tuple[Any, ...]:
    if not isinstance(outcome, LocalResult):
        return number, work, json.dumps(_told(outcome), default=_number), None, None, None
    facts = {
        "codec": outcome.codec,
        "steps": outcome.steps,
        "metrics": dict(outcome.metrics),
        "examples": outcome.examples,
        "remembers": outcome.memory is not None,
    }
    return number, work, json.dumps(facts, default=_number), outcome.payload, outcome.kept, outcome.own


def _told(outcome: InvalidUpdate | Mapping[str, Any] | None) -> dict[str, Any]:
    if isinstance(outcome, InvalidUpdate):
        return {"diverged": str(outcome)}
    return {} if outcome is None else {"measured": dict(outcome)}


def _memory_row(number: int, memory: Memory) -> tuple[int, str, bytes]:
    facts = {
        "base_version": memory.base_version,
        "length_mean": memory.length_mean,
        "notes": dict(memory.notes),
    }
    return number, json.dumps(facts, default=_number), memory.residual.astype(np.float32).tobytes()


def _number(value: Any) -> Any:
    """A number of numpy or torch as one of Python."""
    return value.item()
