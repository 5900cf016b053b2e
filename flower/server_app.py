"""Our strategies under `flwr run`: name this as the serverapp of a Flower app, and it runs without rounds.

[tool.flwr.app.components]
serverapp = "anabranch.flower.server_app:app"
clientapp = "quickstart.client_app:app"          # as before

[tool.flwr.app.config.anabranch]
serverapp = "quickstart.server_app:app"          # the app's own: says what the first model is
out = "runs/quickstart"                          # journal, result.json, report.html

[tool.flwr.app.config.anabranch.strategy]        # any table of docs/configuration.md
name = "fedasync"

[tool.flwr.app.config.anabranch.run]
updates_max = 200
trackers = "jsonl"                               # several: with commas
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabranch.compress.feedback import uplink_of
from anabranch.core.clock import EventClock
from anabranch.core.config.flower import SCHEME
from anabranch.core.config.ranges import SENT
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.buffers import LOCAL
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.chains import AUTO, RAW
from anabranch.core.rng import seed_of
from anabranch.flower.installed import flwr_version

flwr_version()

from flwr.app import Context, Message  # noqa: E402 - the environment is set by then
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from anabranch.core.model.params import Tensors  # noqa: E402
from anabranch.flower.driver import GridRun  # noqa: E402
from anabranch.flower.logbook import Logbook, free_folder  # noqa: E402
from anabranch.flower.messages import EVALUATE, TRAIN, ServerAppMessage, seeded  # noqa: E402
from anabranch.flower.played import Judge, Played, judge_of  # noqa: E402
from anabranch.flower.project import flat, load  # noqa: E402
from anabranch.flower.rehearsal import Rehearsed, hear  # noqa: E402
from anabranch.host.build import WHOLE  # noqa: E402
from anabranch.reports.html import write_report  # noqa: E402
from anabranch.reports.journal_files import JOURNAL, JournalReader  # noqa: E402
from anabranch.reports.metrics import final_text  # noqa: E402
from anabranch.reports.models import FINAL, write_model  # noqa: E402
from anabranch.reports.origin import reason  # noqa: E402
from anabranch.reports.recorder import Recorder  # noqa: E402
from anabranch.reports.result import Result, Status  # noqa: E402
from anabranch.reports.trackers import Trackers  # noqa: E402
from anabranch.reports.tracking.run import TrackedRun  # noqa: E402
from anabranch.strategies.registry import strategy_of  # noqa: E402

log = logging.getLogger(__name__)

PREFIX = "anabranch."
# Devices of a Grid send no heartbeats: a lease must outlast any training. Anybody may set others.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "server": {"lease_s": 3600.0, "lease_min_s": 600.0, "lease_max_s": 3600.0},
    "uplink": {"codec": RAW},  # a ClientApp without our mod has nothing else
}
LAST_WORD_S = 120.0  # how long the nodes have to judge the last version

app = ServerApp()


@dataclass(frozen=True)
class Options:
    """What the run config says under `anabranch`: two keys of its own, and tables of our configuration."""

    serverapp: str
    out: Path
    poll_s: float
    config: Config

    @classmethod
    def of(cls, run_config: Mapping[str, Any]) -> Options:
        """The options of a run config, whose keys are flat. Raises `ConfigError`, naming the key."""
        tables = unflattened({k[len(PREFIX) :]: v for k, v in run_config.items() if k.startswith(PREFIX)})
        serverapp, out = str(tables.pop("serverapp", "")), str(tables.pop("out", ""))
        tables.pop("clientapp", None)  # see client_app.py
        poll_s = float(tables.pop("poll_s", 0.2))
        told = tables.get("run")
        if isinstance(told, dict) and isinstance(names := told.get("trackers"), str):  # Flower has no lists
            told["trackers"] = [name.strip() for name in names.split(",")]
        # What `pack` says; by hand it may be left out, and the bundled workload of the default is another.
        own: Mapping[str, Any] = {"run": {"workload": SCHEME + serverapp.partition(":")[0].partition(".")[0]}}
        layers = (("flower", PRESETS), ("anabranch.serverapp", own), ("run config", tables))
        config = merge(layers)
        strategy_of(config)
        _check_run_config(config.flower.run_config, run_config)
        run = config.run
        if not (run.versions_max or run.updates_max):
            raise ConfigError(
                "the run needs an end: set anabranch.run.updates_max or versions_max, as `anabranch flower "
                "pack --set run.updates_max=200` does"
            )
        if config.downlink.codec not in (AUTO, RAW):
            raise ConfigError(
                f"anabranch.downlink.codec is {config.downlink.codec!r}, but on Flower's Grid models travel "
                "whole, 'raw': a node keeps none between messages"
            )
        if config.uplink.codec != AUTO:
            uplink_of(config.uplink.codec)
        if config.run.initial != SENT:
            raise ConfigError(
                "anabranch.run.initial: on Flower's Grid a model comes with every message, so a node that "
                "builds one saves nothing: leave it 'sent'"
            )
        if config.submodel.name not in (AUTO, "none"):
            raise ConfigError(
                "anabranch.submodel.name: a ClientApp on Flower's Grid trains the whole model, 'none'"
            )
        if config.model.buffers == LOCAL:
            raise ConfigError(
                "anabranch.model.buffers: a node of Flower's keeps none of the model between messages, so it "
                "cannot be 'local': write average or latest; a ClientApp may keep its own in context.state"
            )
        config = merge([*layers, ("flower", WHOLE)])
        return cls(
            serverapp, Path(out or f"runs/flower-{config.strategy.name}-seed{run.seed}"), poll_s, config
        )


def _check_run_config(said: Mapping[str, Any], run_config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where the settings say another run config than Flower hands its nodes."""
    for key, value in flat(said, "anabranch.flower.run_config").items():
        if (own := run_config.get(key)) != value:
            raise ConfigError(
                f"anabranch.flower.run_config: {key} is {value!r}, but nodes have the app's own run config, "
                f"where it is {own!r}: write it there, [tool.flwr.app.config], or pack the app anew"
            )


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run until the budget is used up; a run that an earlier process has begun goes on."""
    _speak_up()
    options = Options.of(context.run_config)
    result = run(grid, context, options)
    found = final_text(result)
    log.info("ended at version %d of %d updates, %s", result.versions, result.updates_applied, found)


def _speak_up() -> None:
    """What we log goes where Flower's log goes, so `flwr run --stream` and `flwr log` show it."""
    ours, flowers = logging.getLogger("anabranch"), logging.getLogger("flwr")
    ours.setLevel(flowers.level)
    ours.handlers = flowers.handlers
    ours.propagate = False


