"""`sweep`: the same run for every choice of a grid and every seed, side by side.

Seeds are paired: each choice is run from the same ones, so that what is compared differs in the choice alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from anabranch.api.comparing import Comparison, compare
from anabranch.api.configuration import Choice, is_config
from anabranch.api.figures import Figure
from anabranch.api.objects import FileTables, RunObjects, RunPlan, Source, check_settings, plan_run
from anabranch.api.pool import PROCESSES, check_place, run_pool
from anabranch.api.progress import LiveBar, share_done
from anabranch.api.records import Records
from anabranch.api.run import Run
from anabranch.api.simulating import Callback, run_simulation
from anabranch.api.studies import OptunaStudy, Space, StudySweep, is_study
from anabranch.api.sweep_file import SEED, SEEDS_SAID, SweepTable, combinations, read_sweep
from anabranch.api.temporary import folder_at
from anabranch.core.config.tables import Config, RunTable
from anabranch.core.errors import ConfigError
from anabranch.core.limits import DEFAULT_LIMITS, KIB, MIB
from anabranch.core.plain import of_python
from anabranch.core.spelling import spelled
from anabranch.reports.compare import Against
from anabranch.reports.folders import FolderBusy, has_ended, wait_until_free
from anabranch.reports.result import Result
from anabranch.simulation.checkpoint import check_code
from anabranch.simulation.executors.pool import check_no_worker_begins, check_seen
from anabranch.simulation.run import RunProgress
from anabranch.workloads.app import App

SEEDS = 5
TRIALS = 20
ARGUMENTS = frozenset(RunObjects.__annotations__) - {"seed", "settings"}
DIGEST_CHARS = 10
# How large a message may be makes no other run. Where nothing is said of it, a name has what was the default
# when names came into being: else runs of an older release would not be found again.
SIZES = {"message_bytes_max": 1 * MIB, "chunk_bytes_max": 256 * KIB}

log = logging.getLogger(__name__)

Grid = Mapping[str, Iterable[Any]] | Iterable[Choice]


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


@spelled(RunObjects, but=("seed",))
def sweep(
    source: Source,
    grid: Grid | OptunaStudy | None = None,
    *,
    space: Space | None = None,
    trials: int | None = None,
    seeds: int | Iterable[int] | None = None,
    out: str | Path | None = None,
    parallel: int | None = None,
    on: str | None = None,
    progress: bool = True,
    **objects: Unpack[RunObjects],
) -> Sweep:
    """Simulate every combination of a grid, each from the same seeds.

    Args:
        source: As for `simulate`; a file of settings may have a grid, seeds and parallel runs in `[sweep]`.
        grid: For each of its arguments (`strategy`, `fleet`, `uplink`, ...), or each setting
            (`"table.key"`), the values to try. Or a list of choices, each a dict of such names. Or an
            Optuna study, which chooses in `space` until it has so many `trials`.
        space: For a study: names of a grid with a distribution of Optuna each, or a function that asks its
            trial (`trial.suggest_float(...)`) and returns a choice.
        trials: How many choices the study is to have in all, those of before among them; None: 20.
        seeds: So many, from 0, or these; None: five.
        out: A folder; each run has one of its own in it, named after its strategy, all of its settings
            and its seed. What has ended there already is not run again, what was broken off goes on: so does
            a sweep. (Of an App whose code has changed all would have to be.) None: in temporary folders.
        parallel: Processes that simulate, a run at a time each. Apps and strategies then come from files.
        on: `processes` of this machine, or `ray`: each run is a task of Ray's, with what `[ray]` says of an
            actor, here or at `[ray] address`. A run whose machine dies goes on where it was. On a cluster
            of several machines give `out`, a folder that all of them have.
        progress: Show a bar with the time left, on standard error, or lines where that is no terminal.
        objects: The arguments of `simulate` from `strategy` to `settings`, but for `seed`, for all runs
            alike.

    Raises `ConfigError` before anything is run, and what `simulate` raises.
    """
    _check_seedless(objects)
    source, said = _swept(source)
    if is_study(grid):
        study: Any = grid
        if parallel not in (None, 1) or on not in (None, PROCESSES):
            raise ConfigError("sweep(study, parallel=...): start the program several times, with one storage")
        wanted = TRIALS if trials is None else trials
        return _studied(source, study, space, wanted, numbers_of(seeds), out, progress, objects)
    if space is not None or trials is not None:
        raise ConfigError(
            "sweep(space=..., trials=...): a study chooses so: give one of Optuna's as the grid"
        )
    chosen = said.choices if grid is None else _choices(grid)
    numbers = numbers_of(said.seeds if seeds is None else seeds)
    parallel = (said.parallel or 1) if parallel is None else of_python(parallel)
    if not isinstance(parallel, int) or parallel < 1:
        raise ConfigError(f"sweep(parallel={parallel!r}): give at least 1 process")
    if parallel > 1:
        check_no_worker_begins()
    place = on or said.on or PROCESSES
    planned = sweep_plans(source, chosen, numbers, objects, place)
    if told := planned[0].run.said:
        warnings.warn(f"{told} each: until=Until(updates=...) says otherwise", stacklevel=3)
    with LiveBar(progress) as bar:
        return carry_sweep(planned, out, parallel, place, lambda p: bar.show(p.share, p.text))


def _studied(
    source: Source,
    study: OptunaStudy,
    space: Space | None,
    trials: int,
    seeds: Sequence[int],
    out: str | Path | None,
    progress: bool,
    objects: RunObjects,
) -> Sweep:
    """The sweep whose choices a study makes."""
    if space is None:
        raise ConfigError("sweep(study, space=...): say what to choose, a dict of Optuna's distributions")
    if not callable(space):
        _check_names(space)
    folder = SweepFolder(out)

    def simulate(choice: Choice, seed: int, tell: Callable[[RunTable, RunProgress], None]) -> Result:
        _check_names(choice)
        plan = _planned(source, choice, seed, objects)
        carry_out(folder.job(plan), [partial(tell, plan.config.run)])
        return Result.read(folder.job(plan).folder)

    with LiveBar(progress) as bar:
        carried = StudySweep(study, space, trials, seeds, simulate, bar)
        carried.run()
    planned = sweep_plans(source, carried.choices, seeds, objects)
    # Of others the study alone knows.
    return folder.sweep([plan for plan in planned if has_ended(folder.job(plan.run).folder)])


class SweepPlan(NamedTuple):
    """A run that a sweep is to have: what was chosen of the grid, the seed, and what it comes to."""

    choice: Choice
    seed: int
    run: RunPlan


def sweep_plans(
    source: Source, choices: Iterable[Choice], seeds: Iterable[int], objects: RunObjects, on: str = PROCESSES
) -> list[SweepPlan]:
    """Every choice from every seed. Those that come to the same settings are one: by the first of them.

    Raises `ConfigError`, also where they cannot be carried out on that place.
    """
    found: dict[str, SweepPlan] = {}
    for choice, seed in product(choices, seeds):
        plan = _planned(source, choice, seed, objects)
        check_place(on, "sweep.on", plan.config)
        found.setdefault(_name(plan.config), SweepPlan(choice, seed, plan))
    return [*found.values()]


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is: so many of its runs have ended, and of all of it such a share is done, 0 to 1."""

    done: int
    runs: int
    share: float

    @property
    def text(self) -> str:
        """For a line."""
        return f"{self.done} of {self.runs} runs"


