"""Configurations: precedence, sources, and errors that name the key and the fix."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anabranch.api.configuration import load_config, shown
from anabranch.core.config.tables import NO_KEY, Config, build, merge, parse_override
from anabranch.core.engine.settable import typed
from anabranch.core.errors import ConfigError, StoreNewer
from anabranch.core.parts import check_names
from anabranch.core.rules import NEWEST
from anabranch.simulation.parts import PARTS


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("ANABRANCH_")]:
        monkeypatch.delenv(name)


def test_later_layers_win_and_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting is in two layers that lie one upon the other, but for the lowest one's."""
    file = tmp_path / "run.toml"
    file.write_text('[run]\nseed = 1\nname = "file"\n[strategy]\nname = "fedbuff"\nbuffer_size = 3\n')
    monkeypatch.setenv("ANABRANCH_RUN_SEED", "2")
    monkeypatch.setenv("ANABRANCH_FLEET_CLIENTS", "5")
    presets: dict[str, Any] = {"client": {"batch_size": 9}, "run": {"name": "preset"}}
    flags: dict[str, Any] = {"fleet": {"clients": 6}, "run": {"updates_max": 7}}
    config = load_config(file, ["run.updates_max=8"], [("demo", presets)], [("--clients", flags)])
    found = {
        "client.batch_size": (config.client.batch_size, "demo"),
        "run.name": (config.run.name, str(file)),
        "run.seed": (config.run.seed, "ANABRANCH_RUN_SEED"),
        "fleet.clients": (config.fleet.clients, "--clients"),
        "run.updates_max": (config.run.updates_max, "--set"),
    }
    assert [value for value, _ in found.values()] == [9, "file", 2, 6, 8]
    assert {key: config.sources[key] for key in found} == {key: source for key, (_, source) in found.items()}
    assert config.strategy.params == {"buffer_size": 3}


def test_a_configuration_survives_json() -> None:
    config = merge([("x", {"strategy": {"name": "fedasync", "alpha": 0.3}, "run": {"seed": 9}})])
    assert Config.from_json(config.to_json()) == config


def test_what_says_nothing_new_is_left_out_so_that_old_journals_stay_what_they_were() -> None:
    plain, every = Config().to_json(), Config().to_json(every_table=True)
    assert "model" not in plain
    assert "clock_step_s" not in plain["faults"]
    assert every["model"]["buffers"] == "average"
    assert (every["faults"]["clock_step_s"], every["faults"]["loss"]) == (3600.0, 0.0)
    assert plain["faults"]["loss"] == 0.0
    changed = merge([("x", {"model": {"buffers": "local"}, "faults": {"clock_step_s": 5.0}})])
    assert changed.to_json()["model"]["buffers"] == "local"
    assert changed.to_json()["faults"]["clock_step_s"] == 5.0
    assert Config.from_json(changed.to_json()) == changed


def test_a_run_of_before_there_was_a_bound_on_rejections_has_none() -> None:
    assert Config.from_json({}).run.rejections_max == 0
    assert Config.from_json({"run": {"rejections_max": 7}}).run.rejections_max == 7
    assert merge([]).run.rejections_max == Config().run.rejections_max == 100


def test_a_run_of_before_devices_took_turns_has_the_lot_and_is_written_as_it_was() -> None:
    before, now = Config.from_json({}), Config()
    assert (before.server.lapsed, now.server.lapsed) == ("lot", "turns")
    assert "lapsed" not in before.to_json()["server"]
    assert now.to_json()["server"]["lapsed"] == "turns"
    assert before.to_json(every_table=True)["server"]["lapsed"] == "lot"
    assert [Config.from_json(c.to_json()) for c in (before, now)] == [before, now]


def test_a_run_on_record_keeps_the_rule_by_which_its_devices_waited() -> None:
    tasks = Config.from_json({"server": {"windows": "tasks"}})
    before, now = Config.from_json({}), Config()
    assert [c.server.windows for c in (before, tasks, now)] == ["minute", "tasks", "places"]
    assert "windows" not in before.to_json()["server"]
    assert [c.to_json()["server"]["windows"] for c in (tasks, now)] == ["tasks", "places"]
    assert [Config.from_json(c.to_json()) for c in (before, tasks, now)] == [before, tasks, now]


