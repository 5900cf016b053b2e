"""What a ServerApp says first is heard, whatever it is written with; and it goes no further."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flower_apps import COUNTING, FEDAVG, LEGACY_SERVER, NUMPY_CLIENT, write_app

from anabranch.core.errors import AppError
from anabranch.flower.rehearsal import rehearse

LOOP = """
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp
    import numpy as np, time

    app = ServerApp()

    @app.main()
    def main(grid, context):
        while len(nodes := list(grid.get_node_ids())) < 1500:
            pass
        model = ArrayRecord({"w": Array(np.full(4, 3.0))})
        content = RecordDict({"model": model, "how": ConfigRecord({"lr": 2.0})})
        ids = list(grid.push_messages([Message(content, n, "train") for n in nodes[:3]]))
        while True:
            grid.pull_messages(ids)
"""

SECURE = """
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
    from flwr.serverapp import ServerApp
    import numpy as np

    app = ServerApp()

    @app.main()
    def main(grid, context):
        strategy = FedAvg(initial_parameters=ndarrays_to_parameters([np.zeros(4)]))
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        masked = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=10)
        DefaultWorkflow(fit_workflow=masked)(grid, legacy)
"""

TALKATIVE = """
    from flwr.app import Array, ArrayRecord, Message, RecordDict
    from flwr.serverapp import ServerApp
    import numpy as np

    app = ServerApp()

    @app.main()
    def main(grid, context):
        records = {name: ArrayRecord({"w": Array(np.zeros(2))}) for name in ("model", "momentum")}
        grid.send_and_receive([Message(RecordDict(records), 1, "train")])
"""

SILENT = """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        raise RuntimeError("the licence has run out")
"""


def test_a_strategy_of_flowers_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heard = rehearse(write_app(tmp_path), {}, 3, 0)
    assert list(heard.arrays) == ["layer.weight", "layer.bias", "steps"]
    assert heard.arrays["layer.weight"].tolist() == np.ones((2, 3)).tolist()
    assert heard.train.arrays == "arrays"
    assert heard.train.records == {"config": {"lr": 0.5, "server-round": 1}}
    assert heard.evaluate.records == {"config": {"how": "well", "server-round": 1}}
    assert not (tmp_path / "finished.txt").exists()


ADAM = FEDAVG.replace("        FedAvg(", "        FedAdam(").replace("import FedAvg", "import FedAdam")
NOISY = "DifferentialPrivacyServerSideFixedClipping"


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (FEDAVG, ""),
        (ADAM, "FedAdam"),
        (
            FEDAVG.replace("import FedAvg", f"import FedAvg, {NOISY}")
            .replace("        FedAvg(", f"        {NOISY}(FedAvg(")
            .replace('"]).start(', '"]), 0.1, 1.0, 2).start('),
            NOISY,
        ),
        (LEGACY_SERVER.replace("FedAvg", "FedMedian"), "FedMedian"),
        (LOOP, ""),
    ],
    ids=["a mean", "another rule", "noise", "legacy", "a loop of its own"],
)
def test_a_strategy_that_is_not_played_is_said(
    server: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    legacy = "ServerAppComponents" in server
    rehearse(write_app(tmp_path, NUMPY_CLIENT if legacy else COUNTING, server), {}, 3, 0)
    lines = [record.getMessage() for record in caplog.records if "is not played" in record.getMessage()]
    assert len(lines) == bool(said)
    assert said in "".join(lines)
    assert ("nor is its noise added" in "".join(lines)) is (said == NOISY)


# What each node is sent depends on its place among them.
OWN_ORDERS = """
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    class Own(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            for place, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
                model = ArrayRecord({"w": Array(np.zeros(3) + place * MODEL)})
                told = ConfigRecord({"lr": 0.5 + place * RATE, "server-round": server_round})
                content = RecordDict({"arrays": model, "config": told})
                yield Message(content, message.metadata.dst_node_id, "train")

    app = ServerApp()

    @app.main()
    def main(grid, context):
        Own().start(grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(3))}), num_rounds=1)