Tell = Callable[[SweepProgress], object]


def carry_sweep(
    planned: Sequence[SweepPlan], out: str | Path | None, parallel: int, on: str, tell: Tell
) -> Sweep:
    """Have every run that is planned. Raises what `simulate` raises."""
    folder = SweepFolder(out)
    _carry_out([folder.job(plan.run) for plan in planned], parallel, on, tell)
    return folder.sweep(planned)


class SweepFolder:
    """Where the runs of a sweep go; None: where they last as long as somebody has one."""

    def __init__(self, out: str | Path | None) -> None:
        self._path, self._temporary = folder_at(out, "anabranch-sweep-")

    def job(self, plan: RunPlan) -> SweepJob:
        """What is to be there of a plan in the end."""
        kept = self._temporary is None
        return SweepJob(plan.config, plan.app, self._path / _name(plan.config), kept)

    def run(self, plan: RunPlan) -> Run:
        """What is there of it."""
        folder = self.job(plan).folder
        return Run(folder, Result.read(folder), plan.app, trusted=True, holds=self._temporary)

    def sweep(self, planned: Iterable[SweepPlan]) -> Sweep:
        """What is there of all of them."""
        return Sweep(tuple(SweptRun(plan.choice, plan.seed, self.run(plan.run)) for plan in planned))


@dataclass(frozen=True)
class SweepJob:
    """A run that is to be there in the end."""

    config: Config
    app: App | None
    folder: Path
    keep_payloads: bool = True


def carry_out(job: SweepJob, callbacks: Iterable[Callback] = ()) -> None:
    """Have the run in its folder, unless it is there. One that was broken off goes on.

    One that another sweep has under way is waited for, and taken over where it does not come to its end.
    Raises `ConfigError` where what is there was made by other code.
    """
    while not has_ended(job.folder):
        try:
            _simulate(job, callbacks)
        except FolderBusy:
            log.warning("%s: another process simulates this run, and is waited for", job.folder)
            wait_until_free(job.folder)
        else:
            return
    # Of these settings, by its name; how much of Ray it had may be other.
    check_code(job.folder, Result.read(job.folder), job.config, job.app)


