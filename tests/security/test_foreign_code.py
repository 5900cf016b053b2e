"""No server can make a device load code: what comes over the wire is a name, and is looked up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_parts import SPLIT, STAGE, STRATEGY, forgotten

from anabranch.client.local import LocalServer
from anabranch.client.shards import shard_of
from anabranch.compress.feedback import Uplink
from anabranch.compress.registry import make_codec
from anabranch.core.config.tables import FleetTable, merge
from anabranch.core.errors import AnabranchError, ConfigError, UnknownCodec
from anabranch.core.model.params import ParamSpec
from anabranch.core.parts import check_names
from anabranch.host.build import Blueprint, device_tables
from anabranch.simulation.parts import PARTS
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.support import code
from anabranch.testing.federation import config, first_weights
from anabranch.workloads.app import Shard, load_app
from anabranch.workloads.splits import partition

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file, and a module, that leave a mark if they are ever run."""
    mark = f"from pathlib import Path\nPath({str(tmp_path / 'sprung')!r}).touch()\n"
    (tmp_path / "trap.py").write_text(mark + "def split(*_): return []\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("place", ["{}/trap.py:split", "trap:split", "trap.split:split"])
def test_a_device_never_loads_what_a_server_names(trap: Path, place: str) -> None:
    hostile = place.format(trap)
    told: dict[str, Any] = {**device_tables(config())}
    told["fleet"] = {**told["fleet"], "split": hostile, "attack": hostile, "executor": hostile}
    told["run"] = {**told["run"], "workload": hostile, "trackers": [hostile]}
    shard = shard_of(told, 0, 4)  # as a device makes of what it is told
    assert isinstance(shard, Shard)
    with pytest.raises(ConfigError, match="which is code: only a command line"):
        partition(np.zeros(20, np.int64), 4, shard.fleet, 0)
    for chain in (hostile, f"topk(0.1)|{hostile}", f"ef(0.9)|{hostile}"):
        with pytest.raises(UnknownCodec):
            Uplink(chain)
        with pytest.raises(UnknownCodec):
            make_codec(chain)
    assert not (trap / "sprung").exists()
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    "tables",
    [
        {"strategy": {"name": "{}"}},
        {"strategy": {"name": "fedbuff", "staleness": {"name": "{}"}}},
        {"robust": {"rule": "{}"}},
        {"strategy": {"name": "asyncdrop"}, "submodel": {"name": "{}"}},
    ],
)
def test_an_engine_is_made_of_names_alone(trap: Path, tables: dict[str, Any]) -> None:
    place = f"{trap}/trap.py:split"
    filled = {t: {k: _filled(v, place) for k, v in keys.items()} for t, keys in tables.items()}
    found = merge([("from elsewhere", filled)])
    with pytest.raises(AnabranchError, match="which is code"):
        Blueprint.of(found, ParamSpec.of(first_weights())).engine(first_weights())
    with pytest.raises(ConfigError, match="which is code"):
        check_names(found, PARTS)
    assert not (trap / "sprung").exists()


def _filled(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {k: _filled(v, place) for k, v in value.items()}
    return value.format(place)


def test_a_run_that_was_found_loads_no_code_of_its_own(tmp_path: Path) -> None:
    """Neither its strategy, nor its App where it has to be trained again; with a word of its reader both."""
    app = str(ROOT / "examples" / "extending" / "app.py") + ":Line"
    run: dict[str, Any] = {"workload": app, "keep_payloads": False, "updates_max": 4}
    found = merge([("mine", {"run": run, "fleet": {"clients": 2}, "strategy": {"name": "fedasync"}})])
    simulate(found, tmp_path / "app")
    with pytest.raises(
        ConfigError, match=r"app has run\.workload = .*Line', which is code: look at it, then"
    ):
        replay_run(tmp_path / "app")
    assert replay_run(tmp_path / "app", load_app(app)).matches
    assert replay_run(tmp_path / "app", load_code=True).matches
    with forgotten():
        STRATEGY.let_in()
        strategy = {"name": STRATEGY.place}
        own = merge([("mine", {"run": {"updates_max": 4, "workload": "synthetic"}, "strategy": strategy})])
        simulate(own, tmp_path / "strategy")
    with pytest.raises(ConfigError, match=r"has strategy\.name = .*WarmUp', which is code"):
        replay_run(tmp_path / "strategy")
    with forgotten():
        assert replay_run(tmp_path / "strategy", load_code=True).matches


def test_a_device_is_told_names_and_no_places() -> None:
    with forgotten():
        SPLIT.let_in(), STAGE.let_in()
        own: dict[str, Any] = {
            "fleet": {"split": SPLIT.place},
            "uplink": {"stages": [STAGE.place], "codec": "signs"},
        }
        settings = config(**own, run={"trackers": ["jsonl"]})
        told = device_tables(settings)
        assert told["fleet"]["split"] == SPLIT.name
        assert ".py" not in repr(told)
        assert partition(np.zeros(20, np.int64), 4, FleetTable(split=told["fleet"]["split"]), 0)
        assert LocalServer(first_weights(), settings).config.fleet.split == SPLIT.place, (
            "the server's own stay"
        )


def test_code_is_loaded_where_it_says_and_nowhere_else() -> None:
    """Every caller of the loader, by name: a new one has to be looked at."""
    words = ("let_in(", "let_in_one(", "code.load(", "from_file(", "from_name(", "from_bundle(")
    callers = {
        str(path.relative_to(ROOT / "src" / "anabranch"))
        for path in (ROOT / "src" / "anabranch").rglob("*.py")
        if "testing" not in path.parts and any(word in path.read_text(encoding="utf-8") for word in words)
    }
    for link in (p for p in (ROOT / "src" / "anabranch").iterdir() if p.is_symlink() and p.name != "testing"):
        callers |= {
            f"{link.name}/{path.relative_to(link.resolve())}"
            for path in link.resolve().rglob("*.py")
            if any(word in path.read_text(encoding="utf-8") for word in words)
        }
    assert callers == {
        "aggregation.py",  # a caller's own words
        "api/calibrating.py",  # an attack, once what was opened is trusted: how hasty are its devices?
        "api/trust.py",  # one's own settings, and what the reader of a folder trusts
        "cli/parts.py",  # the command line's
        "core/parts.py",  # which has a method of this name, and loads nothing
        "server/store/factory.py",  # where this machine's data are
        "simulation/replay.py",  # a run that was found, once its caller has looked at it
        "simulation/checkpoint.py",  # of what one asks for: is its code the same?
        "simulation/problem.py",  # worker processes: what the run that started them was given
        "support/bundled_code.py",  # what was signed by whom the device's user allows: test_bundles.py
        "support/code.py",
        "workloads/bundled.py",
        "workloads/registry.py",  # APP
    }
    assert code.load.__module__ == "anabranch.support.code"
