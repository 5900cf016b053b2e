"""Objects are their TOML: object -> TOML -> configuration -> object, for every strategy, fleet and goal."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import anabranch as ab
from anabranch.api.fleets import GROUPS, Fleet
from anabranch.api.objects import RunObjects
from anabranch.core.config.tables import NO_KEY, Config, FleetTable, merge
from anabranch.core.errors import AppError, ConfigError
from anabranch.strategies import strategy_of
from anabranch.strategies.fedbuff import FedBuff
from anabranch.strategies.registry import STRATEGIES
from anabranch.strategies.robust.krum import Krum
from anabranch.workloads.synthetic import Synthetic


def read_back(config: Config) -> Config:
    """The configuration that its own TOML is."""
    found = merge([("file", tomllib.loads(config.to_toml()))])
    assert found == merge([("file", tomllib.loads(config.to_toml(every_key=True)))]) == config
    return found


FROM_ONE_ON = ("over_selection", "latest_factor")


def changes() -> Iterator[tuple[str, str, Any]]:
    """A value other than the default for each parameter of each strategy that has a range."""
    for name, cls in STRATEGIES.ours().items():
        plain = cls()
        for f in fields(cls):
            value = getattr(plain, f.name)
            if f.metadata == NO_KEY or isinstance(value, str):
                continue
            if f.name == "phases":
                yield (
                    name,
                    f.name,
                    [
                        {"strategy": "fedprox", "until_versions": 3},
                        {"strategy": "fedbuff", "buffer_size": 4},
                    ],
                )
            elif f.name == "outer":
                yield name, f.name, {"name": "nesterov", "lr": 0.5}
            elif isinstance(value, dict):
                yield name, f.name, {"name": "hinge", "a": 2.0, "b": 3.0}
            elif f.name == "c":
                yield name, f.name, 0.125
            elif f.name.endswith("bits"):
                yield name, f.name, 8 if value == 4 else 4
            elif isinstance(value, int):
                yield name, f.name, value + 1
            else:
                yield name, f.name, (value / 2 or 0.25) + (f.name in FROM_ONE_ON)


@pytest.mark.parametrize(("name", "key", "value"), list(changes()))
def test_every_parameter_of_every_strategy_is_its_toml(name: str, key: str, value: Any) -> None:
    given = STRATEGIES.find(name)(**{key: value})
    config = ab.configure("synthetic", strategy=given, until=ab.Until(updates=1))
    assert config.strategy.params == {key: value}, "what is as it is by default is not said"
    assert strategy_of(read_back(config)) == given
    assert f"{key} = " in config.to_toml()


def test_every_strategy_has_its_name_in_the_package() -> None:
    classes = {getattr(ab.strategies, name) for name in ab.strategies.__all__ if name != "strategy_of"}
    assert classes == set(STRATEGIES.ours().values())


def measured(rows: list[tuple[float, ...]]) -> ab.Measured:
    return ab.Measured(*zip(*rows, strict=True))


numbers = st.floats(1e-3, 1e3)
counts = st.integers(1, 1000)
speeds = st.one_of(
    st.builds(ab.Levels, st.floats(1, 100), counts, numbers),
    st.builds(ab.Lognormal, st.floats(1, 100), counts, numbers),
    st.builds(ab.FadasMild, numbers),
    st.builds(ab.FadasLarge, numbers),
    st.builds(
        measured, st.lists(st.tuples(numbers, st.floats(0, 0.9), numbers, numbers, numbers), min_size=1)
    ),
)
splits = st.one_of(
    st.builds(ab.Iid),
    st.builds(ab.Dirichlet, numbers),
    st.builds(ab.Shards, counts),
    st.builds(ab.SpeedShards, counts),
    st.builds(ab.Draws, counts, numbers),
)
arrivals = st.one_of(
    st.builds(ab.AllAtOnce),
    st.builds(ab.Arriving, numbers, st.sampled_from(["none", "classes", "rotate"]), counts),
)
fleets = st.builds(
    Fleet,
    clients=counts,
    split=splits,
    speed=speeds,
    links=st.builds(ab.Links, numbers, numbers, numbers),
    arrival=arrivals,
    dropout=st.floats(0, 0.9),
    availability=st.floats(0.1, 1),
    availability_period_s=numbers,
    attackers=st.floats(0, 1),
    attack=st.sampled_from(["sign_flip", "alie"]),
    attack_strength=numbers,
    waiting=st.sampled_from(["auto", "ask", "called"]),
    batch_devices=counts,
)


@given(fleets)
def test_a_fleet_is_its_toml(fleet: Fleet) -> None:
    config = ab.configure("synthetic", fleet=fleet, until=ab.Until(updates=1))
    assert Fleet.of(read_back(config).fleet) == fleet


@given(fleets.filter(lambda fleet: not isinstance(fleet.split, ab.Draws)), counts)
def test_a_cap_on_examples_is_of_every_other_split(fleet: Fleet, cap: int) -> None:
    capped = replace(fleet, examples_per_client=cap)
    config = ab.configure("synthetic", fleet=capped, until=ab.Until(updates=1))
    assert config.fleet.examples_per_client == cap
    assert Fleet.of(config.fleet) == capped


def test_every_key_of_the_table_has_a_place_and_its_default_in_the_fleet() -> None:
    kinds = [Fleet, ab.Links, *(kind for kinds in GROUPS.values() for kind in kinds.values())]
    reached = {f.metadata.get("key", f.name) for kind in kinds for f in fields(kind)} - {"links"}
    assert reached == {f.name for f in fields(FleetTable)}
    assert FleetTable(**Fleet().keys()) == FleetTable()
    assert Fleet.of(FleetTable()) == Fleet()


@given(fleets, fleets)
def test_a_fleet_is_whole_whatever_lies_below_it(before: Fleet, fleet: Fleet) -> None:
    base = ab.configure("synthetic", fleet=before, until=ab.Until(updates=1))
    alone = ab.configure("synthetic", fleet=fleet, until=ab.Until(updates=1))
    assert ab.configure(base, fleet=fleet).fleet == alone.fleet


def test_a_fleet_is_whole_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        "[run]\nworkload = 'synthetic'\nupdates_max = 3\n"
        "[fleet]\nspeed = 'measured'\nstep_times_s = [0.1, 0.2]\narrival = 'stream'\narrival_rate = 2.0\n"
    )
    assert ab.configure(path, fleet=Fleet(clients=4)).fleet == FleetTable(clients=4)


def test_a_split_of_ones_own_reads_what_a_file_says_for_it(tmp_path: Path) -> None:
    own, path = tmp_path / "mine.py", tmp_path / "run.toml"
    own.write_text("def split(labels, count, fleet, seed, speed_groups):\n    return []\n")
    path.write_text(
        "[run]\nworkload = 'synthetic'\nupdates_max = 3\n"
        "[fleet]\ndirichlet_alpha = 0.7\nshards_per_client = 5\nspeed_ratio = 9.0\n"
    )
    split = f"{own}:split"
    found = ab.configure(path, fleet=Fleet(clients=4, split=split)).fleet
    assert found == FleetTable(clients=4, split=split, dirichlet_alpha=0.7, shards_per_client=5)
    assert ab.configure(path, fleet=Fleet(clients=4)).fleet == FleetTable(clients=4)


@pytest.mark.parametrize(
    ("until", "keys"),
    [
        (ab.Until(updates=5, seconds=7), {"updates_max": 5, "virtual_s_max": 7.0}),
        (
            ab.Until(versions=3, accuracy=0.9),
            {"versions_max": 3, "target_accuracy": 0.9, "stop_at_target": True},
        ),
        (ab.Until(updates=5, accuracy=0.9, go_on=True), {"updates_max": 5, "target_accuracy": 0.9}),
        (
            ab.Until(updates=5, metric="mae", mode="min", target=2),
            {"updates_max": 5, "metric": "mae", "mode": "min", "target": 2.0, "stop_at_target": True},
        ),
    ],
)
def test_an_end_is_its_toml(until: ab.Until, keys: dict[str, Any]) -> None:
    config = read_back(ab.configure("synthetic", until=until))
    own = {"name": "synthetic", "workload": "synthetic"}
    assert asdict(config.run) == asdict(merge([("test", {"run": {**own, **keys}})]).run)


ENDED_SOON = """
[run]
workload = "synthetic"
updates_max = 40
target_accuracy = 0.15
stop_at_target = true
[strategy]
name = "fedasync"
"""


def ended(said: str) -> dict[str, Any]:
    """Of a file's `[run]` what is judged and when it ends, where it is not as by default."""
    return {
        key: value for key, value in tomllib.loads(said)["run"].items() if key not in ("name", "workload")
    }


