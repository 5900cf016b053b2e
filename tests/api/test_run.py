"""What a run is good for: frames, models, events, a replay, figures; of a folder too."""

from __future__ import annotations

import csv
import dataclasses
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anabranch as ab
from anabranch.core.errors import AppError, ConfigError, DataError, FolderMissing, ReplayMismatch
from anabranch.core.model.params import ParamSpec, digest
from anabranch.workloads.app import Shard
from anabranch.workloads.digits import Digits
from anabranch.workloads.trainer import trainer_for


class Net(Digits):
    """A torch model of this file's own."""

    def model(self) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ab.Run:
    folder = tmp_path_factory.mktemp("api") / "run"
    fleet = ab.Fleet(clients=4, examples_per_client=60, executor="serial")
    return ab.simulate(Net(), strategy="fedasync", fleet=fleet, until=ab.Until(updates=12), out=folder)


def test_its_history_is_a_frame_of_either_kind(run: ab.Run, tmp_path: Path) -> None:
    points = run.result.history
    assert run.history.columns[:2] == ("time_s", "version")
    pandas, polars = run.history.to_pandas(), run.history.to_polars()
    assert list(pandas["accuracy"]) == [p.accuracy for p in points] == polars["accuracy"].to_list()
    assert list(pandas.columns) == polars.columns == list(run.history.columns)
    assert run.history[-1]["updates"] == 12
    assert [row["version"] for row in run.history[-2:]] == [11, 12]
    with run.history.to_csv(tmp_path / "history.csv").open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [p.loss for p in points]
    assert "<th>accuracy</th>" in run.history._repr_html_()


def test_a_value_that_one_row_lacks_is_none_in_it() -> None:
    rows = ab.Records([{"a": 1}, {"b": "<x>"}])
    assert [dict(row) for row in rows] == [{"a": 1, "b": None}, {"a": None, "b": "<x>"}]
    assert rows.to_polars()["b"].to_list() == [None, "<x>"]
    assert "&lt;x&gt;" in rows._repr_html_()
    with pytest.raises(KeyError, match="there are a, b"):
        rows.column("c")
    with pytest.raises(TypeError, match=r"of a column write \.column\('a'\)"):
        rows["a"]  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_frame_without_its_library_says_how_to_install_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf'{name} is not installed: pip install "anabranch\[frames\]"'):
        getattr(ab.Records([{"a": 1}]), f"to_{name}")()


def test_its_model_comes_in_three_ways_and_is_the_one_that_was_measured(run: ab.Run) -> None:
    weights, tensors, model = run.weights(), run.state_dict(), run.model()
    assert isinstance(model, torch.nn.Sequential)
    assert not model.training
    assert set(weights) == set(tensors) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name])
        assert np.array_equal(tensor.numpy(), weights[name])
    spec: ParamSpec = trainer_for(Net()).spec
    assert digest(spec.flatten(weights)) == run.result.model_sha256
    held_out = Net().data(Shard("test"))
    right = (model(torch.tensor(held_out.x)).argmax(1).numpy() == held_out.y).mean()
    assert right == pytest.approx(run.history[-1]["accuracy"])


class Arrays(Digits):
    """A model of arrays, whose names are in no order."""

    def model(self) -> Any:
        return {
            "weight": np.zeros((64, 10), np.float32),
            "count": np.zeros(1, np.int64),
            "bias": np.zeros(10),
        }

    def train(self, model: Any, examples: Any, plan: Any, seed: int) -> dict[str, float]:
        model["bias"] += 1
        return {}

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"accuracy": 0.0}


def test_a_model_of_arrays_is_in_the_apps_order() -> None:
    run = ab.simulate(Arrays(), strategy="fedasync", fleet=ab.Fleet(clients=1), until=ab.Until(updates=2))
    model = run.model()
    assert list(model) == ["weight", "count", "bias"]
    assert all(np.array_equal(model[name], run.weights()[name]) for name in model)


class Peaking(Arrays):
    """Its biases are the number of updates; none are as good as two."""

    def evaluate(self, model: Any, examples: Any) -> dict[str, float]:
        return {"accuracy": 1 - abs(float(model["bias"][0]) - 2) / 10}


def test_its_best_model_is_of_the_version_that_was_measured_to_be_the_best() -> None:
    strategy = ab.strategies.FedAsync(alpha=1.0, staleness={"name": "constant"})
    every, until = {"run.evaluate_every_versions": 1}, ab.Until(updates=5)
    run = ab.simulate(Peaking(), strategy=strategy, fleet=ab.Fleet(clients=1), until=until, settings=every)
    for best, updates in ((False, 5.0), (True, 2.0)):
        assert run.weights(best)["bias"].tolist() == [updates] * 10
        assert run.state_dict(best)["bias"].tolist() == [updates] * 10
        assert run.model(best)["bias"].tolist() == [updates] * 10


def test_its_events_are_rows(run: ab.Run) -> None:
    lines = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert len(run.events()) == len(lines)
    decided = run.events("decided")
    assert len(decided) == 12
    assert set(decided.column("verdict")) == {"published"}
    with pytest.raises(ConfigError, match=r"no event is of the kind 'decide': did you mean 'decided'\?"):
        run.events("decide")
    assert len(run.events("failed")) == 0  # there are such, over Flower
    assert len(run.devices) == 4
    assert sum(run.devices.column("updates")) == 12


