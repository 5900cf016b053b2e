"""`app`: an App from a model and a dataset, in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

import anabranch as ab
from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import AppError, DataError
from anabranch.testing import AppConformance
from anabranch.workloads.app import App, Examples, Shard
from anabranch.workloads.calls import data_of
from anabranch.workloads.dataset_rows import labels_of

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(300, 4)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int64) + (X[:, 2] > 1)
FILE = """
import numpy as np
import torch

import anabranch as ab

draws = np.random.default_rng(0)
x = draws.normal(size=(300, 4)).astype(np.float32)


def make_model():
    return torch.nn.Linear(4, 2)


app = ab.app(make_model, (x, (x[:, 0] > 0).astype(np.int64)), name="halves")
"""


def net() -> torch.nn.Module:
    """Four numbers in, three scores out."""
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))


class Rows(Dataset[Any]):
    """Made as they are asked for, with the labels where torchvision has them, or nowhere."""

    def __init__(self, rows: range, told: bool = True) -> None:
        self.rows = rows
        if told:
            self.targets = [int(Y[row]) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return X[self.rows[i]], int(Y[self.rows[i]])


FORMS: dict[str, Any] = {
    "arrays": (X, Y),
    "tensors": (torch.tensor(X), torch.tensor(Y)),
    "TensorDataset": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "Dataset": Rows(range(300)),
    "without targets": Rows(range(300), told=False),
    "parts of Datasets": ConcatDataset([Subset(Rows(range(300)), range(100)), Rows(range(100, 300))]),
    "a mapping": {"train": (X[:250], Y[:250]), "test": (X[250:], Y[250:])},
}


def rows_in(app: App, shard: Shard) -> set[bytes]:
    """The examples of a shard."""
    found: Any = data_of(app, shard)
    if type(found) is Examples:
        return {np.asarray(x).tobytes() for x in found.x}
    return {np.asarray(x).tobytes() for x, _ in (found.source[i] for i in range(len(found)))}


@pytest.mark.parametrize("split", ["iid", "dirichlet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_example_is_in_one_place(form: str, split: str) -> None:
    app, fleet = ab.app(net, FORMS[form]), FleetTable(clients=4, split=split)
    shards = [Shard("train", i, 4, fleet, seed=3) for i in range(4)]
    parts = [rows_in(app, shard) for shard in (*shards, Shard("validation", 0, 1, fleet, seed=3))]
    parts.append(rows_in(app, Shard("test")))
    everything: set[bytes] = set().union(*parts)
    assert everything == {x.tobytes() for x in X}
    assert sum(map(len, parts)) == len(X)
    assert len(parts[-1]) == (50 if form == "a mapping" else 60)


def test_all_forms_of_the_same_data_are_split_alike() -> None:
    fleet = FleetTable(clients=3, split="shards")
    forms = [name for name in FORMS if name != "a mapping"]
    found = [rows_in(ab.app(net, FORMS[name]), Shard("train", 1, 3, fleet, seed=1)) for name in forms]
    assert all(rows == found[0] for rows in found)


@pytest.mark.parametrize("form", ["arrays", "Dataset"])
def test_it_learns_in_a_simulation(form: str) -> None:
    run = ab.simulate(
        ab.app(
            net,
            FORMS[form],
            optimizer=torch.optim.Adam,
            metrics={"ones": lambda o, y: (o.argmax(1) == y).float().mean()},
        ),
        strategy="fedasync",
        fleet=ab.Fleet(clients=4, split=ab.Dirichlet()),
        training=ab.Training(learning_rate=0.01, epochs=3),
        until=ab.Until(updates=30),
        settings={"fleet.executor": "serial"},
    )
    first, last = run.result.history[0], run.result.history[-1]
    assert first.accuracy is not None
    assert last.accuracy is not None
    assert last.accuracy > first.accuracy
    assert last.metrics["ones"] == pytest.approx(last.accuracy)
    assert run.result.workload == "net"


def test_a_loss_of_its_own() -> None:
    def flat() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))

    app = ab.app(flat, (X, X @ np.array([1, -2, 0.5, 0], np.float32)), loss=torch.nn.functional.mse_loss)
    training = ab.Training(steps=100, learning_rate=0.1)
    with ab.Server.local(app, strategy="fedasync", training=training, until=ab.Until(updates=10)) as server:
        with ab.Client(app, server, id="device-0") as device:
            device.wait(600)
        weights = server.weights()
    assert np.abs(weights["0.weight"] - [[1, -2, 0.5, 0]]).max() < 0.3


def test_processes_come_to_the_same_digest_and_so_does_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "halves.py").write_text(FILE)
    settings = {"fleet.clients": 4, "run.updates_max": 8}
    here = ab.simulate("halves.py:app", settings={**settings, "fleet.executor": "serial"})
    there = ab.simulate("halves.py:app", settings={**settings, "fleet.executor": "processes"}, workers=1)
    for digest in ("model_sha256", "journal_sha256"):
        assert getattr(here.result, digest) == getattr(there.result, digest)


class Scores:
    """What a model of Hugging Face's returns."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Wrapped(torch.nn.Module):
    """Returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: torch.Tensor) -> Scores:
        return Scores(self.inner(x))


def test_scores_may_be_the_logits_of_what_a_model_returns() -> None:
    few: Any = {"until": ab.Until(updates=6), "settings": {"fleet.clients": 3}}
    runs = [ab.simulate(ab.app(model, (X, Y), name="same"), **few) for model in (net, Wrapped)]
    losses = [[point.loss for point in run.result.history] for run in runs]
    assert losses[0] == pytest.approx(losses[1])


def test_a_model_itself_is_copied() -> None:
    mine: Any = net()
    app = ab.app(mine, (X, Y))
    made: Any = app.model()
    assert made is not mine
    assert torch.equal(made[0].weight, mine[0].weight)
    assert app.name == "Sequential"
    assert ab.app(net, (X, Y)).name == "net"


def test_labels_are_found_without_a_pass_over_the_data() -> None:
    class Dear(Rows):
        """What is in it must not be read."""

        def __getitem__(self, i: int) -> Any:
            raise AssertionError(i)

    assert labels_of(Dear(range(10))).tolist() == Y[:10].tolist()
    app = ab.app(net, Rows(range(300), told=False))
    assert len(data_of(app, Shard("train", 0, 2))) == 108


class Streamed:
    """What `datasets` gives for `streaming=True` has these, and neither a length nor a format."""

    column_names = ("x", "label")

    def with_format(self, kind: str) -> Streamed:
        return self

    def __iter__(self) -> Any:
        return iter([{"x": X[0], "label": 1}])


class Counted(IterableDataset[Any]):
    """Of torch's, which has an item for no number."""

    def __iter__(self) -> Any:
        return iter(Rows(range(20)))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "data is a int: give a pair"),
        ("data.csv", "data is a str: give a pair"),
        (X, "data is a ndarray: give a pair"),
        ({"x": X, "y": Y}, r"has the parts x, y: one must be 'train', or give a pair \(x, y\)"),
        ({"validation": (X, Y)}, "one must be 'train'"),
        ((X, Y[:-1]), "give each its label"),
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "at least one example"),
        ((X, Y, Y), r"a tuple of 3, each a ndarray: give a pair \(x, y\); give test data as app\(..., test="),
        ([*X], r"a list of 300, each a ndarray: give a pair"),
        (Streamed(), r"is a Streamed of Hugging Face's.* no rows to split: load it with streaming=False"),
        (Counted(), "is a Counted, an IterableDataset, which has no rows to split: give a Dataset with a"),
    ],
)
def test_what_is_wrong_with_data_is_said(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        data_of(ab.app(net, data), Shard("train"))


def test_a_frame_is_no_data() -> None:
    import pandas as pd  # which takes longer than all else that these tests import

    frame = pd.DataFrame({"a": [1.0, 2.0], "klass": [0, 1]})
    with pytest.raises(DataError, match=r"is a DataFrame: .*frame\[\.\.\.\]\.to_numpy\(\)"):
        data_of(ab.app(net, frame), Shard("train"))


def test_what_is_wrong_besides_is_said() -> None:
    with pytest.raises(AppError, match="give a function that makes a torch module"):
        ab.app(3, (X, Y))
    with pytest.raises(AppError, match=r"app\(name=3\): give it as text"):
        ab.app(net, (X, Y), name=3)  # type: ignore[arg-type]
    for named in ({"label": "y"}, {"inputs": ("a", "b")}):
        for data in ((X, Y), Rows(range(20)), {"train": (X, Y)}):
            with pytest.raises(
                AppError, match=r"app\(label=\.\.\., inputs=\.\.\.\): data is a .* no columns"
            ):
                ab.app(net, data, **named)
    many = ab.app(net, (X, np.stack([Y, Y], 1)))
    with pytest.raises(DataError, match="split = 'iid'"):
        data_of(many, Shard("train", 0, 2, FleetTable(clients=2, split="shards")))
    assert len(data_of(many, Shard("train", 0, 2))) == 108


class TestArrays(AppConformance):
    @pytest.fixture
    def app(self) -> App:
        return ab.app(net, (X, Y))


@pytest.mark.parametrize("split", ["iid", "dirichlet", "draws"])
def test_own_data_all_train_but_those_for_tests(split: str) -> None:
    fleet = FleetTable(clients=8, split=split, examples_per_client=7)
    whole = {x.tobytes() for x in X}
    mine = Shard("train", 0, 1, fleet, own=True)
    app = ab.app(net, (X, Y), own_data=True)
    tests = rows_in(app, Shard("test"))
    assert (len(tests), rows_in(app, mine)) == (60, whole - tests)
    apart = ab.app(net, (X[50:], Y[50:]), test=(X[:50], Y[:50]), own_data=True)
    assert rows_in(apart, mine) == {x.tobytes() for x in X[50:]}
    plain = ab.app(net, (X, Y))
    for shard in (Shard("train", 3, 8, fleet), Shard("validation", 0, 8, fleet)):  # of a simulated fleet
        assert rows_in(app, shard) == rows_in(plain, shard)


def test_a_partitioner_has_parts_of_its_own() -> None:
    class Partitioner:
        def load_partition(self, number: int) -> Any:
            raise AssertionError(number)

    with pytest.raises(AppError, match=r"own_data=True.*leave one of them out"):
        ab.app(net, Partitioner(), own_data=True)
