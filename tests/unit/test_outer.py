"""Server optimisers in their strategies: golden values, identities, parts of a model, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from machines import Bench, part, vector

import anabranch
from anabranch.core.config.tables import merge
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import Indices
from anabranch.core.snapshot import state_digest, take_snapshot
from anabranch.strategies.optimisers import Adam, stepped
from anabranch.strategies.registry import make_strategy, strategy_of

FRESH = {"staleness": {"name": "constant"}}
G = (1.0, 2.0, 3.0, -1.0, 0.0, 2.0)


@dataclass(frozen=True)
class AdamsOwn:
    """What Adam remembers, without a strategy's state around it."""

    moment: np.ndarray
    second: np.ndarray
    decayed: np.ndarray


def path(strategy: str, params: dict[str, Any], deltas: Sequence[float], each: int = 1) -> list[float]:
    """Where w = 10 is after each version, of updates one after the other, `each` equal ones a version."""
    sent = [
        anabranch.Update(f"c{i}-{n}", f"t{i}-{n}", i, 1, {"w": np.array([delta])})
        for i, delta in enumerate(deltas)
        for n in range(each)
    ]
    start = {"w": np.array([10.0])}
    ends = range(each, len(sent) + 1, each)
    return [float(anabranch.aggregate(strategy, params, start, sent[:n]).model["w"][0]) for n in ends]


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ({"name": "sgd", "lr": 1.0}, [11.0, 9.0, 13.0]),
        ({"name": "momentum", "lr": 0.7, "momentum": 0.9}, [10.7, 9.93, 12.037]),
        ({"name": "nesterov", "lr": 0.7, "momentum": 0.9}, [11.33, 9.237, 13.9333]),
        ({"name": "adam", "lr": 0.1, "beta2": 0.99}, [10.1, 10.063439, 10.105270]),
        # z = 12, 8, 16; x = 12, 10, 12; w = z/5 + 4x/5.
        ({"name": "schedule_free", "lr": 2.0, "momentum": 0.8}, [12.0, 9.6, 12.8]),
    ],
)
@pytest.mark.parametrize("strategy", ["fedbuff", "qafel", "fedavg", "fedprox"])
def test_golden_optimisers(strategy: str, outer: dict[str, Any], expected: list[float]) -> None:
    size = "clients_per_round" if strategy in ("fedavg", "fedprox") else "buffer_size"
    assert path(strategy, {size: 2, "outer": outer}, (1.0, -2.0, 4.0), each=2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("c", "expected"),
    [
        (0.0, [10.233333, 10.7, 12.66, 12.426667, 12.426667, 14.237333]),
        (1 / 6, [10.233333, 10.7, 12.24, 12.216667, 12.426667, 13.789333]),
    ],
)
def test_golden_delayed_nesterov(c: float, expected: list[float]) -> None:
    params = {"buffer_size": 3, "server_lr": 0.7, "momentum": 0.9, "c": c, **FRESH}
    assert path("delayed_nesterov", params, G) == pytest.approx(expected, abs=1e-6)


def test_the_key_momentum_is_the_optimiser_momentum_to_the_bit() -> None:
    key = Bench(buffer_size=2, momentum=0.9, server_lr=0.7)
    outer = Bench(buffer_size=2, outer={"name": "momentum", "lr": 0.7, "momentum": 0.9})
    for bench in (key, outer):
        bench.enrol("a")
        for n in range(6):
            bench.work("a", f"t{n}", (0.1 * n, 0.2, -0.3, 0.7), now=float(n))
    assert state_digest(key.engine) == state_digest(outer.engine)


def test_nesterov_without_momentum_is_sgd() -> None:
    calm = {"buffer_size": 1, "outer": {"name": "nesterov", "lr": 0.3, "momentum": 0.0}}
    assert path("fedbuff", calm, G) == path(
        "fedbuff", {"buffer_size": 1, "outer": {"name": "sgd", "lr": 0.3}}, G
    )


