"""`anabranch check`: what a federation will do with an App, done once, and what of it does not work."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from anabranch.api.configuration import load_config
from anabranch.cli.initialise import AppName, DataPath
from anabranch.cli.options import AsJson, FlowerFolder, Overrides, app_spec
from anabranch.cli.output import Output
from anabranch.core.errors import AppError
from anabranch.core.model.updates import LocalPlan

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


def check(
    app: AppName = "",
    flower: FlowerFolder = None,
    shards: Annotated[int, typer.Option(help="Devices that share the data; 0: fleet.clients.", min=0)] = 0,
    data_path: DataPath = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check an App: build it, train it, restart, export, reload and measure it; say what will not work.

    Each line is ok, warn or fail. The exit code is 3 if anything failed.
    """
    from anabranch.client.checkup import FAIL, Checkup
    from anabranch.workloads import load_app
    from anabranch.workloads.calls import join_run

    output = Output(as_json)
    spec = app_spec(app, flower)
    config = load_config(None, overrides or ())
    found = load_app(spec, data_path)
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
