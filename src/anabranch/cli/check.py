"""`anabranch check`: what a federation will do with an App, done once, and what of it does not work."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from anabranch.api.configuration import load_config
from anabranch.cli.options import AsJson, FlowerFolder, Overrides
from anabranch.cli.output import Output
from anabranch.cli.run_options import RunDataPath, RunSource, option_layers, run_source, with_an_app
from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def check(
    source: RunSource = "",
    flower: FlowerFolder = None,
    shards: Annotated[int, typer.Option(help="Devices that share the data; 0: fleet.clients.", min=0)] = 0,
    data_path: RunDataPath = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check an App: build it, train it, restart, export, reload and measure it; say what will not work.

    Of a TOML file it is the App of its run.workload, with all that the file sets. Each line is ok, warn or
    fail. The exit code is 3 if anything failed.
    """
    from anabranch.client.checkup import FAIL, Checkup
    from anabranch.workloads import load_app
    from anabranch.workloads.calls import join_run

    output = Output(as_json)
    file, presets, chosen = run_source(source, flower)
    chosen += option_layers(data_path=data_path)
    config = with_an_app(load_config(file, overrides or (), presets, chosen), source or flower)
    spec = config.run.workload
    found = load_app(spec, config.run.data_path)
    join_run(found, config.to_json())
    client = config.client
    plan = LocalPlan(
        batch_size=client.batch_size, learning_rate=client.learning_rate, momentum=client.momentum
    )
    failed = []
    for finding in Checkup(found, config.to_json(), plan, shards or config.fleet.clients):
        output.event("finding", level=finding.level, about=finding.about, text=finding.text)
        if not as_json:
            line = Text(f"{finding.level:4} ", style=STYLES[finding.level])
            output.console.print(line + Text(f"{finding.about}: {finding.text}", style=""), soft_wrap=True)
        failed += [finding.about] if finding.level == FAIL else []
    if failed:
        raise AppError(f"{spec} will not work: see {', '.join(failed)} above")
    output.result({"kind": "checked", "app": spec}, f"{spec} will work")