def _simulate(job: SweepJob, callbacks: Iterable[Callback]) -> None:
    kept = None if job.keep_payloads else 0.0  # nobody comes back to a temporary folder
    run_simulation(
        job.config,
        job.folder,
        job.app,
        callbacks=callbacks,
        keep_payloads=job.keep_payloads,
        checkpoint_s=kept,
        resume=True,
    )


def _carry_out(jobs: Sequence[SweepJob], parallel: int, on: str, tell: Tell) -> None:
    def show(done: int, share: float = 0.0) -> None:
        tell(SweepProgress(done, len(jobs), (done + share) / len(jobs)))

    def show_run(done: int, run: RunTable, progress: RunProgress) -> None:
        show(done, share_done(run, progress))

    show(0)
    if parallel == 1 and on == PROCESSES:
        for done, job in enumerate(jobs):
            carry_out(job, [partial(show_run, done, job.config.run)])
            show(done + 1)
        return
    if on == PROCESSES:
        check_seen((job.app for job in jobs), f"sweep(parallel={parallel})")
    with run_pool(parallel, on, jobs[0].config.ray, shared=jobs[0].keep_payloads) as pool:
        futures = [pool.submit(carry_out, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            show(done)


def numbers_of(seeds: int | Iterable[int] | None) -> list[int]:
    """The seeds that were asked for, each once. Raises `ConfigError`."""
    wanted = SEEDS if seeds is None else of_python(seeds)
    if not isinstance(wanted, int | Iterable) or isinstance(wanted, str):
        raise ConfigError(f"sweep(seeds={wanted!r}): give how many, from 0, or a list of them")
    numbers = list(range(wanted)) if isinstance(wanted, int) else of_python(list(wanted))
    if not numbers or None in numbers:  # None is the seed of whoever names none
        raise ConfigError("sweep(seeds=...): give at least one seed, each a whole number")
    return list(dict.fromkeys(numbers))


def _swept(source: Source) -> tuple[Source, SweepTable]:
    """The source without its `[sweep]`, and what that says."""
    if not (isinstance(source, str | Path) and is_config(str(source))):
        return source, SweepTable()
    tables, found = read_sweep(Path(source))
    return (source, SweepTable()) if found is None else (FileTables(Path(source), tables), found)


def _choices(grid: Any) -> Sequence[Choice]:
    if not isinstance(grid, Mapping):
        choices = list(grid) if isinstance(grid, Iterable) else []
        if not choices or not all(isinstance(choice, Mapping) for choice in choices):
            raise ConfigError("sweep(grid=...): give a dict of lists, or a list of choices, each a dict")
        for choice in choices:
            _check_names(choice)
        return choices
    _check_names(grid)
    return combinations({name: _values(name, values) for name, values in grid.items()})


def _values(name: str, values: Any) -> Sequence[Any]:
    """Those of a grid's name; an iterator gives them only once."""
    found = [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
    if not found:
        raise ConfigError(f"sweep(grid={{{name!r}: {values!r}}}): give a list of values")
    return found


def _check_seedless(objects: RunObjects) -> None:
    """Seeds of the objects would lie over those of the sweep, by whose numbers its runs are told."""
    check_settings(objects.get("settings") or {})
    if "seed" in objects:
        raise ConfigError(f"sweep(seed=...): {SEEDS_SAID}")
    if SEED in (objects.get("settings") or {}):
        raise ConfigError(f"sweep(settings={{{SEED!r}: ...}}): {SEEDS_SAID}")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name in ("seed", SEED):
            raise ConfigError(f"sweep(grid={{{name!r}: ...}}): {SEEDS_SAID}")
        if name not in ARGUMENTS and "." not in str(name):
            raise ConfigError(
                f"sweep(grid={{{name!r}: ...}}): name one of {', '.join(sorted(ARGUMENTS))}, or a setting, "
                "'table.key'"
            )


def _planned(source: Source, choice: Choice, seed: int, objects: RunObjects) -> RunPlan:
    if twice := sorted({*choice} & {*objects}):
        raise ConfigError(f"sweep: {', '.join(twice)} is in the grid and beside it: give it once")
    settings = dict(objects.get("settings") or {})
    settings |= {name: value for name, value in choice.items() if name not in ARGUMENTS}
    chosen: Any = {name: value for name, value in choice.items() if name in ARGUMENTS}
    return plan_run(source, {**objects, **chosen, "seed": seed, "settings": settings})


def _name(config: Config) -> str:
    tables = config.to_json()
    if limits := tables.get("limits"):
        limits |= {key: size for key, size in SIZES.items() if limits[key] == getattr(DEFAULT_LIMITS, key)}
    told = json.dumps(tables, sort_keys=True, default=str)
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
