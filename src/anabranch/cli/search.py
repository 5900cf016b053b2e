"""`anabranch search`: the strongest compression that costs at most so much accuracy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from anabranch.cli.configuration import load_config
from anabranch.cli.options import AsJson, Overrides
from anabranch.cli.output import Output
from anabranch.cli.run_options import Clients, RunSource, Seed, option_layers, run_source
from anabranch.core.config.tables import Config, StrategyTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Tensors
from anabranch.core.rng import seed_of
from anabranch.reports.folders import SEARCH_FILE, claimed
from anabranch.reports.search import search_html
from anabranch.reports.text import bytes_text, percent_text
from anabranch.simulation.run import open_simulation
from anabranch.strategies.compression_schedule import Strength
from anabranch.strategies.compression_search import Search, Trial, search_compression

LAST_SHARE = 0.25  # of a trial's evaluations: their mean is its accuracy


def search(
    source: RunSource = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The folder for found.toml, search.json and search.html.", metavar="DIR"),
    ] = None,
    loss_max: Annotated[float, typer.Option(help="Accuracy that may be lost: 0.01 is a point.")] = 0.01,
    updates: Annotated[int, typer.Option(help="Updates of each trial.", min=1)] = 200,
    warm_up_updates: Annotated[
        int, typer.Option(help="Train so long without compression first; 0 begins with the first weights.")
    ] = 0,
    clients: Clients = None,
    seed: Seed = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Search kept fraction and bits for `teasq`: short simulated runs, judged on the validation part.

    The pair that is found is written as a configuration, with every decision and a page of them beside it.
    """
    output = Output(as_json)
    config, presets, flags = run_source(source)
    flags += option_layers(clients=clients, seed=seed)
    presets.append(("search", {"strategy": {"name": "teasq"}}))
    settings = load_config(config, overrides or (), presets, flags)
    if settings.strategy.name != "teasq":
        output.say(f"the configuration is for {settings.strategy.name}: searching with teasq in its place")
        settings = replace(settings, strategy=StrategyTable("teasq"))
    if not 0 <= loss_max < 1:
        raise ConfigError(f"--loss-max must be in [0, 1), not {loss_max!r}")
    start = _warm(settings, warm_up_updates, output) if warm_up_updates else None

    def measure(strength: Strength) -> Trial:
        trial = _trial(_with(settings, strength, updates), strength, start)
        output.event(
            "trial",
            f"kept {strength.kept:g}, {strength.bits} bits: accuracy {percent_text(trial.accuracy)},"
            f" {bytes_text(trial.update_bytes)} an update",
            kept=strength.kept,
            bits=strength.bits,
            accuracy=trial.accuracy,
            update_bytes=trial.update_bytes,
        )
        return trial

    with claimed(out or Path("runs/search"), explicit=out is not None) as folder:
        found = search_compression(measure, loss_max)
        _write(folder, found, loss_max)
    _show(output, found, folder)


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
        seed=seed_of(config.run.seed, "search") % 2**31,
    )
    return replace(config, run=run, strategy=replace(config.strategy, params=params))


def _trial(config: Config, strength: Strength, start: Tensors | None) -> Trial:
    with open_simulation(config, start=start) as simulation:
        simulation.run()
        result = simulation.result(0.0)
    last = result.history[-max(1, int(LAST_SHARE * len(result.history))) :]
    decided = max(1, result.updates_applied + result.updates_rejected)
    accuracy = statistics.fmean(point.accuracy or 0.0 for point in last)  # not finite: worth nothing
    return Trial(strength, accuracy, result.uplink_bytes / decided)


def _warm(config: Config, updates: int, output: Output) -> Tensors:
    """The weights after a run without compression."""
    output.say(f"warm-up: {updates} updates without compression")
    with open_simulation(_with(config, Strength(1.0, 32), updates)) as simulation:
        simulation.run()
        engine = simulation.engine
        return engine.spec.unflatten(engine.vector, simulation.frozen)


def _write(folder: Path, found: Search, loss_max: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data: Mapping[str, Any] = {
        "kept": found.found.kept,
        "bits": found.found.bits,
        "loss_max": loss_max,
        "decisions": [decision.to_json() for decision in found.decisions],
    }
    (folder / SEARCH_FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (folder / "search.html").write_text(search_html(data), encoding="utf-8")
    toml = f'[strategy]\nname = "teasq"\nkept = {found.found.kept!r}\nbits = {found.found.bits}\n'
    (folder / "found.toml").write_text(toml, encoding="utf-8")


def _show(output: Output, found: Search, folder: Path) -> None:
    rows = [
        [
            f"{d.trial.strength.kept:g}",
            str(d.trial.strength.bits),
            percent_text(d.trial.accuracy),
            bytes_text(d.trial.update_bytes),
            "yes" if d.taken else "",
            d.why,
        ]
        for d in found.decisions
    ]
    output.table("decisions", ["kept", "bits", "accuracy", "an update", "taken", "why"], rows)
    output.result(
        {"kind": "found", "kept": found.found.kept, "bits": found.found.bits, "folder": str(folder)},
        f"found: kept = {found.found.kept:g}, bits = {found.found.bits}; {folder / 'found.toml'} has it,"
        f" {folder / 'search.html'} why",
    )
