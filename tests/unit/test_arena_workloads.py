"""The arena's generated workloads: who has what, what can be known, gradients, stacks, a run of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from measuring import benchmark
from torch import nn

from anabranch.core.config.tables import FleetTable
from anabranch.core.model.updates import LocalPlan
from anabranch.reports.result import Point
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.batched import BatchedTraining
from anabranch.workloads.torch_trainer import TorchTrainer
from anabranch.workloads.trainer import Training

cells = benchmark("arena.cells")
play = benchmark("arena.play")
pools = benchmark("arena.pools")
regression = benchmark("arena.regression")
rows = benchmark("arena.rows")
runs = benchmark("arena.runs")
store = benchmark("arena.store")
text = benchmark("arena.text")
transformer = benchmark("arena.transformer")
tuning = benchmark("arena.tuning")

APPS = (text.Text, regression.Regression)
GROUPS = tuple(i % 5 for i in range(20))


def shard(split: str, index: int = 0, role: str = "train", **fleet: Any) -> Shard:
    return Shard(role, index, 20, FleetTable(clients=20, split=split, **fleet), 7, GROUPS)


# --- who has what ---


def few() -> Any:
    """A pool in which each value tells its row, and so its kind."""
    kinds = np.arange(400) % 4
    return pools.Pool(np.arange(400.0)[:, None], np.arange(400.0), kinds)


class Few(pools.PoolApp):  # type: ignore[misc,name-defined]
    """20 devices have 360 examples of four kinds; row i is of kind i mod 4."""

    held = few().cut(400)[0], few().cut(8)[0]

    def pools(self) -> Any:
        return self.held


@pytest.mark.parametrize("split", ["iid", "dirichlet", "speed-shards"])
def test_examples_and_their_kinds_are_of_the_same_rows(split: str) -> None:
    app = Few()
    wholes = [shard(split, role=role) for role in ("validation", "test")]
    for part in [shard(split, 3), shard(split, 19), *wholes]:
        found = app.data(part)
        assert found.x[:, 0].tolist() == found.y.tolist()
        assert app.kinds(part).tolist() == [int(value) % 4 for value in found.y]


def test_splits_go_by_the_kind_though_every_label_is_another() -> None:
    app = Few()
    held = [app.kinds(shard("dirichlet", i, dirichlet_alpha=0.1)) for i in range(20)]
    assert np.mean([np.bincount(kinds).max() / len(kinds) for kinds in held]) > 0.6
    fast = [set(app.kinds(shard("speed-shards", i, shards_per_client=1)).tolist()) for i in (0, 5, 10, 15)]
    assert len(set.union(*fast)) <= 2  # a run of sorted examples has two kinds at the most
    alike = [app.kinds(shard("iid", i)) for i in range(20)]
    assert np.mean([np.bincount(kinds).max() / len(kinds) for kinds in alike]) < 0.5


def test_every_training_example_is_on_one_device() -> None:
    app = Few()
    held = np.concatenate([app.data(shard("iid", i)).y for i in range(20)])
    spared = app.data(shard("iid", role="validation")).y
    assert sorted([*held.tolist(), *spared.tolist()]) == list(range(400))


@pytest.mark.parametrize("kind", APPS)
def test_everybody_has_the_same_examples(kind: Any) -> None:
    first = kind().data(shard("iid", 4))
    module = text if kind is text.Text else regression
    module._pools.cache_clear()
    again = kind().data(shard("iid", 4))
    assert first.x.tobytes() == again.x.tobytes()
    assert first.y.tobytes() == again.y.tobytes()


# --- the text ---


def test_tokens_come_as_often_as_the_language_says() -> None:
    draws = np.random.default_rng(3)
    language = text.Language.of(draws)
    tokens = language.texts(np.full(40_000, 2), 3, draws)
    begun = np.flatnonzero(tokens[:, 0] == np.bincount(tokens[:, 0]).argmax())
    begun = begun[tokens[begun, 1] == np.bincount(tokens[begun, 1]).argmax()]
    u, v = tokens[begun[0], :2]
    scores = 2.0 * language._after[v] / text.GRAMMAR + 1.0 * language._before[u] / text.BEFORE
    scores = scores + 1.5 * language._words[2] / text.WORDS
    due = np.exp(scores) / np.exp(scores).sum()
    seen = np.bincount(tokens[begun, 2], minlength=text.TOKENS) / len(begun)
    assert len(begun) > 1_000
    assert np.abs(seen - due).max() < 4 * np.sqrt(0.25 / len(begun))


def test_who_knows_the_topic_guesses_more() -> None:
    draws = text.stream(0, "arena", "text")
    topics = draws.integers(text.TOPICS, size=text.TRAIN_TEXTS + text.TEST_TEXTS)
    language, (_, test) = text.Language.of(draws), text._pools()
    assert (topics[text.TRAIN_TEXTS :] == test.kinds).all()
    knowing = np.mean(language.scores(test.x, test.kinds).argmax(1) == test.y)
    wrong = np.mean(language.scores(test.x, (test.kinds + 1) % text.TOPICS).argmax(1) == test.y)
    assert knowing == pytest.approx(0.562, abs=0.001)  # what nobody can be better than
    assert wrong < knowing - 0.2


def test_attention_is_that_of_torch_at_the_last_token() -> None:
    torch.manual_seed(1)
    model = text.Text().model()
    states = torch.randn(5, text.CONTEXT, text.WIDTH)
    peer = nn.MultiheadAttention(text.WIDTH, text.HEADS, batch_first=True)
    with torch.no_grad():
        parts = model.query, model.keys, model.values
        peer.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        peer.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        peer.out_proj.load_state_dict(model.heard.state_dict())
        due = peer(states[:, -1:], states, states)[0][:, 0]
        assert torch.allclose(model.heard(model._attended(states)), due, atol=1e-6)


def test_the_transformer_trains_in_a_stack() -> None:
    trainer = TorchTrainer(text.Text())
    stacks = BatchedTraining(trainer)
    vector, frozen = trainer.spec.flatten(trainer.initial(0)), trainer.frozen
    plan = LocalPlan(steps=2, batch_size=4, learning_rate=0.1)
    training = Training(vector, text.Text().data(shard("iid", 1)), plan, 5, None, None)
    assert stacks.objection(training, frozen) == ""
    assert stacks.pays()


# --- the regression ---


def test_the_gradient_is_that_of_differences() -> None:
    app, (pool, _) = regression.Regression(), regression._pools()
    model = {name: array.astype(np.float64) for name, array in app.model(1).items()}
    x, y = pool.x[:7].astype(np.float64), pool.y[:7].astype(np.float64)
    _, gradient = regression.loss_and_gradient(model, x, y)
    for name, array in model.items():
        for at in (0, array.size // 2, array.size - 1):
            ends = []
            for step in (1e-5, -1e-5):
                moved = {**model, name: array.copy()}
                moved[name].flat[at] += step
                ends.append(regression.loss_and_gradient(moved, x, y)[0])
            assert gradient[name].flat[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-9)


def test_r2_by_hand_and_as_the_mean_of_parts() -> None:
    app, (_, test) = regression.Regression(), regression._pools()
    model = app.model(2)
    model["output.weight"][:] = 0
    model["output.bias"][:] = test.y.mean()
    assert app.evaluate(model, Examples(test.x, test.y))["r2"] == pytest.approx(0, abs=1e-6)
    model = app.model(2)
    parts = slice(1000), slice(1000, 2000)
    halves = [app.evaluate(model, Examples(test.x[part], test.y[part]))["r2"] for part in parts]
    assert app.evaluate(model, Examples(test.x, test.y))["r2"] == pytest.approx(np.mean(halves), abs=1e-6)


def test_more_is_learned_than_a_line_and_less_than_noise_allows() -> None:
    app, (pool, test) = regression.Regression(), regression._pools()
    model, plan = app.model(0), LocalPlan(steps=4_000, batch_size=20, learning_rate=0.4)
    assert app.train(model, Examples(pool.x, pool.y), plan, 1)["steps"] == 4_000
    known, asked = (np.column_stack([p.x, np.ones(len(p.x))]) for p in (pool, test))
    line = asked @ np.linalg.lstsq(known, pool.y, rcond=None)[0]
    variance = np.var(test.y)
    found = app.evaluate(model, Examples(test.x, test.y))["r2"]
    assert 1 - np.mean((line - test.y) ** 2) / variance + 0.05 < found
    assert found < 1 - regression.NOISE**2 / variance


# --- runs ---


def test_what_a_run_is_judged_by() -> None:
    point = Point(1.0, 1, 1, 0.25, 0.5, 0, 0, {"r2": 0.75})
    assert runs.score_of(point, "auto") == 25
    assert runs.score_of(point, "r2") == 75
    assert runs.score_of(replace(point, accuracy=None, metrics={"r2": None}), "r2") == 0
    curve = [replace(point, time_s=float(t), metrics={"r2": t / 10}) for t in range(11)]
    assert runs.late_score(curve, "r2") == pytest.approx(90)  # at 8, 9 and 10 s
    assert runs.half_score(curve, 10.0, "r2") == pytest.approx(45)  # at 4 and 5 s


@pytest.mark.parametrize("workload", ["text", "regression"])
def test_a_run_of_each_from_its_settings_to_its_line(workload: str, tmp_path: Path) -> None:
    name = f"{workload}/speed-shards/compute/steady"
    cell = next(cell for cell in cells.CELLS if cell.name == name)
    row = next(row for row in rows.ROWS if row.name == "fedbuff/raw")
    match = play.Match(cell, row, store.Store.of(cell.name, tmp_path))
    record = match.play(tuning.Run((0.4, 5), 0.1, 1, "test"))
    first, last = record.curve[0][1], record.curve[-1][1]
    assert record.updates > 40
    assert last > first + 5
    assert record.accuracy == pytest.approx(record.curve[-1][1])
    assert record.worst_tenth < last
