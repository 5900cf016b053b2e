"""An app made ready for `flwr run`: the copy has our ServerApp and settings, the app is as it was."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from commands import anabranch
from flower_apps import (
    CENTRAL,
    COUNTING,
    FEDAVG,
    LEGACY_CENTRAL,
    LEGACY_SERVER,
    NUMPY_CLIENT,
    TRAINS_ONLY,
    write_app,
)
from flwr.common.config import flatten_dict
from safetensors.numpy import load_file

from anabranch.core.errors import AppError, ConfigError
from anabranch.flower import baseline
from anabranch.flower.local_grid import LocalGrid, Node, in_a_task
from anabranch.flower.messages import handled, new_context
from anabranch.flower.packing import ASYNCHRONOUS, BASELINE, pack
from anabranch.flower.project import Project
from anabranch.flower.server_app import Options
from anabranch.reports.models import BEST, FINAL
from anabranch.reports.result import Result

TABLES: dict[str, dict[str, Any]] = {
    "strategy": {"name": "fedasync", "staleness": {"name": "constant"}},
    "run": {"updates_max": 5},
}


@pytest.fixture(autouse=True)
def task() -> Iterator[None]:
    with in_a_task():
        yield


def test_a_packed_app_has_our_server_app_and_the_settings(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    before = {p: p.read_bytes() for p in app.rglob("*") if p.is_file()}
    packed = pack(app, tmp_path / "packed", ASYNCHRONOUS, tmp_path / "run", TABLES)
    assert packed.serverapp == ASYNCHRONOUS
    assert packed.run_config["learning-rate"] == 0.5
    options = Options.of(packed.run_config)
    assert options.serverapp == Project.read(app).serverapp
    assert options.out == tmp_path / "run"
    assert options.config.strategy.params == {"staleness": {"name": "constant"}}
    assert (options.config.run.updates_max, options.config.server.lease_s) == (5, 3600.0)
    assert {p: p.read_bytes() for p in app.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("serverapp", [ASYNCHRONOUS, BASELINE])
def test_a_run_config_that_is_set_is_the_copys_own(serverapp: str, tmp_path: Path) -> None:
    """Which is what Flower hands out, to nodes and to the ServerApp that is rehearsed."""
    app = write_app(tmp_path, config="model.width = 3\nanabranch.out = 'of another copy'\n")
    overrides = {"learning-rate": 9.0, "model": {"width": 5}}
    tables: dict[str, Any] = {"run": {"updates_max": 5}, "flower": {"run_config": overrides}}
    packed = pack(app, tmp_path / "packed", serverapp, tmp_path / "run", tables)
    own = {k: v for k, v in packed.run_config.items() if not k.startswith("anabranch.")}
    usual = {"num-server-rounds": 3, "fraction-evaluate": 1.0}
    assert own == {**usual, "learning-rate": 9.0, "model.width": 5}
    assert packed.run_config["anabranch.out"] == str(tmp_path / "run")
    with pytest.raises(AppError, match="has no key 'learning_rate'"):
        pack(
            app,
            tmp_path / "no",
            serverapp,
            tmp_path / "run",
            {"flower": {"run_config": {"learning_rate": 1}}},
        )
    assert not (tmp_path / "no").exists()


def test_a_folder_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    with pytest.raises(AppError, match="is there already"):
        pack(app, tmp_path, ASYNCHRONOUS, tmp_path / "run", {})


def test_an_app_without_a_server_app_is_refused(tmp_path: Path) -> None:
    app = write_app(tmp_path)
    project = app / "pyproject.toml"
    project.write_text("\n".join(x for x in project.read_text().splitlines() if "serverapp" not in x))
    with pytest.raises(AppError, match="names no serverapp"):
        pack(app, tmp_path / "packed", ASYNCHRONOUS, tmp_path / "run", {})


def watched(app: Path, folder: Path, run_config: dict[str, Any], count: int = 3, **tables: Any) -> Result:
    """What is written down of the app's own ServerApp with so many nodes."""
    given = {"run": {"workload": "counting"}, **tables}
    packed = pack(app, folder / "packed", BASELINE, folder / "run", given)
    client, own = Project.read(app).client_app(), Project.read(app).fused(run_config)

    def node(part: int) -> Node:
        context = new_context(part, count, own)
        return lambda message: handled(client, message, context, 1)

    context = new_context(0, count, {**packed.run_config, **own})
    baseline.main(LocalGrid({i + 1: node(i) for i in range(count)}), context)
    return Result.read(folder / "run")


