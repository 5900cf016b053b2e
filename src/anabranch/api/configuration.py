"""Reading configurations: defaults < TOML < environment < flags, or the arguments of a function."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.api.trust import admit
from anabranch.compress.broadcast import check_downlink
from anabranch.compress.feedback import uplink_of
from anabranch.core.config.ranges import ELASTIC, check_today
from anabranch.core.config.tables import ENVIRONMENT, TABLES, TYPED, Config, merge, parse_override
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.metrics import ACCURACY
from anabranch.core.rng import seed_of
from anabranch.strategies.registry import strategy_of
from anabranch.workloads.app import App, load_app
from anabranch.workloads.calls import join_run, settings_of
from anabranch.workloads.registry import SETTINGS

KERNELS = "ANABRANCH_KERNELS"  # no setting of a run: `core/kernels/loops.c` reads it
BROUGHT = "settings.json"  # beside a model: what its App brings along
WHOLE = "strategy="  # the source of a strategy that is whole, whatever the layers below say of it
UNTIL = "until="  # the source of an `Until`: what lies below says nothing of another goal
TUNE = "tune"  # the table of a file that is no run's, but says how one is tuned
SWEEP = "sweep"  # the same, of which runs there are
UPDATES = 200  # of a run whose end nobody has set
UPDATES_TO_TARGET = 10_000  # the same, where the target is its end

Layer = tuple[str, Mapping[str, Any]]
Choice = Mapping[str, Any]  # of settings, by `table.key`


def load_config(
    path: Path | str | None = None,
    overrides: Iterable[str] = (),
    presets: Iterable[Layer] = (),
    flags: Iterable[Layer] = (),
) -> Config:
    """The merged configuration, checked whole, the strategy's parameters too.

    `presets` lie under everything else: what a command such as `demo` sets where nobody else does.
    `flags` are options that stand for a setting; `overrides` are `table.key=value`. A strategy that a later
    layer names takes the place of another one, parameters and all; one that is an object of any (`WHOLE`).
    Raises `ConfigError`.
    """
    layers = [*presets]
    if path is not None:
        layers.append((str(path), one_run(read_settings(Path(path)), path)))
    layers += _environment(os.environ)
    layers += flags
    for text in (overrides,) if isinstance(overrides, str) else overrides:
        table, key, value = parse_override(text)
        if table in (TUNE, SWEEP):
            raise ConfigError(
                f"{TYPED} {table}.{key}: [{table}] is no table of a run: write it in a file, "
                + ("or give `anabranch tune` its options" if table == TUNE else "for `anabranch simulate`")
            )
        layers.append((TYPED, {table: {key: value}}))
    config = merge(_one_target(_one_goal(_one_strategy(layers))))
    check_today(config.client)
    admit(config)
    strategy_of(config)
    if config.uplink.codec != AUTO:
        _check_uplink(config)
    check_downlink(config.downlink.codec)
    return config


def _check_uplink(config: Config) -> None:
    uplink = uplink_of(config.uplink.codec)
    if uplink.share is not None and config.client.push == ELASTIC:
        raise ConfigError(
            f"uplink.codec = {uplink.text!r}: with client.push = 'elastic' a device goes on from its own "
            "model and sends how that has moved, which is no mean of its tasks: leave momentum out"
        )


def load_model_run(
    model: Path,
    app: str,
    path: Path | str | None,
    overrides: Iterable[str] = (),
    presets: Iterable[Layer] = (),
    flags: Iterable[Layer] = (),
) -> Config:
    """As `load_config`, of a run of a model that `anabranch init` wrote to a folder.

    It bears the App's name, and has the settings that the App brings along; `presets` lie over both. Raises
    `ConfigError` where a Flower app was heard with another run config than these settings say.
    """
    file, run = model / BROUGHT, {"name": run_name(app), "workload": app}
    brought = read_settings(file) if file.is_file() else {}
    layers: list[Layer] = [(str(model), {"run": run}), (str(file), brought), *presets]
    config = load_config(path, overrides, layers, flags)
    heard = _keys(brought, "flower").get("run_config")
    said = dict(config.flower.run_config)
    if heard is not None and heard != said:
        raise ConfigError(
            f"flower.run_config is {said}, but {model} was made with {heard}, of which its first weights and "
            f"what devices are told may come: make another, `anabranch init {path or app} --out NEW` with "
            "the same --set, and serve that"
        )
    return config


def load_run(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    presets: Sequence[Layer] = (),
    flags: Sequence[Layer] = (),
    app: App | None = None,
) -> Config:
    """As `load_config`; what the run's App brings along lies under everything else. Raises `AppError`.

    `app` stands in for the one that `[run] workload` names.
    """
    config = load_config(path, overrides, presets, flags)
    app = app or load_app(config.run.workload, config.run.data_path)
    join_run(app, config.to_json())
    brought = settings_of(app, seed_of(config.run.seed, "initial"))
    if not brought:
        return config
    return load_config(path, overrides, [(config.run.workload, brought), *presets], flags)


def with_end(config: Config) -> tuple[Config, str]:
    """A configuration that comes to an end, and what to say where it had none."""
    run = config.run
    if run.updates_max or run.versions_max or run.virtual_s_max:
        return config, ""
    updates = UPDATES_TO_TARGET if run.stop_at_target else UPDATES
    return replace(config, run=replace(run, updates_max=updates)), f"no end was set, so {updates} updates"


def is_config(source: str) -> bool:
    """Whether APP|CONFIG is a file of settings."""
    path = Path(source)
    return path.suffix in SETTINGS or (path.suffix != ".py" and path.is_file())


def run_name(app: str) -> str:
    """What a run of an App is called: `wine` for `examples/wine.py:App`, `apps.wine:App` and `wine`."""
    place, colon, last = app.rpartition(":")
    if place == "flower" or not colon:
        place = last
    path = Path(place)
    return path.stem if path.suffix == ".py" else path.name.rpartition(".")[2]


def shown(config: Config) -> list[tuple[str, Any, str]]:
    """Every value with its source, passwords masked: (table.key, value, source)."""
    rows = []
    for table, keys in config.to_json(every_table=True).items():
        for key, value in keys.items():
            path = f"{table}.{key}"
            rows.append((path, value, config.sources.get(path, "default")))
    return rows


def secrets_environment(config: Config) -> dict[str, str]:
    """The environment that hands another process what the configuration's file does not say."""
    return {
        f"{ENVIRONMENT}{path.replace('.', '_').upper()}": value for path, value in config.secrets().items()
    }