JUDGED_BY_LOSS = "[run]\nworkload='synthetic'\nmetric = 'loss'\ntarget = 0.5\nstop_at_target = true\n"
JUDGED_BY_MAE = "[run]\nworkload='synthetic'\nmetric = 'mae'\nmode = 'min'\ntarget = 2.0\n"


@pytest.mark.parametrize(
    ("file", "until", "keys"),
    [
        (ENDED_SOON, ab.Until(updates=9), {"updates_max": 9, "target_accuracy": 0.15}),
        (
            ENDED_SOON,
            ab.Until(updates=9, accuracy=0.15, go_on=True),
            {"updates_max": 9, "target_accuracy": 0.15},
        ),
        (
            ENDED_SOON,
            ab.Until(updates=9, metric="loss", target=0.1),
            {"updates_max": 9, "metric": "loss", "target": 0.1, "stop_at_target": True},
        ),
        (ENDED_SOON, ab.Until(updates=9, metric="loss"), {"updates_max": 9, "metric": "loss"}),
        (
            ENDED_SOON,
            ab.Until(updates=9, metric="accuracy"),
            {"updates_max": 9, "metric": "accuracy", "target_accuracy": 0.15},
        ),
        (
            ENDED_SOON,
            ab.Until(updates=9, metric="accuracy", target=0.2),
            {"updates_max": 9, "metric": "accuracy", "target": 0.2, "stop_at_target": True},
        ),
        (JUDGED_BY_LOSS, ab.Until(updates=9), {"updates_max": 9, "metric": "loss", "target": 0.5}),
        (
            JUDGED_BY_LOSS,
            ab.Until(updates=9, target=0.2),
            {"updates_max": 9, "metric": "loss", "target": 0.2, "stop_at_target": True},
        ),
        (
            JUDGED_BY_MAE,
            ab.Until(updates=9, accuracy=0.8),
            {"updates_max": 9, "target_accuracy": 0.8, "stop_at_target": True},
        ),
        (
            JUDGED_BY_MAE,
            ab.Until(updates=9, metric="accuracy", accuracy=0.8),
            {"updates_max": 9, "metric": "accuracy", "target_accuracy": 0.8, "stop_at_target": True},
        ),
        (
            JUDGED_BY_MAE,
            ab.Until(updates=9, metric="mae", target=1),
            {"updates_max": 9, "metric": "mae", "mode": "min", "target": 1.0, "stop_at_target": True},
        ),
    ],
)
def test_an_end_counts_over_a_file_and_over_a_configuration(
    file: str, until: ab.Until, keys: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(file)
    assert ended(ab.configure(path, until=until).to_toml()) == keys
    assert ended(ab.configure(ab.load_config(path), until=until).to_toml()) == keys


@pytest.mark.parametrize("said", ["run = 3", "strategy = 3", "run = 'metric'"])
def test_what_is_wrong_in_a_file_is_said_where_an_end_is_given(said: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(said)
    with pytest.raises(ConfigError, match=r"must be a table of keys, not .* \(.*run\.toml\)"):
        ab.configure(path, strategy="fedasync", until=ab.Until(updates=9, accuracy=0.5))


def test_an_end_may_name_the_metric_that_a_file_has_a_target_of(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nworkload = 'synthetic'\nmode = 'min'\ntarget = 2.0\n")
    found = ab.configure(path, until=ab.Until(updates=9, metric="mae"))
    assert ended(found.to_toml()) == {"updates_max": 9, "metric": "mae", "mode": "min", "target": 2.0}


def test_a_target_of_a_file_ends_nothing_where_an_end_is_given(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(ENDED_SOON)
    assert ab.simulate(path).result.updates_applied < 30
    gone_on = ab.simulate(path, until=ab.Until(updates=30)).result
    assert (gone_on.updates_applied, gone_on.target_accuracy) == (30, 0.15)
    assert gone_on.time_to_target_s is not None, "the way to it is measured"
    said = ab.simulate(path, until=ab.Until(updates=30, accuracy=0.15, go_on=True)).result
    assert said.journal_sha256 == gone_on.journal_sha256


def test_tables_are_objects_and_a_later_word_counts() -> None:
    config = ab.configure(
        "synthetic",
        robust=ab.Robust(rule="krum", attackers=0.2),
        training=ab.Training(epochs=3),
        faults=ab.Faults(loss=0.1),
        uplink="topk(0.1)|int8|gaps|zstd",
        downlink="log(1)",
        seed=4,
        until=ab.Until(updates=9),
        settings={"client.batch_size": 7, "submodel.name": "none"},
    )
    read_back(config)
    assert (config.robust.rule, config.client.epochs, config.client.batch_size) == ("krum", 3, 7)
    assert (config.faults.loss, config.uplink.codec, config.downlink.codec) == (
        0.1,
        "topk(0.1)|int8|gaps|zstd",
        "log(1)",
    )
    assert (config.run.seed, config.submodel.name) == (4, "none")
    again = ab.configure(config, seed=5, training=ab.Training(epochs=1))
    changed = replace(config, run=replace(config.run, seed=5), client=ab.Training(epochs=1))
    assert again.whole(clear=True) == changed.whole(clear=True)


def test_an_object_takes_the_place_of_the_whole_strategy(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nworkload = "synthetic"\nupdates_max = 3\n[strategy]\nname = "teasq"\nbits = 8\n')
    assert dict(ab.configure(file).strategy.params) == {"bits": 8}
    assert dict(ab.configure(file, strategy="teasq").strategy.params) == {"bits": 8}
    assert dict(ab.configure(file, strategy=ab.strategies.Teasq(kept=0.5)).strategy.params) == {"kept": 0.5}
    assert ab.load_config(file).strategy.name == "teasq"


@dataclass(frozen=True)
class Damped(FedBuff):
    """A strategy of this file's own."""

    name: ClassVar[str] = "damped"
    by: float = 0.5


def test_a_strategy_of_ones_own_is_an_object_like_any_other() -> None:
    config = ab.configure("synthetic", strategy=Damped(by=0.25), until=ab.Until(updates=1))
    assert config.strategy.name == f"{__name__}:Damped"
    assert strategy_of(config) == Damped(by=0.25)


@dataclass(frozen=True)
class NoStrategy:
    """Lacks everything."""

    name: ClassVar[str] = "none of it"
    rule: Any = field(default=None)


@dataclass
class Counting:
    """May remember in itself what no snapshot has."""

    name: ClassVar[str] = "counting"
    count: int = 0


LEVELS: Any = "levels"  # as the table has it
ANYTHING: Any = "5"  # where a number belongs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"strategy": ab.strategies.Teasq}, r"give Teasq\(\.\.\.\), an object"),
        ({"strategy": FedBuff(rule=Krum(0.2))}, r"robust=Robust\(rule='\.\.\.'\)"),
        ({"strategy": NoStrategy()}, "is no strategy: it lacks"),
        ({"strategy": Counting()}, "one whose class is a dataclass, frozen=True"),
        ({"strategy": "teask"}, "did you mean 'teasq'"),
        ({"fleet": ab.Links()}, r"fleet=Links\(.*: give an object of it, anabranch\.Fleet\(\.\.\.\)"),
        ({"training": {"epochs": 2}}, r"training=.*anabranch\.Training\(\.\.\.\)"),
        ({"until": 10}, r"until=10: give an object of it, such as anabranch\.Until"),
        ({"fleet": Fleet(speed=LEVELS)}, r"Fleet\.speed must be one of Levels\(\), Lognormal\(\)"),
        ({"fleet": Fleet(clients=0)}, r"fleet\.clients must be greater than 0"),
        ({"settings": {"client": 3}}, "'client.epochs'"),
        ({"settings": {"client.epoch": 3}}, "did you mean 'epochs'"),
        ({"until": ab.Until(metric="mae", mode="min", accuracy=0.5)}, "target=0.5 in its place"),
        ({"uplink": "topk(2)"}, "topk"),
        ({"settings": [("client.epochs", 2)]}, r"settings is a list: give a dict of them"),
        ({"settings": "client.epochs=2"}, r"settings is a str: give a dict of them"),
        ({"settings": {3: 2}}, r"settings=\{3: \.\.\.\}: name each as 'table\.key'"),
        ({"until": ab.Until(seconds=ANYTHING)}, r"run\.virtual_s_max must be float, not '5'"),
        ({"until": ab.Until(accuracy=ANYTHING)}, r"run\.target_accuracy must be float, not '5'"),
        (
            {"until": ab.Until(metric="loss", target=ANYTHING)},
            r"run\.target must be a number or 'none', not '5'",
        ),
        (
            {"fleet": Fleet(split=ab.Draws(examples_per_client=5), examples_per_client=7)},
            r"Fleet\.examples_per_client is 7, and split=Draws\(examples_per_client=5",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_fix(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ab.AnabranchError, match=said):
        ab.configure(Synthetic(), **{"until": ab.Until(updates=1), **arguments})


def test_numbers_of_numpy_are_numbers() -> None:
    """A seed of `np.arange`, a rate of a grid."""
    ours, rate = np.arange(4)[3], np.logspace(-2, 0, 3)[1]
    settings = {
        "submodel.widths": np.array([0.5, 1.0]),
        "client.learning_rate": rate,
        "run.updates_max": ours,
    }
    found = ab.configure(Synthetic(), seed=ours, settings=settings)
    assert (found.run.seed, found.client.learning_rate) == (3, 0.1)
    assert (type(found.run.seed), type(found.client.learning_rate)) == (int, float)
    assert (list(found.submodel.widths), found.run.updates_max) == ([0.5, 1.0], 3)
    seven: Any = np.float32(7)
    two: Any = np.int64(2)
    until = ab.Until(seconds=seven, metric="loss", target=two)
    run = ab.configure(Synthetic(), until=until).run
    assert (run.virtual_s_max, run.target, type(run.target)) == (7.0, 2.0, float)


def test_whatever_takes_the_objects_of_a_run_takes_those_of_simulate() -> None:
    own = {"source", "callbacks", "progress", "out", "workers", "checkpoint_s", "resume"}
    assert list(RunObjects.__annotations__) == [n for n in signature(ab.simulate).parameters if n not in own]


TAKERS: dict[str, Callable[..., Any]] = {
    "configure": ab.configure,
    "sweep": partial(ab.sweep, grid={}),
    "tune": ab.tune,
    "Server": ab.Server,
    "Server.local": ab.Server.local,
    "JobServer.add": lambda source, **objects: ab.JobServer().add("wards", source, **objects),
}


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("stratgy", "did you mean 'strategy'"),
        ("trainng", "did you mean 'training'"),
        ("callbacks", "it takes .*strategy, fleet, .*, settings"),
    ],
)
def test_an_argument_that_there_is_not_is_said(name: str, argument: str, said: str) -> None:
    """As of `simulate`, of whose own arguments none is one of these."""
    wanted = rf"^{re.escape(name)}\(\) got an unexpected keyword argument '{argument}': {said}"
    with pytest.raises(TypeError, match=wanted):
        TAKERS[name]("synthetic", until=ab.Until(updates=1), **{argument: None})


@pytest.mark.parametrize(
    ("taker", "argument", "said"),
    [
        (ab.simulate, "stratgy", r"^simulate\(\) got an .*'stratgy': did you mean 'strategy'\?$"),
        (
            ab.simulate,
            "nonsense",
            r"^simulate\(\) got .*: it takes source, strategy, .*, checkpoint_s, resume$",
        ),
        (ab.join, "state_dri", r"^join\(\) got .*did you mean 'state_dir'\?$"),
        (ab.Client, "tokn", r"^Client\(\) got .*did you mean 'token'\?$"),
        (ab.JobServer, "addres", r"^JobServer\(\) got .*did you mean 'address'\?$"),
        (ab.app, "optimiser", r"^app\(\) got .*did you mean 'optimizer'\?$"),
    ],
)
def test_whoever_takes_arguments_of_its_own_says_which_is_near(
    taker: Callable[..., Any], argument: str, said: str
) -> None:
    """Before it does anything: the others are nothing that it could begin with."""
    with pytest.raises(TypeError, match=said):
        taker(None, None, **{argument: None})


def test_arguments_of_its_own_are_near_as_well_and_none_that_is_refused() -> None:
    with pytest.raises(TypeError, match="did you mean 'fresh_seeds'"):
        ab.tune("synthetic", fresh_seds=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"faults, until, settings$"):
        ab.sweep("synthetic", {}, workers=2)  # type: ignore[call-arg]


def test_what_is_no_app_is_said() -> None:
    with pytest.raises(AppError, match="has no method 'model'"):
        ab.configure(NoStrategy())  # type: ignore[arg-type]
