"""What is to be run, and the running of it, within a bound of time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from anabranch.core.config.tables import Config
from benchmarks.arena.cells import Cell
from benchmarks.arena.rows import TUNED, Row
from benchmarks.arena.runs import record_of
from benchmarks.arena.store import RESULTS, Record, Store, key_of
from benchmarks.arena.tuning import SEEDS, TEST, Progress, Run, fresh, mean, progress

Runner = Callable[[str, Run, Sequence[str], Config], Record]


@dataclass(frozen=True)
class Match:
    """A row in a cell, and what is known of it. `like`: the match in which the row's point is found."""

    cell: Cell
    row: Row
    store: Store
    like: Match | None = None
    _keys: dict[Run, str] = field(default_factory=dict)

    def found(self, run: Run) -> Record | None:
        """What it came to, if it was run."""
        return self.store.records.get(self._key(run))

    def _key(self, run: Run) -> str:
        if run not in self._keys:
            point = self.row.point(self.cell, run.setting, run.share)
            self._keys[run] = key_of(point.whole(run.seed, run.part))
        return self._keys[run]

    @property
    def progress(self) -> Progress:
        """What it still needs; of a row that goes by another's point nothing until that is found."""
        if self.like is None:
            return progress(self.row.grid_in(self.cell), self._score)
        other = self.like.progress
        if other.best is None or other.wanted:
            return Progress([], None)
        return Progress(fresh(other.best, self._score), other.best, other.settled)

    @property
    def waits(self) -> bool:
        """Whether nothing can be run of it until another row's point is found."""
        return self.like is not None and self.progress.best is None

    @property
    def tuned(self) -> float:
        """What the point that it has found came to in the tuning, in all of the time; 0 without one."""
        best = self.progress.best
        return 0.0 if best is None else mean(best, 1.0, self._score)

    @property
    def finals(self) -> list[Record]:
        """The runs on fresh seeds; empty until all of them have ended."""
        now = self.progress
        if now.wanted or now.best is None:
            return []
        found = (self.found(Run(now.best, 1.0, seed, TEST)) for seed in SEEDS)
        return [record for record in found if record is not None]

    def play(self, run: Run, runner: Runner = record_of) -> Record:
        """Run it, and keep what it came to."""
        record = self.played(run, runner)
        self.store.add(record)
        return record

    def played(self, run: Run, runner: Runner = record_of) -> Record:
        """Run it."""
        names = [axis.setting for axis in self.row.grid.axes]
        config = self.row.point(self.cell, run.setting, run.share).config(run.seed, run.part)
        return replace(runner(self.row.name, run, names, config), key=self._key(run))

    def _score(self, run: Run) -> float | None:
        record = self.found(run)
        return None if record is None else record.accuracy


def matches(cells: Iterable[Cell], rows: Sequence[Row], folder: Path = RESULTS) -> list[Match]:
    """Every row in every cell, cell after cell."""
    stores = [(cell, Store.of(cell.name, folder)) for cell in cells]
    return [_match(cell, row, store) for cell, store in stores for row in rows]


def _match(cell: Cell, row: Row, store: Store) -> Match:
    like = next((other for other in TUNED if other.name == row.like), None)
    return Match(cell, row, store, None if like is None else Match(cell, like, store))


def play(
    todo: Iterable[Match],
    seconds: float,
    tell: Callable[[Match, Run, Record], None],
    runner: Runner = record_of,
    now: Callable[[], float] = time.monotonic,
) -> bool:
    """Run what is wanted; no run begins after so many seconds.

    Whether everything has been run, but for matches that wait for others.
    """
    end = now() + seconds
    for match in todo:
        while wanted := match.progress.wanted:
            for run in wanted:
                if now() >= end:
                    return False
                tell(match, run, match.play(run, runner))
    return True


@dataclass(frozen=True)
class Repeated:
    """A run that was published, and what it comes to now."""

    match: Match
    published: Record
    now: Record

    @property
    def alike(self) -> str:
        """How far both are the same: to the bit, by every figure, or by how many points they differ."""
        if replace(self.published, key="") == replace(self.now, key=""):
            return "to the bit"
        was, found = self.published.accuracy, self.now.accuracy
        if replace(self.published, key="", model_sha256="") == replace(self.now, key="", model_sha256=""):
            return "in every figure, the model in its last bits another"
        return f"accuracy {was:.2f} % published, {found:.2f} % now: {found - was:+.2f}"


def again(
    of: Iterable[Match],
    seconds: float,
    draw: int = 0,
    runner: Runner = record_of,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Repeated]:
    """Run what was published again, a seed of each match, in an order that is drawn; nothing is kept.

    No run begins after so many seconds.
    """
    end, drawn = now() + seconds, random.Random(draw)
    found = [match for match in of if match.finals]
    for match in drawn.sample(found, len(found)):
        if now() >= end:
            return
        published = drawn.choice(match.finals)
        run = Run(tuple(published.setting.values()), published.share, published.seed, published.part)
        yield Repeated(match, published, match.played(run, runner))


def tell(match: Match, run: Run, record: Record) -> None:
    """A line for each run, as it ends."""
    said = ", ".join(f"{key} = {value:g}" for key, value in record.setting.items())
    at = time.strftime("%H:%M:%S")
    print(
        f"{at} {match.cell.name} {match.row.name}: {said}, {run.share:g} of the time, seed {run.seed}, "
        f"{run.part}: {record.accuracy:.1f} %",
        flush=True,
    )
