"""`anabranch simulate`: a fleet on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.configuration import load_run, with_end
from anabranch.api.progress import TimeLeft, share_done
from anabranch.api.run import Run
from anabranch.api.simulating import run_simulation
from anabranch.api.sweeping import sweep
from anabranch.cli.left import say_what_is_left, where_it_goes
from anabranch.cli.next_steps import with_commands, with_run
from anabranch.cli.options import (
    AsJson,
    FlowerFolder,
    Out,
    Overrides,
    parse_seeds,
    run_folder,
    summary,
    writing,
)
from anabranch.cli.output import Output, Ticker
from anabranch.cli.parts import names_code
from anabranch.cli.run_options import (
    Clients,
    Metric,
    Mode,
    RunSource,
    Seed,
    StrategyName,
    Target,
    Updates,
    Versions,
    option_layers,
    run_source,
)
from anabranch.cli.runs import tell_comparison
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError, Diverged
from anabranch.core.model.chains import AUTO
from anabranch.reports.folders import claimed
from anabranch.reports.metrics import metric_text
from anabranch.reports.text import count_text, duration_text
from anabranch.simulation.run import RunProgress

Seconds = Annotated[
    float | None, typer.Option(help="End after so many virtual seconds: run.virtual_s_max.", min=0.0)
]
ExecutorName = Annotated[
    str | None, typer.Option(help="What trains: auto, serial, processes, batched, ray (fleet.executor).")
]
Workers = Annotated[
    int, typer.Option(help="Worker processes (or actors of Ray) that train; 0: this process.", min=0)
]
RayAddress = Annotated[str | None, typer.Option(help="A cluster of Ray, for its executor (ray.address).")]
Seeds = Annotated[
    str | None,
    typer.Option(help="A run for each seed, side by side; again goes on.", metavar="0..4|1,3,7"),
]
Parallel = Annotated[
    int, typer.Option(help="Of the runs of --seeds so many at a time, each in a process.", min=1)
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
    executor: ExecutorName = None,
    workers: Workers = 0,
    ray_address: RayAddress = None,
    seeds: Seeds = None,
    parallel: Parallel = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet: the same engine and devices as live, on a virtual clock.

    Of an App the settings are the defaults and what the options and --set say; where nothing sets an end, it
    comes after 200 updates. The same configuration gives the same digests, whatever the number of workers.
    Those of the batched executor are its own.
    """
    output = Output(as_json)
    config, presets, chosen = run_source(source, flower)
    chosen += option_layers(strategy=strategy, updates=updates, versions=versions, seconds=seconds)
    chosen += option_layers(clients=clients, seed=seed, target=target, metric=metric, mode=mode)
    chosen += option_layers(executor="ray" if ray_address else executor, ray_address=ray_address)
    settings = load_run(config, overrides or (), presets, chosen)
    of_app = presets and config is None  # a file of settings says itself when its run ends
    settings, said = with_end(settings) if of_app else (settings, "")
    if said:
        output.say(f"{said}: --updates, --versions or --seconds say otherwise")
    if seeds is not None:
        if seed is not None or workers:
            raise ConfigError("--seeds goes with neither --seed nor --workers: it has --parallel")
        _simulate_seeds(output, settings, parse_seeds(seeds), out, parallel)
        return
    wanted = out or run_folder(settings.run.name, settings.strategy.name, settings.run.seed)
    with writing(wanted), claimed(wanted, explicit=out is not None) as folder:
        where_it_goes(output, settings, wanted, folder)
        with say_what_is_left(output, folder):
            result = _run(output, settings, folder, workers).result
    steps = with_run(folder, names_code(settings))
    output.result(result.to_json(), with_commands(f"{summary(result, folder)}\nnext:", steps))
    if result.given_up:
        raise Diverged(result.given_up)


def _simulate_seeds(
    output: Output, settings: Config, seeds: Sequence[int], out: Path | None, parallel: int
) -> None:
    """A run for each seed in a folder of its own, and all of them side by side."""
    folder = out or run_folder(settings.run.name, settings.strategy.name, "seeds")
    output.say(f"{len(seeds)} runs in {folder}; what has ended there is not run again")
    with writing(folder):
        found = sweep(settings, {}, seeds=seeds, out=folder, parallel=parallel, progress=not output.as_json)
    tell_comparison(output, found.comparison, folder / "compare.html")
    if why := next((run.result.given_up for run in found.runs if run.result.given_up), ""):
        raise Diverged(why)


def _run(output: Output, settings: Config, folder: Path, workers: int) -> Run:
    goal, left = Goal.of(settings.run), TimeLeft()
    with Ticker(output) as ticker:

        def show(p: RunProgress) -> None:
            counts = {"virtual_s": p.virtual_s, "version": p.version, "updates": p.updates}
            named = {} if goal.metric == AUTO else {goal.metric: goal.value(p.metrics)}
            figures = {"accuracy": p.accuracy, "loss": p.loss} | named
            share = share_done(settings.run, p)
            words = _in_words(p, goal) + _left_text(share, left.after(share))
            ticker.show(words, **counts, rejected=p.rejected, share=share, **figures)

        devices = settings.fleet.clients
        ticker.show(f"getting {count_text(devices)} device{'s'[: devices > 1]} ready")
        return run_simulation(settings, folder, workers=workers, callbacks=[show])


def _left_text(share: float, left_s: float | None) -> str:
    if left_s is None:
        return ""
    return f" ({100 * share:.0f} %" + (f", {duration_text(left_s)} left)" if share < 1 else ")")


def _in_words(p: RunProgress, goal: Goal) -> str:
    name, value = goal.among(p.metrics).metric, goal.value(p.metrics)
    measured = "" if value is None else f", {name} {metric_text(name, value)}"
    rejected = f", {count_text(p.rejected)} rejected" if p.rejected else ""
    return (
        f"virtual time {duration_text(p.virtual_s)}: version {count_text(p.version)},"
        f" {count_text(p.updates)} updates{rejected}{measured}"
    )
