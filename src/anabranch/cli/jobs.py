"""Several runs on one server: `admin jobs`, and what `server --jobs` and `client --jobs` do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.api.jobs import FOLDER, add_job, read_job
from anabranch.cli.initialise import MODEL_FOLDER
from anabranch.cli.logs import LogLevel
from anabranch.cli.next_steps import command_line
from anabranch.cli.operating import operates
from anabranch.cli.options import AsJson, ConfigFile, app_spec
from anabranch.cli.output import STDOUT, Output, descriptor
from anabranch.core.config.tables import Config
from anabranch.core.errors import ConfigError
from anabranch.core.limits import MIB
from anabranch.identity.addresses import checked_job, parse_addresses

if TYPE_CHECKING:
    from anabranch.api.cockpit_process import CockpitProcess
    from anabranch.client.jobs import Worker
    from anabranch.client.listed import ListedJob
    from anabranch.client.operator import OperatorClient
    from anabranch.client.run import ClientOptions
    from anabranch.client.stopping import Bell
    from anabranch.server.app import ServerInfo
    from anabranch.server.hosting import HostInfo
    from anabranch.server.job import JobState

SIGNER_CHARS = 16  # of a signer, in a table

jobs_app = typer.Typer(help="The runs of a server that serves several.", no_args_is_help=True)

JobsFolder = Annotated[
    Path | None,
    typer.Option("--jobs", help="Serve every job of this folder instead of one run.", metavar="DIR"),
]
BundleFile = Annotated[
    Path | None,
    typer.Option(
        "--bundle", help="Devices may have the App from it: `anabranch bundle make`.", metavar="FILE"
    ),
]
Signers = Annotated[
    list[str] | None,
    typer.Option(
        "--signer",
        help="With --jobs: run the App of a job's bundle if this one has signed it. Repeatable.",
        metavar="HEX",
    ),
]
EveryJob = Annotated[
    bool, typer.Option("--jobs", help="Serve the server's jobs, one after another, and wait for more.")
]
Papers = Annotated[
    Path | None,
    typer.Option("--identity", help="Its papers, if not in the state directory.", metavar="DIR"),
]
OfFolder = Annotated[Path, typer.Option("--folder", help="The server's folder of jobs.", metavar="DIR")]
JobName = Annotated[str, typer.Argument(help="1 to 64 ASCII letters, digits, '.', '_', '-'.", metavar="NAME")]


@jobs_app.command("list")
@operates
def list_jobs(server: OperatorClient, output: Output) -> None:
    """List the jobs of a server, and how they stand."""
    rows = server.jobs()
    for row in rows:
        output.event("job", "", **asdict(row))
    cells = [cells_of(row) for row in rows]
    output.table("", ["job", "state", "version", "App", "devices", "bundle", "why"], cells)


def cells_of(job: ListedJob) -> list[str]:
    """A row of `admin jobs list`."""
    signed = "" if job.bundle is None else f"of {job.bundle.signer[:SIGNER_CHARS]}"
    version = str(job.version) if job.run_id else ""  # of one that is not served nobody has looked
    return [job.name, job.state, version, job.app, ", ".join(job.devices) or "all", signed, job.why]


@jobs_app.command("add")
def add(
    name: JobName,
    config: ConfigFile = None,
    model: Annotated[
        Path, typer.Option("--model", help="What `anabranch init` wrote.", metavar="DIR")
    ] = MODEL_FOLDER,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--devices",
            help="Whose it is: a name, or a pattern such as ward-*. Repeatable.",
            metavar="PATTERN",
        ),
    ] = None,
    bundle: BundleFile = None,
    folder: OfFolder = FOLDER,
    as_json: AsJson = False,
) -> None:
    """Give a server another run, on its own machine; it begins within seconds, and needs no restart.

    Settings, model and bundle are copied; without --devices it is every device's.
    """
    job = add_job(folder, name, config, model, devices or (), bundle)
    whose = f"devices {', '.join(devices)}" if devices else "every device"
    begin = command_line("server", "--jobs", folder)
    Output(as_json).result(
        {"job": name, "folder": str(job), "devices": devices or []},
        f"{job}: a job for {whose}; a server of this folder begins it:\n  {begin}",
    )


@jobs_app.command("stop")
def stop(name: JobName, folder: OfFolder = FOLDER, as_json: AsJson = False) -> None:
    """Drain a job and close its data, until `start`; the other jobs go on."""
    _set_stopped(folder, name, True, Output(as_json))


@jobs_app.command("start")
def start(name: JobName, folder: OfFolder = FOLDER, as_json: AsJson = False) -> None:
    """Let a job that was stopped go on where it was."""
    _set_stopped(folder, name, False, Output(as_json))


def _set_stopped(folder: Path, name: str, stopped: bool, output: Output) -> None:
    from anabranch.server.job_folder import set_stopped

    new = set_stopped(folder / checked_job(name), stopped)
    said = {True: "stops", False: "goes on"} if new else {True: "is stopped", False: "is not stopped"}
    output.result({"job": name, "stopped": stopped, "new": new}, f"{name} {said[stopped]}")


def check_folder_options(of_run: Sequence[str], flower: Path | None, bundle: Path | None) -> None:
    """Raises `ConfigError` for options of one run, given to a server of several."""
    files = {"--flower": flower, "--bundle": bundle}
    if named := [*of_run, *(name for name, file in files.items() if file is not None)]:
        names = ", ".join(named)
        raise ConfigError(
            f"{names} with --jobs: each job has its own settings, data and model: anabranch admin jobs add"
        )


def serve_folder(
    folder: Path, host: Config, insecure: bool, output: Output, cockpit: CockpitProcess | None
) -> None:
    """Serve its jobs until a signal, then leave the command."""
    from anabranch.server.hosting import serve_jobs

    def ready(info: HostInfo) -> None:
        text = serving_text(f"the jobs of {folder}", info)
        output.event("serving", text, folder=str(folder), **asdict(info))
        if cockpit is not None:
            cockpit.start(info.admin_address)

    def told(name: str, state: JobState, why: str) -> None:
        output.event(
            "job", f"job {name}: {state}{f' ({why})' if why else ''}", job=name, state=state, why=why
        )

    read = partial(read_job, host)
    with ExitStack() as stack:
        if cockpit is not None:
            stack.callback(cockpit.close)
        code = asyncio.run(serve_jobs(folder, host, read, ready=ready, told=told, insecure=insecure))
    raise typer.Exit(code)


def serving_text(what: str, info: HostInfo | ServerInfo) -> str:
    """What is served, and where."""
    text = f"serving {what} on {info.address}, operators on {info.admin_address}"
    if info.metrics_address:
        text += f", metrics on http://{info.metrics_address}/metrics"
    if info.join_address:
        text += f", devices join on {info.join_address}\nca-sha256: {info.ca_sha256}"
    return text


def device_app(app: str, flower: Path | None, signers: Sequence[str], jobs: bool) -> str:
    """The App of a device, empty where it has none and goes by the bundles of jobs. Raises `ConfigError`."""
    if signers and not jobs:
        raise ConfigError("--signer is for --jobs: a device of one run has the App that was named")
    if app or flower is not None or not jobs:
        return app_spec(app, flower)
    if not signers:
        raise ConfigError(
            "name one App: APP, or --flower DIR for the folder of a Flower app; or allow those whose bundles "
            "this device shall run: --signer HEX"
        )
    return ""


def serve_server(
    options: ClientOptions,
    parts: Sequence[str],
    output: Output,
    bell: Bell,
    log_level: LogLevel,
    signers: Sequence[str],
) -> None:
    """Serve a server's jobs until a signal, or the bell's. `signers`: whose bundles are run."""
    from anabranch.client.jobs import serve_jobs
    from anabranch.identity.signers import checked_signers

    def tell(kind: str, **data: Any) -> None:
        output.event(kind, SAID[kind].format(**data), **data)

    def begin(job: ListedJob, app: str, client_id: str, papers: Path | None, state_dir: Path) -> Worker:
        words = _device_words(replace(options, app=app), parts, output, log_level)
        below = f"/{job.name}" if job.name else ""
        servers = ",".join(f"{address}{below}" for address in parse_addresses(options.server))
        words += ["--server", servers, "--id", client_id, "--state-dir", str(state_dir), "--until-eof"]
        words += ["--identity", str(papers)] if papers is not None else []
        command = [sys.executable, "-m", "anabranch.cli.main", "client", *words]
        return subprocess.Popen(  # noqa: S603 - a Ctrl-C in the terminal is this process's, and ends it well
            command, stdin=subprocess.PIPE, stdout=descriptor(STDOUT), start_new_session=True
        )

    serve_jobs(options, begin, tell, bell, checked_signers(signers))
    output.result({"kind": "stopped"}, "stopped")


SAID = {
    "waiting": "waiting for a job",
    "begun": "job {job} ({app}) begins",
    "ended": "job {job} has ended here, exit code {code}",
    "opened": "job {job}: its bundle {bundle} is signed by {signer}, who is allowed",
    "unopened": "job {job}: its bundle is signed by {signer}, whom no --signer allows; {app} is used",
    "left": "job {job} is left alone for now: {why}",
}


def _device_words(
    options: ClientOptions, parts: Sequence[str], output: Output, log_level: LogLevel
) -> list[str]:
    """What every job's device is told as this one was."""
    said = {
        "--shard": "" if options.shard is None else "{}/{}".format(*options.shard),
        "--data-path": options.data_path,
        "--device": options.device,
        "--precision": options.precision,
        "--step-time": options.step_time_s,
        "--width-max": options.width_max,
        "--threads": options.threads,
        "--outbox-results": options.outbox.entries_max,
        "--outbox-mib": options.outbox.bytes_max // MIB,
        "--cohort-min": options.trust.cohort_min,
        "--log-level": log_level,
    }
    words = [word for name, value in said.items() if value != "" for word in (name, str(value))]
    words += [word for place in parts for word in ("--part", place)]
    given = [f"{key}={json.dumps(value)}" for key, value in options.options.items()]  # which is TOML as well
    words += [word for text in given for word in ("--option", text)]
    words += [word for keeper in options.trust.keepers for word in ("--keeper", keeper)]
    words += ["--insecure"] if options.insecure else []
    words += ["--json"] if output.as_json else []
    return [options.app, *words]
