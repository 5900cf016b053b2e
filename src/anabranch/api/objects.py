"""From objects to the layers of a configuration: what the arguments of `simulate` and the like stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack

from anabranch.api.configuration import UNTIL, WHOLE, Layer, is_config, load_run, run_name, with_end
from anabranch.api.fleets import Fleet
from anabranch.api.until import Until
from anabranch.core.config.faults import FaultsTable
from anabranch.core.config.tables import NO_KEY, TABLES, ClientTable, Config, FleetTable
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import AsyncStrategy, Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.parts import is_data
from anabranch.core.plain import of_python
from anabranch.core.spelling import spelled
from anabranch.strategies.registry import STRATEGIES
from anabranch.workloads.app import App, app_of, load_app


class AnyModel(Protocol):
    """A torch module."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take weights."""
        ...


@dataclass(frozen=True)
class FileTables:
    """What a file of settings says, once somebody has read it."""

    path: Path
    tables: Mapping[str, Any]


# An App by its name, its class or itself; a file of settings, or a configuration; or a model alone (a torch
# module, arrays by name, or a function that makes either), which is all that a server needs.
Source = str | Path | FileTables | Config | App | type[Any] | Callable[[], Any] | dict[str, Any] | AnyModel
Settings = Mapping[str, Any]  # `table.key` -> value


@dataclass(frozen=True)
class RunPlan:
    """What a run begins from. `app` is None where the configuration names it.

    `said`: what was decided for who has not said it.
    """

    config: Config
    said: str
    app: App | None

    def load_app(self) -> App:
        """The App, be it named or given. Raises `AppError`."""
        return self.app or load_app(self.config.run.workload, self.config.run.data_path)


class RunObjects(TypedDict, total=False):
    """What a run can be told beside its source: see `simulate`, which has the same arguments."""

    strategy: Strategy | AsyncStrategy | str | None
    fleet: Fleet | FleetTable | None
    uplink: str | None
    downlink: str | None
    robust: RobustTable | None
    training: ClientTable | None
    faults: FaultsTable | None
    seed: int | None
    until: Until | None
    settings: Settings | None


def plan_run(source: Source, objects: RunObjects, ends: bool = True, name: str = "") -> RunPlan:
    """The configuration of a run; unless `ends` it may go on for ever. `name`: unless a file has one.

    Raises `ConfigError` and `AppError`.
    """
    path, presets, flags, app = _begun(source)
    presets += [("name", {"run": {"name": name}})] if name else []
    flags += _strategy_layers(objects.get("strategy"))
    flags += _table_layers(
        fleet=objects.get("fleet"),
        robust=objects.get("robust"),
        client=objects.get("training"),
        faults=objects.get("faults"),
    )
    codecs = {"uplink": objects.get("uplink"), "downlink": objects.get("downlink")}
    flags += [(f"{t}=", {t: {"codec": str(codec)}}) for t, codec in codecs.items() if codec is not None]
    if (until := objects.get("until")) is not None:
        if not isinstance(until, Until):
            raise ConfigError(f"until={until!r}: give an object of it, such as anabranch.Until(updates=500)")
        flags.append((UNTIL, {"run": until.keys()}))
    if (seed := objects.get("seed")) is not None:
        flags.append(("seed=", {"run": {"seed": seed}}))
    flags += setting_layers(objects.get("settings") or {})
    config = load_run(path, (), presets, flags, app)
    return RunPlan(*with_end(config), app) if ends else RunPlan(config, "", app)


@spelled(RunObjects)
def configure(source: Source, **objects: Unpack[RunObjects]) -> Config:
    """The configuration of a run that `simulate` would make of the same arguments, without the run.

    Raises `ConfigError` and `AppError`.
    """
    return plan_run(source, objects).config


def app_source(source: Any) -> tuple[App, str]:
    """An App that was given itself, as an object, a class or a module; and the place of its code."""
    kind = source if inspect.isclass(source) or inspect.ismodule(source) else type(source)
    place = kind.__name__ if inspect.ismodule(kind) else f"{kind.__module__}:{kind.__qualname__}"
    return app_of(source, place), place


