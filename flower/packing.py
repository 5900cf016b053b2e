"""A copy of a Flower app whose ServerApp is one of ours, for `flwr run`; the app itself stays as it is."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.core.errors import AppError
from anabranch.core.model.chains import RAW
from anabranch.flower.installed import flwr_version
from anabranch.flower.project import PROJECT, Project, flat

ASYNCHRONOUS = "anabranch.flower.server_app:app"
BASELINE = "anabranch.flower.baseline:app"
COMPRESSED = "anabranch.flower.client_app:app"
LEFT_OUT = shutil.ignore_patterns("__pycache__", ".git", ".venv", "runs")


def pack(
    folder: Path, out: Path, serverapp: str, run_folder: Path, tables: Mapping[str, Mapping[str, Any]]
) -> Project:
    """Copy the app to `out`, with `serverapp` in the place of its own, which that one is told the name of.

    `tables` is our configuration; results go to `run_folder`. What it says as `flower.run_config` is in the
    copy's own run config, which nodes have. With a codec for the uplink, a ClientApp of ours is around the
    app's own. Raises `AppError` where `out` is there, and `ConfigError` for settings that no run on a Grid
    can have.
    """
    flwr_version()
    import tomli_w

    from anabranch.flower.server_app import Options, unflattened

    project = Project.read(folder)
    if not project.serverapp:
        raise AppError(f"{project.folder / PROJECT} names no serverapp: it says what the first model is")
    if out.exists():
        raise AppError(f"{out} is there already: name a new folder, or remove it")
    data = tomllib.loads((project.folder / PROJECT).read_text(encoding="utf-8"))
    app = data["tool"]["flwr"]["app"]
    app["components"]["serverapp"] = serverapp
    given = {"serverapp": project.serverapp, "out": str(run_folder.resolve()), **tables}
    if serverapp == ASYNCHRONOUS and tables.get("uplink", {}).get("codec", RAW) != RAW:
        given["clientapp"] = project.clientapp
        app["components"]["clientapp"] = COMPRESSED
    overrides = tables.get("flower", {}).get("run_config", {})
    app["config"] = {**unflattened(project.fused(overrides)), "anabranch": given}
    if serverapp == ASYNCHRONOUS:
        Options.of(flat(app["config"], "--set"))  # what would end the run a minute later, in its log
    shutil.copytree(project.folder, out, ignore=LEFT_OUT)
    (out / PROJECT).write_text(tomli_w.dumps(data), encoding="utf-8")
    return Project.read(out)
