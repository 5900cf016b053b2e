"""`anabranch search`: the strongest compression that costs at most so much of what the run is judged by."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.api.configuration import load_config
from anabranch.cli.options import AsJson, Overrides, coming_back
from anabranch.cli.output import Output, Ticker
from anabranch.cli.run_options import (
    Clients,
    RunDataPath,
    RunSource,
    Seed,
    option_layers,
    run_source,
    with_an_app,
)
from anabranch.core.config.goal import NO_TARGET, Goal
from anabranch.core.config.tables import Config, StrategyTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.model.params import Tensors
from anabranch.core.rng import seed_of
from anabranch.reports.folders import SEARCH_FILE, claimed
from anabranch.reports.intervals import mean
from anabranch.reports.metrics import metric_names, metric_text, value
from anabranch.reports.result import Result
from anabranch.reports.search import search_html
from anabranch.reports.text import bytes_text, count_text
from anabranch.simulation.run import RunProgress, open_simulation
from anabranch.strategies.compression_schedule import BITS, KEPT, Strength
from anabranch.strategies.compression_search import Search, Trial, search_compression
from anabranch.support.stop_signals import leaving_in_order

LAST_SHARE = 0.25  # of a trial's evaluations: their mean is its value
LOSS_MAX = 0.01  # of accuracy: a point
MILDEST = Strength(KEPT[0], BITS[0])


def search(
    source: RunSource = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder for found.toml, search.json and search.html.", metavar="DIR"),
    ] = None,
    loss_max: Annotated[
        float | None,
        typer.Option(
            help="How much worse run.metric may get, in its unit; of accuracy 0.01, a point, if not given."
        ),
    ] = None,
    updates: Annotated[int, typer.Option(help="Updates of each trial.", min=1)] = 200,
    warm_up_updates: Annotated[
        int, typer.Option(help="Train so long without compression first; 0 begins with the first weights.")
    ] = 0,
    clients: Clients = None,
    seed: Seed = None,
    data_path: RunDataPath = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Search kept fraction and bits for `teasq`: short simulated runs, judged on the validation part.

    The pair that is found is written as a configuration, with every decision and a page of them beside it.
    """
    output = Output(as_json)
    config, presets, flags = run_source(source)
    flags += option_layers(clients=clients, seed=seed, data_path=data_path)
    presets.append(("search", {"strategy": {"name": "teasq"}}))
    with coming_back():
        settings = with_an_app(load_config(config, overrides or (), presets, flags), source)
    if settings.strategy.name != "teasq":
        output.say(f"the configuration is for {settings.strategy.name}: searching with teasq in its place")
        settings = replace(settings, strategy=StrategyTable("teasq"))
    _check(loss_max, Goal.of(settings.run))
    with leaving_in_order(), claimed(out or Path("runs/search"), explicit=out is not None) as folder:
        with coming_back(), Ticker(output, patient=True) as ticker:
            start = _warm(settings, warm_up_updates, ticker) if warm_up_updates else None
            trials = _Trials(settings, updates, start, ticker)
            goal = trials.goal()
            theta = _check(loss_max, goal)
            found = search_compression(trials.measure, theta, goal)
        _write(folder, found, theta, goal)
    _show(output, found, folder, goal)


def _check(loss_max: float | None, goal: Goal) -> float:
    """How much may be lost. Raises `ConfigError`."""
    share = goal.metric in (AUTO, ACCURACY)
    if loss_max is None and not share:
        raise ConfigError(f"--loss-max: say how much worse {goal.metric!r} may get, in its own unit")
    found = LOSS_MAX if loss_max is None else loss_max
    if not (0 <= found < 1 if goal.metric == ACCURACY else 0 <= found < math.inf):
        most = "in [0, 1)" if goal.metric == ACCURACY else "0 or more"
        raise ConfigError(f"--loss-max must be {most}, not {found!r}")
    return found