def test_secrets_are_kept_apart() -> None:
    url = "postgresql://me:secret@host/db"
    config = merge([("x", {"server": {"database": url}})])
    assert config.to_json()["server"]["database"] == "postgresql://me:***@host/db"
    assert config.secrets() == {"server.database": url}
    assert Config().secrets() == {}


@dataclass(frozen=True)
class Bare:
    """A table without keys."""


@dataclass(frozen=True)
class Odd:
    """A table with a key that must be given, and one of two kinds."""

    needed: int
    either: int | str = 3
    free: Any = None
    hidden: int = field(default=0, metadata=NO_KEY)


def test_a_table_is_built_of_its_keys() -> None:
    assert build(Odd, {"needed": 1, "either": "x", "free": [1]}, "odd") == Odd(1, "x", [1])
    for values, words in (
        ({}, "odd.needed is missing"),
        ({"needed": 1.0}, "odd.needed must be int, not 1.0"),
        ({"needed": 1, "either": 2.5}, "odd.either must be int or str, not 2.5"),
        ({"needed": 1, "either": False}, "odd.either must be int or str, not False"),
        ({"needed": 1, "hidden": 1}, "unknown key in [odd]: 'hidden'"),
        ({"needed": 1, "qqq": 1}, "unknown key in [odd]: 'qqq'; known: needed, either, free"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            build(Odd, values, "odd")
    with pytest.raises(ConfigError, match=r"^unknown key in \[bare\]: 'a'; there are none$"):
        build(Bare, {"a": 1}, "bare")


def test_the_momentum_of_a_task_stays_below_one_but_runs_of_before_have_what_they_had() -> None:
    said = r"^client.momentum must be less than 1, not 1.3"
    with pytest.raises(ConfigError, match=said):
        load_config(None, ["client.momentum=1.3"])
    with pytest.raises(ConfigError, match=said):
        typed(Config(), {"client.momentum": 1.3})
    before = Config.from_json({"client": {"momentum": 1.3}})
    assert before.client.momentum == 1.3
    assert typed(before, {"run.updates_max": 7}) == {"run.updates_max": 7}


def test_another_strategy_drops_the_parameters_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[strategy]\nname = "fedbuff"\nbuffer_size = 3\n')
    config = load_config(file, flags=[("--strategy", {"strategy": {"name": "fedasync"}})])
    assert (config.strategy.name, config.strategy.params) == ("fedasync", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "tune.trials=4",
            r"--set tune\.trials: \[tune\] is no table of a run: .* give `anabranch tune` its opt",
        ),
        ("sweep.seeds=2", r"--set sweep\.seeds: \[sweep\] is no table of a run: .* `anabranch simulate`"),
    ],
)
def test_a_table_that_is_of_many_runs_is_not_taken_for_a_slip_of_the_pen(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [text])


