"""A ClientApp as an App: it is told what Flower would tell it, and what it says is used or refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

from flower_apps import COUNTING, LEGACY_SERVER, NUMPY_CLIENT, write_app
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

import anabranch as ab
from anabranch.core.config.flower import FlowerTable
from anabranch.core.errors import AppError, ConfigError
from anabranch.core.model.updates import LocalPlan
from anabranch.flower.app import FlowerApp, Partition, mean_metrics, named
from anabranch.flower.messages import Reply
from anabranch.flower.project import Project
from anabranch.flower.records import from_bytes, to_bytes
from anabranch.support.own_code import on_device
from anabranch.workloads import Examples, Shard, load_app, trainer_for
from anabranch.workloads.trainer import ENDLESS_STEPS

PLAN = LocalPlan()
CONFIG = {"fleet": {"clients": 3}}


def joined(folder: Path, config: dict[str, dict[str, object]] | None = None) -> FlowerApp:
    app = FlowerApp(folder)
    app.join({**CONFIG, **(config or {})})
    return app


def replying(answer: str) -> str:
    """A ClientApp whose replies are this expression of `msg` and its `arrays`."""
    return f"""
        from flwr.app import *
        from flwr.clientapp import ClientApp
        import numpy as np

        app = ClientApp()

        @app.train()
        def train(msg, context):
            arrays = msg.content["arrays"]
            return {answer}
    """


def reply(arrays: str, metrics: str) -> str:
    content = f'{{"a": ArrayRecord(dict({arrays})), "m": MetricRecord({metrics})}}'
    return f"Message(RecordDict({content}), reply_to=msg)"


# --- training ------------------------------------------------------------------------------------


def test_a_task_is_a_message_as_the_server_app_sends_it(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path))
    model = app.model()
    app.version = 4
    found = app.train(model, app.data(Shard("train", 1, 3)), PLAN, seed=1)
    assert model["layer.bias"].tolist() == [1.0, 1.0, 1.0]  # 0.5 (learning rate) * 2 (partition) * 1 (task)
    assert found == {"examples": 20, "tasks": 1.0, "round": 5.0}


def test_what_it_keeps_is_there_again_in_the_next_task(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path))
    part = app.data(Shard("train", 0, 3))
    assert app.train(app.model(), part, PLAN, seed=1)["tasks"] == 1
    kept = app.kept
    assert app.train(app.model(), part, PLAN, seed=1)["tasks"] == 2
    app.kept = kept
    assert app.train(app.model(), part, PLAN, seed=1)["tasks"] == 2
    app.kept = b""
    assert app.train(app.model(), part, PLAN, seed=1)["tasks"] == 1


def test_a_numpy_client_works_as_well(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path, NUMPY_CLIENT, LEGACY_SERVER))
    model = app.model()
    app.version = 6
    found = app.train(model, app.data(Shard("train", 2, 3)), PLAN, seed=1)
    assert [a.tolist() for a in model.values()] == [np.full((2, 3), 6.5).tolist(), [1.5, 1.5, 1.5]]
    assert found == {"examples": 30, "fit_loss": 0.5, "round": 7.0}
    judged = app.evaluate(app.model(), app.data(Shard("test")))
    assert judged["accuracy"] == pytest.approx(8 / 60)
    assert judged["loss"] == 5.0


def test_mods_are_in_force(tmp_path: Path) -> None:
    clipped = COUNTING.replace("app = ClientApp()", "app = ClientApp(mods=[])").replace(
        "@app.train()", "from mods import halved\n\n    @app.train(mods=[halved])"
    )
    folder = write_app(tmp_path, clipped)
    (folder / "mods.py").write_text(
        "import numpy as np\nfrom flwr.app import Array, ArrayRecord\n"
        "def halved(message, context, call_next):\n"
        "    reply = call_next(message, context)\n"
        "    came = reply.content['arrays'].items()\n"
        "    half = {n: Array(np.asarray(a.numpy() / 2, a.dtype)) for n, a in came}\n"
        "    reply.content['arrays'] = ArrayRecord(half)\n"
        "    return reply\n"
    )
    app = joined(folder)
    model = app.model()
    app.train(model, app.data(Shard("train", 1, 3)), PLAN, seed=1)
    assert model["layer.bias"].tolist() == [0.5, 0.5, 0.5]


def test_what_an_app_draws_follows_from_the_tasks_seed(tmp_path: Path) -> None:
    drawn = reply(
        "{n: Array(np.asarray(a.numpy() + np.random.rand(), a.dtype)) for n, a in arrays.items()}",
        "{'num-examples': 1}",
    )
    app = joined(write_app(tmp_path, replying(drawn)))
    found = []
    for seed in (1, 1, 2):
        model = app.model()
        app.train(model, app.data(Shard("train", 0, 3)), PLAN, seed)
        found.append(model["layer.bias"].tolist())
    assert found[0] == found[1] != found[2]


def test_examples_and_metrics_come_through_the_trainer(tmp_path: Path) -> None:
    app = load_app(f"flower:{write_app(tmp_path)}")
    app.join(CONFIG)
    trainer = trainer_for(app)
    initial = trainer.initial(0)
    frozen = trainer.spec.frozen(initial)
    done = trainer.train(trainer.spec.flatten(initial), frozen, app.data(Shard("train", 1, 3)), PLAN, seed=1)
    assert (done.examples, done.steps, dict(done.metrics)) == (20, 1, {"tasks": 1.0, "round": 1.0})
    assert done.delta.tolist() == [1.0] * 9
    assert [t.name for t in trainer.spec.tensors] == ["layer.weight", "layer.bias", "steps"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (reply("arrays", "{'loss': 1.0}"), "has no metric 'num-examples'"),
        (reply("arrays", "{'num-examples': 0}"), "says num-examples = 0"),
        (reply("arrays", "{'num-examples': float('inf')}"), "says num-examples = inf"),
        (
            reply("{'layer.weight': arrays['layer.weight']}", "{'num-examples': 1}"),
            "'layer.bias' is not in it",
        ),
        (
            reply("{**arrays, 'more': arrays['layer.bias']}", "{'num-examples': 1}"),
            "'more' is only in the reply",
        ),
        (
            reply("{**arrays, 'layer.bias': Array(np.zeros(4))}", "{'num-examples': 1}"),
            r"'layer.bias' came back with shape \(4,\), not \(3,\)",
        ),
        ("Message(RecordDict({'m': MetricRecord({'num-examples': 1})}), reply_to=msg)", "has 0 ArrayRecords"),
        (
            "Message(Error(7, 'the disk is full'), reply_to=msg)",
            "answered 'train' with error 7: the disk is full",
        ),
        ("1 / 0", r"train \(.*:11\): ZeroDivisionError"),
    ],
)
def test_a_reply_of_no_use_is_an_error_that_says_why(answer: str, why: str, tmp_path: Path) -> None:
    app = joined(write_app(tmp_path, replying(answer)))
    with pytest.raises(AppError, match=why):
        app.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)
    assert app.kept == b""


def test_what_an_app_prints_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = joined(
        write_app(tmp_path, COUNTING.replace("app = ClientApp()", 'print("loaded"); app = ClientApp()'))
    )
    printing = joined(write_app(tmp_path, replying("print('training') or 1 / 0")))
    with pytest.raises(AppError):
        printing.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)
    said = capsys.readouterr()
    assert ("loaded" in said.err, "training" in said.err, said.out) == (True, True, "")


def test_elastic_training_is_refused(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path))
    with pytest.raises(AppError, match="'elastic' looks at the model between local steps"):
        app.train(app.model(), app.data(Shard("train", 0, 3)), LocalPlan(steps=ENDLESS_STEPS), seed=1)


def test_settings_that_say_nothing_to_a_client_app_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = {"fleet.clients": 3, "run.updates_max": 6, "strategy.name": "fedasync"}
    idle = {"client.learning_rate": 0.5, "client.batch_size": 3, "fleet.split": "shards"}
    app = f"flower:{write_app(tmp_path)}"
    plain = ab.simulate(app, settings=run).result
    assert "client" not in caplog.text
    assert ab.simulate(app, settings=run | idle).result.model_sha256 == plain.model_sha256
    assert [key for key in idle if f"{key} = " in caplog.text] == list(idle)
    longer = ab.simulate(app, settings=run | {"client.steps": 4}).result
    assert (longer.virtual_s or 0.0) > (plain.virtual_s or 0.0) > 0
    assert "client.steps = 4 is time on a virtual clock and nothing else" in caplog.text


def test_examples_from_elsewhere_are_refused(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path))
    flipped = Examples(np.zeros(1), np.zeros(1))
    with pytest.raises(AppError, match=r"another fleet\.attack than 'label_flip'"):
        app.train(app.model(), flipped, PLAN, seed=1)


# --- evaluation ----------------------------------------------------------------------------------


def test_an_evaluation_is_the_mean_over_all_partitions(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path))
    found = app.evaluate(app.model(), app.data(Shard("test", 0, 3)))
    assert found["accuracy"] == found["eval_acc"] == pytest.approx((0 * 10 + 0.1 * 20 + 0.2 * 30) / 60)
    assert found["loss"] == pytest.approx((1 + 0 + 7) / 3)
    assert found["tasks"] == 0  # a device's state stays with it


def test_of_some_partitions_if_asked_for(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path), {"flower": {"evaluate_partitions": 1}})
    assert app.evaluate(app.model(), app.data(Shard("test", 0, 3)))["accuracy"] == 0.0


def test_metrics_may_be_named(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path), {"flower": {"accuracy": "eval_loss", "loss": "tasks"}})
    found = app.evaluate(app.model(), app.data(Shard("test", 0, 3)))
    assert (found["accuracy"], found["loss"]) == (found["eval_loss"], found["tasks"])


def test_an_evaluation_without_accuracy_says_what_there_is() -> None:
    with pytest.raises(
        AppError, match=r"no metric 'accuracy' \(it has mae, rmse\): name one, flower.accuracy"
    ):
        named({"rmse": 1.0, "mae": 2.0}, FlowerTable(), "app")
    with pytest.raises(AppError, match="no metric 'mape'"):
        named({"rmse": 1.0, "acc": 2.0}, FlowerTable(loss="mape"), "app")
    found = named({"top1_acc": 0.5}, FlowerTable(), "app")
    assert found == {"accuracy": 0.5}
    assert named({"mse_loss": 2.0}, FlowerTable(), "app") == {"loss": 2.0}  # a regression


def test_a_metric_that_some_lack_is_the_mean_of_the_others() -> None:
    replies = [Reply({}, 1, {"a": 1.0}), Reply({}, 3, {"a": 2.0, "b": 5.0})]
    assert mean_metrics(replies) == {"a": 1.75, "b": 5.0}


# --- the configuration ---------------------------------------------------------------------------


def test_messages_may_be_configured(tmp_path: Path) -> None:
    told = {"arrays": "arrays", "records": {"config": {"lr": 2.0, "server-round": 0}}}
    app = joined(write_app(tmp_path, server="app = None"), {"flower": {"train": told}})
    model = {"layer.bias": np.zeros(3, np.float32)}
    app.train(model, app.data(Shard("train", 0, 3)), PLAN, seed=1)
    assert model["layer.bias"].tolist() == [2.0, 2.0, 2.0]


def test_another_run_has_messages_of_its_own(tmp_path: Path) -> None:
    def told(lr: float) -> dict[str, object]:
        return {"train": {"arrays": "arrays", "records": {"config": {"lr": lr, "server-round": 0}}}}

    app = joined(write_app(tmp_path, server="app = None"), {"flower": told(2.0)})
    found = []
    for lr in (2.0, 3.0):
        app.join({**CONFIG, "flower": told(lr)})
        for _ in range(2):  # of the same run the second is told the same
            app.kept, model = b"", {"layer.bias": np.zeros(3, np.float32)}
            app.train(model, app.data(Shard("train", 0, 3)), PLAN, seed=1)
            found.append(model["layer.bias"].tolist())
    assert found == [[2.0] * 3] * 2 + [[3.0] * 3] * 2


@pytest.mark.parametrize(
    "told",
    [{"arrays": 3}, {"records": {"config": 3}}, {"records": 3}, {"records": {"config": {"lr": {"a": 1}}}}],
)
def test_messages_of_another_form_are_refused(told: dict[str, object], tmp_path: Path) -> None:
    app = joined(write_app(tmp_path), {"flower": {"train": told}})
    with pytest.raises(AppError, match=r"flower(\.train|: a message cannot have)"):
        app.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'run_config'"):
        joined(write_app(tmp_path), {"flower": {"runconfig": {}}})


def test_the_options_of_a_device_are_in_the_node_config(tmp_path: Path) -> None:
    app = joined(write_app(tmp_path, replying("1 / context.node_config['zero']")))
    app.options = {"zero": 0, "partition-id": 7}
    with pytest.raises(AppError, match="ZeroDivisionError"):
        app.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)


def test_what_a_client_app_raises_has_its_file_and_line(tmp_path: Path) -> None:
    folder = write_app(tmp_path, replying("1 / len(arrays) / 0"))
    app = joined(folder)
    with on_device("device-0002"), pytest.raises(AppError) as caught:
        app.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)
    first, *lines = str(caught.value).splitlines()
    file = next(folder.rglob("client_app.py"))
    why = "ZeroDivisionError: float division by zero"
    assert first == f"the ClientApp's train ({file}:11) on device-0002: {why}"
    assert lines == [f"  {file}:11 in train", "    return 1 / len(arrays) / 0"]


def test_the_data_path_is_in_the_node_config(tmp_path: Path) -> None:
    client = replying("1 / 0 if context.node_config.get('data-path') == '/data' else msg")
    app = load_app(f"flower:{write_app(tmp_path, client)}", "/data")
    app.join(CONFIG)
    with pytest.raises(AppError, match="ZeroDivisionError"):
        app.train(app.model(), app.data(Shard("train", 0, 3)), PLAN, seed=1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"names no ClientApp: it needs clientapp"),
        ("[tool", "is not TOML"),
        (
            '[tool.flwr.app.components]\nclientapp = "a:b"\n[tool.flwr.app.config]\nx = [1]',
            "x must be a number",
        ),
    ],
)
def test_a_folder_without_an_app_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(AppError, match=why):
        Project.read(tmp_path)
    with pytest.raises(AppError, match="cannot be read: name the folder of a Flower app"):
        load_app(f"flower:{tmp_path / 'elsewhere'}")


def test_a_nested_run_config_has_keys_with_dots(tmp_path: Path) -> None:
    folder = write_app(tmp_path, config="[tool.flwr.app.config.model]\nwidth = 3\n")
    project = Project.read(folder)
    assert project.run_config["model.width"] == 3
    assert project.fused({"model": {"width": 4}})["model.width"] == 4


def test_a_package_that_hides_the_apps_is_refused(tmp_path: Path) -> None:
    first = write_app(tmp_path / "a")
    FlowerApp(first)
    second = tmp_path / "b"
    second.mkdir()
    (first / "pyproject.toml").rename(second / "pyproject.toml")
    (first / first.name).rename(second / first.name)
    with pytest.raises(AppError, match="it hides the one in"):
        FlowerApp(second)


def test_a_partition_stands_for_its_data() -> None:
    part = Partition.of(2, 5)
    assert (part.index, part.count, len(part)) == (2, 5, 1)


# --- records as bytes ----------------------------------------------------------------------------

numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=8)
arrays = st.builds(
    lambda shape, dtype: Array(np.arange(math.prod(shape)).reshape(shape).astype(dtype)),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(["float32", "float64", "int8", "uint16", "bool"]),
)
records = st.dictionaries(
    names,
    st.dictionaries(names, arrays, max_size=3).map(ArrayRecord)
    | st.dictionaries(names, numbers, max_size=3).map(MetricRecord)
    | st.dictionaries(
        names,
        numbers | st.booleans() | st.binary(max_size=9) | names | st.lists(st.binary(max_size=3), max_size=3),
        max_size=3,
    ).map(ConfigRecord),
    max_size=4,
)


@given(records)
@settings(max_examples=60, deadline=None)
def test_a_state_survives_as_bytes(found: dict[str, ArrayRecord | MetricRecord | ConfigRecord]) -> None:
    state = RecordDict(found)
    again = from_bytes(to_bytes(state))
    assert list(again) == list(state)
    assert all(
        type(again[name]) is type(state[name]) and dict(again[name]) == dict(state[name]) for name in state
    )
    assert to_bytes(again) == to_bytes(state)


@pytest.mark.parametrize(
    "data", [b"x", b"{}\n", b'{"format": 2, "records": []}\n', b'{"format": 1, "records": [1]}']
)
def test_bytes_that_are_no_state_are_refused(data: bytes) -> None:
    with pytest.raises(AppError, match="cannot be read"):
        from_bytes(data)
