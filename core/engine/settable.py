"""Which settings may change while a run goes on, and why the others may not: the one table of it.

What may change says how much, how fast and how long: a budget, a lease, a rate. Nothing of it changes what a
vector means, and no version that there is would be another with it. It takes effect with the next event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from anabranch.core.config.ranges import check_staleness, check_today
from anabranch.core.config.tables import TABLES, TYPED, Config, merge
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.errors import ConfigError
from anabranch.core.secagg.plans import JOINED
from anabranch.core.spelling import did_you_mean

SETTABLE = (
    *("run.versions_max", "run.updates_max", "run.rejections_max"),
    *("server.concurrency", "server.staleness_max", "server.tasks_per_client", "server.upload_now_versions"),
    *("server.lease_s", "server.lease_min_s", "server.lease_max_s"),
    *("server.retry_after_min_s", "server.retry_after_max_s"),
    *("robust.clip", "robust.buffer_max", "robust.window_max", "robust.window_versions"),
    *("robust.tasks_per_minute", "robust.flaws_max"),
    # They travel with each task.
    *("client.epochs", "client.steps", "client.batch_size"),
    *("client.learning_rate", "client.momentum", "client.weight_decay"),
)

# What devices train by (`core/secagg/plans.py`).
PLANNED = tuple(path for path in SETTABLE if path.startswith("client."))

RULE = "the versions so far were made by that rule, and updates wait for it"
PROCESS = "it is of the server's process: start the server again with another value"
JOINING = "devices read it when they join: start the server again with another value, and then the devices"
SIMULATED = "only simulations read it"
JUDGED = "the best version so far was found by it"
PRIVATE = "[privacy] sets it"
# What the bounds of a private run stand in the place of.
SET_BY_PRIVACY = ("clip", "buffer_max", "window_max", "window_versions", "flaws_max")
MASKED = "[secagg] sets it"
SET_BY_SECAGG = ("clip", "buffer_max")
SEALED = "masks are sealed under the plan that all devices have, or one could be told another than the others"
REPORTED = "only the run's report reads it, which has what the run was started with"
FIXED: Mapping[str, str] = {  # a table, or one key of it: why it may not change
    "run.name": "its data and its devices know it by that",
    "run.seed": "every draw of the run comes of it",
    "run.rules": "the versions so far were made by them",
    "run.workload": "it is what is learned",
    "run.data_path": JOINING,
    "run.target_accuracy": REPORTED,
    "run.target": REPORTED,
    "run.metric": JUDGED,
    "run.mode": JUDGED,
    "run.keep_payloads": REPORTED,
    "run.trackers": PROCESS,
    "run.payload_digest": JOINING,
    "run": SIMULATED,
    "fleet": JOINING,
    "ray": SIMULATED,
    "faults": SIMULATED,
    "flower": JOINING,
    "strategy": "the versions so far were made by it",
    "submodel": "the tasks so far were chosen by it",
    "model": "it says what the values of an update mean",
    "robust": RULE,
    "privacy": "the noise of the versions so far was made for it",
    "secagg": "masks are sealed under it",
    "uplink": "devices keep what its codec has left out so far",
    "downlink": "devices make the next model of what it has sent them",
    "server.lapsed": SIMULATED,
    "server.windows": SIMULATED,
    "server": PROCESS,
    "identity": PROCESS,
    "limits": PROCESS,
    "limits.receipts_max": "what was answered to updates that came again depends on it",
    "client": JOINING,
}
# Rules with another default than in older releases: a run has the one that it was started with.
RULES = ("run.rules", "submodel.step_time")
# What a restart compares with the run's start, as the history is a function of it.
KEPT = (
    *("run.seed", "run.rules", "run.metric", "run.mode", "strategy", "submodel", "model.buffers"),
    *("robust", "privacy", "secagg", "uplink.codec", "downlink.codec", "limits.receipts_max"),
)


def why_fixed(path: str) -> str:
    """Why a setting may not change; empty for one that may."""
    return "" if path in SETTABLE else FIXED.get(path) or FIXED[path.partition(".")[0]]


def why_kept(path: str) -> str:
    """Why a restart may not change a setting (`differences`)."""
    return SEALED if path in map(_of_the_clients, JOINED) else why_fixed(path)


def check_settable(paths: Iterable[str]) -> None:
    """Raises `ConfigError` for a setting that may not change, with the reason, or that there is not."""
    for path in paths:
        table, _, key = path.partition(".")
        known = table in TABLES and (table == "strategy" or key in TABLES[table].__dataclass_fields__)
        if not known or not key:
            hint = did_you_mean(path, SETTABLE, likeness=0.7) or "docs/configuration.md has them"
            raise ConfigError(f"there is no setting {path!r}: {hint}")
        if why := why_fixed(path):
            raise ConfigError(f"{path} cannot be changed in a run: {why}")


def typed(config: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their settings have them, in a run that has `config`. Raises `ConfigError`."""
    check_settable(values)
    for on, keys, kind, why in (
        (config.privacy.on, SET_BY_PRIVACY, "a private run", PRIVATE),
        (config.secagg.on, SET_BY_SECAGG, "a run with masked sums", MASKED),
    ):
        if on and (set_ := [f"robust.{key}" for key in keys if f"robust.{key}" in values]):
            raise ConfigError(f"{set_[0]} cannot be changed in {kind}: {why}")
    if _has_a_sealed_plan(config) and (planned := [path for path in values if path in PLANNED]):
        raise ConfigError(f"{planned[0]} cannot be changed in a run with masked sums: {SEALED}")
    given: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        table, _, key = path.partition(".")
        given.setdefault(table, {})[key] = value
    whole = merge([("", config.to_json(every_table=True)), (TYPED, given)])
    if "client.momentum" in values:  # a run of before that has another may still change the rest
        check_today(whole.client)
    if "server.staleness_max" in values:
        check_staleness(whole.server, whole.downlink)
    return {path: value_of(whole, path) for path in values}


