"""`anabranch simulate`: a fleet on a virtual clock."""

from __future__ import annotations

from typing import Annotated

import typer

from anabranch.cli.configuration import Layer, load_run
from anabranch.cli.options import (
    AsJson,
    ConfigFile,
    FlowerFolder,
    Out,
    Overrides,
    app_spec,
    run_folder,
    summary,
)
from anabranch.cli.output import Output, Ticker
from anabranch.reports.text import count_text, duration_text, percent_text
from anabranch.simulation.run import Progress
from anabranch.simulation.run import simulate as simulate_run

MANY_DEVICES = 10_000  # whose data takes more than a moment to be looked at


def simulate(
    config: ConfigFile = None,
    out: Out = None,
    flower: FlowerFolder = None,
    strategy: Annotated[str | None, typer.Option(help="Override strategy.name.")] = None,
    executor: Annotated[
        str | None, typer.Option(help="What trains: auto, serial, processes, batched, ray (fleet.executor).")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(help="Worker processes (or actors of Ray) that train; 0: this process.", min=0),
    ] = 0,
    ray_address: Annotated[
        str | None, typer.Option(help="A cluster of Ray, for its executor (ray.address).")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a fleet: the same engine and devices as live, on a virtual clock.

    The same configuration gives the same digests, whatever the number of workers. Those of the batched
    executor are its own.
    """
    output = Output(as_json)
    chosen: list[Layer] = [("--strategy", {"strategy": {"name": strategy}})] if strategy else []
    if flower is not None:
        chosen.append(("--flower", {"run": {"workload": app_spec("", flower)}}))
    if executor:
        chosen.append(("--executor", {"fleet": {"executor": executor}}))
    if ray_address:
        chosen.append(("--ray-address", {"fleet": {"executor": "ray"}, "ray": {"address": ray_address}}))
    settings = load_run(config, overrides or (), flags=chosen)
    folder = out or run_folder(settings.run.name, settings.strategy.name, settings.run.seed)
    with Ticker(output) as ticker:

        def show(p: Progress) -> None:
            accuracy = "" if p.accuracy is None else f", accuracy {percent_text(p.accuracy)}"
            text = (
                f"virtual time {duration_text(p.virtual_s)}: version {count_text(p.version)},"
                f" {count_text(p.updates)} updates{accuracy}"
            )
            ticker.show(
                text, virtual_s=p.virtual_s, version=p.version, updates=p.updates, accuracy=p.accuracy
            )

        if settings.fleet.clients >= MANY_DEVICES:
            ticker.show(f"getting {count_text(settings.fleet.clients)} devices ready")
        result = simulate_run(settings, folder, workers=workers, progress=show)
    output.result(result.to_json(), summary(result, folder))
