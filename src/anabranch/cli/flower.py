"""`anabranch flower pack`: a Flower app made ready for `flwr run` with our strategies, or as a baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.api.configuration import load_config
from anabranch.cli.options import AsJson, Overrides
from anabranch.cli.output import Output
from anabranch.core.config.tables import parse_override
from anabranch.core.errors import ConfigError

OF_BASELINES = {"run", "flower"}  # tables that say something of a run that is only written down

flower_app = typer.Typer(help="Flower apps on Flower's own runtime.", no_args_is_help=True)


@flower_app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="The Flower app's folder.", metavar="FOLDER")],
    out: Annotated[Path, typer.Option("--out", help="The copy to write.", metavar="DIR")],
    run_folder: Annotated[
        Path, typer.Option("--run", help="Where the run's results shall go.", metavar="DIR")
    ] = Path("runs/flower"),
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Keep the app's own ServerApp, and only write down what it does."),
    ] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Copy a Flower app, with a ServerApp of ours in the place of its own; then: flwr run DIR.

    With --set go the settings of the run, such as strategy.name=fedasync and run.updates_max=100.
    """
    from anabranch.flower.packing import ASYNCHRONOUS, BASELINE
    from anabranch.flower.packing import pack as pack_app

    load_config(None, overrides or ())
    tables: dict[str, dict[str, Any]] = {"run": {"workload": f"flower:{folder}"}}
    for text in overrides or ():
        table, key, value = parse_override(text)
        tables.setdefault(table, {})[key] = value
    if baseline and (idle := sorted(set(tables) - OF_BASELINES)):
        raise ConfigError(
            f"--set {idle[0]}...: with --baseline the app's own ServerApp decides: leave out one of both"
        )
    project = pack_app(folder, out, BASELINE if baseline else ASYNCHRONOUS, run_folder, tables)
    Output(as_json).result(
        {"folder": str(out), "app": project.name, "run_folder": str(run_folder.resolve())},
        f"{out}: {project.name}; run it with\n  flwr run {out}\nand then look at {run_folder.resolve()}",
    )
