"""Which settings tell something, and the command that has them."""

from __future__ import annotations

import shlex
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.config.tables import Config, merge, parse_override
from anabranch.core.config.toml import setting_text
from anabranch.reports.settings import changed, differing, label_text, settings, simulate_command, told_apart

TABLES: dict[str, dict[str, Any]] = {
    "run": {"seed": 3, "updates_max": 24, "name": "it's", "data_path": '/a b/ü"\\'},
    "strategy": {"name": "fedasync", "alpha": 0.2, "staleness": {"name": "hinge", "a": 1.5, "b": 4}},
    "submodel": {"widths": [1.0, 0.5]},
    "client": {"learning_rate": 1e-05},
    "server": {"database": "postgresql://me:secret@host/db"},
}


def test_only_what_differs_from_the_defaults_is_told() -> None:
    config = merge([("a", TABLES)]).to_json()
    expected = {f"{t}.{k}": v for t, keys in TABLES.items() for k, v in keys.items()}
    assert changed(config) == {**expected, "server.database": "postgresql://me:***@host/db"}
    assert changed(Config().to_json()) == {"strategy.name": "fedbuff"}


def test_the_command_makes_the_same_configuration_without_the_places_of_servers() -> None:
    whole = merge([("a", TABLES)])
    words = shlex.split(simulate_command(whole.to_json()))
    assert words[:2] == ["anabranch", "simulate"]
    assert "secret" not in " ".join(words)
    tables: dict[str, dict[str, object]] = {}
    for flag, text in zip(words[2::2], words[3::2], strict=True):
        assert flag == "--set"
        table, key, value = parse_override(text)
        tables.setdefault(table, {})[key] = value
    expected = {**whole.to_json(), "server": Config().to_json()["server"]}
    assert merge([("b", tables)]).to_json() == expected


VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), inner)
    ),
    max_leaves=5,
)


@given(VALUES)
def test_a_value_is_spelt_as_toml_reads_it(value: object) -> None:
    assert parse_override(f"a.b={setting_text(value)}") == ("a", "b", value)


def test_what_differs_is_neither_the_seed_nor_a_place_nor_a_default_that_is_not_given() -> None:
    one = {"run": {"seed": 0, "name": "a"}, "server": {"data_dir": "x"}, "fleet": {"executor": "serial"}}
    two = {"run": {"seed": 1, "name": "b"}, "fleet": {"clients": 8, "executor": "processes"}}
    assert differing([one, two]) == ()
    three = {"fleet": {"clients": 9, "executor": "batched"}, "strategy": {"alpha": 0.5}}
    assert differing([one, two, three]) == ("fleet.clients", "fleet.executor", "strategy.alpha")


def test_labels() -> None:
    assert label_text("strategy.alpha", 0.2) == "alpha=0.2"
    assert label_text("client.push", "overlap") == "push=overlap"
    assert label_text("uplink.codec", "") == 'codec=""'
    assert label_text("strategy.staleness", {"a": 1}) == "staleness={ a = 1 }"


def test_of_the_limits_those_are_told_that_were_set() -> None:
    """A configuration has all of them once one is set, and none before."""
    plain = merge([("test", {"strategy": {"name": "fedasync"}})]).to_json()
    limited = merge(
        [("test", {"strategy": {"name": "fedasync"}, "limits": {"delta_abs_max": 10.0}})]
    ).to_json()
    assert len(limited["limits"]) > 1
    assert [key for key in changed(limited) if key.startswith("limits.")] == ["limits.delta_abs_max"]
    assert differing([plain, limited]) == ("limits.delta_abs_max",)
    assert simulate_command(limited).count("limits.") == 1


def test_what_an_older_release_did_not_record_is_as_it_was_then() -> None:
    """And so the command for it makes that again; by default it would be otherwise now."""
    today = Config().to_json()
    older = {**today, "server": {k: v for k, v in today["server"].items() if k != "lapsed"}}
    assert changed(older)["server.lapsed"] == settings(older)["server.lapsed"] == "lot"
    assert differing([older, today]) == ("server.lapsed",)
    assert told_apart(older, today) == ['server.lapsed is "lot" there and "turns" here']
    assert "--set server.lapsed=lot" in simulate_command(older)


def test_how_large_a_message_may_be_makes_no_other_run() -> None:
    """An older release's defaults are on record where any limit was set."""
    today = merge([("test", {"limits": {"delta_abs_max": 10.0}})]).to_json()
    sizes = {"message_bytes_max": 2**20, "chunk_bytes_max": 2**18}
    older = {**today, "limits": {**today["limits"], **sizes}}
    assert told_apart(older, today) == []
    assert differing([older, today]) == ()
