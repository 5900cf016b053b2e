"""`anabranch demo`: a real server, real device processes, real data, a report to look at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.api.configuration import Layer, load_config, load_run
from anabranch.api.live_result import report_of_data
from anabranch.cli.left import say_what_is_left
from anabranch.cli.options import AsJson, FlowerFolder, Out, Overrides, app_spec, short_name
from anabranch.cli.output import Output, Ticker
from anabranch.cli.processes import FleetProcesses
from anabranch.cli.run_options import RunDataPath, option_layers
from anabranch.cli.summary import summary
from anabranch.client.operator import OperatorClient, RunStatus
from anabranch.core.config.goal import Goal
from anabranch.core.config.tables import Config
from anabranch.core.errors import AnabranchError, DataError, Unavailable
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.reports.folders import LIVE_DATA, claimed
from anabranch.reports.metrics import metric_text
from anabranch.reports.result import Result
from anabranch.reports.text import bytes_text, count_text, counted, duration_text
from anabranch.support.stop_signals import leaving_in_order

POLL_S = 0.5
DEADLINE_S = 900.0

# What makes a short, telling run on two cores. Anything may be overridden with --set.
FLEET = {"split": "dirichlet", "dirichlet_alpha": 0.5}
Tables = dict[str, dict[str, Any]]
WORKLOADS: dict[str, Tables] = {
    "fashion-mnist": {
        "run": {"target_accuracy": 0.75, "updates_max": 160},
        "fleet": {**FLEET, "examples_per_client": 2000, "step_time_s": 0.01},
        "client": {"learning_rate": 0.1, "batch_size": 32, "epochs": 1},
    },
    "fashion-mnist-resnet": {
        "run": {"target_accuracy": 0.75, "updates_max": 160},
        "fleet": {**FLEET, "examples_per_client": 2000, "step_time_s": 0.01},
        "client": {"learning_rate": 0.1, "batch_size": 32, "epochs": 1},
    },
    "digits": {
        "run": {"target_accuracy": 0.9, "updates_max": 240},
        "fleet": {**FLEET, "step_time_s": 0.01},
        "client": {"learning_rate": 0.2, "batch_size": 16, "epochs": 4},
    },
    "synthetic": {
        "run": {"updates_max": 160},
        "fleet": {**FLEET, "step_time_s": 0.005},
        "client": {"learning_rate": 0.1, "batch_size": 32, "epochs": 2},
    },
}


@dataclass(frozen=True)
class Watched:
    """What the demo shows while it runs."""

    status: RunStatus
    metric: str
    value: float | None
    evaluated: int

    @property
    def measured(self) -> str:
        """What was measured last, in words; empty where nothing was."""
        return "" if self.value is None else f", {self.metric} {metric_text(self.metric, self.value)}"


def demo(
    workload: Annotated[
        str | None,
        typer.Option(help="fashion-mnist, fashion-mnist-resnet, digits or synthetic; or an App of yours."),
    ] = None,
    flower: FlowerFolder = None,
    strategy: Annotated[str, typer.Option(help="The strategy's name.")] = "fedbuff",
    clients: Annotated[int, typer.Option(help="Device processes.", min=1)] = 8,
    data_path: RunDataPath = None,
    out: Out = None,
    server: Annotated[
        str, typer.Option("--server", help="Use a server that runs already.", metavar="HOST:PORT")
    ] = "",
    admin: Annotated[
        str, typer.Option("--admin", help="The operators' address of --server.", metavar="HOST:PORT")
    ] = "127.0.0.1:7071",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation on this machine: a server, unequal devices, an evaluator.

    Devices differ in speed by `fleet.speed_ratio` (5): each emulates its own by pausing. Nobody waits
    for the slowest, unless the strategy has rounds.
    """
    output = Output(as_json)
    given = option_layers(data_path=data_path)
    data = load_config(None, overrides or (), flags=given).run.data_path
    name = app_spec(workload or "", flower) if flower else workload or _available_workload(output, data)
    settings = load_run(None, overrides or (), presets=_presets(name, strategy, clients), flags=given)
    strategy = short_name(settings.strategy.name)
    wanted = out or Path("runs") / f"demo-{strategy}-{time.strftime('%Y%m%d-%H%M%S')}"
    with claimed(wanted, explicit=out is not None) as folder, say_what_is_left(output, folder):
        output.say(
            f"demo: {settings.strategy.name} on {name}, {clients} devices with a speed ratio of"
            f" {settings.fleet.speed_ratio:g}; everything goes to {folder}"
        )
        with (
            leaving_in_order(),
            _report_in_any_case(folder, settings, ours=not server),
            FleetProcesses(folder, settings, name) as fleet,
        ):
            addresses = (server, admin) if server else fleet.start_server()
            output.say(f"server: {addresses[0]} (operators: {addresses[1]}); starting the devices ...")
            fleet.start_devices(addresses, clients)
            watched = _watch(fleet, addresses[1], output)
        if server:
            _closing_words(watched, output)
        else:
            result = Result.read(folder)
            output.result(result.to_json(), summary(result, folder))


