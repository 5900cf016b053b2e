"""SR-STE as an App: the mask and its gradient by hand, two of four in what is deployed, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from anabranch.core.config.tables import merge
from anabranch.simulation.run import simulate
from anabranch.support.code import load
from anabranch.testing import AppConformance
from anabranch.workloads.app import App, Shard
from anabranch.workloads.calls import merged
from scripts import EXAMPLES

FILE = EXAMPLES / "nm_sparse.py"
SparseDigits: Any = load(f"{FILE}:SparseDigits")
sparse: Any = load(f"{FILE}:sparse")
mask: Any = load(f"{FILE}:mask")
PULL = 2e-4
Array = npt.NDArray[Any]


class TestSparseDigits(AppConformance):
    @pytest.fixture
    def app(self) -> App:
        found: App = SparseDigits()
        return found


def by_hand(weight: Array) -> Array:
    """The mask, group by group: of (out, in, ...) the largest two of every four inputs."""
    found = np.zeros(weight.shape, bool)
    rows, place = np.moveaxis(weight, 1, -1), np.moveaxis(found, 1, -1)
    for at in np.ndindex(rows.shape[:-1]):
        for first in range(0, rows.shape[-1], 4):
            sizes = np.abs(rows[at][first : first + 4])
            for kept in sorted(range(4), key=lambda i: (-sizes[i], i))[:2]:
                place[at][first + kept] = True
    return found


@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 2, 3), (2, 12, 1)])
def test_the_mask_keeps_two_of_every_four_inputs(shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(1).normal(size=shape).round(1)  # with equals among them
    found = mask(torch.from_numpy(weight)).numpy()
    np.testing.assert_array_equal(found, by_hand(weight))
    assert (np.moveaxis(found, 1, -1).reshape(-1, 4).sum(1) == 2).all()


def test_the_gradient_passes_the_mask_and_pulls_what_is_masked() -> None:
    """dL/dW' + lambda (1 - M) W, of L = sum(c W' x), in which dL/dW' is c x whatever the mask."""
    layer = sparse(nn.Linear(4, 1, bias=False))
    w, x = torch.tensor([[3.0, -1.0, 0.5, -4.0]]), torch.tensor([[1.0, 2.0, -3.0, 0.5]])
    (original,) = layer.parameters()
    with torch.no_grad():
        original.copy_(w)
    output = layer(x)
    assert output.item() == 3.0 - 4.0 * 0.5, "the second and the third are masked"
    output.sum().backward()
    torch.testing.assert_close(original.grad, x + PULL * torch.tensor([[0.0, -1.0, 0.5, 0.0]]))


def test_layers_whose_inputs_do_not_come_in_fours_stay_dense() -> None:
    model = sparse(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 1), nn.Flatten(), nn.Linear(6, 2)))
    names = [name for name in model.state_dict() if name.endswith("weight.original")]
    assert names == ["1.parametrizations.weight.original"]


def accuracy(app: App, weights: dict[str, Array]) -> float:
    """Of a perceptron on the held-out digits, in numpy alone."""
    test = app.data(Shard("test"))
    hidden = np.maximum(test.x @ weights["0.weight"].T + weights["0.bias"], 0)
    scores = hidden @ weights["2.weight"].T + weights["2.bias"]
    return float((scores.argmax(1) == test.y).mean())


@pytest.mark.parametrize(
    ("seed", "updates", "apart"),
    [(0, 300, 0.02), *(pytest.param(seed, 1000, 0.01, marks=pytest.mark.prove) for seed in (0, 1))],
)
def test_what_is_deployed_has_two_of_four_and_is_as_good(
    seed: int, updates: int, apart: float, tmp_path: Path
) -> None:
    """The command of docs/extending/app.md."""
    app: App = SparseDigits()
    tables = {
        "run": {"updates_max": updates, "seed": seed, "evaluate_every_versions": 100},
        "client": {"learning_rate": 0.2},
        "fleet": {"clients": 8, "executor": "serial"},
    }
    simulate(merge([("test", tables)]), tmp_path / "run", app=app)
    run = load_file(tmp_path / "run" / "final.safetensors")
    dense = {name.replace("parametrizations.weight.original", "weight"): a for name, a in run.items()}
    found = merged(app, run)
    assert {name: a.shape for name, a in found.items()} == {name: a.shape for name, a in dense.items()}
    for name in ("0.weight", "2.weight"):
        assert (np.count_nonzero(found[name].reshape(-1, 4), axis=1) == 2).all()
        assert np.count_nonzero(dense[name]) == dense[name].size
        np.testing.assert_array_equal(found[name], dense[name] * by_hand(dense[name]))
    before, after = accuracy(app, dense), accuracy(app, found)
    told = json.loads((tmp_path / "run" / "result.json").read_text())["final_accuracy"]
    assert after == pytest.approx(told, abs=0.003), "the run measures what is deployed"
    assert after > 0.85
    assert abs(after - before) < apart
