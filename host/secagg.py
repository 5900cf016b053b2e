"""Which runs can have masked sums, and their terms.

With `[secagg]` nobody but the device sees an update. So it cannot stand beside what looks at single updates,
publishes each of them, or sends anything but numbers that add up. Every reason is in one place, here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from anabranch.core import events as ev
from anabranch.core.config.ranges import ELASTIC
from anabranch.core.config.tables import Config
from anabranch.core.engine.cohorts import Cohorts
from anabranch.core.engine.robust import NO_RULE, RobustTable
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError
from anabranch.core.limits import COHORT_BYTES_MAX, COHORT_MAX, COHORT_MEMBER_BYTES_MAX
from anabranch.core.model.chains import AUTO
from anabranch.core.model.params import ParamSpec
from anabranch.core.secagg.cohort import COHORT_HEAD_BYTES, member_bytes_max
from anabranch.core.secagg.plans import plan_digest
from anabranch.core.secagg.ring import Numbers, chain_of
from anabranch.core.secagg.terms import STEEPEST, Terms, weights_of
from anabranch.host.private import check_private, dealt
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.submodels.registry import NO_PLANNER

# Those that add up buffers of updates whose number is fixed. Subclasses are not meant.
GATHERING: tuple[type[Any], ...] = (FedBuff, QAFeL)


def terms_of(config: Config, spec: ParamSpec, strategy: Strategy) -> Terms:
    """The terms of a run with masked sums. Raises `ConfigError` where it cannot have them."""
    for why in _objections(config, spec, strategy):
        raise ConfigError(why)
    assert isinstance(strategy, FedBuff)
    secagg, privacy = config.secagg, config.privacy
    bound, local = config.run.rules > 1, EngineSettings.of(config).local
    if privacy.on:
        check_private(config, spec, strategy)
    made = Terms(
        bits=secagg.bits,
        value_bits=secagg.value_bits,
        clip=secagg.clip_of(privacy),
        size=spec.size,
        weights=weights_of(strategy.s, secagg.levels, STEEPEST if bound else 0),
        cohort=strategy.buffer_size,
        cohort_min=secagg.cohort_min,
        keepers=tuple(sorted(secagg.keepers)),
        noise=privacy.noise_used if privacy.on else 0.0,
        participations=privacy.participations if privacy.on else 0,
        separation=privacy.separation if privacy.on else 0,
        plan=plan_digest(local, config.client, config.model.buffers, spec.layout_hash) if bound else "",
    )
    made.check()
    if bound:  # simulations of before had any, and replay
        _check_carried(made)
    return made


def _check_carried(terms: Terms) -> None:
    """Raises `ConfigError` for sums that a keeper does not take: they would wait for ever."""
    keepers, each = len(terms.keepers), member_bytes_max(len(terms.keepers))
    if each > COHORT_MEMBER_BYTES_MAX:
        most = (COHORT_MEMBER_BYTES_MAX - member_bytes_max(0)) // (member_bytes_max(1) - member_bytes_max(0))
        raise ConfigError(f"secagg.keepers names {keepers}: an update has boxes for {most} at most")
    most = min(COHORT_MAX, (COHORT_BYTES_MAX - COHORT_HEAD_BYTES) // each)
    if terms.cohort > most:
        raise ConfigError(
            f"strategy.buffer_size is {terms.cohort}, and a keeper takes masked sums of {most} updates at "
            f"most, with {keepers} in secagg.keepers: take smaller sums"
        )


def cohorts_of(config: Config, spec: ParamSpec, strategy: Strategy) -> Cohorts:
    """The cohorts of a run with masked sums, before the first. Raises as `terms_of` does."""
    terms = terms_of(config, spec, strategy)
    assert isinstance(strategy, FedBuff)
    return Cohorts(terms, strategy.of_total)


def mask_sum_arrived(
    terms: Terms, now: float, number: int, keeper: str, numbers: Numbers
) -> tuple[ev.MaskSumArrived, bytes]:
    """The event of a keeper's answer for a cohort, and the payload that goes into the log with it."""
    data = numbers.tobytes()
    payload = ev.Payload(hashlib.sha256(data).hexdigest(), len(data), terms.codec)
    return ev.MaskSumArrived(now, number, keeper, payload, numbers), data