def run(grid: Grid, context: Context, options: Options) -> Result:
    """Begin or resume the run of these options, and see it to its end. Raises what `Logbook` does."""
    folder = free_folder(options.out)
    trackers = Trackers.of(options.config.run.trackers)
    config, initial, judge = _prepared(grid, context, options, folder)
    said = {
        what: ServerAppMessage.from_json(getattr(config.flower, what), f"flower.{what}")
        for what in (TRAIN, EVALUATE)
    }
    with Logbook(folder, config, initial) as logbook, Recorder.of(config, folder) as recorder:
        recorder.spec = logbook.spec
        clock = EventClock(time.time(), time.time, time.monotonic)
        grid_run = GridRun(grid, config, logbook, recorder, said, clock.now, judge)
        trackers.start(TrackedRun.of(config, "live", folder))
        recorder.trackers = trackers  # from now on: of what is on record an earlier process has told
        began = time.perf_counter()
        try:
            _until_done(grid_run, options.poll_s)
        except BaseException as error:  # the run goes on when the next process opens the folder
            _leave(grid_run, recorder, logbook, began, "interrupted", reason(error))
            raise
        result = _leave(grid_run, recorder, logbook, began)
        logbook.pack()  # last: what has no result goes on by its payloads
        return result


def _leave(
    grid_run: GridRun,
    recorder: Recorder,
    logbook: Logbook,
    began: float,
    status: Status = "finished",
    why: str = "",
) -> Result:
    """Write the result, its page and the model."""
    wall_s, folder = time.perf_counter() - began, logbook.folder
    result = recorder.result(grid_run.model_sha256, logbook.sha256, wall_s, status, why)
    write_model(folder / FINAL, grid_run.model(), grid_run.engine.version)
    result.write(folder)
    write_report(result, folder)
    recorder.trackers.finish(result.to_json())
    return result


def _until_done(grid_run: GridRun, poll_s: float) -> None:
    waits_since: float | None = None
    while not grid_run.done:
        grid_run.step()
        if grid_run.engine.finished:
            waits_since = waits_since or time.monotonic()
            if time.monotonic() - waits_since > LAST_WORD_S:
                if not grid_run.wait_no_longer():
                    log.warning(
                        "the last version was not measured: no node was there for %.0f s", LAST_WORD_S
                    )
                    return
                waits_since = None  # an older version may have been in the last one's way
        time.sleep(poll_s)


def _prepared(
    grid: Grid, context: Context, options: Options, folder: Path
) -> tuple[Config, Tensors, Judge | None]:
    """The configuration with what messages say, the first model, and the ServerApp's judge if it is wanted.

    The journal's, if there is one.
    """
    if (folder / JOURNAL).exists():
        journal = JournalReader(folder)
        known = {w: getattr(journal.config.flower, w) for w in ("train", "evaluate", "central")}
        config = _with(known, options.config)
        played = _heard(grid, context, options).played if config.flower.central else Played()
        initial = journal.initial()
    else:
        heard = _heard(grid, context, options)
        config, initial = _with(heard.settings, options.config), dict(heard.arrays)
        played = heard.played
    return config, initial, judge_of(played, options.serverapp) if config.flower.central else None


def _heard(grid: Grid, context: Context, options: Options) -> Rehearsed:
    """What the app's own ServerApp says. Raises `AppError`."""
    if not options.serverapp:
        raise AppError(
            'anabranch.serverapp must name the app\'s own ServerApp, "module:app": it has the first model'
        )
    serverapp = load(options.serverapp)
    if not isinstance(serverapp, ServerApp):
        raise AppError(
            f"anabranch.serverapp: {options.serverapp!r} is a {type(serverapp).__name__}, no ServerApp"
        )
    with seeded(seed_of(options.config.run.seed, "flower", "first")):
        return hear(serverapp, context, lambda message: _by_a_node(grid, message), options.serverapp)


def _with(said: Mapping[str, Any], config: Config) -> Config:
    lacking = {k: v for k, v in said.items() if f"flower.{k}" not in config.sources}
    return replace(config, flower=replace(config.flower, **lacking))


def _by_a_node(grid: Grid, message: Message) -> Message:
    """What the first node of the Grid answers; waited for, as the first one may still be on its way."""
    while not (node_ids := sorted(grid.get_node_ids())):
        time.sleep(1.0)
    message.metadata.dst_node_id = node_ids[0]
    (reply,) = grid.send_and_receive([message])
    return reply


def unflattened(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots as nested tables again."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        *above, last = key.split(".")
        table = found
        for name in above:
            table = table.setdefault(name, {})
        table[last] = value
    return found