def test_passwords_are_masked() -> None:
    config = load_config(None, ['server.database="postgresql://me:secret@host/db"'])
    rows = {path: value for path, value, _ in shown(config)}
    assert rows["server.database"] == "postgresql://me:***@host/db"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"run": {"sed": 1}}, "unknown key in [run]: 'sed'; did you mean 'seed'?"),
        ({"runs": {}}, "unknown table: 'runs'; did you mean 'run'?"),
        ({"workload": "digits"}, "'workload' stands in no table: it is a key of [run], and goes below"),
        ({"nonsense": 1}, "'nonsense' stands in no table"),
        ({"zzz": {}}, "known: run, fleet"),
        ({"run": 3}, "[run] must be a table"),
        ({"run": {"seed": "one"}}, "run.seed must be int, not 'one'"),
        ({"run": {"seed": True}}, "run.seed must be int, not True"),
        ({"run": {"keep_payloads": 1}}, "run.keep_payloads must be bool, not 1"),
        ({"run": {"target_accuracy": 75}}, "run.target_accuracy must be from 0 to 1"),
        ({"run": {"versions_max": -1}}, "run.versions_max must not be negative"),
        ({"fleet": {"clients": 0}}, "fleet.clients must be greater than 0"),
        ({"fleet": {"speed_ratio": 0.5}}, "fleet.speed_ratio must be at least 1"),
        ({"fleet": {"availability": 0}}, "fleet.availability must be greater than 0"),
        ({"client": {"precision": "float8"}}, "client.precision must be one of"),
        ({"client": {"learning_rate": float("nan")}}, "client.learning_rate must be a finite number"),
        ({"client": {"epochs": 0}}, "client.epochs or client.steps"),
        ({"fleet": {"dropout": 1}}, "fleet.dropout must be less than 1"),
        ({"fleet": {"leavers": 0.5}}, "fleet.leavers needs run.virtual_s_max"),
        ({"fleet": {"submodel_step": "half"}}, "fleet.submodel_step must be one of operations, whole"),
        ({"submodel": {"drop": 1}}, "submodel.drop must be less than 1"),
        ({"submodel": {"widths": []}}, "submodel.widths must be fractions in (0, 1]"),
        ({"submodel": {"widths": [0.5, 2]}}, "submodel.widths must be fractions in (0, 1]"),
        ({"server": {"lease_min_s": 9, "lease_max_s": 5}}, "lease_min_s must not be over lease_max_s, 5"),
        ({"server": {"retry_after_min_s": 9}}, "retry_after_min_s must not be over retry_after_max_s"),
    ],
)
def test_bad_values_name_the_key(tables: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        merge([("x", tables)])


@pytest.mark.parametrize("tables", [{"run": {"sed": 1}}, {"runs": {}}], ids=["key", "table"])
def test_who_said_what_is_unknown_is_named(tables: Any) -> None:
    with pytest.raises(ConfigError, match=r" \(ANABRANCH_RUN\)$"):
        merge([("run.toml", {"run": {"seed": 3, "versions_max": 4}}), ("ANABRANCH_RUN", tables)])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"fleet": {"split": "random"}}, "fleet.split must be one of iid, dirichlet"),
        ({"submodel": {"name": "half"}}, "submodel.name must be one of auto, none, random, hetero"),
        ({"robust": {"rule": "mean"}}, "robust.rule must be one of none, trimmed_mean"),
        ({"fleet": {"attack": "sign"}}, "fleet.attack must be one of sign_flip, scale, alie, ipm"),
        ({"fleet": {"executor": "thread"}}, "fleet.executor must be one of auto, serial, processes"),
        ({"strategy": {"name": "fedbuf"}}, "not 'fedbuf'; did you mean 'fedbuff'?"),
        ({"strategy": {"staleness": {"name": "poly"}}}, "strategy.staleness.name must be one of constant"),
        (
            {"strategy": {"name": "my.py:Mine"}},
            "strategy.name is 'my.py:Mine', which is code: only a command",
        ),
    ],
)
def test_names_of_parts_are_checked_by_who_knows_them(tables: Any, words: str) -> None:
    config = merge([("x", tables)])
    with pytest.raises(ConfigError, match=re.escape(words)):
        check_names(config, PARTS)


def test_integers_are_welcome_where_floats_are() -> None:
    assert merge([("x", {"fleet": {"speed_ratio": 3}})]).fleet.speed_ratio == 3.0
    assert merge([("a", {"robust": {"clip": 2}})]).robust.clip == 2.0, "where a word may stand as well"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("run.seed=1", ("run", "seed", 1)),
        ("run.name=abc", ("run", "name", "abc")),
        ("strategy.staleness={name='hinge'}", ("strategy", "staleness", {"name": "hinge"})),
        ("run.keep_payloads = false", ("run", "keep_payloads", False)),
    ],
)
def test_overrides(text: Any, parsed: Any) -> None:
    assert parse_override(text) == parsed