"""


def orders(folder: Path, model: int, rate: int) -> Path:
    return write_app(folder, COUNTING, OWN_ORDERS.replace("MODEL", str(model)).replace("RATE", str(rate)))


@pytest.mark.parametrize("rate", [0, 1])
def test_settings_of_each_nodes_own_are_said_to_be_the_first_ones(
    rate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = rehearse(orders(tmp_path, 0, rate), {}, 3, 0)
    assert heard.train.records["config"]["lr"] == 0.5
    assert ("tells its nodes different settings in a round" in caplog.text) is bool(rate)


def test_a_server_app_that_sends_each_node_a_model_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AppError, match="sends its nodes different models in its first round"):
        rehearse(orders(tmp_path, 1, 0), {}, 3, 0)


def test_a_weight_of_its_own_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = FEDAVG.replace("FedAvg(", 'FedAvg(weighted_by_key="batches", ')
    rehearse(write_app(tmp_path, COUNTING, server), {}, 3, 0)
    assert "ServerApp weighs by 'batches': here an update weighs as its num-examples" in caplog.text


def test_a_run_config_is_overridden(tmp_path: Path) -> None:
    heard = rehearse(write_app(tmp_path), {"learning-rate": 0.25}, 3, 0)
    assert heard.train.records["config"]["lr"] == 0.25


def test_without_evaluations_they_are_told_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    heard = rehearse(write_app(tmp_path), {"fraction-evaluate": 0.0, "num-server-rounds": 1}, 3, 0)
    assert heard.evaluate.records == {"config": {"server-round": 1}}
    assert not (tmp_path / "finished.txt").exists()


def test_a_legacy_app_gets_its_first_weights_from_a_client(tmp_path: Path) -> None:
    heard = rehearse(write_app(tmp_path, NUMPY_CLIENT, LEGACY_SERVER), {}, 3, 0)
    assert [a.tolist() for a in heard.arrays.values()] == [np.full((2, 3), 5.0).tolist(), [0.0, 0.0, 0.0]]
    assert heard.train.arrays == "fitins.parameters"
    assert heard.train.records == {"fitins.config": {"lr": 0.5, "server_round": 1}}
    assert heard.evaluate.arrays == "evaluateins.parameters"


def test_a_loop_of_its_own_is_heard(tmp_path: Path) -> None:
    heard = rehearse(write_app(tmp_path, COUNTING, LOOP), {}, 3, 0)
    assert heard.arrays["w"].tolist() == [3.0] * 4
    assert (heard.train.arrays, heard.train.records) == ("model", {"how": {"lr": 2.0}})


def test_what_is_drawn_follows_from_the_seed(tmp_path: Path) -> None:
    folder = write_app(tmp_path, server=FEDAVG.replace("np.ones((2, 3), ", "np.random.rand(2, 3).astype("))
    first, same = rehearse(folder, {}, 3, 1), rehearse(folder, {"learning-rate": 0.5}, 3, 1)
    other = rehearse(folder, {}, 3, 2)
    assert first.arrays["layer.weight"].tolist() == same.arrays["layer.weight"].tolist()
    assert first.arrays["layer.weight"].tolist() != other.arrays["layer.weight"].tolist()


@pytest.mark.parametrize(
    ("server", "why"),
    [
        (SECURE, "Flower's secure aggregation, which is a protocol of rounds: .*here is \\[secagg\\]"),
        (TALKATIVE, r"2 ArrayRecords in a message \(model, momentum\)"),
        (SILENT, r"ended before it sent a message for training \(.*:\d+\): RuntimeError: the licence has"),
        (FEDAVG.replace("np.float32)", "np.uint8)"), r"no numbers with a fraction \(int64, uint8\): trees"),
        ("app = 3", "is a int, no ServerApp"),
        ("import no_such_module", r"cannot be loaded \(.*:1\): ModuleNotFoundError"),
    ],
    ids=["masked", "two models", "an error", "trees", "no app", "no module"],
)
def test_what_cannot_be_heard_is_said(server: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(AppError, match=why):
        rehearse(write_app(tmp_path, COUNTING, server), {}, 3, 0)


def test_of_a_legacy_app_that_is_refused_no_thread_goes_on(tmp_path: Path) -> None:
    """The one that looks after nodes is told of twice as many at each look, every five seconds."""
    before = set(threading.enumerate())
    with pytest.raises(AppError, match="secure aggregation"):
        rehearse(write_app(tmp_path, server=SECURE), {}, 3, 0)
    begun = set(threading.enumerate()) - before
    for thread in begun:
        thread.join(600.0)
    assert begun, "it looks after nodes"
    assert not [thread for thread in begun if thread.is_alive()]


def test_an_unknown_key_of_the_run_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AppError, match=r"has no key 'learning_rate' \(num-server-rounds, fraction"):
        rehearse(write_app(tmp_path), {"learning_rate": 1.0}, 3, 0)
