"""`anabranch simulate`: a fleet on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from anabranch.api.configuration import Layer, with_end
from anabranch.api.pool import PROCESSES
from anabranch.api.progress import TimeLeft, UpdateRate, share_done
from anabranch.api.run import Run
from anabranch.api.simulating import run_simulation
from anabranch.api.sweep_file import SweepTable, read_sweep
from anabranch.api.sweeping import SweepProgress, carry_sweep, numbers_of, sweep_plans
from anabranch.cli.left import say_what_is_left, where_it_goes
from anabranch.cli.next_steps import with_commands, with_run
from anabranch.cli.options import (
    AsJson,
    FlowerFolder,
    Out,
    Overrides,
    coming_back,
    parse_seeds,
    run_folder,
    writing,
)
from anabranch.cli.output import Output, Ticker
from anabranch.cli.overall import bar_or_lines, left_text
from anabranch.cli.parts import names_code
from anabranch.cli.run_options import (
    Clients,
    Metric,
    Mode,
    RunDataPath,
    RunSource,
    Seed,
    StrategyName,
    Target,
    Updates,
    Versions,
    option_layers,
    run_settings,
    run_source,
    with_an_app,
)
from anabranch.cli.runs import tell_comparison
from anabranch.cli.summary import summary
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, Diverged
from anabranch.core.model.chains import AUTO
from anabranch.reports.folders import claimed
from anabranch.reports.metrics import metric_text
from anabranch.reports.text import count_text, duration_text
from anabranch.simulation.executors.names import RAY
from anabranch.simulation.run import RunProgress
from anabranch.support.stop_signals import leaving_in_order

PROCESSES_MAX = 100_000  # more than any machine or cluster has

Seconds = Annotated[
    float | None, typer.Option(help="End after so many virtual seconds: run.virtual_s_max.", min=0.0)
]
ExecutorName = Annotated[
    str | None,
    typer.Option(help="auto, serial, processes, batched, compiled or ray: what trains (fleet.executor)."),
]
Workers = Annotated[
    int,
    typer.Option(
        help="Worker processes (or actors of Ray) that train; 0: this process.", min=0, max=PROCESSES_MAX
    ),
]
RayAddress = Annotated[
    str | None, typer.Option(help="A cluster of Ray, for its executor or whole runs (ray.address).")
]
Seeds = Annotated[
    str | None,
    typer.Option(help="A run for each seed, side by side; again goes on.", metavar="0..4|1,3,7"),
]
CheckpointSeconds = Annotated[
    float | None,
    typer.Option(
        help="Keep what the run needs to go on every so many virtual seconds; otherwise every minute of real"
        " time, and on Ctrl-C; 0: never.",
        min=0.0,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with the run that was broken off there, to the same digests."),
]
Parallel = Annotated[
    int | None,
    typer.Option(
        help="Of the runs of --seeds or of a sweep so many at a time, each in a process.",
        min=1,
        max=PROCESSES_MAX,
    ),
]
On = Annotated[
    str | None,
    typer.Option(help="Where the runs of --seeds or of a sweep are: processes of this machine, or ray."),
]


def simulate(
    source: RunSource = "",
    out: Out = None,
    flower: FlowerFolder = None,
    strategy: StrategyName = None,
    updates: Updates = None,
    versions: Versions = None,
    seconds: Seconds = None,
    clients: Clients = None,
    seed: Seed = None,
    target: Target = None,
    metric: Metric = None,
    mode: Mode = None,
    data_path: RunDataPath = None,
    executor: ExecutorName = None,
    workers: Workers = 0,
    ray_address: RayAddress = None,
    seeds: Seeds = None,
    parallel: Parallel = None,
    on: On = None,
    checkpoint_s: CheckpointSeconds = None,
    resume: Resume = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet: the same engine and devices as live, on a virtual clock.

    A file with a table `sweep` is many runs, side by side. Of an App the settings are the defaults and what
    the options and --set say; where nothing sets an end, it comes after 200 updates. The same configuration
    gives the same digests, whatever the number of workers. Those of the batched executor are its own, and so
    are those of the compiled one.
    """
    output = Output(as_json)
    presets, chosen, swept, of_app = _begun(source, flower)
    chosen += option_layers(strategy=strategy, updates=updates, versions=versions, seconds=seconds)
    chosen += option_layers(clients=clients, seed=seed, target=target, metric=metric, mode=mode)
    chosen += option_layers(data_path=data_path) + _on_ray(executor, ray_address, on or (swept and swept.on))
    settings = with_an_app(run_settings(overrides, presets, chosen), source or flower)
    settings, said = with_end(settings) if of_app else (settings, "")
    if said:
        output.say(f"{said}: --updates, --versions or --seconds say otherwise")
    if seeds is not None or swept is not None:
        _check_many(seed is not None or workers > 0, resume or checkpoint_s is not None)
        _simulate_all(output, settings, _with_options(swept or SweepTable(), seeds, parallel, on), out)
        return
    if on is not None:
        raise ConfigError("--on says where many runs are: give --seeds, or a file with [sweep]")
    wanted = out or run_folder(settings.run.name, settings.strategy.name, settings.run.seed)
    keeping = Keeping(checkpoint_s, resume)
    with writing(wanted), claimed(wanted, explicit=out is not None, resume=resume) as folder:
        where_it_goes(output, settings, wanted, folder)
        with say_what_is_left(output, folder):
            result = _run(output, settings, folder, workers, keeping).result
    steps = with_run(folder, names_code(settings))
    output.result(result.to_json(), with_commands(f"{summary(result, folder)}\nnext:", steps))
    if result.given_up:
        raise Diverged(result.given_up)