def test_delayed_nesterov_of_one_update_is_nesterov() -> None:
    delayed = path("delayed_nesterov", {"buffer_size": 1, **FRESH}, G)
    outer = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
    assert delayed == pytest.approx(path("fedbuff", {"buffer_size": 1, "outer": outer, **FRESH}, G))


def test_delayed_nesterov_without_momentum_is_a_buffer_of_one() -> None:
    delayed = path("delayed_nesterov", {"buffer_size": 4, "momentum": 0.0, "server_lr": 0.8}, G)
    assert delayed == pytest.approx(path("fedbuff", {"buffer_size": 1, "server_lr": 0.2}, G))


def test_adam_goes_by_the_sign_where_nothing_changes() -> None:
    outer = {"name": "adam", "lr": 0.1, "eps": 1e-30}
    reached = path("fedbuff", {"buffer_size": 1, "outer": outer}, [-0.003] * 7)
    assert reached == pytest.approx([10 - 0.1 * t for t in range(1, 8)])


@pytest.mark.parametrize("strategy", ["fedavg", "fedbuff"])
def test_adam_goes_on_after_a_sum_whose_square_is_no_float(strategy: str) -> None:
    """Of examples times a long delta: the path is that of the definition."""
    outer, lr, mu, b2 = {"name": "adam", "lr": 0.1}, 0.1, 0.9, 0.99
    size = "clients_per_round" if strategy == "fedavg" else "buffer_size"
    sent = [([2e10, 1.0], 10**9), *(([1.0, 1.0], 10) for _ in range(300))]
    updates = [
        anabranch.Update("a", f"t{i}", i, examples, {"w": np.array(delta, np.float32)})
        for i, (delta, examples) in enumerate(sent)
    ]
    found = anabranch.aggregate(strategy, {size: 1, "outer": outer}, {"w": np.zeros(2, np.float32)}, updates)
    w, m, v = np.zeros(2), np.zeros(2), np.zeros(2)
    for t, (delta, _) in enumerate(sent, 1):
        m, v = mu * m + (1 - mu) * np.array(delta), b2 * v + (1 - b2) * np.array(delta) ** 2
        w += lr * m / (1 - mu**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)
    assert found.model["w"] == pytest.approx(w, rel=1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mean", [1.9e19, 3e20, -1e38])
@pytest.mark.parametrize("count", [1.0, 0.25])
@pytest.mark.parametrize("at", [slice(None), np.array([0, 1])], ids=["whole", "part"])
def test_adam_goes_on_after_a_mean_whose_square_is_no_float(
    mean: float, count: float, at: slice | Indices
) -> None:
    """It counts as one of 1.826e19: the path is that of the definition, which bounds each step."""
    adam, longest = Adam(lr=0.1, beta2=0.9), 0.99 * np.sqrt(float(np.finfo(np.float32).max))
    vector, m, v, w = np.zeros(2, np.float32), 0.0, 0.0, 0.0
    state: Any = AdamsOwn(**adam.init(vector))
    for t, sent in enumerate([mean] + [np.sign(mean)] * 1000, 1):
        total = np.array([sent * count, count], np.float32)
        state = stepped(adam, state, vector, total, count, at)
        m = 0.9 * m + 0.1 * np.clip(sent, -longest, longest)
        v = 0.9 * v + 0.1 * np.clip(sent, -longest, longest) ** 2
        w += 0.1 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    assert vector == pytest.approx([w, 0.1 * 1001], rel=1e-3)


def test_a_stale_update_counts_less_at_once_and_in_the_momentum() -> None:
    """Of staleness 1, S = 2^-.5: w = .7 (1 + .9 m) with m = 4 * .707107 after an update of 0."""
    sent = [
        anabranch.Update("a", "t0", 0, 1, {"w": np.array([0.0])}),
        anabranch.Update("b", "t1", 0, 1, {"w": np.array([4.0])}),
    ]
    result = anabranch.aggregate("delayed_nesterov", {"buffer_size": 1}, {"w": np.array([10.0])}, sent)
    assert result.model["w"] == pytest.approx(10 + 0.7 * 1.9 * 4 / 2**0.5)
    assert [s.weight for s in result.steps] == [1.0, pytest.approx(0.707107)]


def test_schedule_free_is_between_the_steps_and_the_mean_of_where_they_led() -> None:
    rng, mu, lr = np.random.default_rng(3), 0.7, 1.5
    deltas = rng.standard_normal(12).tolist()
    z, led, expected = 10.0, list[float](), list[float]()
    for delta in deltas:
        z += lr * delta
        led.append(z)
        expected.append((1 - mu) * z + mu * sum(led) / len(led))
    outer = {"name": "schedule_free", "lr": lr, "momentum": mu}
    assert path("fedbuff", {"buffer_size": 1, "outer": outer}, deltas) == pytest.approx(expected)


def test_schedule_free_without_momentum_is_sgd() -> None:
    calm = {"buffer_size": 1, "outer": {"name": "schedule_free", "lr": 0.3, "momentum": 0.0}}
    assert path("fedbuff", calm, G) == pytest.approx(
        path("fedbuff", {"buffer_size": 1, "outer": {"name": "sgd", "lr": 0.3}}, G)
    )


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adam", "schedule_free"])
@pytest.mark.parametrize("rule", ["none", "median"])
def test_what_no_update_covers_keeps_its_direction(name: str, rule: str) -> None:
    """A whole round, one of the first two coordinates, one of the others; each pair as if it were alone."""
    outer = {"name": name, "lr": 0.5, "momentum": 0.8}
    bench = Bench(
        "fedavg", clients_per_round=1, outer=outer, any_submodel=True, robust={"rule": rule}, deadline_s=0.0
    )
    alone = [Bench("fedavg", clients_per_round=1, outer=outer, deadline_s=0.0) for _ in range(2)]
    for each in (bench, *alone):
        each.enrol("a")
    rounds: list[tuple[tuple[float, ...], tuple[int, ...]]] = [
        ((1, -2, 3, 4), (0, 1, 2, 3)),
        ((5, 6), (0, 1)),
        ((7, -8), (2, 3)),
        ((1, 1), (0, 1)),
    ]
    for n, (delta, at) in enumerate(rounds):
        bench.ask("a", f"t{n}")
        covers: dict[str, Any] = {} if len(at) == 4 else {"submodel": part(*at)}
        bench.push("a", f"t{n}", delta, **covers)
        for pair, one in zip(((0, 1), (2, 3)), alone, strict=True):
            if set(pair) <= set(at):
                whole = np.zeros(4)
                whole[list(at)] = delta
                one.work("a", f"t{n}", tuple(whole))
    expected = np.concatenate([alone[0].engine.vector[:2], alone[1].engine.vector[2:]])
    assert bench.engine.version == 4
    np.testing.assert_allclose(bench.engine.vector, expected, rtol=1e-6)


def test_a_rules_direction_takes_the_place_of_the_mean() -> None:
    """Twice the median, 2 and then 3: m = 2, w = .5 * 2 * (1 + .5); m = 4, w += .5 * (3 + .5 * 4)."""
    outer = {"name": "nesterov", "lr": 0.5, "momentum": 0.5}
    bench = Bench(buffer_size=3, outer=outer, robust={"rule": "median"})
    bench.enrol("a")
    for n, delta in enumerate((2, 2, 900, 3, -900, 3)):
        bench.work("a", f"t{n}", (delta,) * 4)
    assert bench.engine.vector.tolist() == pytest.approx([1.5 + 2.5] * 4)
    assert bench.engine.state.moment.tolist() == [4.0] * 4


def test_without_an_optimiser_a_round_is_written_as_it_always_was() -> None:
    """No field of a state that says nothing: digests of unchanged runs stay."""
    bench = Bench("fedavg", clients_per_round=1)
    assert not {"moment", "second", "decayed", "steps"} & take_snapshot(bench.engine).meta["strategy"].keys()
    some = Bench("fedavg", clients_per_round=1, outer={"name": "adam"})
    assert {"moment", "second", "decayed"} <= take_snapshot(some.engine).meta["strategy"].keys()
    assert take_snapshot(some.engine).arrays["strategy/decayed"].shape == (2, 1)


@pytest.mark.parametrize(
    ("strategy", "params", "words"),
    [
        (
            "fedbuff",
            {"outer": {"name": "nesterof"}},
            r"outer.name must be one of sgd, momentum, nesterov, adam, schedule_free",
        ),
        ("fedbuff", {"outer": {"lr": 0.5}}, "outer.name must be one of"),
        ("fedbuff", {"outer": {"name": "sgd", "lr": 0.0}}, "outer.lr must be greater than 0, not 0"),
        ("fedavg", {"outer": {"name": "momentum", "momentum": 1.0}}, r"outer.momentum must be in \[0, 1\)"),
        ("fedprox", {"outer": {"name": "adam", "beta2": 1.0}}, r"outer.beta2 must be in \[0, 1\)"),
        (
            "fedavg",
            {"outer": {"name": "schedule_free", "momentum": 1}},
            r"outer.momentum must be in \[0, 1\)",
        ),
        ("fedavg", {"outer": {"name": "adam", "eps": 0.0}}, "outer.eps must be greater than 0"),
        ("fedavg", {"outer": {"name": "nesterov", "lr": "fast"}}, "outer.lr must be float, not 'fast'"),
        (
            "fedavg",
            {"outer": {"name": "sgd", "momentum": 0.5}},
            r"unknown key in \[strategy.outer\]: 'momentum'",
        ),
        (
            "fedbuff",
            {"momentum": 0.9, "outer": {"name": "nesterov"}},
            "leave momentum out, and write momentum",
        ),
        (
            "fedbuff",
            {"server_lr": 0.7, "outer": {"name": "sgd"}},
            "leave server_lr out, and write lr into outer",
        ),
        ("fedasync", {"outer": {"name": "nesterov"}}, "such as 'fedbuff' or 'fedavg'"),
        ("asyncdrop", {"outer": {"name": "nesterov"}}, "such as 'fedbuff' or 'fedavg'"),
        ("delayed_nesterov", {"c": 0.126}, r"strategy.c must be in \[0, 1/8\]"),
        ("delayed_nesterov", {"c": -0.1}, "strategy.c must not be negative"),
        ("delayed_nesterov", {"momentum": 1.0}, r"strategy.momentum must be in \[0, 1\)"),
    ],
)
def test_bad_parameters_name_the_field_and_the_fix(strategy: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy(strategy, params)


def test_a_rule_needs_a_buffer_and_delayed_nesterov_has_none() -> None:
    with pytest.raises(ConfigError, match="'delayed_nesterov' gathers no buffer that takes one"):
        make_strategy("delayed_nesterov", {}, RobustTable(rule="median"))


def test_diloco_is_a_configuration() -> None:
    """As docs/strategies.md has it: file and object are one, and the first round is Nesterov's step."""
    outer = {"name": "nesterov", "lr": 0.7, "momentum": 0.9}
    table = {"name": "fedavg", "clients_per_round": 1, "outer": outer}
    made = strategy_of(merge([("file", {"strategy": table, "client": {"steps": 500}})]))
    assert made == anabranch.strategies.FedAvg(clients_per_round=1, outer=outer)
    state: Any = made.init(vector(0, 0, 0, 0))
    bench = Bench("fedavg", clients_per_round=1, outer=outer)
    bench.enrol("a")
    bench.work("a", "t0", (1, 1, 1, 1))
    assert bench.engine.vector.tolist() == pytest.approx([0.7 * 1.9] * 4)
    assert state.moment.tolist() == [0.0] * 4