@pytest.mark.parametrize("text", ["seed=1", "run.seed", "=1", "run.=1"])
def test_an_override_that_is_none(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"table.key=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("text", "example"),
    [
        ("learning_rate=0.1", "--set client.learning_rate=0.1"),
        ("name=mine", "--set run.name=mine or --set strategy.name=mine or --set submodel.name=mine"),
        ("nonsense=1", "--set run.updates_max=1"),
    ],
)
def test_a_setting_without_its_table_is_told_with_those_that_have_it(text: str, example: str) -> None:
    with pytest.raises(ConfigError, match=f"write table.key=value, for example {re.escape(example)}$"):
        parse_override(text)


def test_a_missing_file_a_broken_file_and_a_bad_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run")
    for text, said in (("[1, 2]", "a list"), ("3", "3")):
        other = tmp_path / "other.json"
        other.write_text(text)
        with pytest.raises(ConfigError, match=rf"other\.json has no tables of settings, but {said}: write"):
            load_config(other)
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(broken)
    monkeypatch.setenv("ANABRANCH_NONSENSE", "1")
    with pytest.raises(ConfigError, match="ANABRANCH_<TABLE>_<KEY>"):
        load_config(None)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_a_file_of_an_editor_that_begins_with_a_mark_is_read(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("# für alle\n[run]\nseed = 7\n", encoding=encoding)
    assert load_config(file).run.seed == 7


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_told_how_to_save(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text("# für alle\n[run]\nseed = 7\n", encoding=encoding)
    with pytest.raises(ConfigError, match=r"run\.toml is not UTF-8: save it as UTF-8"):
        load_config(file)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("split = dirichlet", r': split = dirichlet; text wants quotes: split = "dirichlet"$'),
        ("split = dirichlet  # unequal", r'; text wants quotes: split = "dirichlet"$'),
        ("split = digits.py:Own", r'; text wants quotes: split = "digits\.py:Own"$'),
        ("speed_ratio = 0,05", r"at line 2, column \d+\): speed_ratio = 0,05$"),
        ("split = 'iid'\nsplit = 'draws'", r": split = 'draws'$"),
        ("split = '", r"is not TOML: "),
    ],
)
def test_a_line_that_is_no_toml_is_shown(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[fleet]\n{line}\nclients = 3\n")
    with pytest.raises(ConfigError, match=told):
        load_config(file)


def test_the_strategys_own_parameters_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'buffer_size'"):
        load_config(None, ["strategy.buffersize=3"])


def test_a_bad_value_is_told_with_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[server]\nlease_s = 'x'\n")
    with pytest.raises(ConfigError, match=rf"^server\.lease_s must be .* \({re.escape(str(file))}\)$"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"^server\.lease_s must be greater than 0, not -1\.0$"):
        load_config(file, ["server.lease_s=-1.0"])
    monkeypatch.setenv("ANABRANCH_RUN_UPDATES_MAX", "many")
    with pytest.raises(ConfigError, match=r"not 'many' \(ANABRANCH_RUN_UPDATES_MAX\)$"):
        load_config(None)


@pytest.mark.parametrize("setting", ["uplink.codec", "downlink.codec"])
@pytest.mark.parametrize(
    ("text", "told"), [("nope", "unknown stage 'nope'; known: raw"), ("INT8", "write stages")]
)
def test_a_codec_that_is_not_known_is_told_with_its_setting(setting: str, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting} = '{text}': {told}"):
        load_config(None, [f"{setting}={text}"])


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"tides": {"high": 1}}, r"\[tides\] is a table of settings that is not known here"),
        ({"server": {"moon": 1}}, r"server\.moon is a setting that is not known here"),
        ({"run": {"rules": NEWEST + 1}}, rf"run\.rules is {NEWEST + 1}, and {NEWEST} is the newest known"),
    ],
)
def test_settings_that_a_newer_release_has_stored_are_no_mistake_of_a_user(stored: Any, said: str) -> None:
    with pytest.raises(StoreNewer, match=rf"{said}.*: a newer release has written it; upgrade anabranch"):
        Config.from_json(stored)
    with pytest.raises(ConfigError):
        merge([("mine.toml", stored)])


def test_what_a_strategy_is_told_is_its_own() -> None:
    assert Config.from_json({"strategy": {"name": "mine", "moon": 1}}).strategy.params == {"moon": 1}