@contextmanager
def _report_in_any_case(folder: Path, settings: Config, ours: bool) -> Iterator[None]:
    """The report of the server's data, once it has stopped: of a run that is interrupted as well."""
    try:
        yield
    except BaseException:
        if ours and (folder / LIVE_DATA).is_dir():
            with suppress(AnabranchError):  # what ended the run is what matters
                report_of_data(folder / LIVE_DATA, settings.server.database, folder)
        raise
    if ours:
        report_of_data(folder / LIVE_DATA, settings.server.database, folder)


def _available_workload(output: Output, data_path: str) -> str:
    """Fashion-MNIST where its files are, else the digits that scikit-learn carries."""
    from anabranch.workloads import Shard, load_app

    try:
        load_app("fashion-mnist", data_path).data(Shard("test"))
    except DataError as error:
        output.say(f"no Fashion-MNIST, so digits: {error}")
        return "digits"
    return "fashion-mnist"


def _presets(workload: str, strategy: str, clients: int) -> list[Layer]:
    base: Tables = WORKLOADS.get(workload, {"run": {"updates_max": 160}})
    run = {"name": "demo", "workload": workload, **base["run"]}
    fleet = {"clients": clients, **base.get("fleet", {})}
    cohort = max(1, clients // 2)
    params: Tables = {
        "fedbuff": {"buffer_size": cohort},
        "fedavg": {"clients_per_round": cohort, "deadline_s": 30.0},
        "fedprox": {"clients_per_round": cohort, "deadline_s": 30.0},
        "qafel": {"buffer_size": cohort},
        "teasq": {"concurrency_fraction": 0.75, "cache_size": cohort, "decay_every": 20},
        "teasq_drop": {"concurrency_fraction": 0.75, "cache_size": cohort, "decay_every": 20},
    }
    server = {"address": "127.0.0.1:0", "admin_address": "127.0.0.1:0", "lease_s": 120.0}
    tables = {**base, "run": run, "fleet": fleet, "server": server}
    return [("demo", {**tables, "strategy": {"name": strategy, **params.get(strategy, {})}})]


def _watch(fleet: FleetProcesses, admin: str, output: Output) -> Watched:
    """Follow the run until its budget is used up and the last version is measured."""
    deadline = time.monotonic() + DEADLINE_S
    started = time.monotonic()
    with OperatorClient(admin) as operator, Ticker(output) as ticker:
        operator.status()  # nobody there: better known at once
        while True:
            watched = _look(operator)
            if watched is not None:
                ticker.show(_progress(watched, time.monotonic() - started), **_figures(watched))
                if watched.status.finished and (
                    watched.evaluated >= watched.status.version or fleet.evaluator_ended()
                ):
                    return watched
            fleet.check()
            if time.monotonic() > deadline:
                raise Unavailable(f"the demo did not end within {DEADLINE_S:.0f} s: see {fleet.logs}")
            time.sleep(POLL_S)


def _progress(watched: Watched, elapsed_s: float) -> str:
    s = watched.status
    if not s.clients:
        return f"{duration_text(elapsed_s)}: no device is there yet"
    return (
        f"{duration_text(elapsed_s)}: version {count_text(s.version)},"
        f" {counted(s.updates_applied, 'update')} from {counted(s.clients, 'device')},"
        f" {s.live_tasks} in training, {bytes_text(s.uplink_bytes)} up{watched.measured}"
    )


def _figures(watched: Watched) -> dict[str, Any]:
    s = watched.status
    return {
        "version": s.version,
        "updates": s.updates_applied,
        "clients": s.clients,
        "live_tasks": s.live_tasks,
        watched.metric: watched.value,
    }


def _look(operator: OperatorClient) -> Watched | None:
    """None while nobody answers: a server that starts again is no end of the run."""
    try:
        status = operator.status()
        versions = operator.versions(max(0, status.version - 50))
    except Unavailable:
        return None
    goal = Goal.of_json(status.config).among({name for v in versions for name in v.metrics})
    metric = ACCURACY if goal.metric == AUTO else goal.metric
    last = next((v for v in reversed(versions) if v.metrics), None)
    return Watched(status, metric, last.metrics.get(metric) if last else None, last.version if last else -1)


def _closing_words(watched: Watched, output: Output) -> None:
    s = watched.status
    data = {
        "version": s.version,
        "updates_applied": s.updates_applied,
        "updates_rejected": s.updates_rejected,
        f"final_{watched.metric}": watched.value,
    }
    output.result(
        data,
        f"the run has ended at version {s.version}{watched.measured}; when the"
        " server is stopped, `anabranch report DATA_DIR` makes the report of its data",
    )
