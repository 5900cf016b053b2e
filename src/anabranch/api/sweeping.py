"""`sweep`: the same run for every choice of a grid and every seed, side by side.

Seeds are paired: each choice is run from the same ones, so that what is compared differs in the choice alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Unpack

from anabranch.api.comparing import Comparison, compare
from anabranch.api.figures import Figure
from anabranch.api.objects import RunObjects, RunPlan, Source, plan_run
from anabranch.api.progress import LiveBar
from anabranch.api.records import Records
from anabranch.api.run import Run
from anabranch.api.simulating import run_simulation
from anabranch.api.temporary import TemporaryFolder
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.reports.compare import Against
from anabranch.reports.folders import has_ended
from anabranch.reports.result import Result
from anabranch.workloads.app import App

SEEDS = 5
ARGUMENTS = frozenset(RunObjects.__annotations__) - {"seed", "settings"}
DIGEST_CHARS = 10

Choice = Mapping[str, Any]


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: what was chosen of the grid, the seed, and what came of it."""

    choice: Choice
    seed: int
    run: Run


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, choice after choice, and in each seed after seed."""

    cells: Sequence[SweptRun] = field(repr=False)

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [cell.run for cell in self.cells]

    @cached_property
    def comparison(self) -> Comparison:
        """A row for each choice, over its seeds. Raises `DataError`."""
        return compare(self.runs)

    @cached_property
    def rows(self) -> Records:
        """A row for each run: its choice, its seed, and what it came to."""
        return Records(
            {
                **_told(cell),
                "final_value": cell.run.result.final_value,
                "best_value": cell.run.result.best_value,
                "time_to_target_s": cell.run.result.time_to_target_s,
                "updates": cell.run.result.updates_applied,
                "versions": cell.run.result.versions,
                "uplink_bytes": cell.run.result.uplink_bytes,
                "downlink_bytes": cell.run.result.downlink_bytes,
                "virtual_s": cell.run.result.virtual_s,
            }
            for cell in self.cells
        )

    @cached_property
    def history(self) -> Records:
        """A row for each measurement of each run, with its choice and its seed: a long frame."""
        return Records({**_told(cell), **row} for cell in self.cells for row in cell.run.history)

    def plot(self, metric: str = "", against: Against = "time") -> Figure:
        """The mean of each choice over its seeds, with a band; see `Comparison.plot`."""
        return self.comparison.plot(metric, against)

    def _repr_html_(self) -> str:
        return self.comparison._repr_html_()


def sweep(
    source: Source,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Iterable[int] = SEEDS,
    out: str | Path | None = None,
    parallel: int = 1,
    progress: bool = True,
    **objects: Unpack[RunObjects],
) -> Sweep:
    """Simulate every combination of a grid, each from the same seeds.

    Args:
        source: As for `simulate`.
        grid: For each of its arguments (`strategy`, `fleet`, `uplink`, ...), or each setting
            (`"table.key"`), the values to try.
        seeds: So many, from 0, or these.
        out: A folder; each run has one of its own in it, named after its strategy, all of its settings
            and its seed. What has ended there already is not run again: a sweep that was interrupted goes
            on. (Of an App whose code has changed it would have to be.) None: in temporary folders.
        parallel: Processes that simulate, a run at a time each. Apps and strategies then come from files.
        progress: Show a bar with the time left, on standard error.
        objects: The other arguments of `simulate`, `settings` among them, for all runs alike.

    Raises `ConfigError` before anything is run, and what `simulate` raises.
    """
    chosen = _combinations(grid)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ConfigError("sweep(seeds=...): give at least one seed")
    if parallel < 1:
        raise ConfigError(f"sweep(parallel={parallel!r}): give at least 1 process")
    plans = [(choice, seed, _planned(source, choice, seed, objects)) for choice in chosen for seed in numbers]
    if said := plans[0][2].said:
        warnings.warn(f"{said} each: until=Until(updates=...) says otherwise", stacklevel=2)
    temporary = TemporaryFolder("anabranch-sweep-") if out is None else None
    folder = temporary.path if temporary else Path(out or "")
    jobs = [
        SweepJob(plan.config, plan.app, folder / _name(plan.config), out is not None) for *_, plan in plans
    ]
    with LiveBar(progress) as bar:
        _carry_out(jobs, parallel, bar)
    cells = []
    for (choice, seed, plan), job in zip(plans, jobs, strict=True):
        run = Run(job.folder, Result.read(job.folder), plan.app, trusted=True, holds=temporary)
        cells.append(SweptRun(choice, seed, run))
    return Sweep(tuple(cells))


@dataclass(frozen=True)
class SweepJob:
    """A run that is to be there in the end."""

    config: Config
    app: App | None
    folder: Path
    keep_payloads: bool = True


def carry_out(job: SweepJob) -> None:
    """Have the run in its folder, unless it is there. What an interrupted sweep has left there goes."""
    if has_ended(job.folder):
        return
    if job.folder.exists():
        shutil.rmtree(job.folder)
    run_simulation(job.config, job.folder, job.app, keep_payloads=job.keep_payloads)


def _carry_out(jobs: Sequence[SweepJob], parallel: int, bar: LiveBar) -> None:
    def show(done: int) -> None:
        bar.show(done / len(jobs), f"{done} of {len(jobs)} runs")

    show(0)
    if parallel == 1:
        for done, job in enumerate(jobs, 1):
            carry_out(job)
            show(done)
        return
    main = sys.modules["__main__"]
    if any(type(job.app).__module__ == "__main__" for job in jobs) and not hasattr(main, "__file__"):
        raise ConfigError(
            f"sweep(parallel={parallel}): "
            "other processes cannot see what a notebook defines: put the App in a file"
        )
    # Not forked: neither torch's threads nor gRPC's survive that.
    with ProcessPoolExecutor(parallel, get_context("spawn")) as pool:
        futures = [pool.submit(carry_out, job) for job in jobs]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                show(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _combinations(grid: Mapping[str, Sequence[Any]]) -> list[Choice]:
    for name, values in grid.items():
        if name not in ARGUMENTS and "." not in name:
            raise ConfigError(
                f"sweep(grid={{{name!r}: ...}}): name one of {', '.join(sorted(ARGUMENTS))}, or a setting, "
                "'table.key'"
            )
        if isinstance(values, str) or not isinstance(values, Iterable) or not list(values):
            raise ConfigError(f"sweep(grid={{{name!r}: {values!r}}}): give a list of values")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _planned(source: Source, choice: Choice, seed: int, objects: RunObjects) -> RunPlan:
    if "seed" in objects:
        raise ConfigError("sweep(seed=...): a sweep has seeds=, so many or a list of them")
    if twice := sorted({*choice} & {*objects}):
        raise ConfigError(f"sweep: {', '.join(twice)} is in the grid and beside it: give it once")
    settings = dict(objects.get("settings") or {})
    settings |= {name: value for name, value in choice.items() if name not in ARGUMENTS}
    chosen: Any = {name: value for name, value in choice.items() if name in ARGUMENTS}
    return plan_run(source, {**objects, **chosen, "seed": seed, "settings": settings})


def _name(config: Config) -> str:
    told = json.dumps(config.to_json(), sort_keys=True, default=str)
    strategy = config.strategy.name.rpartition(":")[2]
    return f"{strategy}-{hashlib.sha256(told.encode()).hexdigest()[:DIGEST_CHARS]}-seed{config.run.seed}"


def _told(cell: SweptRun) -> dict[str, Any]:
    return {**{name: _text(value) for name, value in cell.choice.items()}, "seed": cell.seed}


def _text(value: Any) -> Any:
    """A value of a grid as a cell of a table: an object by its name and what is not as it is by default."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    plain: Any = type(value)()
    said = [f for f in fields(value) if getattr(value, f.name) != getattr(plain, f.name)]
    name = getattr(value, "name", "") or type(value).__name__
    words = ", ".join(f"{f.name}={_text(getattr(value, f.name))}" for f in said)
    return f"{name}({words})" if words else name