def check_masking(masks: bool) -> None:
    """Raises `ConfigError` where whoever drives the run has neither devices that mask nor keepers."""
    if not masks:
        raise ConfigError(
            "secagg.mode = 'keeper' is not served here: nothing of this run masks updates or asks keepers; "
            "leave [secagg] out"
        )


def check_guarded(config: Config, guarded: bool) -> None:
    """Raises `ConfigError` for masked sums where devices have no certificates: keepers answer for those."""
    if config.secagg.on and not guarded:
        raise ConfigError(
            "secagg.mode = 'keeper' needs devices with certificates, as keepers check who has signed: set "
            "identity.tls = 'always', and leave out --insecure"
        )


def _objections(config: Config, spec: ParamSpec, strategy: Strategy) -> Iterator[str]:
    """Why a run cannot have masked sums, the plainest first."""
    yield from dealt(strategy)
    if type(strategy) not in GATHERING:
        names = " or ".join(repr(cls.name) for cls in GATHERING)
        yield (
            f"strategy {strategy.name!r} cannot have masked sums: it does not make its versions of the sums "
            f"of a fixed number of updates; with secagg.mode = 'keeper' take {names}"
        )
        return
    assert isinstance(strategy, FedBuff)
    if strategy.flush_s:
        yield (
            f"strategy.flush_s = {strategy.flush_s!r} applies buffers of fewer updates than a sum hides: "
            "with secagg.mode = 'keeper' leave it out"
        )
    yield from _looking(config)
    yield from _not_adding(config, spec)
    if config.privacy.on and config.privacy.bands_used > 1:
        yield (
            f"privacy.bands is {config.privacy.bands_used}: a keeper's noise is independent from sum to sum; "
            "with secagg.mode = 'keeper' set privacy.bands = 1"
        )


def _looking(config: Config) -> Iterator[str]:
    """What looks at single updates."""
    robust, defaults = config.robust, RobustTable()
    if robust.rule != NO_RULE:
        yield (
            f"robust.rule = {robust.rule!r} looks at single updates, which are masked: with secagg.mode = "
            "'keeper' set it to 'none'"
        )
    if robust.clip not in (AUTO, 0):
        yield (
            f"robust.clip = {robust.clip!r} looks at the lengths of updates, which are masked: leave it out, "
            "devices cut to secagg.clip"
        )
    if robust.buffer_max not in (defaults.buffer_max, 1):
        yield (
            f"robust.buffer_max is {robust.buffer_max!r}, but a device is once in a masked sum: leave it out"
        )


def _not_adding(config: Config, spec: ParamSpec) -> Iterator[str]:
    """What sends anything but whole numbers of the whole model."""
    ring = chain_of(config.secagg.bits, config.secagg.value_bits)
    if config.uplink.codec not in (AUTO, ring):
        yield (
            f"uplink.codec = {config.uplink.codec!r} sends what does not add up under masks: with "
            f"secagg.mode = 'keeper' updates travel as {ring}, leave uplink.codec out"
        )
    if config.submodel.name not in (AUTO, NO_PLANNER):
        yield (
            f"submodel.name = {config.submodel.name!r} has devices send parts of the model, which do not add "
            "up under masks: with secagg.mode = 'keeper' set it to 'none'"
        )
    if config.client.push == ELASTIC:
        yield (
            "client.push = 'elastic' sends differences of a training that goes on, of which each cut loses a "
            "part: with secagg.mode = 'keeper' take 'task' or 'overlap'"
        )
    if spec.buffer_places.size and config.model.buffers != "local":
        yield (
            f"model.buffers = {config.model.buffers!r} needs what each device has measured as it is: with "
            "secagg.mode = 'keeper' set it to 'local'"
        )
