"""Who judges a version: the ClientApp, or the ServerApp itself where nobody else does, as in Flower."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flower_apps import CENTRAL, COUNTING, LEGACY_CENTRAL, NUMPY_CLIENT, TRAINS_ONLY, write_app
from flwr.app import Message
from left import loggers_put_back

from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import AppError
from anabranch.core.rng import seed_of
from anabranch.flower import server_app
from anabranch.flower.local_grid import LocalGrid, Node, in_a_task
from anabranch.flower.messages import handled, new_context
from anabranch.flower.project import Project
from anabranch.simulation.run import simulate
from anabranch.workloads import load_app
from anabranch.workloads.calls import join_run, settings_of


def configured(folder: Path, **flower: Any) -> Config:
    """Four devices in rounds, of what the app itself brings along."""
    spec = f"flower:{folder}"
    tables = {
        "run": {"workload": spec, "updates_max": 8, "evaluate_every_versions": 1},
        "fleet": {"clients": 4},
        "strategy": {"name": "fedavg", "clients_per_round": 4, "over_selection": 1.0},
        "flower": flower,
    }
    app = load_app(spec)
    join_run(app, merge([("test", tables)]).to_json())
    return merge([("app", settings_of(app, 0)), ("test", tables)])


def central(folder: Path, client: str, **flower: Any) -> Config:
    return configured(write_app(folder, client, CENTRAL), **flower)


def test_an_app_whose_server_app_alone_judges_is_judged_by_it(tmp_path: Path) -> None:
    config = central(tmp_path, TRAINS_ONLY, run_config={"fraction-evaluate": 0.0})
    assert config.flower.central
    found = simulate(config)
    assert [(point.version, point.metrics["round"]) for point in found.history] == [(v, v) for v in range(3)]
    # Of four devices with 10, 20, 30, 40 examples: they move by 0.5, 1, 1.5, 2 in their first task.
    assert found.history[1].loss == pytest.approx((10 * 0.5 + 20 * 1 + 30 * 1.5 + 40 * 2) / 100)


NOISY = "DifferentialPrivacyServerSideFixedClipping"  # a wrapper of Flower's, with no settings of the other
PLAIN = 'FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])'
WRAPPED = CENTRAL.replace("import FedAvg", f"import FedAvg, {NOISY}").replace(
    PLAIN, f"{NOISY}({NOISY}({PLAIN}, 0.1, 1.0, 2), 0.1, 1.0, 2)"
)
LEGACY_WRAPPED = LEGACY_CENTRAL.replace("import FedAvg", f"import FedAvg, {NOISY}").replace(
    "        return", f"        strategy = {NOISY}(strategy, 0.1, 1.0, 2)\n        return"
)


@pytest.mark.parametrize(
    ("client", "server", "share"),
    [(TRAINS_ONLY, WRAPPED, 0.0), (TRAINS_ONLY, WRAPPED, 1.0), (NUMPY_CLIENT, LEGACY_WRAPPED, 0.0)],
)
def test_who_judges_is_what_a_wrapped_strategy_says(
    client: str, server: str, share: float, tmp_path: Path
) -> None:
    config = configured(write_app(tmp_path, client, server), run_config={"fraction-evaluate": share})
    assert config.flower.central is (share == 0)


def test_a_server_app_is_played_once_for_a_simulation(tmp_path: Path) -> None:
    folder = write_app(tmp_path, TRAINS_ONLY, CENTRAL)
    spec = {"workload": f"flower:{folder}", "updates_max": 8, "seed": 5}
    tables = {"run": spec, "fleet": {"clients": 4}, "flower": {"run_config": {"fraction-evaluate": 0.0}}}
    first = merge([("test", tables)])
    app = load_app(first.run.workload)
    join_run(app, first.to_json())
    simulate(merge([("app", settings_of(app, seed_of(5, "initial"))), ("test", tables)]))
    module = __import__(f"{folder.name}.server_app", fromlist=["played"])
    assert len(module.played) == 1


def test_a_legacy_strategy_judges_as_well(tmp_path: Path) -> None:
    config = configured(write_app(tmp_path, NUMPY_CLIENT, LEGACY_CENTRAL))
    found = simulate(config)
    assert config.flower.central
    assert [point.metrics["round"] for point in found.history] == [0, 1, 2]
    assert found.history[1].loss == pytest.approx(5 + (10 * 0.5 + 20 * 1 + 30 * 1.5 + 40 * 2) / 100)


def test_clients_judge_where_they_are_asked_to(tmp_path: Path) -> None:
    config = central(tmp_path, COUNTING)
    assert not config.flower.central
    _, first, _ = simulate(config).history
    assert "central_loss" not in first.metrics
    assert first.metrics["round"] == first.version == 1


def test_a_run_may_choose_the_server_apps_judgement(tmp_path: Path) -> None:
    _, first, _ = simulate(central(tmp_path, COUNTING, central=True)).history
    assert set(first.metrics) == {"central_loss", "round"}  # a list is no metric


SILENT = CENTRAL.replace(", evaluate_fn=judged", "")
NO_NUMBER = CENTRAL.replace(
    '{"central_loss": mean, "round": round, "all": [1.0, 2.0]}', '{"all": [mean, 2.0]}'
)
LISTED = COUNTING.replace('"eval_acc": 0.1 * part, "eval_loss": mean}', '"all": [0.1, mean]}').replace(
    'metrics |= {"tasks": len(context.state), "round"', 'said = {"round"'
)


@pytest.mark.parametrize(
    ("client", "server", "share"),
    [(TRAINS_ONLY, SILENT, 1.0), (LISTED, SILENT, 1.0), (TRAINS_ONLY, NO_NUMBER, 0.0)],
    ids=["nobody", "a list", "the ServerApp, a list"],
)
def test_a_run_that_nothing_measures_goes_on(
    client: str, server: str, share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Flower, whose own first example has no metric that is one number. It is said once."""
    found = simulate(configured(write_app(tmp_path, client, server), run_config={"fraction-evaluate": share}))
    assert (found.status, found.updates_applied, found.history) == ("finished", 8, ())
    assert [r.message.count("a version is not measured where") for r in caplog.records].count(1) == 1


