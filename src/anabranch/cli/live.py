"""`server`, `client` and `evaluate`: the parts of a live federation."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.api.configuration import Layer, load_config, load_model_run
from anabranch.cli.initialise import MODEL_FOLDER, AppName, DataPath
from anabranch.cli.jobs import (
    BundleFile,
    EveryJob,
    JobsFolder,
    Papers,
    Signers,
    check_folder_options,
    device_app,
    serve_folder,
    serve_server,
    serving_text,
)
from anabranch.cli.logs import DeviceLogLevel, LogLevel, set_up_logging
from anabranch.cli.next_steps import command_line, once_stopped, while_served, with_commands, with_state
from anabranch.cli.operating import ADMIN_ADDRESS
from anabranch.cli.options import (
    AsJson,
    ConfigFile,
    FlowerFolder,
    Identity,
    Insecure,
    Overrides,
    app_spec,
    coming_back,
    parse_setting,
    parse_shard,
)
from anabranch.cli.output import STDOUT, Output, descriptor, json_line
from anabranch.cli.parts import Parts, admit_parts
from anabranch.cli.run_options import Clients, Seed, StrategyName, Updates, Versions, option_layers
from anabranch.cli.starter import UntilEof, bell_of
from anabranch.client.state import state_dir_of
from anabranch.core.config.flower import SCHEME
from anabranch.core.config.tables import Config
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.limits import COHORT_MIN, MIB, OUTBOX_BYTES_MAX, OUTBOX_ENTRIES_MAX
from anabranch.core.model.metrics import ACCURACY, LOSS
from anabranch.core.text import visible
from anabranch.identity.addresses import devices_beside
from anabranch.reports.metrics import metric_text
from anabranch.reports.text import count_text, counted
from anabranch.server.manifest import read_manifest
from anabranch.support.folders import check_folder
from anabranch.support.heap import uncollected

if TYPE_CHECKING:
    from anabranch.api.cockpit_process import CockpitProcess
    from anabranch.client.outbox import OutboxBounds
    from anabranch.client.run import ClientOptions
    from anabranch.client.summary import AgentSummary
    from anabranch.client.trust import KeeperTrust
    from anabranch.server.app import RunEnded, ServerInfo
    from anabranch.server.manifest import Manifest

ServerAddress = Annotated[
    str,
    typer.Option(
        "--server",
        help="The server's address, or those of a leader and its standby.",
        metavar="HOST:PORT[,...]",
    ),
]
FollowedAddress = Annotated[
    str,
    typer.Option(
        "--server",
        help="The server's address, or those of a leader and its standby; if not given, port 7070 of "
        "--admin's host, or of this machine.",
        metavar="HOST:PORT[,...]",
        show_default=False,
    ),
]
InsecurePorts = Annotated[
    bool, typer.Option("--insecure", help="Serve other hosts without encryption or authentication.")
]
Standby = Annotated[
    bool | None, typer.Option("--standby", help="Wait while another server leads the run, then take over.")
]
Ui = Annotated[
    str,
    typer.Option(
        "--ui", help="Show the run in a browser, for example on 127.0.0.1:7080.", metavar="HOST:PORT"
    ),
]
UiIdentity = Annotated[
    Path | None, typer.Option("--ui-identity", help="The operator's papers that --ui goes by.", metavar="DIR")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]

Token = Annotated[
    str, typer.Option(help="Join with this; `anabranch admin enrol` makes it.", metavar="TOKEN")
]
TokenFile = Annotated[
    Path | None, typer.Option(help="The same, from a file: other users can read a command line.")
]
CaSha256 = Annotated[str, typer.Option(help="The fingerprint of the federation's authority.", metavar="HEX")]
Join = Annotated[str, typer.Option(help="Where to join; else the server's port + 2.", metavar="HOST:PORT")]

ClientId = Annotated[str, typer.Option("--id", help="This device's name; made up once if not given.")]
ShardPart = Annotated[
    str,
    typer.Option(
        help="Its part of the training data, INDEX from 0; if not given, the number at the end of its name, "
        "of fleet.clients, or all of the data where there is none, or the App says own_data.",
        metavar="INDEX/COUNT",
        show_default=False,
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="Where its outbox lies; if not given, anabranch-devices/ID, or anabranch-device without --id.",
        metavar="DIR",
    ),
]
BuffersDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        help="With the buffers that this device keeps (model.buffers = 'local').",
        metavar="PATH",
    ),
]
Threads = Annotated[
    int, typer.Option(help="Threads of torch on a CPU; 0: this device's part of the machine's.", min=0)
]
StepTime = Annotated[
    float,
    typer.Option("--step-time", help="Emulate a device that needs so many seconds a step.", min=0.0),
]
WidthMax = Annotated[
    float,
    typer.Option(
        "--width-max",
        help="The share of the model's units that this device's memory bears, above 0; 1: the whole model.",
    ),
]
OutboxResults = Annotated[
    int, typer.Option(help="Results that wait for the server at most; then training waits.", min=1)
]
OutboxMib = Annotated[int, typer.Option(help="And their size at most, MiB.", min=1)]
Keepers = Annotated[
    list[str] | None,
    typer.Option(
        "--keeper",
        help="Mask updates for the keeper of this name, told by whoever runs it. Repeatable.",
        metavar="HEX",
    ),
]
CohortMin = Annotated[
    int, typer.Option("--cohort-min", help="With --keeper: the fewest updates in a sum.", min=COHORT_MIN)
]
AppOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", help="Told to the App; a Flower app has it in its node config.", metavar="KEY=VALUE"
    ),
]


def server(
    config: ConfigFile = None,
    model: Annotated[
        Path, typer.Option("--model", help="What `anabranch init` wrote.", metavar="DIR")
    ] = MODEL_FOLDER,
    flower: FlowerFolder = None,
    bundle: BundleFile = None,
    strategy: StrategyName = None,
    updates: Updates = None,
    versions: Versions = None,
    clients: Clients = None,
    seed: Seed = None,
    address: Annotated[str | None, typer.Option(help="Override server.address.")] = None,
    admin_address: Annotated[str | None, typer.Option(help="Override server.admin_address.")] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Let Prometheus read metrics here.", metavar="HOST:PORT"),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Override server.data_dir.")] = None,
    jobs: JobsFolder = None,
    database: Annotated[str | None, typer.Option(help="Override server.database.")] = None,
    insecure: InsecurePorts = False,
    standby: Standby = None,
    cockpit: Ui = "",
    cockpit_identity: UiIdentity = None,
    overrides: Overrides = None,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Serve a federation until its budget is used up and an operator stops it (SIGTERM drains).

    With --flower the model is that of the app's ServerApp, unless --model is there already. With --jobs every
    job of a folder is served, each with its own settings, model and data: CONFIG says where they are served.
    """
    with uncollected():
        from anabranch.server.app import serve

    set_up_logging(as_json, log_level, service="anabranch-server")
    of_run = option_layers(strategy=strategy, updates=updates, versions=versions, clients=clients, seed=seed)
    of_run += option_layers(data_dir=data_dir, database=database, standby=standby)
    flags = of_run + option_layers(address=address, admin_address=admin_address, metrics=metrics)
    if jobs is not None:
        check_folder_options([name for name, _ in of_run], flower, bundle)
        host = load_config(config, overrides or (), flags=flags)
        beside = _cockpit(cockpit, cockpit_identity, host, insecure, as_json)
        serve_folder(jobs, host, insecure, Output(as_json, serves=True), beside)
    if flower is not None:
        flags.append(("--flower", {"run": {"workload": app_spec("", flower)}}))
        _init_once(model, flower, config, overrides or ())
    read = [read_manifest(_there(model, config))]
    app = read[0].app
    settings = _settings(model, app, config, overrides, flags)
    _check_model(model, app, flower)

    voice = _ServerVoice(Output(as_json, serves=True), settings, insecure)
    voice.cockpit = _cockpit(cockpit, cockpit_identity, settings, insecure, as_json)
    raise typer.Exit(voice.tell(partial(serve, bundle=bundle), read.pop))


