"""Settings that change nothing, since another one that they are of is off: who sets them is told so.

Only what is not as it is by default is looked at. A part of one's own may read any key of its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from anabranch.core.config.flower import SCHEME
from anabranch.core.config.ranges import ELASTIC, MEASURED, TRACED, ZEROTH
from anabranch.core.config.tables import Config
from anabranch.core.engine.robust import NO_RULE
from anabranch.core.engine.strategy import Strategy
from anabranch.core.model.chains import AUTO, RAW
from anabranch.strategies.qafel import QAFeL
from anabranch.strategies.scheduled import unscheduled
from anabranch.strategies.submodels.registry import BUILT_IN, NO_PLANNER
from anabranch.strategies.teasq import Teasq

SPLITS = ("iid", "dirichlet", "shards", "speed-shards", "draws")
# Keys of `teasq`.
LOG_STEP, FEEDBACK, CHAIN = "downlink_step", "feedback_decay", ("downlink_kept", "downlink_bits")
STRENGTH = ("kept", "bits", FEEDBACK, "decay_every", "decay_direction", "decay_steps")
# What keys count with.
OTHER_UPLINK, OTHER_DOWNLINK = "uplink.codec = 'auto'", "downlink.codec = 'auto'"
SUBMODELS = "sub-models (submodel.name)"
CLIENT_APP = "an App of ours: a ClientApp goes by its own run config (flower.run_config)"
PARTITION = "an App of ours: a ClientApp reads its partition by itself"


@dataclass(frozen=True)
class Condition:
    """`keys` of a table count where `holds`; `needed` says so to people."""

    table: str
    keys: tuple[str, ...]
    needed: str
    holds: Callable[[Config], Any]


CONDITIONS = (
    Condition(
        "fleet",
        ("attackers", "attack", "attack_strength"),
        "fleet.attackers x fleet.clients of one device at least",
        lambda c: round(c.fleet.attackers * c.fleet.clients),
    ),
    Condition(
        "fleet",
        ("dirichlet_alpha",),
        "fleet.split = 'dirichlet' or 'draws'",
        lambda c: c.fleet.split in ("dirichlet", "draws") or c.fleet.split not in SPLITS,
    ),
    Condition(
        "fleet",
        ("shards_per_client",),
        "fleet.split = 'shards' or 'speed-shards'",
        lambda c: c.fleet.split in ("shards", "speed-shards") or c.fleet.split not in SPLITS,
    ),
    Condition(
        "fleet",
        ("speed_ratio",),
        "fleet.speed = 'levels' or 'lognormal'",
        lambda c: c.fleet.speed in ("levels", "lognormal"),
    ),
    Condition(
        "fleet",
        ("step_time_s",),
        "another fleet.speed than 'measured' and 'traced'",
        lambda c: c.fleet.speed not in (MEASURED, TRACED),
    ),
    Condition(
        "fleet",
        ("availability_period_s",),
        "fleet.availability below 1, or fleet.dropout",
        lambda c: c.fleet.availability < 1 or c.fleet.dropout,
    ),
    Condition(
        "fleet",
        ("widths_max_by",),
        "fleet.widths_max",
        lambda c: c.fleet.widths_max,
    ),
    Condition("client", ("epochs",), "client.steps = 0, which is in its place", lambda c: not c.client.steps),
    Condition(
        "client",
        ("push_when", "push_steps", "push_steps_max", "push_duty", "push_change", "merge", "merge_weight"),
        f"client.push = {ELASTIC!r}",
        lambda c: c.client.push == ELASTIC,
    ),
    Condition(
        "client",
        ("gradient_eps", "gradient_max", "gradient_queries"),
        f"client.gradient = {ZEROTH!r}",
        lambda c: c.client.gradient == ZEROTH,
    ),
    Condition(
        "robust",
        ("attackers", "selected", "radius", "iterations"),
        "a robust.rule",
        lambda c: c.robust.rule != NO_RULE,
    ),
    Condition(
        "privacy",
        ("delta", "participations", "separation", "bands"),
        "privacy.clip",
        lambda c: c.privacy.on,
    ),
    Condition(
        "secagg",
        ("bits", "value_bits", "levels", "cohort_min", "cohorts_waiting_max"),
        "secagg.mode = 'keeper'",
        lambda c: c.secagg.on,
    ),
    Condition(
        "faults",
        ("delay_s",),
        "faults.delay or faults.reordering",
        lambda c: c.faults.delay or c.faults.reordering,
    ),
    Condition("faults", ("delay_shape",), "faults.delay", lambda c: c.faults.delay),
    Condition(
        "faults",
        ("server_down_s",),
        "faults.server_crash_every_s or faults.restore_every_s",
        lambda c: c.faults.server_crash_every_s or c.faults.restore_every_s,
    ),
    *(
        Condition(
            "faults",
            keys,
            f"faults.{rate}",
            lambda c, rate=rate: getattr(c.faults, rate),  # type: ignore[misc]
        )
        for rate, keys in {
            "partition_every_s": ("partition_s", "partition_fraction"),
            "swizzle_every_s": ("swizzle_s", "swizzle_fraction"),
            "device_crash_every_s": ("device_down_s",),
            "server_crash_every_s": ("torn_tail", "lost_tail"),
            "clock_step_every_s": ("clock_step_s",),
            "disk_full_every_s": ("disk_full_s",),
            "restore_every_s": ("restore_age_s",),
            "device_copy_every_s": ("device_copy_s",),
            "keeper_crash_every_s": ("keeper_down_s",),
        }.items()
    ),
)
PLANNERS_OF = {
    "drop": ("random", "hetero"),
    "widths": ("heterofl", "fedrolex", "fjord"),
    "parts": ("ist", "fragments"),
    "pattern": ("fragments",),
    "grow_at": ("progressive",),
    "warm_up_versions": ("progressive",),
    "turns": ("alternate",),
    "period": ("alternate",),
}


def idle(config: Config, strategy: Strategy) -> Iterator[str]:
    """A line for each setting of a run that changes nothing in it."""
    for c in CONDITIONS:
        if not c.holds(config):
            yield from _told(getattr(config, c.table), c.table, c.keys, c.needed)
    if config.run.workload.startswith(SCHEME):
        yield from _idle_of_flower(config)
    yield from _idle_of_submodels(config, strategy)
    yield from _idle_of_strategy(config, unscheduled(strategy))


def _idle_of_flower(config: Config) -> Iterator[str]:
    for key in ("epochs", "steps"):
        if (value := getattr(config.client, key)) != getattr(type(config.client)(), key):
            yield (
                f"client.{key} = {value!r} is time on a virtual clock and nothing else: it counts with "
                f"{CLIENT_APP}"
            )
    keys = ("batch_size", "learning_rate", "momentum", "weight_decay", "precision")
    yield from _told(config.client, "client", keys, CLIENT_APP)
    yield from _told(config.fleet, "fleet", ("split", "examples_per_client"), PARTITION)


def _idle_of_submodels(config: Config, strategy: Strategy) -> Iterator[str]:
    planner = strategy.submodel if config.submodel.name == AUTO else config.submodel.name
    if planner not in (*BUILT_IN, NO_PLANNER):
        return
    for key, planners in PLANNERS_OF.items():
        if planner not in planners:
            needed = f"submodel.name = {' or '.join(map(repr, planners))}"
            yield from _told(config.submodel, "submodel", (key,), needed)
    if planner == NO_PLANNER:
        yield from _told(config.submodel, "submodel", ("coverage_versions",), SUBMODELS)
        yield from _told(config.fleet, "fleet", ("submodel_step",), SUBMODELS)
        yield from _told(config.downlink, "downlink", ("parts",), SUBMODELS)


def _idle_of_strategy(config: Config, strategy: Strategy) -> Iterator[str]:
    if isinstance(strategy, QAFeL) and config.uplink.codec != AUTO:
        yield from _told(strategy, "strategy", ("uplink_bits",), OTHER_UPLINK)
    if not isinstance(strategy, Teasq):
        return
    if config.uplink.codec != AUTO and strategy.schedule.start.chain != RAW:  # else the downlink is raw by it
        yield from _told(strategy, "strategy", STRENGTH, OTHER_UPLINK)
    if config.downlink.codec != AUTO:
        yield from _told(strategy, "strategy", (LOG_STEP, *CHAIN), OTHER_DOWNLINK)
    elif strategy.mode == "paper":
        yield from _told(strategy, "strategy", (LOG_STEP, FEEDBACK), "strategy.mode = 'robust'")
    else:
        yield from _told(strategy, "strategy", CHAIN, "strategy.mode = 'paper'")
    if strategy.mixing:
        yield from _told(strategy, "strategy", ("server_lr",), "strategy.mode = 'robust' and alpha = 0")
    if strategy.cap:
        yield from _told(strategy, "strategy", ("concurrency_fraction",), "cap = 0, which is in its place")
    if strategy.cache_size:
        yield from _told(strategy, "strategy", ("cache_fraction",), "cache_size = 0, which is in its place")


def _told(table: Any, name: str, keys: Iterable[str], needed: str) -> Iterator[str]:
    """Of these keys of a table, those that are not as they are by default."""
    default = type(table)()
    for key in keys:
        value = getattr(table, key)
        if value != getattr(default, key):
            yield f"{name}.{key} = {value!r} changes nothing: it counts with {needed}"
