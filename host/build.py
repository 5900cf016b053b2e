"""The engine of a run: made of its configuration in one place, whoever runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from anabranch.compress.broadcast import downlink_at, make_broadcast
from anabranch.compress.direct import DirectDownlink
from anabranch.compress.registry import others
from anabranch.core.config.caps import told_to_devices
from anabranch.core.config.ranges import ELASTIC, OF_WHOLE_MODELS, OWN, TRAINS_WHOLE, check_staleness
from anabranch.core.config.tables import Config
from anabranch.core.content import UNNAMED, check_algorithm
from anabranch.core.engine.broadcast import Broadcast
from anabranch.core.engine.buffers import AVERAGE
from anabranch.core.engine.cohorts import Cohorts
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.planner import Planner
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.shelf import Shelf
from anabranch.core.engine.strategy import Strategy, Sums
from anabranch.core.errors import ConfigError
from anabranch.core.limits import Limits
from anabranch.core.model.chains import AUTO, RAW
from anabranch.core.model.params import ParamSpec, Tensors
from anabranch.core.parts import told_name
from anabranch.core.snapshot import Snapshot, restore
from anabranch.host.idle import idle
from anabranch.host.private import doubts, private_sums
from anabranch.host.secagg import check_masking, cohorts_of
from anabranch.strategies.memory import DISK, RememberingStrategy
from anabranch.strategies.optimisers import Adam
from anabranch.strategies.phased import Phased
from anabranch.strategies.registry import doubt, shortage, strategy_of
from anabranch.strategies.scheduled import unscheduled
from anabranch.strategies.submodels.progressive import Progressive, length_doubts
from anabranch.strategies.submodels.registry import make_planner
from anabranch.support.said import Said

log = logging.getLogger(__name__)
said = Said()

# Tables of a run whose devices get the model whole and as it is.
WHOLE = {"downlink": {"codec": RAW}, "submodel": {"name": "none"}}
SERVERS_OWN = ("trackers", "rules")  # keys of [run] that no device goes by
DEVICE_TABLES = ("run", "fleet", "client", "flower", "model")
# An engine that goes on from a snapshot, or begins at version 0 (`Blueprint.engine` with its first argument).
Begin = Callable[[Snapshot | None], Engine]


@dataclass(frozen=True)
class Blueprint:
    """What the engines of a run are made of. Two of them share nothing that changes.

    But the shelf: what lies there is named by what it is, and stays as it is.
    """

    config: Config
    spec: ParamSpec
    strategy: Strategy
    settings: EngineSettings
    sums: Callable[[], Sums | None] = lambda: None
    cohorts: Callable[[], Cohorts | None] = lambda: None
    shelf: Shelf | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        spec: ParamSpec,
        limits: Limits | None = None,
        key: bytes | None = None,
        masks: bool = False,
        shelf: Shelf | None = None,
        unnamed: bool = False,
    ) -> Blueprint:
        """What a configuration says of a model; `limits` stand in for its own. Raises `ConfigError`.

        `key`: that of a private run's noise. `masks`: its devices can mask, and its keepers be asked.
        `shelf`: for what its strategy remembers where that shall lie on a disk. `unnamed`: nothing looks a
        payload up, or tells two apart, so that they may do without digests.
        """
        _check_digest(config.run.payload_digest, unnamed)
        others()  # of two codec stages with one number nobody knows which is meant: said at the start
        strategy = strategy_of(config)
        _check_elastic(config, strategy)
        _check_memory(config, spec, strategy)
        _check_publishing(config, strategy)
        settings = EngineSettings.of(config, limits)
        for text in (
            doubt(strategy, config.fleet.clients),
            shortage(strategy, config.fleet.clients, settings.buffer_max),
            *doubts(config, strategy),
            *length_doubts(config, strategy),
            *idle(config, strategy),
            _buffer_doubt(config, spec, strategy),
        ):
            warn_once(text)
        if config.secagg.on:
            check_masking(masks)
            cohorts = partial(cohorts_of, config, spec, strategy)
            cohorts()  # what is wrong with it is said at the start
            return cls(config, spec, strategy, settings, cohorts=cohorts, shelf=shelf)
        if not config.privacy.on:
            return cls(config, spec, strategy, settings, shelf=shelf)
        sums = partial(private_sums, config, spec, strategy, key)
        sums()  # what is wrong with it is said at the start
        return cls(config, spec, strategy, settings, sums, shelf=shelf)

    @property
    def codec_at(self) -> Callable[[int], str]:
        """The codec of a version's way to the devices."""
        return downlink_at(self.strategy, self.config.downlink.codec)

    def engine(self, initial: Tensors, snapshot: Snapshot | None = None) -> Engine:
        """The engine of a snapshot, or of version 0: the weights `initial`, by name.

        Raises as `parts` does, and `ConfigError` where a shelf is needed and there is none.
        """
        self.check_shelf()
        parts = (*self.parts(), self.sums(), self.cohorts())
        if snapshot is not None:
            return restore(snapshot, self.spec, self.strategy, self.settings, *parts, shelf=self.shelf)
        first = self.spec.flatten(initial)
        return Engine(self.spec, self.strategy, self.settings, first, *parts, own=True, shelf=self.shelf)

    def check_shelf(self) -> None:
        """Raises `ConfigError` where the strategy needs a shelf and there is none."""
        if self.shelf is None and any(map(_wants_shelf, _parts(self.strategy))):
            raise ConfigError(
                f"strategy.memory = {DISK!r} needs a store that has a shelf, and this one has none "
                "(server.database): use SQLite or PostgreSQL, or set memory = 'ram'"
            )

    def parts(self) -> tuple[Broadcast | None, Planner | None]:
        """What an engine sends models by, and what deals sub-models.

        Raises `ConfigError` or `UnknownCodec` where downlink or sub-models do not fit strategy and model.
        """
        downlink, rules = self.config.downlink, self.config.run.rules
        every = downlink.publish_every_versions
        broadcast = make_broadcast(self.spec, self.strategy, downlink.codec, every, rules)
        if downlink.parts == OWN and isinstance(broadcast, DirectDownlink):
            raise ConfigError(
                "downlink.parts = 'own' is for the delta log: a chain encodes versions whole. "
                "Set downlink.codec = 'log(2)', or parts = 'whole'"
            )
        return broadcast, make_planner(self.spec, self.strategy, self.config)