def given_app(source: Any) -> App:
    """An App by its name or the place of its code, or itself. Raises `AppError`."""
    return load_app(str(source)) if isinstance(source, str | Path) else app_source(source)[0]


def _begun(source: Source) -> tuple[Path | None, list[Layer], list[Layer], App | None]:
    """What a source says: the file, the layers below all others, those above it, and the App itself."""
    if isinstance(source, FileTables):
        return None, [(str(source.path), source.tables)], [], None
    if isinstance(source, Config):
        return None, [], [("config", source.whole(clear=True))], None
    if isinstance(source, str | Path):
        if is_config(str(source)):
            return Path(source), [], [], None
        named = (str(source), {"run": {"name": run_name(str(source))}})
        return None, [named], [("source", {"run": {"workload": str(source)}})], None
    app, place = app_source(source)
    named = (place, {"run": {"name": app.name.lower()}})
    return None, [named], [("source", {"run": {"workload": place}})], app


def _strategy_layers(strategy: Strategy | AsyncStrategy | str | None) -> list[Layer]:
    if strategy is None:
        return []
    if isinstance(strategy, str):
        return [("strategy", {"strategy": {"name": strategy}})]
    return [(WHOLE, {"strategy": strategy_keys(strategy)})]


def strategy_keys(strategy: Strategy | AsyncStrategy) -> dict[str, Any]:
    """`[strategy]` for an object: its name and what is not as it is by default. Raises `ConfigError`.

    The class of one's own is let in: it is known by its place from then on.
    """
    kind: Any = type(strategy)
    if isinstance(strategy, type) or not is_data(kind):
        what = "one whose class is a dataclass, frozen=True"
        if isinstance(strategy, type):
            what = f"{strategy.__name__}(...)"
        raise ConfigError(f"strategy={strategy!r}: give {what}, an object, or the name of one")
    for f in fields(kind):
        if f.metadata == NO_KEY and getattr(strategy, f.name) != _default(f):
            raise ConfigError(f"strategy.{f.name} is of [robust]: write robust=Robust(rule='...') beside it")
    params = {f.name: getattr(strategy, f.name) for f in fields(kind) if f.init and f.metadata != NO_KEY}
    defaults = {f.name: _default(f) for f in fields(kind)}
    said = {name: value for name, value in params.items() if value != defaults[name]}
    return {"name": STRATEGIES.named(kind), **said}


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return f.default


# The tables that have an argument of their own, by its name; its class is called the same.
NAMED = {"fleet": "fleet", "robust": "robust", "client": "training", "faults": "faults"}


def _table_layers(**tables: Any) -> list[Layer]:
    layers: list[Layer] = []
    for table, given in tables.items():
        if given is None:
            continue
        if not isinstance(given, TABLES[table] if table != "fleet" else (Fleet, FleetTable)):
            name = NAMED[table]
            raise ConfigError(f"{name}={given!r}: give an object of it, anabranch.{name.capitalize()}(...)")
        layers.append((f"{table}=", {table: given.whole() if isinstance(given, Fleet) else asdict(given)}))
    return layers


def check_settings(settings: Any) -> None:
    """Raises `ConfigError` for what is no table of them."""
    if not isinstance(settings, Mapping):
        what = type(settings).__name__
        raise ConfigError(f"settings is a {what}: give a dict of them, such as {{'client.epochs': 2}}")


def setting_layers(settings: Settings) -> Iterable[Layer]:
    """A layer for each `table.key`. Raises `ConfigError` for what is none."""
    check_settings(settings)
    for path, value in settings.items():
        table, dot, key = str(path).partition(".")
        if not (dot and key):
            raise ConfigError(
                f"settings={{{path!r}: ...}}: name each as 'table.key', such as 'client.epochs'"
            )
        yield "settings=", {table: {key: of_python(value)}}