def client(
    app: AppName = "",
    flower: FlowerFolder = None,
    server_address: ServerAddress = "127.0.0.1:7070",
    client_id: ClientId = "",
    shard: ShardPart = "",
    state_dir: StateDir = None,
    data_path: DataPath = "",
    app_options: AppOptions = None,
    parts: Parts = None,
    device: Device = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    step_time_s: StepTime = 0.0,
    width_max: WidthMax = 1.0,
    threads: Threads = 0,
    tasks_max: Annotated[int, typer.Option(help="Stop after so many tasks (0: never).", min=0)] = 0,
    jobs: EveryJob = False,
    signers: Signers = None,
    identity: Papers = None,
    token: Token = "",
    token_file: TokenFile = None,
    ca_sha256: CaSha256 = "",
    join: Join = "",
    insecure: Insecure = False,
    outbox_results: OutboxResults = OUTBOX_ENTRIES_MAX,
    outbox_mib: OutboxMib = OUTBOX_BYTES_MAX // MIB,
    keepers: Keepers = None,
    cohort_min: CohortMin = COHORT_MIN,
    until_eof: UntilEof = False,
    log_level: DeviceLogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Run a device: ask, train on local data, push, again; until the run ends or SIGTERM.

    Several devices on one machine need a name each: --id device-0, --id device-1 and so on. With --jobs it
    goes from one job of its server to the next, and waits for more; each has a process of its own. With
    --signer it runs the App of a job's bundle, with this user's rights, and needs no APP of its own.
    """
    with uncollected():
        from anabranch.client.run import ClientOptions

    set_up_logging(as_json, log_level, service="anabranch-client")
    trains: dict[str, Any] = {"device": device, "precision": precision, "threads": threads}
    trains |= {"step_time_s": step_time_s, "width_max": width_max, "tasks_max": tasks_max}
    names = {"server": server_address, "client_id": client_id, "data_path": data_path}
    token, of_token = (token, "") if token_file is None else _handed_over(token_file)
    joins: dict[str, Any] = {"token": token, "ca_sha256": ca_sha256 or of_token, "join": join}
    joins |= {"identity": identity, "insecure": insecure, "trust": _trust(keepers, cohort_min)}
    options = ClientOptions(
        app=device_app(app, flower, signers or (), jobs),
        shard=parse_shard(shard) if shard else None,
        state_dir=state_dir or state_dir_of(client_id),
        options=_told_to_app(app_options),
        outbox=_outbox(outbox_results, outbox_mib),
        **(trains | joins | names),
    )
    _work(options, parts or (), as_json, until_eof, (log_level, signers or ()) if jobs else None)


def evaluate(
    app: AppName = "",
    flower: FlowerFolder = None,
    server_address: FollowedAddress = "",
    admin_address: Annotated[
        str, typer.Option("--admin", help="Report the metrics there as well.", metavar="HOST:PORT")
    ] = "",
    on: Annotated[str, typer.Option(help="test or validation.")] = "test",
    seed: Annotated[
        int | None, typer.Option(help="The run's seed; taken from --admin if not given, else 0.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Measure the newest version, then stop.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Append each measurement to this JSON lines file.")
    ] = None,
    data_path: DataPath = "",
    app_options: AppOptions = None,
    state_dir: BuffersDir = None,
    device: Device = "auto",
    identity: Identity = None,
    insecure: Insecure = False,
    log_level: LogLevel = "info",
    as_json: AsJson = False,
) -> None:
    """Follow a run: fetch each new version as any device does, and measure it on held-out data."""
    from anabranch.client.run import FollowerOptions, follow

    set_up_logging(as_json, log_level)
    output = Output(as_json)
    out = out and out.absolute()  # an App may change the working directory
    options = FollowerOptions(
        app=app_spec(app, flower),
        server=server_address or _beside(admin_address, output),
        admin=admin_address,
        role=on,
        seed=seed,
        once=once,
        data_path=data_path,
        device=device,
        identity=identity,
        insecure=insecure,
        state_dir=state_dir,
        options=_told_to_app(app_options),
    )
    for measured in follow(options, lambda: output.say("the run has ended: that was its last version")):
        row = {"version": measured.version, **measured.metrics}
        if out is not None:
            with out.open("a", encoding="utf-8") as lines:
                lines.write(json_line(row))
        output.event("evaluated", f"version {measured.version}: {_measured_text(measured.metrics)}", **row)


def _beside(admin_address: str, output: Output) -> str:
    """The devices' port that is followed where none was named, which is said."""
    found = devices_beside(admin_address or ADMIN_ADDRESS)
    output.warn(f"following {found}; --server HOST:PORT names another")
    return found


@dataclass
class _ServerVoice:
    """What a server says on standard output; what its run does is told in its log."""

    output: Output
    settings: Config
    insecure: bool
    admin_address: str = ""
    over: bool = False
    cockpit: CockpitProcess | None = None

    def tell(self, serve: Callable[..., Coroutine[Any, Any, int]], manifest: Callable[[], Manifest]) -> int:
        """Have the run served until a signal, and say what becomes of it; returns the exit code.

        `manifest` hands over what it reads: nobody else may hold the first weights while the run is served.
        """
        told = partial(serve, waiting=self.waiting, ended=self.ended, reopened=self.reopened)
        try:
            code = asyncio.run(told(self.settings, manifest(), ready=self.ready, insecure=self.insecure))
        finally:
            if self.cockpit is not None:
                self.cockpit.close()
        self.drained()
        return code

    def ready(self, info: ServerInfo) -> None:
        self.admin_address = info.admin_address
        text = serving_text(visible(info.name), info)
        self.output.event("serving", text, **asdict(info))
        if self.cockpit is not None:
            self.cockpit.start(info.admin_address)

    def waiting(self, why: str) -> None:
        self.output.event("standby", "", why=why)  # in words the log has it

    def ended(self, end: RunEnded) -> None:
        self.over = True
        commands = while_served(self.settings, self.admin_address, self.insecure, end.rated)
        which = "the best version" if end.rated else "it"
        text = f"{end.why}; this server serves the last version until Ctrl-C. To take {which} out:"
        self.output.event("ended", with_commands(text, commands), why=end.why, next=commands)

    def reopened(self) -> None:
        self.over = False
        text = "the run had ended, and goes on: its budget is larger now; start its devices again"
        self.output.event("reopened", text)

    def drained(self) -> None:
        if self.over:
            commands = once_stopped(self.settings)
            text = with_commands("its report, with the models, and a check of its data:", commands)
            self.output.event("drained", text, next=commands)


def _cockpit(
    listen: str, identity: Path | None, settings: Config, insecure: bool, as_json: bool
) -> CockpitProcess | None:
    """The server's cockpit, not started yet, if there is to be one. Raises `ConfigError`."""
    if not listen:
        return None
    from anabranch.api.cockpit_process import CockpitProcess
    from anabranch.client.operator import operator_wallet
    from anabranch.server.tls import uses_tls

    if uses_tls(settings.server.admin_address, settings, insecure) and operator_wallet(identity) is None:
        raise ConfigError(
            "--ui speaks to the operators' port, which is guarded: name an operator's papers by --ui-identity"
            " DIR (`anabranch admin operator NAME --out DIR` makes them)"
        )
    return CockpitProcess(listen, identity, insecure, descriptor(STDOUT) if as_json else None)


def _measured_text(metrics: Mapping[str, float]) -> str:
    """The accuracy and the loss first, where the App has them."""
    names = sorted(metrics, key=lambda name: (name != ACCURACY, name != LOSS))
    return ", ".join(f"{name} {metric_text(name, metrics[name], digits=4)}" for name in names)


def _told_to_app(options: Sequence[str] | None) -> dict[str, Any]:
    return dict(parse_setting(text) for text in options or ())


def _outbox(results: int, mib: int) -> OutboxBounds:
    from anabranch.client.outbox import OutboxBounds

    return OutboxBounds(results, mib * MIB)


def _trust(keepers: Sequence[str] | None, cohort_min: int) -> KeeperTrust:
    from anabranch.client.trust import trusted

    return trusted(keepers or (), cohort_min)


def _work(
    options: ClientOptions,
    parts: Sequence[str],
    as_json: bool,
    until_eof: bool,
    jobs: tuple[str, Sequence[str]] | None,
) -> None:
    """Work for one run, to its end; or for every `jobs`: from which level their devices log, and signers."""
    from anabranch.client.run import run_client

    output, bell = Output(as_json, serves=True), bell_of(until_eof)
    if jobs is not None:
        serve_server(options, parts, output, bell, *jobs)
        return
    admit_parts(parts)
    done = run_client(options, _teller(output), bell=bell)
    _say_goodbye(output, done, options.state_dir)


def _say_goodbye(output: Output, done: AgentSummary, state_dir: Path) -> None:
    rejected = f", {count_text(done.rejected)} of them rejected" if done.rejected else ""
    answered = f"{counted(done.answered, 'update')} answered{rejected}"
    told = f"{answered}\n{with_state(state_dir, done.run_ended)}"
    if not done.client_id:
        told = "it has not joined yet: start it again with its token"
    counts = {"answered": done.answered, "rejected": done.rejected}
    output.result({"kind": "stopped", "why": done.why, **counts}, told)


PLACED = {
    "shard": "{client}: shard {index} of {count}, state in {state_dir}",
    "name": "{client}: shard {index} of {count} by the number in its name (--shard gives another, own_data "
    "of its App all that is here), state in {state_dir}",
    "own_data": "{client}: all of its own data but those for tests, state in {state_dir}",
}
UNNUMBERED = "{client}: all of the training data (a name such as device-0 gives a part), state in {state_dir}"


# All else is told for each task, and so to those alone who log that much.
ONCE = ("placed", "enrolled", "stopped")


def _teller(output: Output) -> Callable[..., None]:
    log = logging.getLogger(__name__)

    def tell(kind: str, **data: Any) -> None:
        level = logging.WARNING if kind == "failed" else logging.INFO
        if not (output.as_json or kind in ONCE or log.isEnabledFor(level)):
            return
        # One line, whatever a server has said in it.
        text = visible(f"{kind} " + " ".join(f"{k}={_shown(v)}" for k, v in data.items()))
        if kind == "placed":
            text = PLACED[data["by"]] if data["count"] > 1 or data["by"] == "own_data" else UNNUMBERED
            text = text.format(**data)
        output.event(kind, text, **data)

    return tell


def _handed_over(file: Path) -> tuple[str, str]:
    from anabranch.cli.members import read_token

    return read_token(file)


def _init_once(model: Path, flower: Path, config: Path | None, overrides: Sequence[str]) -> None:
    """Write the model's folder unless it is there, in a process of its own: a server needs no framework."""
    if model.exists():
        return
    command = [
        sys.executable,
        "-m",
        "anabranch.cli.main",
        "init",
        *([] if config is None else [str(config)]),
        "--flower",
        str(flower),
        "--out",
        str(model),
    ]
    command += [word for text in overrides for word in ("--set", text)]
    # What it says of itself is for those who have called it by name.
    nothing = subprocess.DEVNULL
    done = subprocess.run(command, stdin=nothing, stdout=nothing, check=False)  # noqa: S603
    if done.returncode:
        raise AppError(f"the model of {flower} could not be made: see above")


def _settings(
    model: Path, app: str, config: Path | None, overrides: list[str] | None, flags: list[Layer]
) -> Config:
    with coming_back():  # parts of one's own are loaded
        return load_model_run(model, app, config, overrides or (), flags=flags)


def _check_model(model: Path, app: str, flower: Path | None) -> None:
    """Raises `ConfigError` for a model of another app than the Flower app that was named."""
    if flower is not None and _folder_name(app) != flower.resolve().name:
        raise ConfigError(f"{model} is a model of {app}, not of {flower}: name another --model DIR")


def _folder_name(app: str) -> str:
    """That of the Flower app which an App's name stands for; of a relative one too."""
    return Path(app.removeprefix(SCHEME)).resolve().name


def _there(model: Path, config: Path | None) -> Path:
    """The model's folder. Raises `FolderMissing`, and `ConfigError` where it is named as the settings."""
    if config is not None and config.is_dir():
        named = command_line("server", "--model", config)
        raise ConfigError(f"{config} is a folder, not a file of settings: a model is named by `{named}`")
    check_folder(model, "name the folder that `anabranch init APP --out FOLDER` writes")
    return model


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}:{_shown(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