def device_tables(config: Config) -> dict[str, Any]:
    """What a device may read of a run's configuration: names of parts, and never the place of any code."""
    tables = {table: values for table, values in config.to_json().items() if table in DEVICE_TABLES}
    # Always, though a run's own record may leave it out: by it a device knows that the server has a stream.
    tables["client"] = {**tables["client"], "connection": config.client.connection}
    tables["fleet"] = {key: told_name(value) for key, value in tables["fleet"].items()}
    tables["run"] = {key: value for key, value in tables["run"].items() if key not in SERVERS_OWN}
    told = told_to_devices(config.limits)
    more = {"limits": told} if told else {}
    if config.submodel.name == Progressive.name:  # a device has to know the stages
        more["submodel"] = {"name": Progressive.name}
    return {**tables, "server": {"tasks_per_client": config.server.tasks_per_client}, **more}


def warn_once(text: str) -> None:
    """Once, however many runs, looks at a configuration or worker processes there are; nothing, if empty."""
    if text and said.is_new(text):
        log.warning(text)


def _buffer_doubt(config: Config, spec: ParamSpec, strategy: Strategy) -> str:
    """What who judges the model should know of buffers that follow the steps of Adam; empty: nothing."""
    adaptive = any(isinstance(getattr(part, "optimiser", None), Adam) for part in _parts(strategy))
    if not (adaptive and spec.buffers and config.model.buffers == AVERAGE):
        return ""
    return (
        f"model.buffers is {AVERAGE!r}: under {strategy.name!r} buffers, such as a BatchNorm's statistics, "
        "take steps of the server's rate, and a model that has learned is judged by those of one that has "
        "not; take 'latest', see docs/buffers.md"
    )


def _parts(strategy: Strategy) -> tuple[Strategy, ...]:
    """The strategies of a run, one after the other."""
    found = strategy.parts if isinstance(strategy, Phased) else (strategy,)
    return tuple(map(unscheduled, found))


def _wants_shelf(strategy: Strategy) -> bool:
    return isinstance(strategy, RememberingStrategy) and strategy.memory == DISK


def _check_memory(config: Config, spec: ParamSpec, strategy: Strategy) -> None:
    """What a strategy remembers of the fleet must fit."""
    for part in _parts(strategy):
        if isinstance(part, RememberingStrategy):
            part.check_fleet(spec, config.fleet.clients)


def _check_publishing(config: Config, strategy: Strategy) -> None:
    """Raises `ConfigError` where a round would begin from an older version, or tasks have no use."""
    check_staleness(config.server, config.downlink)
    every = config.downlink.publish_every_versions
    if every > 1 and strategy.synchronous:
        raise ConfigError(
            f"downlink.publish_every_versions must be 1, not {every}: strategy {strategy.name!r} works in "
            "rounds, and each begins from its own version"
        )


def _check_digest(algorithm: str, unnamed: bool) -> None:
    """Raises `ConfigError` as `check_algorithm` does, and where payloads shall have none and need one."""
    if algorithm != UNNAMED:
        check_algorithm(algorithm)
    elif not unnamed:
        raise ConfigError(
            f"run.payload_digest = {UNNAMED!r} is for simulations that keep no payloads, and this run knows "
            "them by their digests: write 'sha256' or 'blake3'"
        )


def _check_elastic(config: Config, strategy: Strategy) -> None:
    """What a device keeps of its own must not be added to the model again with its next update.

    And the sub-models that a strategy chooses by itself are none for such a device.
    """
    if config.client.push != ELASTIC:
        return
    if config.submodel.name == AUTO and strategy.submodel not in OF_WHOLE_MODELS:
        chosen = f"strategy {strategy.name!r} chooses sub-models ({strategy.submodel!r})"
        raise ConfigError(f"{chosen}, and {TRAINS_WHOLE}")
    adds = not all(part.mixes_models for part in _parts(strategy))
    if adds and config.client.merge_weight < 1:
        raise ConfigError(
            f"client.push = 'elastic' with strategy {strategy.name!r}, which adds updates up, needs "
            "client.merge_weight = 1: or take a strategy that mixes models, such as fedasync"
        )
