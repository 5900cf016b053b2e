"""Jobs of a server of several runs: what lies in its folder, read as `anabranch server` reads a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.api.configuration import load_config, load_model_run
from anabranch.client.bundles import read_bundle
from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, ConfigError, FolderMissing
from anabranch.server.job_folder import MODEL, OF_THE_HOST, SETTINGS, add, job_with, names_in, note_of
from anabranch.server.manifest import Manifest, read_manifest
from anabranch.workloads.registry import BUILT_IN

log = logging.getLogger(__name__)

FOLDER = Path("anabranch-jobs")


def read_job(host: Config, job: Path, data_dir: Path) -> tuple[Config, Manifest]:
    """A job's settings, with the ports and the authority of its server, and its model. Raises `ConfigError`.

    Its data lies in `data_dir`, and in the database that its settings name. Where a job that was added before
    has that one, this raises: whichever came first after a restart would go on with the other's run.
    """
    config, manifest = settings_of_job(job / SETTINGS, job / MODEL, job.name)
    _check_database(config, [other for other in _others(job) if _place(other) < _place(job)])
    shared = {key: getattr(host.server, key) for key in OF_THE_HOST}
    server = replace(config.server, **shared, metrics_address="", data_dir=str(data_dir), standby=False)
    # The ports are the server's: no chunk of a job may be larger than goes through them.
    chunk = min(config.limits.chunk_bytes_max, host.limits.chunk_bytes_max)
    limits = replace(config.limits, chunk_bytes_max=chunk)
    return replace(config, server=server, identity=host.identity, limits=limits), manifest


def settings_of_job(settings: Path | None, model: Path, name: str) -> tuple[Config, Manifest]:
    """The same before it is anybody's; the run bears the job's name unless its settings say otherwise."""
    manifest = read_manifest(model)
    named = ("the job's name", {"run": {"name": name}})
    return load_model_run(model, manifest.app, settings, presets=[named]), manifest


def add_job(
    folder: Path,
    name: str,
    settings: Path | None,
    model: Path,
    devices: Sequence[str] = (),
    bundle: Path | None = None,
) -> Path:
    """Put a job into a server's folder, where the server finds it. Raises `ConfigError`.

    `devices`: patterns of the names of those that may serve it; none for all. A database is one job's alone.
    `bundle`: the file of its App's, from which devices may have it; raises as `read_bundle` for a bad one.
    """
    config, manifest = settings_of_job(settings, model, name)
    _check_database(config, _others(folder / name))
    if bundle is not None:
        _compare_app(read_bundle(bundle).manifest.entry, manifest.app)
    return add(folder, name, settings, model, devices, time.time(), bundle)


def _compare_app(entry: str, app: str) -> None:
    """Warn where a bundle's App bears another name than the model's; only its code could say for sure."""
    _, colon, modelled = BUILT_IN.get(app, app).rpartition(":")
    if colon and entry.rpartition(":")[2] != modelled:
        log.warning(
            "the bundle has the App %s, and the model is of %s: if these are two models, no device that goes "
            "by the bundle is let in",
            entry,
            app,
        )


def _others(job: Path) -> list[Path]:
    """The jobs beside one."""
    try:
        return [job.with_name(name) for name in names_in(job.parent) if name != job.name]
    except FolderMissing:
        return []


def _place(job: Path) -> tuple[float, str]:
    """By which the job that was added first comes first; one whose note is damaged comes last."""
    try:
        return note_of(job).added_at, job.name
    except AnabranchError:
        return math.inf, job.name


def _check_database(config: Config, others: Iterable[Path]) -> None:
    if not (wanted := config.server.database):
        return
    if same := job_with(wanted, {other.name: _database(other) for other in others}):
        raise ConfigError(f"server.database is that of job {same!r} too: each job needs one of its own")


def _database(job: Path) -> str:
    """The one that a job's settings name; what is wrong with these is said of that job."""
    try:
        return load_config(job / SETTINGS).server.database
    except AnabranchError:
        return ""
