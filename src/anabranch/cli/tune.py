"""`anabranch tune`: settings for a target or a budget, found in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.api.tune_file import TuneTable, read_tune
from anabranch.api.tune_ranges import parse_range
from anabranch.api.tuning import PAGE, RECOMMENDED, TuneProgress, Tuning, carry_tuning
from anabranch.cli.options import AsJson, Overrides, coming_back, run_folder, writing
from anabranch.cli.output import Output
from anabranch.cli.overall import bar_or_lines
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
    option_layers,
    run_settings,
    run_source,
    with_an_app,
)
from anabranch.reports.tuning import fresh_table, fresh_text, front_table, ranges_table
from anabranch.support.stop_signals import leaving_in_order

Bytes = Annotated[
    int | None, typer.Option("--bytes", help="A budget of bytes, up and down: tune.bytes_max.", min=1)
]
Seconds = Annotated[
    float | None, typer.Option(help="A budget of virtual seconds: run.virtual_s_max.", min=0.0)
]
Aim = Annotated[
    str | None,
    typer.Option(help="What is to be best: time, updates or bytes to the target, or the value (tune.aim)."),
]
Trials = Annotated[int | None, typer.Option(help="Choices to begin with, yours among them: 16.", min=2)]
SeedCount = Annotated[
    int | None, typer.Option("--seeds", help="From how many each is run, from run.seed on: 2.", min=1)
]
FreshSeeds = Annotated[
    int | None, typer.Option(help="From how many others the recommendation is measured: 5.", min=2)
]
Extensions = Annotated[
    int | None, typer.Option(help="Trials beyond the ends of ranges, where the best is at one: 4.", min=0)
]
Ranges = Annotated[
    list[str] | None,
    typer.Option("--range", help="What to try of a setting. Repeatable.", metavar="KEY=FROM..TO|A,B,C"),
]
Defaults = Annotated[
    bool | None,
    typer.Option("--defaults/--no-defaults", help="Tune what is worth it, beside what --range names."),
]
Parallel = Annotated[int | None, typer.Option(help="So many runs at a time, each in a process: 1.", min=1)]
On = Annotated[str | None, typer.Option(help="Where they are: processes of this machine, or ray (tune.on).")]
Folder = Annotated[
    Path | None,
    typer.Option("--out", help="The folder for what it leaves; again goes on there.", metavar="DIR"),
]


def tune(
    source: RunSource = "",
    out: Folder = None,
    target: Target = None,
    updates: Updates = None,
    seconds: Seconds = None,
    bytes_max: Bytes = None,
    aim: Aim = None,
    ranges: Ranges = None,
    defaults: Defaults = None,
    trials: Trials = None,
    seeds: SeedCount = None,
    fresh_seeds: FreshSeeds = None,
    extensions: Extensions = None,
    parallel: Parallel = None,
    on: On = None,
    strategy: StrategyName = None,
    clients: Clients = None,
    seed: Seed = None,
    metric: Metric = None,
    mode: Mode = None,
    data_path: RunDataPath = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Tune a run: learning rate, steps, buffer, mixing, staleness and compression, in the simulator.

    For a target, or a budget of updates, virtual seconds or bytes. What is found is measured once more from
    fresh seeds, and written as a configuration that runs as it is. The same command goes on where it was
    broken off.
    """
    output = Output(as_json)
    config, presets, chosen = run_source(source)
    tables, said = ({}, TuneTable()) if config is None else read_tune(config)
    chosen += option_layers(strategy=strategy, updates=updates, seconds=seconds, clients=clients, seed=seed)
    chosen += option_layers(target=target, metric=metric, mode=mode, data_path=data_path)
    layers = presets if config is None else [*presets, (str(config), tables)]
    settings = with_an_app(run_settings(overrides, layers, chosen), source)
    given = {"aim": aim, "bytes_max": bytes_max, "trials": trials, "seeds": seeds, "parallel": parallel}
    given |= {"fresh_seeds": fresh_seeds, "extensions": extensions, "defaults": defaults, "on": on}
    table = said.over(given, [parse_range(text) for text in ranges or ()])
    folder = out or run_folder(settings.run.name, settings.strategy.name, "tune")
    there = folder.absolute()
    output.say(f"tuning in {folder}; what has ended there is not run again")
    with writing(folder), bar_or_lines(output) as show, coming_back(), leaving_in_order():

        def tell(p: TuneProgress) -> None:
            legs = {} if p.leg is None or p.end is None else {**vars(p.leg), **p.end.to_json()}
            show(p.share, p.text, **legs)

        found = carry_tuning(settings, table, there, tell, {})
    _tell(output, found)


def _tell(output: Output, found: Tuning) -> None:
    report = found.report
    for title, (heads, rows) in (
        ("the front of value, time and bytes", front_table(report)),
        ("ranges", ranges_table(report)),
        ("from fresh seeds: mean (95 % interval)", fresh_table(report)),
    ):
        output.table(title, heads, rows)
    for remark in report.said:
        output.say(remark)
    told = {
        "kind": "tuned",
        "choice": dict(found.choice),
        "aim": report.aim,
        "metric": report.metric,
        "front": [dict(row) for row in found.front],
        "fresh": [dict(row) for row in found.fresh],
        "said": list(report.said),
        "folder": str(found.folder),
    }
    config, page = found.folder / RECOMMENDED, found.folder / PAGE
    output.result(told, f"recommended: {fresh_text(report)}\n  {config} runs as it is, {page} shows the rest")