class _Trials:
    """Short simulated runs, each of one strength, told as they come."""

    def __init__(self, settings: Config, updates: int, start: Tensors | None, ticker: Ticker) -> None:
        self._settings, self._updates, self._start, self._ticker = settings, updates, start, ticker
        self._mildest: Result | None = None

    def goal(self) -> Goal:
        """By which metric trials are judged, as the mildest one shows. Raises `ConfigError`."""
        self._mildest = self._run(MILDEST)
        goal = self._mildest.goal
        if goal.metric == AUTO:
            told = ", ".join(metric_names([self._mildest])) or "nothing that is finite"
            raise ConfigError(f"the App measures {told}: set run.metric and run.mode, which to search by")
        return goal

    def measure(self, strength: Strength) -> Trial:
        """Run one, unless it is the mildest, which is known."""
        result = self._mildest if strength == MILDEST and self._mildest else self._run(strength)
        name, last = result.goal.metric, result.history[-max(1, int(LAST_SHARE * len(result.history))) :]
        known = [v for point in last if (v := value(point, name)) is not None]
        decided = max(1, result.updates_applied + result.updates_rejected)
        middle = mean(known) if len(known) == len(last) else None
        trial = Trial(strength, middle, result.uplink_bytes / decided)
        self._ticker.output.event(
            "trial",
            f"kept {strength.kept:g}, {strength.bits} bits: {name} {metric_text(name, middle)},"
            f" {bytes_text(trial.update_bytes)} an update",
            kept=strength.kept,
            bits=strength.bits,
            update_bytes=trial.update_bytes,
            **{name: middle},
        )
        return trial

    def _run(self, strength: Strength) -> Result:
        config = _with(self._settings, strength, self._updates)
        shown = partial(_show_trial, self._ticker, strength, self._updates)
        with open_simulation(config, progress=shown, start=self._start) as simulation:
            simulation.run()
            return simulation.result(0.0)


def _show_trial(ticker: Ticker, strength: Strength, updates: int, p: RunProgress) -> None:
    done = f"{count_text(p.updates)} of {count_text(updates)} updates"
    words = f"kept {strength.kept:g}, {strength.bits} bits: {done}"
    ticker.show(words, kept=strength.kept, bits=strength.bits, updates=p.updates)


def _with(config: Config, strength: Strength, updates: int) -> Config:
    """A trial: static compression, on the validation part, with a seed that no run has."""
    params = {**config.strategy.params, "kept": strength.kept, "bits": strength.bits, "decay_every": 0}
    run = replace(
        config.run,
        evaluate_on="validation",
        updates_max=updates,
        versions_max=0,
        virtual_s_max=0.0,
        evaluate_every_s=0.0,
        evaluate_every_versions=1,
        target_accuracy=0.0,
        target=NO_TARGET,
        seed=seed_of(config.run.seed, "search") % 2**31,
    )
    return replace(config, run=run, strategy=replace(config.strategy, params=params))


def _warm(config: Config, updates: int, ticker: Ticker) -> Tensors:
    """The weights after a run without compression."""
    ticker.output.say(f"warm-up: {updates} updates without compression")
    raw = Strength(1.0, 32)
    shown = partial(_show_trial, ticker, raw, updates)
    with open_simulation(_with(config, raw, updates), progress=shown) as simulation:
        simulation.run()
        engine = simulation.engine
        return engine.spec.unflatten(engine.vector, simulation.frozen)


def _write(folder: Path, found: Search, loss_max: float, goal: Goal) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data: Mapping[str, Any] = {
        "kept": found.found.kept,
        "bits": found.found.bits,
        "loss_max": loss_max,
        "metric": goal.metric,
        "mode": goal.mode,
        "decisions": [decision.to_json(goal.metric) for decision in found.decisions],
    }
    (folder / SEARCH_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "search.html").write_text(search_html(data), encoding="utf-8")
    toml = f'[strategy]\nname = "teasq"\nkept = {found.found.kept!r}\nbits = {found.found.bits}\n'
    (folder / "found.toml").write_text(toml, encoding="utf-8")


def _show(output: Output, found: Search, folder: Path, goal: Goal) -> None:
    rows = [
        [
            f"{d.trial.strength.kept:g}",
            str(d.trial.strength.bits),
            metric_text(goal.metric, d.trial.value),
            bytes_text(d.trial.update_bytes),
            "yes" if d.taken else "",
            d.why,
        ]
        for d in found.decisions
    ]
    output.table("decisions", ["kept", "bits", goal.metric, "an update", "taken", "why"], rows)
    output.result(
        {"kind": "found", "kept": found.found.kept, "bits": found.found.bits, "folder": str(folder)},
        f"found: kept = {found.found.kept:g}, bits = {found.found.bits}; {folder / 'found.toml'} has it,"
        f" {folder / 'search.html'} why",
    )