@pytest.mark.parametrize("legacy", [False, True], ids=["messages", "NumPyClient"])
def test_the_apps_own_server_app_is_watched(
    legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = write_app(tmp_path, NUMPY_CLIENT, LEGACY_SERVER) if legacy else write_app(tmp_path)
    result = watched(app, tmp_path, {})
    rounds = 2 if legacy else 3
    assert (result.strategy, result.workload, result.versions) == ("flower", "counting", rounds)
    assert result.updates_applied == 3 * rounds
    assert [point.version for point in result.history] == list(range(1, rounds + 1))
    assert result.final_accuracy == pytest.approx(8 / 60)
    assert {share.examples // share.updates for share in result.clients.values()} == {10, 20, 30}
    assert (tmp_path / "finished.txt").exists() is not legacy  # it came to its own end


# Nodes of 10, 20 and 30 examples move by 0.5, 1 and 1.5: in the older API each round, else times its number.
STEP = (10 * 0.5 + 20 * 1.0 + 30 * 1.5) / 60


@pytest.mark.parametrize(
    ("client", "server", "moved"),
    [
        (TRAINS_ONLY, CENTRAL, [0, STEP, 3 * STEP, 6 * STEP]),
        (NUMPY_CLIENT, LEGACY_CENTRAL, [5, 5 + STEP, 5 + 2 * STEP]),
    ],
    ids=["messages", "NumPyClient"],
)
def test_of_an_app_that_only_its_server_app_judges_each_round_is_written_down(
    client: str, server: str, moved: list[float], tmp_path: Path
) -> None:
    """With what it found, which is in no message, and the model of the last round, which nobody was sent."""
    app = write_app(tmp_path, client, server)
    result = watched(app, tmp_path, {"fraction-evaluate": 0.0})
    rounds = len(moved) - 1
    assert (result.versions, result.updates_applied) == (rounds, 3 * rounds)
    assert [point.version for point in result.history] == list(range(rounds + 1))
    assert [point.loss for point in result.history] == pytest.approx(moved)
    final, best = (load_file(tmp_path / "run" / file) for file in (FINAL, BEST))
    assert next(iter(final.values())).mean() == pytest.approx(moved[-1])
    assert next(iter(best.values())).mean() == pytest.approx(moved[0]), "the least loss is that of the first"


def test_who_judges_a_watched_app_is_what_is_said(tmp_path: Path) -> None:
    app = write_app(tmp_path, COUNTING, CENTRAL)
    by_nodes = watched(app, tmp_path / "nodes", {})
    assert ["eval_loss" in point.metrics for point in by_nodes.history] == [True] * 3
    central = watched(app, tmp_path / "central", {}, flower={"central": True})
    assert ["central_loss" in point.metrics for point in central.history] == [True] * 4


def test_an_app_is_not_ended_by_what_its_metrics_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client = COUNTING.replace('"eval_acc": 0.1 * part, "eval_loss": mean', '"f1": 0.1 * part, "auc": 0.5')
    result = watched(write_app(tmp_path, client), tmp_path, {})
    assert (result.status, result.versions) == ("finished", 3)
    assert [point.metrics["f1"] for point in result.history] == [pytest.approx(8 / 60)] * 3


@pytest.mark.parametrize(
    ("weight", "accuracy"),
    [("0.9 if part else 0.1", 0.1 * 0.9), ('float("inf")', 0.1 / 2)],
    ids=["fractions", "not finite"],
)
def test_nodes_are_weighed_by_what_the_strategy_weighs_by(
    weight: str, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The accuracies are 0 and 0.1. A device's examples are still those that it tells."""
    monkeypatch.chdir(tmp_path)
    training, judging = (f'"num-examples": 10 * (part + 1), "{key}"' for key in ("tasks", "eval_acc"))
    client = COUNTING.replace(training, f'"weight": 0.5, {training}')
    client = client.replace(judging, f'"weight": {weight}, {judging}')
    server = FEDAVG.replace("FedAvg(fraction", 'FedAvg(weighted_by_key="weight", fraction')
    result = watched(write_app(tmp_path, client, server), tmp_path, {}, count=2)
    assert (result.status, result.versions) == ("finished", 3)
    assert [point.metrics["eval_acc"] for point in result.history] == [pytest.approx(accuracy)] * 3
    assert {share.examples // share.updates for share in result.clients.values()} == {10, 20}


# No strategy, no round in its messages, and two ArrayRecords in each.
OWN_LOOP = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        for round in range(4):
            own = np.full(3, round, np.float32)
            records = {name: ArrayRecord({"w": Array(own)}) for name in ("arrays", "more")}
            records["config"] = ConfigRecord({"lr": 0.5, "key": b"bytes"})
            ids = []
            for node in grid.get_node_ids():
                ids += grid.push_messages([Message(RecordDict(records), node, "train")])
            for one in ids:
                list(grid.pull_messages([one]))
"""


def test_a_loop_of_ones_own_is_watched_whatever_it_sends(tmp_path: Path) -> None:
    client = COUNTING.replace(', "round": config["server-round"]', "")
    result = watched(write_app(tmp_path, client, OWN_LOOP), tmp_path, {})
    assert (result.status, result.versions, result.updates_applied) == ("finished", 4, 12)
    assert load_file(tmp_path / "run" / FINAL)["w"].tolist() == [3.0] * 3, "as it was sent last"


def test_a_straggler_that_is_never_pulled_joins_no_rounds(tmp_path: Path) -> None:
    """Two of three nodes are waited for: each round is a version all the same."""
    client = COUNTING.replace(', "round": config["server-round"]', "")
    server = OWN_LOOP.replace("for one in ids:", "for one in ids[:-1]:")
    result = watched(write_app(tmp_path, client, server), tmp_path, {})
    assert (result.status, result.versions, result.updates_applied) == ("finished", 4, 8)


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    app = write_app(tmp_path)

    def said(*arguments: object) -> str:
        done = anabranch(tmp_path, *arguments)
        assert done.returncode in (2, 3), done.stderr
        return done.stderr

    wrong = ("--set", "strategy.nane=x")
    assert "nane" in said("flower", "pack", app, "--out", tmp_path / "packed", *wrong)
    assert not (tmp_path / "packed").exists()
    assert "set anabranch.run.updates_max" in said("flower", "pack", app, "--out", tmp_path / "packed")
    for key in ("submodel.name=random", "downlink.codec=int8"):
        of_no_use = ("--set", "run.updates_max=3", "--set", key)
        assert key.split("=")[0] in said("flower", "pack", app, "--out", tmp_path / "packed", *of_no_use)
    watched = ("--baseline", "--set", "strategy.name=fedasync")
    assert "ServerApp decides" in said("flower", "pack", app, "--out", tmp_path / "packed", *watched)
    assert not (tmp_path / "packed").exists()
    assert "name one App" in said("client", "digits", "--flower", app)
    assert "write key=value" in said("client", "--flower", app, "--option", "key")
    assert "cannot be read: name the folder of a Flower app" in said("simulate", "--flower", "nowhere")


def test_what_the_page_has_one_write_by_hand_is_a_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    [by_hand] = [told for told in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "serverapp" in told]
    told = tomllib.loads(by_hand)["tool"]["flwr"]["app"]
    assert told["components"]["serverapp"] == "anabranch.flower.server_app:app"
    options = Options.of(flatten_dict(told["config"]))
    assert (options.serverapp, options.config.strategy.name) == ("quickstart.server_app:app", "fedbuff")
    assert options.config.run.workload == "flower:quickstart", "no workload of ours"


def test_a_table_that_is_none_is_told_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"\[run\] must be a table of keys, not 'mine'"):
        Options.of({"anabranch.run": "mine"})