def read_settings(path: Path) -> dict[str, Any]:
    """A TOML file, or the JSON that `Config.to_json` gives."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: name a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8: save it as UTF-8 in your editor") from None
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}{_shown_line(text, str(error))}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f'{path} has no tables of settings, but {_shown(found)}: write {{"table": {{...}}}}'
        )
    return found


def _shown(found: Any) -> str:
    return "a list" if isinstance(found, list) else repr(found)


def _shown_line(text: str, why: str) -> str:
    """The line of a file that an error is of, and what it most often lacks; empty where none is named."""
    place = re.search(r"at line (\d+)", why)
    if place is None:
        return ""
    line = text.split("\n")[int(place[1]) - 1].strip()
    unquoted = re.fullmatch(r"([\w.-]+)\s*=\s*([A-Za-z_./][\w./:-]*)\s*(#.*)?", line)
    return f": {line}" + (f'; text wants quotes: {unquoted[1]} = "{unquoted[2]}"' if unquoted else "")


def one_run(tables: dict[str, Any], path: Path | str) -> dict[str, Any]:
    """The tables of a run, without how it is tuned. Raises `ConfigError` where they are of many runs."""
    if SWEEP in tables:
        raise ConfigError(
            f"{path} has [sweep], which is many runs, for `anabranch simulate` and sweep(): take it out"
        )
    return {name: keys for name, keys in tables.items() if name != TUNE}


def flat_settings(tables: Any, where: str) -> Iterator[tuple[str, Any]]:
    """`table.key` and value, of names with a dot or of tables in tables. Raises `ConfigError`."""
    if not isinstance(tables, Mapping):
        raise ConfigError(f"{where} must be a table of settings, not {tables!r}")
    for name, value in tables.items():
        if "." in str(name):
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{key}", its) for key, its in value.items())
        else:
            raise ConfigError(f"{where}: {name!r} is no setting: write 'table.key', such as 'client.epochs'")


def _environment(environ: Mapping[str, str]) -> list[Layer]:
    layers: list[Layer] = []
    for name in sorted(n for n in environ if n.startswith(ENVIRONMENT) and n != KERNELS):
        table, _, key = name.removeprefix(ENVIRONMENT).lower().partition("_")
        if table not in TABLES or not key:
            raise ConfigError(
                f"{name}: write {ENVIRONMENT}<TABLE>_<KEY>, with a table of {', '.join(TABLES)}"
            )
        _, _, value = parse_override(f"{table}.{key}={environ[name]}")
        layers.append((name, {table: {key: value}}))
    return layers


def _keys(tables: Mapping[str, Any], table: str) -> Mapping[str, Any]:
    """What a layer says in a table; nothing where that is none, which `merge` then says."""
    keys = tables.get(table)
    return keys if isinstance(keys, Mapping) else {}


def _one_target(layers: list[Layer]) -> list[Layer]:
    """`--target` is of whatever metric the run is judged by: `run.target`, where that is not the accuracy."""
    named = [keys["metric"] for _, tables in layers if "metric" in (keys := _keys(tables, "run"))]
    if not named or named[-1] in (AUTO, ACCURACY):
        return layers

    def renamed(source: str, tables: Mapping[str, Any]) -> Layer:
        return source, {
            "run": {"target": tables["run"]["target_accuracy"]}
        } if source == "--target" else tables

    return [renamed(*layer) for layer in layers]


def _one_goal(layers: list[Layer]) -> list[Layer]:
    """Drop what does not go with the goal of an `Until` from the layers below it."""
    at = next((i for i, (source, _) in enumerate(layers) if source == UNTIL), 0)
    if not at:
        return layers
    below = [_keys(tables, "run") for _, tables in layers[:at]]
    metric = next((keys["metric"] for keys in reversed(below) if "metric" in keys), AUTO)
    gone = _outdone(layers[at][1]["run"], metric)

    def kept(source: str, tables: Mapping[str, Any]) -> Layer:
        run = _keys(tables, "run")
        return source, {**tables, "run": {k: v for k, v in run.items() if k not in gone}} if run else tables

    return [*(kept(*layer) for layer in layers[:at]), *layers[at:]]


def _outdone(own: Mapping[str, Any], metric: str) -> set[str]:
    """The keys of a goal, judged by `metric`, in whose place there is something else in `own`."""
    targets, usual = {"target", "target_accuracy"}, (AUTO, ACCURACY)
    gone = targets if targets & own.keys() else set()
    named = own.get("metric", ACCURACY if "target_accuracy" in own else metric)
    if named == metric or (named in usual and metric in usual):
        return gone
    if metric == AUTO:  # then mode and target are of whichever is named
        return gone | {"target_accuracy"}
    return targets | {"metric", "mode"}


def _one_strategy(layers: list[Layer]) -> list[Layer]:
    """Drop the parameters of a strategy that a later layer replaces by another one."""
    named = [i for i, (_, tables) in enumerate(layers) if "name" in _keys(tables, "strategy")]
    if not named:
        return layers
    last = named[-1]
    chosen = layers[last][1]["strategy"]["name"]
    kept: list[Layer] = []
    for i, (source, tables) in enumerate(layers):
        named_here = _keys(tables, "strategy").get("name", chosen)
        replaced = i < last and (named_here != chosen or layers[last][0] == WHOLE)
        kept.append((source, {t: v for t, v in tables.items() if t != "strategy"} if replaced else tables))
    return kept
