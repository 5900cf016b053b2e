"""The settings of a run: which of them say something about it, and the command that has them all."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from anabranch.core.config.tables import UNSAID, Config
from anabranch.core.config.toml import setting_text
from anabranch.core.model.chains import AUTO

Settings = dict[str, Any]  # `table.key` -> value

# Where things are and what they are called, and how large a message is: no part of what was tried.
PLACES = frozenset(
    {
        *("run.name", "run.data_path", "run.keep_payloads", "ray.address"),
        *("server.address", "server.admin_address", "server.metrics_address", "server.database"),
        *("server.data_dir", "server.archive"),
        *("identity.folder", "identity.join_address"),
        *("limits.message_bytes_max", "limits.chunk_bytes_max"),
    }
)
SEED, EXECUTOR = "run.seed", "fleet.executor"
STACKED = ("batched", "compiled")  # executors
NO_WORDS = ("true", "false", "inf", "nan")
_MISSING = object()
# What records of older releases do not say.
_UNSAID = {f"{table}.{key}": value for table, keys in UNSAID.items() for key, value in keys.items()}


def settings(config: Mapping[str, Any]) -> Settings:
    """The tables of a configuration as `table.key` -> value; what is not in it has its default.

    Executors are told apart only where their results are other ones.
    """
    found = {**_defaults(), **_keys(config)}
    if found[EXECUTOR] not in STACKED:
        found[EXECUTOR] = AUTO
    return found


def changed(config: Mapping[str, Any]) -> Settings:
    """What is not as it is by default, and all that was said about the strategy."""
    defaults = _defaults()
    given = _keys(config)
    return {k: v for k, v in given.items() if k.startswith("strategy.") or defaults.get(k, _MISSING) != v}


def differing(configs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The settings, but for the seed and places, that are not the same in all of the configurations."""
    known = [settings(config) for config in configs]
    keys = dict.fromkeys(key for one in known for key in one)
    return tuple(
        k
        for k in keys
        if k not in PLACES
        and k != SEED
        and any(o.get(k, _MISSING) != known[0].get(k, _MISSING) for o in known)
    )


def told_apart(
    there: Mapping[str, Any] | None, here: Mapping[str, Any], auto_is_any: bool = True
) -> list[str]:
    """In words, what two configurations differ in, the seed too; nothing where only one is known.

    Whoever trains is the same until it is settled who, if `auto_is_any`.
    """
    if there is None:
        return []
    known, mine = ({**_defaults(), **_keys(json.loads(json.dumps(one)))} for one in (there, here))
    keys = [key for key in dict.fromkeys([*known, *mine]) if key not in PLACES]
    found = [key for key in keys if known.get(key, _MISSING) != mine.get(key, _MISSING)]
    if auto_is_any and AUTO in (known[EXECUTOR], mine[EXECUTOR]) and EXECUTOR in found:
        found.remove(EXECUTOR)
    return [f"{key} is {_shown(known, key)} there and {_shown(mine, key)} here" for key in found]


def _shown(found: Settings, key: str) -> str:
    return setting_text(found[key]) if key in found else "not set"


def all_settings(config: Mapping[str, Any]) -> Settings:
    """Every setting that was recorded."""
    return _keys(config)


def shared_names(configs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Names that settings of several tables have, such as `codec`."""
    keys = {key for config in configs for key in settings(config)}
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {name for name, count in counts.items() if count > 1}


def label_text(key: str, value: object, shared: Container[str] = ()) -> str:
    """`alpha=0.2`, of the setting's own name; with its table if `shared`, unless it is a strategy's."""
    text = value if isinstance(value, str) and value else setting_text(value)
    table, _, name = key.rpartition(".")
    return f"{key if name in shared and table != 'strategy' else name}={text}"


def simulate_command(config: Mapping[str, Any]) -> str:
    """The command that simulates the same again, whatever file and flags the settings came from."""
    return " ".join(["anabranch simulate", *_sets(config)])


def serve_commands(config: Mapping[str, Any]) -> str:
    """The commands that serve a run of the same settings; its devices are what they were."""
    app = shlex.quote(str(config["run"]["workload"]))
    return f"anabranch init {app}\n" + " ".join(["anabranch server", *_sets(config, but="run.workload")])


def _sets(config: Mapping[str, Any], but: str = "") -> list[str]:
    needed = {k: v for k, v in changed(config).items() if k not in PLACES or k.startswith("run.")}
    return [f"--set {shlex.quote(f'{k}={_word(v)}')}" for k, v in needed.items() if k != but]


def _word(value: object) -> str:
    """A value as `--set` reads it: a plain word may do without its quotes."""
    plain = isinstance(value, str) and re.fullmatch(r"[a-z][a-z_-]+", value)
    return str(value) if plain and value not in NO_WORDS else setting_text(value)


def _defaults() -> Settings:
    """Every setting as it is by default; of tables too that a configuration has once a key of them is set."""
    config = Config()
    later = {"model": asdict(config.model), "limits": asdict(config.limits)}
    return {**_keys(later), **_keys(config.to_json())}


def _keys(config: Mapping[str, Any]) -> Settings:
    found: Settings = dict(_UNSAID)
    for table, keys in config.items():
        if isinstance(keys, Mapping):
            found |= {f"{table}.{key}": value for key, value in keys.items()}
        else:
            found[table] = keys
    return found
