"""What a run is started from, an App or a TOML file, and the settings that have options of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.api.configuration import Layer, is_config, load_run, run_name
from anabranch.cli.options import app_spec, coming_back
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError

RunSource = Annotated[
    str,
    typer.Argument(
        help="An App (a built-in workload, module:App or path.py:App), or a TOML file.",
        metavar="APP|CONFIG",
        show_default=False,
    ),
]
StrategyName = Annotated[str | None, typer.Option(help="Override strategy.name.")]
Updates = Annotated[
    int | None, typer.Option(help="End after so many updates: run.updates_max (0: no such end).", min=0)
]
Versions = Annotated[
    int | None, typer.Option(help="End after so many versions: run.versions_max (0: no such end).", min=0)
]
Clients = Annotated[int | None, typer.Option(help="Devices of the fleet: fleet.clients.", min=1)]
RunDataPath = Annotated[
    str | None,
    typer.Option("--data-path", help="Where the App finds its data: run.data_path.", show_default=False),
]
Seed = Annotated[int | None, typer.Option(help="What every draw comes of: run.seed.", min=0)]
Target = Annotated[
    float | None,
    typer.Option(help="Measure the way to this accuracy, 0 to 1, or this value of --metric: run.target."),
]
Metric = Annotated[
    str | None,
    typer.Option(help="The metric, of the App's evaluate, that the run is judged by: run.metric."),
]
Mode = Annotated[
    str | None, typer.Option(help="Whether more of --metric is better, or less: max, min (run.mode).")
]

SETTINGS = {
    "strategy": "strategy.name",
    "updates": "run.updates_max",
    "versions": "run.versions_max",
    "seconds": "run.virtual_s_max",
    "data_path": "run.data_path",
    "clients": "fleet.clients",
    "seed": "run.seed",
    "target": "run.target_accuracy",
    "metric": "run.metric",
    "mode": "run.mode",
    "executor": "fleet.executor",
    "ray_address": "ray.address",
    "address": "server.address",
    "admin_address": "server.admin_address",
    "metrics": "server.metrics_address",
    "data_dir": "server.data_dir",
    "database": "server.database",
    "standby": "server.standby",
}


def option_layers(**given: Any) -> list[Layer]:
    """The settings that options stand for; those that were not given are left out."""
    layers: list[Layer] = []
    for option, value in given.items():
        if value is not None:
            table, _, key = SETTINGS[option].partition(".")
            layers.append((f"--{option.replace('_', '-')}", {table: {key: value}}))
    return layers


NO_APP = "name an App, such as digits or path.py:App, the folder of a Flower app by --flower, or a TOML file"


def run_source(source: str, flower: Path | None = None) -> tuple[Path | None, list[Layer], list[Layer]]:
    """What APP|CONFIG and --flower say: the TOML file, presets, and options. Raises `ConfigError`.

    A run of an App bears its name, unless a setting says otherwise.
    """
    if is_config(source):
        config, app = Path(source), "" if flower is None else app_spec("", flower)
    else:
        config, app = None, app_spec(source, flower) if source or flower else ""
    if not app:
        return config, [], []
    return config, [(app, {"run": {"name": run_name(app)}})], [("APP", {"run": {"workload": app}})]


def run_settings(overrides: Sequence[str] | None, presets: Sequence[Layer], flags: Sequence[Layer]) -> Config:
    """The settings of a run, with what its App brings along. Raises `AppError` and `ConfigError`."""
    with coming_back():
        return load_run(None, overrides or (), presets, flags)


def with_an_app(settings: Config, source: str | Path | None) -> Config:
    """The settings. Raises `ConfigError` where nothing says of which App: who types none means no default."""
    if not source and "run.workload" not in settings.sources:
        raise ConfigError(NO_APP)
    return settings
