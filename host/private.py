"""Which runs can be private, and what their sums are made of.

`[privacy]` bounds what one device adds to a sum, and nothing else of it may show. So it cannot stand beside
what looks at single updates, or publishes each of them. Every reason is in one place, here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from anabranch.compress.layout import Layout
from anabranch.compress.registry import make_codec
from anabranch.core.config.tables import Config
from anabranch.core.engine.robust import NO_RULE, RobustTable
from anabranch.core.engine.settable import SET_BY_PRIVACY
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO, RAW, payload_codec
from anabranch.core.model.params import ParamSpec
from anabranch.core.privacy.mechanism import Mechanism, PrivateSums
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.fedprox import FedProx
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.scheduled import Scheduled
from anabranch.strategies.submodels.registry import NO_PLANNER

# Those whose new model is a function of the sums alone. Subclasses are not meant.
ADDING: tuple[type[Any], ...] = (FedBuff, QAFeL, FedAvg, FedProx)


def private_sums(config: Config, spec: ParamSpec, strategy: Strategy, key: bytes | None) -> PrivateSums:
    """The sums of a private run, before version 0. Raises `ConfigError` where there can be none."""
    check_private(config, spec, strategy)
    if key is None:
        raise ConfigError(
            "privacy.clip is set, but there is no key for the noise here: private are a server's run and "
            "`anabranch simulate`, which make one; leave [privacy] out otherwise"
        )
    assert isinstance(strategy, FedBuff | FedAvg)
    privacy = config.privacy
    mechanism = Mechanism(privacy.clip, privacy.noise_used, privacy.bands_used)
    timed = isinstance(strategy, FedAvg) or strategy.flush_s > 0
    return PrivateSums(mechanism, spec.size, key, 1 if timed else strategy.updates_in_sum)


def check_private(config: Config, spec: ParamSpec, strategy: Strategy) -> None:
    """Raises `ConfigError` where a run cannot be private."""
    for why in _objections(config, spec, strategy):
        raise ConfigError(why)


def salted(config: Config) -> bool:
    """Whether each update's record carries a salt, without which a link of the chain would tell of it."""
    return config.privacy.on and config.run.rules > 1


def doubts(config: Config, strategy: Strategy) -> Iterator[str]:
    """What the people of a private run should know, although it is as they want it."""
    privacy, devices = config.privacy, config.fleet.clients
    if not privacy.on:
        return
    if privacy.delta * devices >= 1:
        yield (
            f"privacy.delta = {privacy.delta:g} with {devices} devices: who publishes all that one of them "
            f"has keeps to that as well; take much less than {1 / devices:.1g}"
        )
    wanted = strategy.uplink if isinstance(strategy, QAFeL) else RAW
    chain = wanted if config.uplink.codec == AUTO else config.uplink.codec
    if not config.secagg.on and _length_tells(chain):
        yield (
            f"updates travel as {chain!r}: how long one is follows of its values, and is in the run's record "
            "without noise; set uplink.codec to a chain whose lengths are all alike, such as 'int8(256)', if "
            "that is for others to see"
        )


def _length_tells(chain: str) -> bool:
    """Whether a codec has fewer bytes for some values than for others."""
    codec, some = make_codec(payload_codec(chain)), np.linspace(-1.0, 1.0, 4096, dtype=np.float32) ** 3
    layout = Layout.of(ParamSpec.of({"w": some.reshape(64, 64)}))
    return len({len(codec.encode(values, layout)) for values in (some, some * (some > 0), 0 * some)}) > 1


def dealt(strategy: Strategy) -> Iterator[str]:
    """What is private of an update must not be told by how its device is treated next."""
    if isinstance(strategy, Scheduled):
        yield (
            f"strategy.scheduler {strategy.scheduler.name!r} with [privacy] or [secagg]: "
            "their sums are of tasks of one kind: leave the scheduler out"
        )


def _objections(config: Config, spec: ParamSpec, strategy: Strategy) -> Iterator[str]:
    """Why a run cannot be private, the plainest first."""
    yield from dealt(strategy)
    if type(strategy) not in ADDING:
        names = ", ".join(cls.name for cls in ADDING)
        yield (
            f"strategy {strategy.name!r} cannot be private: its versions show more than the sum of some "
            f"updates; with privacy.clip take one of {names}"
        )
        return
    robust, defaults = config.robust, RobustTable()
    if robust.rule != NO_RULE:
        yield f"robust.rule = {robust.rule!r} looks at single updates: with privacy.clip set it to 'none'"
    if robust.clip not in (AUTO, 0):
        yield "robust.clip cuts by the median of what others sent: with privacy.clip leave it out"
    for key in SET_BY_PRIVACY[1:]:
        if getattr(robust, key) != getattr(defaults, key):
            yield (
                f"robust.{key} is set, but in a private run who is heard how often follows of "
                "privacy.participations and privacy.separation alone: leave it out"
            )
    if config.submodel.name not in (AUTO, NO_PLANNER):
        yield (
            f"submodel.name = {config.submodel.name!r} has devices send other parts, whose sums have other "
            "counts: with privacy.clip set it to 'none'"
        )
    if spec.buffer_places.size and config.model.buffers != "local":
        yield (
            f"model.buffers = {config.model.buffers!r} publishes what a device has measured as it is: with "
            "privacy.clip set it to 'local'"
        )
    yield from _too_few(config, strategy)


def _too_few(config: Config, strategy: Any) -> Iterator[str]:
    """Why its devices could never fill its sums."""
    if isinstance(strategy, FedAvg) and not strategy.deadline_s:
        yield (
            "strategy.deadline_s = 0: a round of a private run may wait for devices that have given all they "
            "may: set a deadline"
        )
    wanted = strategy.updates_in_sum * config.privacy.separation
    if config.fleet.clients < wanted:
        yield (
            f"fleet.clients is {config.fleet.clients}, but sums of {strategy.updates_in_sum} updates with "
            f"privacy.separation = {config.privacy.separation} need {wanted} devices, as one is heard once "
            "in so many versions: say how many there are, or take smaller sums"
        )
