"""Jobs of a server of several runs: what lies in its folder, read as `anabranch server` reads a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.api.configuration import load_config, model_presets
from anabranch.core.config.tables import Config
from anabranch.server.job_folder import MODEL, SETTINGS, add
from anabranch.server.manifest import Manifest, read_manifest

FOLDER = Path("anabranch-jobs")


def read_job(host: Config, job: Path, data_dir: Path) -> tuple[Config, Manifest]:
    """A job's settings, with the ports and the authority of its server, and its model. Raises `ConfigError`.

    Its data lies in `data_dir`, in its own database where its settings name one.
    """
    config, manifest = settings_of_job(job / SETTINGS, job / MODEL, job.name)
    server = replace(
        config.server,
        address=host.server.address,
        admin_address=host.server.admin_address,
        metrics_address="",
        data_dir=str(data_dir),
        drain_s=host.server.drain_s,
        standby=False,
    )
    return replace(config, server=server, identity=host.identity), manifest


def settings_of_job(settings: Path | None, model: Path, name: str) -> tuple[Config, Manifest]:
    """The same before it is anybody's; the run bears the job's name unless its settings say otherwise."""
    manifest = read_manifest(model)
    presets = [*model_presets(model, manifest.app), ("the job's name", {"run": {"name": name}})]
    return load_config(settings, presets=presets), manifest


def add_job(folder: Path, name: str, settings: Path | None, model: Path, devices: Sequence[str] = ()) -> Path:
    """Put a job into a server's folder, where the server finds it. Raises `ConfigError`.

    `devices`: patterns of the names of those that may serve it; none for all.
    """
    settings_of_job(settings, model, name)
    return add(folder, name, settings, model, devices, time.time())
