"""`app` takes tables of Hugging Face's `datasets`, and the parts of `flwr-datasets`: the real libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner
from transformers import BertConfig, BertForSequenceClassification

import anabranch as ab
from anabranch.core.config.tables import FleetTable
from anabranch.core.errors import DataError
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.calls import data_of

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("default")]

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(200, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
WORDS = DRAWS.integers(1, 20, (200, 6))
UNTIL: dict[str, Any] = {"strategy": "fedasync", "until": ab.Until(updates=6)}


def table() -> Dataset:
    """A column of arrays, a text that no model takes as it is, and class numbers."""
    return Dataset.from_dict({"x": X.tolist(), "text": ["a"] * 200, "label": Y.tolist()})


def sentences() -> Dataset:
    """Tokenised."""
    columns = {"input_ids": WORDS.tolist(), "attention_mask": np.ones_like(WORDS).tolist()}
    return Dataset.from_dict({**columns, "labels": (WORDS[:, 0] > 9).astype(int).tolist()})


def bert() -> Any:
    """Small, with random weights."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))


def line() -> torch.nn.Module:
    """Four numbers in, two scores out."""
    return torch.nn.Linear(4, 2)


def test_a_table_is_split_as_its_arrays_are() -> None:
    shard = Shard("train", 1, 3, FleetTable(clients=3, split="dirichlet"), seed=2)
    of_table, of_arrays = (data_of(ab.app(line, data), shard) for data in (table(), (X, Y)))
    assert type(of_table) is Examples
    assert np.array_equal(of_table.x, of_arrays.x)
    assert np.array_equal(of_table.y, of_arrays.y)


def test_a_table_in_parts_and_with_other_names() -> None:
    named = table().rename_column("label", "kind")
    parts = DatasetDict(train=named, test=named)
    with pytest.raises(DataError, match="no column 'label or labels' among x, text, kind: say app"):
        data_of(ab.app(line, parts), Shard("train"))
    with pytest.raises(DataError, match="no column 'y'"):
        data_of(ab.app(line, parts, label="kind", inputs=["y"]), Shard("train"))
    assert len(data_of(ab.app(line, parts, label="kind"), Shard("test"))) == 200
    with pytest.raises(DataError, match="tokenise text first"):
        data_of(ab.app(line, table().remove_columns("x")), Shard("train"))


def test_a_model_of_several_columns_learns_in_a_simulation() -> None:
    app = ab.app(bert, sentences(), optimizer=torch.optim.AdamW)
    training = ab.Training(learning_rate=0.003, epochs=8)
    run = ab.simulate(app, training=training, fleet=ab.Fleet(clients=3, split=ab.Dirichlet()), **UNTIL)
    losses = [point.loss for point in run.result.history if point.loss is not None]
    assert min(losses[1:]) < losses[0]


def test_what_its_owner_makes_of_a_table_is_kept() -> None:
    doubled = table().with_transform(lambda rows: {"x": 2 * torch.tensor(rows["x"]), "label": rows["label"]})
    streamed: Any = data_of(ab.app(line, doubled), Shard("train", 0, 2, FleetTable(split="shards"), seed=1))
    plain = data_of(ab.app(line, (X, Y)), Shard("train", 0, 2, FleetTable(split="shards"), seed=1))
    x, y = streamed.rows(np.arange(5))
    assert torch.equal(x, 2 * torch.tensor(plain.x[:5]))
    assert y.tolist() == plain.y[:5].tolist()


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_partitioners_parts_are_the_devices(kind: str) -> None:
    partitioner = IidPartitioner(4) if kind == "iid" else DirichletPartitioner(4, "label", alpha=1.0, seed=1)
    partitioner.dataset = table()
    app = ab.app(line, partitioner, test=(X[:50], Y[:50]))
    parts = [data_of(app, Shard("train", i, 4)) for i in range(4)]
    held_out = data_of(app, Shard("validation"))
    seen = [x.tobytes() for part in (*parts, held_out) for x in part.x]
    assert sorted(seen) == sorted(x.tobytes() for x in X)
    for i, part in enumerate(parts):
        own = {np.asarray(x, np.float32).tobytes() for x in partitioner.load_partition(i)["x"]}
        assert {x.tobytes() for x in part.x} < own
    with pytest.raises(DataError, match=r"fleet\.clients is 5, and the partitioner has 4 parts"):
        data_of(app, Shard("train", 0, 5))
    with pytest.raises(DataError, match="no test data"):
        data_of(ab.app(line, partitioner), Shard("test"))
    run = ab.simulate(app, fleet=ab.Fleet(clients=4), **UNTIL)
    assert run.result.updates_applied == 6


def test_a_federated_dataset_is_one_as_well(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table().to_parquet(tmp_path / "data" / "train.parquet")
    table().select(range(50)).to_parquet(tmp_path / "data" / "test.parquet")
    federated = FederatedDataset(dataset=str(tmp_path / "data"), partitioners={"train": IidPartitioner(4)})
    app = ab.app(line, federated)
    assert len(data_of(app, Shard("train", 2, 4))) == 45
    assert len(data_of(app, Shard("test"))) == 50
