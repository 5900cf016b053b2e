"""Which values the tables of a configuration may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any

from anabranch.core.config.caps import check_limits
from anabranch.core.config.goal import MAX, MIN, Goal
from anabranch.core.config.secagg import MODES
from anabranch.core.content import ALGORITHMS, UNNAMED
from anabranch.core.errors import ConfigError
from anabranch.core.model.chains import AUTO
from anabranch.core.model.updates import NO_WIDTH, is_width
from anabranch.core.retention import Keep
from anabranch.core.rules import NEWEST

Tables = Mapping[str, Any]  # by name, as the fields of `Config`

TASK, OVERLAP, ELASTIC = "task", "overlap", "elastic"  # client.push
BY_STREAM, BY_CALLS = "stream", "calls"  # client.connection, beside AUTO
OF_WHOLE_MODELS = ("none", "fragments")  # submodel.name: devices have the whole model all the same
TRAINS_WHOLE = (
    "client.push = 'elastic' trains the whole model: set submodel.name = 'none', or 'fragments', which "
    "exchanges whole tensors in turn"
)
TURNS, LOT = "turns", "lot"  # server.lapsed
PLACES, TASKS, MINUTE = "places", "tasks", "minute"  # server.windows
MEASURED, TRACED = "measured", "traced"  # fleet.speed
STREAM, CLASSES, ROTATE = "stream", "classes", "rotate"  # fleet.arrival and fleet.arrival_drift
MEASURES = ("step_times_s", "step_spreads", "latencies_s", "up_rates_mbps", "down_rates_mbps")  # by device
LINEAR, PROPORTIONAL = "linear", "proportional"  # submodel.step_time
SENT, BUILT = "sent", "built"  # run.initial
SERVED, LOCAL = "served", "local"  # run.frozen
WHOLE_VERSIONS, OWN = "whole", "own"  # downlink.parts
EXACT, ZEROTH = "exact", "zeroth"  # client.gradient
ENERGY = ("train_w", "up_j_per_mb", "down_j_per_mb")  # of [fleet], and columns of a trace
BY_SPEED, BY_CHANCE = "speed", "chance"  # fleet.widths_max_by
ASKED, UNASKED = "asked", "unasked"  # fleet.fetch
BY_OPERATIONS, AS_WHOLE = "operations", "whole"  # fleet.submodel_step

CHOICES = {
    "run.evaluate_on": ("test", "validation"),
    "run.mode": (AUTO, MAX, MIN),
    "run.initial": (SENT, BUILT),
    "run.frozen": (SERVED, LOCAL),
    "run.payload_digest": (*ALGORITHMS, UNNAMED),
    "downlink.parts": (WHOLE_VERSIONS, OWN),
    "submodel.pattern": ("balanced", "strided", "sequential"),
    "submodel.step_time": (LINEAR, PROPORTIONAL),
    "model.buffers": ("average", "latest", "local"),
    "fleet.submodel_step": (BY_OPERATIONS, AS_WHOLE),
    "fleet.waiting": (AUTO, "ask", "called"),
    "server.lapsed": (TURNS, LOT),
    "server.windows": (PLACES, TASKS, MINUTE),
    "fleet.arrival": ("all", STREAM),
    "fleet.arrival_drift": ("none", CLASSES, ROTATE),
    "fleet.speed": ("levels", "lognormal", "fadas-mild", "fadas-large", MEASURED, TRACED),
    "fleet.widths_max_by": (BY_SPEED, BY_CHANCE),
    "fleet.fetch": (ASKED, UNASKED),
    "identity.tls": ("auto", "always"),
    "secagg.mode": MODES,
    "client.gradient": (EXACT, ZEROTH),
    "client.push": (TASK, OVERLAP, ELASTIC),
    "client.connection": (AUTO, BY_STREAM, BY_CALLS),
    "client.push_when": ("interval", "continuous", "change", "advised"),
    "client.merge": ("delta", "paper-interpolation", "blend"),
    "client.precision": ("auto", "float32", "bfloat16", "float16"),
    "faults.delay_shape": ("fixed", "uniform", "exponential", "lognormal", "pareto"),
}
POSITIVE = (
    "fleet.clients",
    "fleet.dirichlet_alpha",
    "fleet.shards_per_client",
    "fleet.speed_levels",
    "fleet.batch_devices",
    "fleet.step_time_s",
    "fleet.availability_period_s",
    "fleet.availability_day_s",
    "submodel.period",
    "robust.iterations",
    "robust.window_versions",
    "downlink.publish_every_versions",
    "server.lease_s",
    "server.lease_min_s",
    "server.lease_max_s",
    "server.tasks_per_client",
    "server.upload_bytes_per_client",
    "server.retry_after_max_s",
    "server.leader_lease_s",
    "identity.certificate_s",
    "client.batch_size",
    "client.learning_rate",
    "faults.timeout_s",
    "faults.clock_step_s",
    "faults.restore_age_s",
    "client.gradient_eps",
    "client.gradient_queries",
    "client.push_steps",
    "client.push_duty",
    "client.push_change",
    "client.merge_weight",
)
FRACTIONS = (
    "run.target_accuracy",
    "fleet.dropout",
    "fleet.availability",
    "fleet.availability_swing",
    "fleet.availability_zones",
    "fleet.leavers",
    "fleet.attackers",
    "faults.duplication",
    "faults.reordering",
    "faults.delay",
    "faults.partition_fraction",
    "faults.swizzle_fraction",
    "faults.torn_tail",
    "faults.lost_tail",
    "client.push_duty",
    "client.merge_weight",
)
SIGNED = ("run.target",)  # what alone may be negative
IN_A_TASK = ("client.epochs", "client.steps", "client.batch_size")  # they travel as 32 bits
COUNT_MAX = 2**32 - 1
BELOW_ONE = {
    "submodel.drop": "nothing would be left of a unit group",
    "fleet.dropout": "no update would ever come",
    "faults.loss": "no message would ever arrive",
    "faults.drift": "a device's clock would stand still",
}


def _at(tables: Tables, path: str) -> Any:
    table, key = path.split(".")
    return getattr(tables[table], key)


def check_ranges(tables: Tables) -> None:
    """Raises `ConfigError`, naming the key and what it may be."""
    for path, allowed in CHOICES.items():
        if _at(tables, path) not in allowed:
            raise ConfigError(f"{path} must be one of {', '.join(allowed)}, not {_at(tables, path)!r}")
    for path in POSITIVE:
        if not _at(tables, path) > 0:
            raise ConfigError(f"{path} must be greater than 0, not {_at(tables, path)!r}")
    for path in FRACTIONS:
        if not 0 <= _at(tables, path) <= 1:
            raise ConfigError(f"{path} must be from 0 to 1, not {_at(tables, path)!r}")
    for path in IN_A_TASK:
        if _at(tables, path) > COUNT_MAX:
            raise ConfigError(f"{path} must be at most {COUNT_MAX}, not {_at(tables, path)!r}")
    _check_no_negatives(tables)
    if tables["run"].rules > NEWEST:
        raise ConfigError(
            f"run.rules must be at most {NEWEST}, not {tables['run'].rules}: a newer release has others, "
            "which this one does not know; leave it out of a new run's settings"
        )
    Goal.of(tables["run"])
    check_limits(tables["limits"])
    _check_fleet(tables["fleet"], tables["run"])
    _check_arrival(tables["fleet"], tables["client"].push)
    _check_presence(tables["fleet"])
    _check_relations(tables)
    Keep.of(tables["server"].keep)
    tables["robust"].check()
    tables["privacy"].check()
    tables["secagg"].check(tables["privacy"])
    _check_push(tables)


def _check_fleet(fleet: Any, run: Any) -> None:
    if fleet.speed_ratio < 1:
        raise ConfigError(f"fleet.speed_ratio must be at least 1, not {fleet.speed_ratio!r}")
    if fleet.availability == 0:
        raise ConfigError("fleet.availability must be greater than 0: no device would ever come")
    if fleet.leavers and not run.virtual_s_max:
        raise ConfigError("fleet.leavers needs run.virtual_s_max: devices leave at a random moment of it")
    _check_measures(fleet)
    if any(not is_width(width) for width in fleet.widths_max):
        raise ConfigError(f"every number of fleet.widths_max {NO_WIDTH}, not {list(fleet.widths_max)!r}")
    for name in ENERGY:
        if any(value < 0 for value in getattr(fleet, name)):
            raise ConfigError(f"fleet.{name} must not be negative, not {list(getattr(fleet, name))!r}")


def _check_arrival(fleet: Any, push: str) -> None:
    if fleet.arrival != STREAM:
        for name in ("arrival_rate", "arrival_window"):
            if getattr(fleet, name):
                raise ConfigError(
                    f"fleet.{name} is set, and all examples are there from the start: write fleet.arrival = "
                    f"{STREAM!r} too, or leave it out"
                )
        if fleet.arrival_drift != "none":
            raise ConfigError(f"fleet.arrival_drift needs fleet.arrival = {STREAM!r}")
    elif not 0 < fleet.arrival_rate < math.inf:
        raise ConfigError(
            f"fleet.arrival = {STREAM!r} needs fleet.arrival_rate, how many examples a device gets in a "
            f"second, above 0, not {fleet.arrival_rate!r}"
        )
    elif push == ELASTIC:
        raise ConfigError(
            f"fleet.arrival = {STREAM!r} does not go with client.push = {ELASTIC!r}: what a device trains on "
            "is looked up when a task begins, and these devices train on"
        )


def _check_presence(fleet: Any) -> None:
    """Days that devices follow, and a trace in the place of all that."""
    if fleet.speed == TRACED and not fleet.trace:
        raise ConfigError(
            f"fleet.speed = {TRACED!r} needs fleet.trace, a file that has the step time of each device"
        )
    if fleet.trace and fleet.availability != 1:
        raise ConfigError(
            f"fleet.availability is {fleet.availability!r}, and fleet.trace says when devices are there: "
            "leave one of the two out"
        )
    swing = fleet.availability_swing
    if not swing:
        for name in ("availability_peak_s", "availability_zones"):
            if getattr(fleet, name):
                raise ConfigError(f"fleet.{name} needs fleet.availability_swing, how much a day changes")
    elif fleet.availability * (1 + swing) > 1:
        most = math.floor(1e4 * max(0.0, 1 / fleet.availability - 1)) / 1e4  # rounded up it would be refused
        raise ConfigError(
            f"fleet.availability_swing is {swing!r}: at its peak {fleet.availability * (1 + swing):g} of the "
            f"devices would be there. Lower it to {most:g}, or fleet.availability"
        )


def _check_measures(fleet: Any) -> None:
    """What is known of each device: a number for each, of all the same ones."""
    given = {name: values for name in MEASURES if (values := getattr(fleet, name))}
    if fleet.speed != MEASURED:
        for name in given:
            raise ConfigError(
                f"fleet.{name} is for fleet.speed = {MEASURED!r}, not {fleet.speed!r}: leave it out"
            )
        return
    if not fleet.step_times_s:
        raise ConfigError(
            f"fleet.speed = {MEASURED!r} needs fleet.step_times_s, the seconds of a step of each device: "
            "`anabranch calibrate` writes them of a run"
        )
    for name, values in given.items():
        if len(values) != len(fleet.step_times_s):
            raise ConfigError(
                f"fleet.{name} has {len(values)} numbers and fleet.step_times_s {len(fleet.step_times_s)}: "
                "give one for each device"
            )
        if min(values) < 0 or (name == "step_times_s" and min(values) == 0):
            raise ConfigError(f"fleet.{name} has {min(values)!r}: no device is as quick as that")
    if fleet.step_spreads and max(fleet.step_spreads) >= 1:
        raise ConfigError(f"fleet.step_spreads must be from 0 to below 1, not {max(fleet.step_spreads)!r}")


def _check_relations(tables: Tables) -> None:
    server, submodel, client = tables["server"], tables["submodel"], tables["client"]
    for path, else_ in BELOW_ONE.items():
        if not _at(tables, path) < 1:
            raise ConfigError(f"{path} must be less than 1, not {_at(tables, path)!r}: {else_}")
    if not submodel.widths or not all(0 < w <= 1 for w in submodel.widths):
        raise ConfigError(f"submodel.widths must be fractions in (0, 1], not {submodel.widths!r}")
    _check_growth(submodel.grow_at)
    if not (client.epochs or client.steps):
        raise ConfigError("client.epochs or client.steps must be greater than 0: nothing would be learned")
    if server.lease_min_s > server.lease_max_s:
        raise ConfigError(f"server.lease_min_s must not be over lease_max_s, {server.lease_max_s:g}")
    if server.retry_after_min_s > server.retry_after_max_s:
        raise ConfigError(
            f"server.retry_after_min_s must not be over retry_after_max_s, {server.retry_after_max_s:g}"
        )


def _check_growth(grow_at: tuple[float, ...]) -> None:
    if any(not 0 <= share < 1 for share in grow_at) or any(b <= a for a, b in pairwise(grow_at)):
        raise ConfigError(
            "submodel.grow_at must be increasing shares of the run, each from 0 to below 1, not "
            f"{list(grow_at)!r}"
        )


def _check_push(tables: Tables) -> None:
    client, server, submodel = tables["client"], tables["server"], tables["submodel"]
    if client.push_steps_max < client.push_steps:
        raise ConfigError(f"client.push_steps_max must not be under push_steps, {client.push_steps}")
    if client.push == ELASTIC and submodel.name not in (AUTO, *OF_WHOLE_MODELS):
        raise ConfigError(TRAINS_WHOLE)
    if client.push == OVERLAP and server.tasks_per_client < 2:
        raise ConfigError(
            "client.push = 'overlap' needs server.tasks_per_client of at least 2: "
            "a device asks for a task while the result of another is on its way"
        )


def check_today(client: Any) -> None:
    """What is asked of settings today, and was not of runs of before. Raises `ConfigError`."""
    if client.momentum >= 1:
        raise ConfigError(
            f"client.momentum must be less than 1, not {client.momentum!r}: steps would grow without end"
        )


def check_staleness(server: Any, downlink: Any) -> None:
    """Tasks of an older version must have a use; of runs of before it was asked at their start alone."""
    every, bound = downlink.publish_every_versions, server.staleness_max
    if 0 < bound < every:
        raise ConfigError(
            f"server.staleness_max must be 0 or at least downlink.publish_every_versions, {every}, not "
            f"{bound}: tasks start up to {every - 1} versions behind"
        )


def _check_no_negatives(tables: Tables) -> None:
    for name, table in tables.items():
        for f in fields(table):
            value = getattr(table, f.name)
            if isinstance(value, int | float) and value < 0 and f"{name}.{f.name}" not in SIGNED:
                raise ConfigError(f"{name}.{f.name} must not be negative, not {value!r}")
