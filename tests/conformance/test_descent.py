"""The compiled steps of a chain of linear layers, beside torch's own gradients in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.core.rng import stream

RATE = 0.1
CHAINS = {
    "one layer": (6, 3),
    "of the digits": (64, 64, 10),
    "wider than a row has room for": (7, 33, 17, 2),
    "of one number": (1, 1, 2, 1, 2),
    "wide": (130, 200, 11),
}
LENGTHS = (1, 4, 21, 32, 3)  # of the batches
COUNT = 40  # examples


@pytest.fixture
def descend(loops_module: None) -> Any:
    from anabranch.core.kernels import descent

    if descent._descend is None:
        pytest.skip("the compiled loops were made of older sources")
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("it is for processors with AVX2")
    return descent.descend


def chain(widths: tuple[int, ...]) -> nn.Sequential:
    """In float64, of numbers that float32 has."""
    torch.manual_seed(3)
    pairs = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1]).double()


def vector(model: nn.Module) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()]).astype(np.float32)


def drawn(widths: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Examples, classes, and the rows and lengths of batches."""
    draws = stream(0, "descent")
    x = draws.standard_normal((COUNT, widths[0])).astype(np.float32)
    rows = np.concatenate([draws.permutation(COUNT)[:length] for length in LENGTHS])
    return x, draws.integers(0, widths[-1], COUNT), rows, np.array(LENGTHS)


def by_autograd(model: nn.Module, x: Any, y: Any, rows: Any) -> float:
    """Train the model by these batches; the sum of their losses."""
    total, at = 0.0, 0
    for length in LENGTHS:
        batch = rows[at : at + length]
        at += length
        scores = model(torch.from_numpy(x[batch]).double())
        loss = nn.functional.cross_entropy(scores, torch.from_numpy(y[batch]))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)
        total += float(loss.detach())
    return total


@pytest.mark.parametrize("widths", CHAINS.values(), ids=CHAINS)
def test_steps_are_those_of_autograd(descend: Any, widths: tuple[int, ...]) -> None:
    model = chain(widths)
    given = vector(model)
    x, y, rows, lengths = drawn(widths)
    weights = given.copy()
    loss = descend(weights, np.array(widths), x, y, rows, lengths, RATE)
    wanted = by_autograd(model, x, y, rows)
    assert loss == pytest.approx(wanted, rel=1e-6)
    moved = np.linalg.norm(vector(model) - given)
    assert np.linalg.norm(weights - vector(model)) <= 1e-5 * moved


@pytest.mark.parametrize("score", [1e3, -1e3, 80.0])
def test_scores_far_apart_have_finite_losses(descend: Any, score: float) -> None:
    widths, x = np.array([1, 2]), np.ones((1, 1), np.float32)
    weights = np.array([score, 0, 0, 0], np.float32)
    loss = descend(weights, widths, x, np.array([0]), np.array([0]), np.array([1]), 1.0)
    assert loss == pytest.approx(max(0.0, -score) + math.log1p(math.exp(-abs(score))), abs=1e-6)
    share = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
    assert weights == pytest.approx([score + 1 - share, share - 1, 1 - share, share - 1], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 20, 30])
def test_what_is_not_finite_stays_so(descend: Any, value: float, at: int) -> None:
    widths = (4, 6, 3)
    weights = vector(chain(widths))
    weights[at] = value
    x, y, rows, lengths = drawn(widths)
    loss = descend(weights, np.array(widths), x, y, rows, lengths, RATE)
    assert not np.isfinite(weights).all()
    assert not math.isfinite(loss)


def test_what_is_not_for_it_is_left_as_it_is(descend: Any) -> None:
    widths = np.array([4, 3])
    x, y, rows, lengths = drawn((4, 3))
    good = {"weights": np.ones(15, np.float32), "widths": widths, "x": x, "y": y, "rows": rows}
    good |= {"lengths": lengths}
    bad: list[dict[str, Any]] = [
        {"y": np.where(np.arange(COUNT) == rows[-1], -100, y)},
        {"y": y + 3},
        {"y": y[1:]},
        {"rows": rows - 1 - rows.min()},
        {"rows": rows + COUNT},
        {"rows": rows[1:]},
        {"lengths": lengths - 1},
        {"lengths": np.array([], np.int64)},
        {"widths": np.array([4])},
        {"widths": np.array([4, 3, 3])},
        {"widths": np.array([-4, -3])},
        {"widths": np.full(40, 2)},
        {"weights": np.ones(16, np.float32)},
        {"x": x[:, :3].copy()},
        {"weights": np.ones(64, np.uint8)[1:61].view(np.float32)},
    ]
    for change in bad:
        given = good | change
        before = given["weights"].copy()
        assert descend(*given.values(), RATE) is None, change
        assert given["weights"].tobytes() == before.tobytes()
    assert descend(*good.values(), RATE) > 0


def test_it_does_nothing_without_the_compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.core.kernels import descent

    monkeypatch.setattr(descent, "_descend", None)
    x, y, rows, lengths = drawn((4, 3))
    weights = np.ones(15, np.float32)
    assert descent.descend(weights, np.array([4, 3]), x, y, rows, lengths, RATE) is None
    assert weights.tolist() == [1.0] * 15