def _of_the_clients(name: str) -> str:
    return f"client.{name}"


def _has_a_sealed_plan(config: Config) -> bool:
    return config.secagg.on and config.run.rules > 1


def value_of(config: Config, path: str) -> Any:
    """The value of `table.key`."""
    table, _, key = path.partition(".")
    return getattr(getattr(config, table), key)


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with other values of settings that may change."""
    for path, value in values.items():
        table, _, key = path.partition(".")
        config = replace(config, **{table: replace(getattr(config, table), **{key: value})})
    return config


def as_started(stored: Config, given: Config) -> Config:
    """What a process was given, with the settings that may change as the run was started with.

    And with its name, and its rules where nobody says anything of them.
    """
    today = Config()
    unsaid = [
        path for path in RULES if path not in given.sources and value_of(given, path) == value_of(today, path)
    ]
    return with_values(given, {path: value_of(stored, path) for path in (*SETTABLE, *unsaid, "run.name")})


def in_force(settings: EngineSettings, values: Mapping[str, Any]) -> EngineSettings:
    """The settings of an engine with other values of some of them."""
    for path, value in values.items():
        table, _, key = path.partition(".")
        earliest_s, latest_s = settings.retry_after_s
        if table == "client":
            settings = replace(settings, local=replace(settings.local, **{key: value}))
        elif key == "retry_after_min_s":
            settings = replace(settings, retry_after_s=(value, latest_s))
        elif key == "retry_after_max_s":
            settings = replace(settings, retry_after_s=(earliest_s, value))
        else:
            settings = replace(settings, **{key: value})
    return settings


def value_in_force(settings: EngineSettings, path: str) -> Any:
    """The value that an engine goes by."""
    table, _, key = path.partition(".")
    if table == "client":
        return getattr(settings.local, key)
    if key in ("retry_after_min_s", "retry_after_max_s"):
        return settings.retry_after_s[key == "retry_after_max_s"]
    return getattr(settings, key)


def otherwise(settings: EngineSettings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the values that somebody wants, those that are not in force; what may not be set is left in."""
    return {p: v for p, v in values.items() if p not in SETTABLE or value_in_force(settings, p) != v}


def differences(stored: Config, given: Config) -> Iterable[tuple[str, Any, Any]]:
    """What a restart may not change and did: (path, what the run was started with, what was given)."""
    before, now = stored.to_json(every_table=True), given.to_json(every_table=True)
    for kept in (*KEPT, *(map(_of_the_clients, JOINED) if _has_a_sealed_plan(stored) else ())):
        table, _, key = kept.partition(".")
        names = [key] if key else sorted({*before[table], *now[table]}, key=lambda n: (n != "name", n))
        for name in names:
            path = f"{table}.{name}"
            was, value = before[table].get(name), now[table].get(name)
            if path not in SETTABLE and was != value:
                yield path, was, value