def test_it_opens_from_its_folder_but_code_that_is_named_there_is_not_run(run: ab.Run) -> None:
    opened, shares = ab.open_run(str(run.folder)), [0.0]
    assert opened.result == run.result
    assert opened.config == run.config
    assert opened.replay(tell=shares.append).model_sha256 == run.result.model_sha256
    assert shares == sorted(shares)
    assert len(shares) > 1
    assert shares[-1] <= 1
    with pytest.raises(
        ConfigError, match=r"is code: look at it, then say --load-code \(in Python load_code=True\)"
    ):
        opened.model()
    assert torch.equal(
        ab.open_run(run.folder, app=Net).model()[0].weight, ab.open_run(run.folder).state_dict()["0.weight"]
    )
    assert ab.open_run(run.folder, app="synthetic").app.name == "synthetic"
    with pytest.raises(AppError, match="did you mean 'synthetic'"):
        ab.open_run(run.folder, app="synthtic")
    with pytest.raises(FolderMissing, match="is not there"):
        ab.open_run(run.folder / "elsewhere")


def test_a_folder_that_was_tampered_with_does_not_replay(run: ab.Run, tmp_path: Path) -> None:
    copy = run.save(tmp_path / "copy")
    data = json.loads((copy.folder / "result.json").read_text())
    (copy.folder / "result.json").write_text(json.dumps({**data, "model_sha256": "0" * 64}))
    with pytest.raises(ReplayMismatch, match=r"result\.json says otherwise: .*draws by itself"):
        ab.open_run(copy.folder).replay()
    with pytest.raises(ConfigError, match="is there already"):
        run.save(tmp_path / "copy")


def test_its_curves_are_a_figure(run: ab.Run, tmp_path: Path) -> None:
    figure = run.plot("loss", against="updates")
    drawing = ET.parse(figure.save(tmp_path / "loss.svg")).getroot()
    assert drawing.get("aria-label") == "loss against applied updates"
    assert 'src="data:image/svg+xml;base64,' in figure._repr_html_()
    with pytest.raises(ConfigError, match=r"end the name with \.svg or \.png"):
        figure.save(tmp_path / "loss.pdf")
    with pytest.raises(DataError, match=r"no run has measured 'f1': there is accuracy, loss"):
        run.plot("f1")
    with pytest.raises(DataError, match="against one of time, updates, bytes"):
        run.plot(against="versions")  # type: ignore[arg-type]
    html = run._repr_html_()
    assert "seed 0" in html
    assert figure._repr_html_().startswith("<img")


def test_a_folder_of_runs_stands_for_them(run: ab.Run, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    run.save(sweep / "one")
    (sweep / "compare.html").write_text("")
    (sweep / "notes").mkdir()
    assert [r.seed for r in ab.compare(sweep).results] == [run.result.seed]
    assert ab.compare([sweep]).left_out == ()
    found = ab.compare(sorted(sweep.iterdir()))
    assert [r.seed for r in found.results] == [run.result.seed]
    assert found.left_out[0] == f"{sweep / 'compare.html'} is a file: name the folder of a run"
    with pytest.raises(DataError, match="is missing: name the folder of a run that has ended"):
        ab.compare(sweep / "notes")


def test_runs_are_compared(run: ab.Run, tmp_path: Path) -> None:
    fleet = ab.Fleet(clients=4, examples_per_client=60, executor="serial")
    until = ab.Until(updates=12)
    others = [ab.simulate(Net(), strategy="fedasync", fleet=fleet, until=until, seed=seed) for seed in (0, 1)]
    found = ab.compare([run, *others, tmp_path / "none"])
    assert len(found.left_out) == 2
    assert found.left_out[0].endswith(f"is the same run as {run.folder}, to the bit")
    assert "is not there" in found.left_out[1]
    [row] = found.rows
    assert all(value is None or isinstance(value, str | int | float) for value in row.values())
    finals = [run.history[-1]["accuracy"], others[1].history[-1]["accuracy"]]
    assert (row["seeds"], row["final_accuracy"]) == (2, pytest.approx(np.mean(finals)))
    assert row["final_accuracy_std"] == pytest.approx(np.std(finals, ddof=1))
    assert found.rows.to_pandas()["final_loss"].notna().all()
    [single] = ab.compare([run]).rows
    assert single["final_accuracy"] == finals[0]
    assert {value for name, value in single.items() if name.endswith("_std")} == {None}, (
        "one has no deviation"
    )
    assert found.save(tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert found.plot(against="bytes").svg.startswith("<svg")
    with pytest.raises(FolderMissing):
        ab.compare([tmp_path / "none"])
    alone = [ab.compare(one).results for one in (run, str(run.folder), run.folder, run.result)]
    assert [len(results) for results in alone] == [1, 1, 1, 1]
    with pytest.raises(DataError, match="no finished run among these folders: name"):
        ab.compare([])
    broken_off = dataclasses.replace(run.result, status="interrupted", why="Ctrl-C")
    with pytest.raises(DataError, match=r"these folders \(.* was interrupted \(Ctrl-C\)\): name"):
        ab.compare(broken_off)