def _on_ray(executor: str | None, ray_address: str | None, on: object) -> list[Layer]:
    """Where Ray carries out whole runs, none asks for more of it."""
    return option_layers(executor=RAY if ray_address and on != RAY else executor, ray_address=ray_address)


class Begun(NamedTuple):
    """What APP|CONFIG stands for: layers of settings, and the runs of a file's `[sweep]`."""

    presets: list[Layer]
    chosen: list[Layer]
    swept: SweepTable | None
    of_app: bool  # a file of settings says itself when its run ends


def _begun(source: str, flower: Path | None) -> Begun:
    config, presets, chosen = run_source(source, flower)
    if config is None:
        return Begun(presets, chosen, None, bool(presets))
    tables, swept = read_sweep(config)
    return Begun([*presets, (str(config), tables)], chosen, swept, of_app=False)


def _check_many(as_one: bool, going_on: bool) -> None:
    """Raises `ConfigError` where many runs are told what only one can be told."""
    if as_one:
        raise ConfigError("many runs go with neither --seed nor --workers: say --seeds and --parallel")
    if going_on:
        raise ConfigError("many runs go on by themselves: leave --resume and --checkpoint-s out")


def _with_options(said: SweepTable, seeds: str | None, parallel: int | None, on: str | None) -> SweepTable:
    numbers = said.seeds if seeds is None else parse_seeds(seeds)
    return replace(said, seeds=numbers_of(numbers), parallel=parallel or said.parallel or 1, on=on or said.on)


def _simulate_all(output: Output, settings: Config, wanted: SweepTable, out: Path | None) -> None:
    """A run for each choice and seed in a folder of its own, and all of them side by side."""
    seeds = wanted.seeds or ()
    name = "sweep" if len(wanted.choices) > 1 else "seeds"
    folder = out or run_folder(settings.run.name, settings.strategy.name, name)
    parallel, place = wanted.parallel or 1, wanted.on or PROCESSES
    with coming_back():
        planned = sweep_plans(settings, wanted.choices, seeds, {}, place)
    output.say(f"{len(planned)} runs in {folder}; what has ended there is not run again")
    there = folder.absolute()
    with writing(folder), bar_or_lines(output) as show, coming_back(), leaving_in_order():

        def tell(p: SweepProgress) -> None:
            show(p.share, p.text, done=p.done, runs=p.runs)

        found = carry_sweep(planned, there, parallel, place, tell)
    tell_comparison(output, found.comparison, folder / "compare.html")
    if why := next((run.result.given_up for run in found.runs if run.result.given_up), ""):
        raise Diverged(why)


class Keeping(NamedTuple):
    """What a run keeps to go on, and whether it is one that does."""

    checkpoint_s: float | None
    resume: bool


def _run(output: Output, settings: Config, folder: Path, workers: int, keeping: Keeping) -> Run:
    goal, left, rate, there = Goal.of(settings.run), TimeLeft(), UpdateRate(), folder.absolute()
    with Ticker(output) as ticker, coming_back():

        def show(p: RunProgress) -> None:
            counts = {"virtual_s": p.virtual_s, "version": p.version, "updates": p.updates}
            named = {} if goal.metric == AUTO else {goal.metric: goal.value(p.metrics)}
            figures = {"accuracy": p.accuracy, "loss": p.loss} | named
            share = share_done(settings.run, p)
            words = _in_words(p, goal) + left_text(share, left, rate.text(p.updates))
            ticker.show(words, **counts, rejected=p.rejected, share=share, **figures)

        devices = settings.fleet.clients
        ticker.show(f"getting {count_text(devices)} device{'s'[: devices > 1]} ready")
        return run_simulation(settings, there, workers=workers, callbacks=[show], **keeping._asdict())


def _in_words(p: RunProgress, goal: Goal) -> str:
    name, value = goal.among(p.metrics).metric, goal.value(p.metrics)
    measured = "" if value is None else f", {name} {metric_text(name, value)}"
    rejected = f", {count_text(p.rejected)} rejected" if p.rejected else ""
    return (
        f"virtual time {duration_text(p.virtual_s)}: version {count_text(p.version)},"
        f" {count_text(p.updates)} updates{rejected}{measured}"
    )