def test_a_metric_that_a_run_is_judged_by_and_nobody_has_is_an_error(tmp_path: Path) -> None:
    folder = write_app(tmp_path, TRAINS_ONLY, SILENT)
    config = configured(folder)
    with pytest.raises(
        AppError, match=r"^app-\d+: run\.metric is 'mae', and evaluate returns no such metric"
    ):
        simulate(merge([("app", config.to_json()), ("goal", {"run": {"metric": "mae", "mode": "min"}})]))
    with pytest.raises(
        AppError, match=r"^flower\.central: the ServerApp of .* gives its strategy no evaluate"
    ):
        simulate(configured(write_app(tmp_path, COUNTING, SILENT), central=True))


@pytest.mark.parametrize("what", ["", "flower.loss", "run.metric"])
@pytest.mark.parametrize("legacy", [False, True], ids=["messages", "NumPyClient"])
def test_a_judge_may_skip_a_version(legacy: bool, what: str, tmp_path: Path) -> None:
    picky = LEGACY_CENTRAL.replace("lambda r, a, c: ", "lambda r, a, c: None if r == 1 else ")
    app = (NUMPY_CLIENT, picky) if legacy else (TRAINS_ONLY, CENTRAL.replace("round < 0", "round == 1"))
    name = "loss" if legacy else "central_loss"
    naming = {"flower": {"loss": name}} if what == "flower.loss" else {}
    if what == "run.metric":
        naming = {"run": {"metric": name, "mode": "min"}}
    config = configured(write_app(tmp_path, *app), central=True)
    found = simulate(merge([("app", config.to_json()), ("named", naming)]))
    assert [point.version for point in found.history] == [0, 2]


# --- on a Grid -----------------------------------------------------------------------------------


@pytest.fixture
def task() -> Iterator[None]:
    with in_a_task(), loggers_put_back():
        yield


def on_grid(project: Project, out: Path) -> dict[str, Any]:
    return {
        **project.fused({"fraction-evaluate": 0.0}),
        "anabranch.serverapp": f"{project.folder.name}.server_app:app",
        "anabranch.out": str(out),
        "anabranch.poll_s": 0.0,
        "anabranch.run.updates_max": 9,
        "anabranch.run.evaluate_every_versions": 1,
        "anabranch.strategy.name": "fedbuff",
        "anabranch.strategy.buffer_size": 3,
    }


@pytest.mark.usefixtures("task")
@pytest.mark.parametrize(("said", "judges"), [({}, True), ({"anabranch.flower.central": False}, False)])
def test_on_a_grid_who_judges_is_what_is_said_and_else_what_is_heard(
    said: dict[str, Any], judges: bool, tmp_path: Path
) -> None:
    project, out = Project.read(write_app(tmp_path, COUNTING, CENTRAL)), tmp_path / "run"
    app, context = project.client_app(), new_context(0, 1, project.fused({}))
    grid = LocalGrid({1: lambda message: handled(app, message, context, 1)})
    server_app.main(grid, new_context(0, 1, on_grid(project, out) | said))
    history = json.loads((out / "result.json").read_text())["history"]
    assert len(history) > 1
    assert {"central_loss" in row["metrics"] for row in history} == {judges}


@pytest.mark.usefixtures("task")
def test_on_a_grid_the_server_app_judges_and_after_a_crash_again(tmp_path: Path) -> None:
    folder = write_app(tmp_path, TRAINS_ONLY, CENTRAL)
    project, out = Project.read(folder), tmp_path / "run"
    app = project.client_app()
    answers = iter(range(7))

    def node(index: int) -> Node:
        context = new_context(index, 2, project.fused({}))

        def answer(message: Message) -> Message:
            if next(answers, None) == 5:
                raise KeyboardInterrupt
            return handled(app, message, context, 1)

        return answer

    grid, given = LocalGrid({1: node(0), 2: node(1)}), on_grid(project, out)
    with pytest.raises(KeyboardInterrupt):
        server_app.main(grid, new_context(0, 2, given))
    server_app.main(grid, new_context(0, 2, given))
    history = json.loads((out / "result.json").read_text())["history"]
    assert [(row["version"], row["metrics"]["round"]) for row in history] == [(v, v) for v in range(4)]
