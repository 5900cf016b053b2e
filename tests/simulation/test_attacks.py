"""Hostile devices in a simulated fleet: what they send, and what the rules make of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Ones, config, events
from own_parts import forgotten

from anabranch.core.config.tables import FleetTable, merge
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import AppError, ConfigError
from anabranch.reports.result import Result
from anabranch.simulation.attacks import ATTACKS, FLOOD, GAMMAS, Attack, Poison, hostile_devices, hurried
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import simulate
from anabranch.strategies.robust.registry import make_rule
from anabranch.strategies.robust.rows import Row
from anabranch.strategies.robust.rule import combine
from anabranch.workloads.app import Examples
from anabranch.workloads.profiles import speed_profile

HONEST = [np.array([1.0, 2.0], np.float32), np.array([3.0, 2.0], np.float32)]


def fleet(attack: str, attackers: float = 0.2, **more: Any) -> FleetTable:
    return FleetTable(clients=20, attack=attack, attackers=attackers, **more)


@pytest.mark.parametrize(
    ("attack", "strength", "expected"),
    [
        ("sign_flip", 0.0, [-5, -10]),
        ("sign_flip", 2.0, [-2, -4]),
        ("scale", 0.0, [100, 200]),
        ("alie", 0.0, [0.5, 2]),  # mean (2, 2), deviation (1, 0)
        ("ipm", 0.0, [-10, -10]),
        ("min_max", 0.0, [1, 2]),  # two apart, one from the mean: as far again as a deviation
        ("min_max", 0.5, [1.5, 2]),
        ("label_flip", 0.0, [1, 2]),
        ("flood", 0.0, [-1, -2]),
    ],
)
def test_what_a_hostile_device_sends(attack: str, strength: float, expected: Any) -> None:
    found = Attack(fleet(attack, attack_strength=strength), 0).poisoned(HONEST)
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx(expected)


DRIFT = """
import numpy as np

from anabranch.simulation.attacks import Poison


class Drift(Poison):
    name, strength, sum = "drift", 1.0, None

    def update(self, deltas, s):
        if self.sum is None:
            self.sum = np.zeros_like(deltas[0])
            self.view = self.sum[:]
        self.view += s * deltas[0]
        return self.sum


class Copying(Drift):
    name = "copying"

    def update(self, deltas, s):
        return super().update(deltas, s).copy()
"""


SLOW = {"attackers": 0.5, "up_mbps": 0.01}  # updates are under way for 3 seconds


def test_an_attack_of_one_s_own_may_go_on_with_what_it_returned(tmp_path: Path) -> None:
    (file := tmp_path / "drift.py").write_text(DRIFT)
    found = [
        simulate(config(fleet={"attack": f"{file}:{name}", **SLOW}), app=Ones(1000))
        for name in ("Drift", "Copying")
    ]
    assert found[0].model_sha256 == found[1].model_sha256
    assert found[0].updates_applied > 30


class Flipping(Poison):
    name = "flipping"

    def labels(self, y: Any, last_label: Any) -> Any:
        y[:] = last_label() - y
        return y


class Marking(Poison):
    name = "marking"

    def examples(self, honest: Any, last_label: Any) -> Any:
        honest.x[:] += 1
        return honest

    def goal(self, honest: Any) -> Any:
        honest.y[:] = 0
        return honest


class Noise(Poison):
    name = "noise"

    def update(self, deltas: Any, s: float) -> Any:
        return np.random.normal(size=deltas[0].shape) + random.random()


class FewLabels(Poison):
    name = "few_labels"

    def labels(self, y: Any, last_label: Any) -> Any:
        y[:] = 0


class NoExamples(Poison):
    name = "no_examples"

    def examples(self, honest: Any, last_label: Any) -> Any:
        return honest.x

    def goal(self, honest: Any) -> Any:
        return honest.x


class Late(Poison):
    name, haste = "late", -1.0


class Lonely(Poison):
    name, colluders = "lonely", 0


class Worded(Poison):
    name, strength = "worded", "5"  # type: ignore[assignment]


@pytest.fixture
def careless() -> Iterator[Any]:
    def make(kind: type[Poison]) -> Attack:
        ATTACKS.let_in(f"careless.py:{kind.__name__}", kind)
        return Attack(fleet(kind.name), 0)

    with forgotten():
        yield make


def test_an_attack_that_writes_to_what_it_is_given_changes_nothing_of_anybody_else_s(careless: Any) -> None:
    honest = Examples(np.zeros((3, 1), np.float32), np.array([0, 4, 9]))
    flipping, marking = careless(Flipping), careless(Marking)
    for _ in range(2):  # two tasks of one device, whose examples are kept
        assert flipping.examples(flipping.devices[0], honest, lambda: 9).y.tolist() == [9, 5, 0]
        assert marking.examples(marking.devices[0], honest, lambda: 9).x.tolist() == [[1], [1], [1]]
        assert marking.goal(honest).y.tolist() == [0, 0, 0]
    assert (honest.x.tolist(), honest.y.tolist()) == ([[0], [0], [0]], [0, 4, 9])


def test_a_run_whose_attack_draws_is_the_same_again(careless: Any) -> None:
    attack = careless(Noise)
    settings = config(fleet={"attack": "noise", "attackers": 0.5})
    first, again = (simulate(settings, app=Ones()) for _ in range(2))
    assert (first.model_sha256, first.journal_sha256) == (again.model_sha256, again.journal_sha256)
    drawn = {attack.poisoned(HONEST, seed).tobytes() for seed in (1, 2, 1)}
    assert len(drawn) == 2, "each task has draws of its own"


def test_what_an_attack_of_one_s_own_must_not_answer_is_said_with_its_name(careless: Any) -> None:
    honest = Examples(np.zeros((3, 1), np.float32), np.array([0, 4, 9]))
    few, none = careless(FewLabels), careless(NoExamples)
    with pytest.raises(AppError, match=r"attack 'few_labels': labels must give shape \(3,\), not \(\)"):
        few.examples(few.devices[0], honest, lambda: 9)
    with pytest.raises(AppError, match="attack 'no_examples': examples must give Examples, not ndarray"):
        none.examples(none.devices[0], honest, lambda: 9)
    with pytest.raises(AppError, match="attack 'no_examples': goal must give Examples, not ndarray"):
        none.goal(honest)


@pytest.mark.parametrize(
    ("kind", "said"), [(Late, "haste = -1.0"), (Lonely, "colluders = 0"), (Worded, "strength = '5'")]
)
def test_an_attack_that_is_declared_so_that_it_cannot_be_is_refused(
    kind: type[Poison], said: str, careless: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}.{said}"):
        careless(kind)


def test_min_max_is_no_farther_from_any_honest_update_than_those_are_from_each_other() -> None:
    honest = list(np.random.default_rng(2).standard_normal((4, 50)).astype(np.float32))
    sent = Attack(fleet("min_max"), 0).poisoned(honest)
    widest = max(float(np.linalg.norm(a - b)) for a in honest for b in honest)
    assert max(float(np.linalg.norm(sent - row)) for row in honest) == pytest.approx(widest, rel=1e-5)
    farther = Attack(fleet("min_max", attack_strength=1.01), 0).poisoned(honest)
    assert max(float(np.linalg.norm(farther - row)) for row in honest) > widest
    assert Attack(fleet("min_max"), 0).poisoned(honest[:1]).tolist() == honest[0].tolist(), (
        "alone it is honest"
    )


RULED: dict[str, dict[str, Any]] = {
    "none": {},
    "a clip": {"clip": 2.0},
    "multi-Krum": {"rule": "multi_krum", "attackers": 0.3},
    "mixing": {"rule": "neighbour_mixing", "attackers": 0.3, "clip": 2.0},
    "clipping": {"rule": "centred_clipping"},
}


def moved(honest: list[Any], hostile: Any, robust: RobustTable) -> float:
    """How far the result is from the honest mean, by the rule: two hostile updates among the others."""
    rows = np.asarray([*honest, hostile, hostile], np.float64)
    if robust.clip == 2.0:
        lengths = np.linalg.norm(rows, axis=1)
        rows *= np.minimum(1.0, 2.0 * np.median(lengths[:-2]) / lengths)[:, None]
    mean, rule = np.asarray(np.mean(honest, axis=0), np.float64), make_rule(robust)
    if rule is None:
        return float(np.linalg.norm(rows.mean(axis=0) - mean))
    found = combine(rule, [Row(row) for row in rows], mean, mean).direction
    return float((mean - found) @ np.std(honest, axis=0) / np.linalg.norm(np.std(honest, axis=0)))


@pytest.mark.parametrize("kind", RULED)
def test_the_adaptive_attack_moves_the_rule_in_use_further_than_any_other_strength(kind: str) -> None:
    robust = RobustTable(**RULED[kind])
    draws = np.random.default_rng(4)
    honest = [(1 + draws.standard_normal(60)).astype(np.float32) for _ in range(8)]
    sent = Attack(fleet("adaptive"), 0, robust).poisoned(honest)
    deviation, mean = np.std(honest, axis=0), np.mean(honest, axis=0)
    gammas = (mean - sent) / deviation
    assert gammas == pytest.approx(np.full(60, gammas[0]), rel=1e-3), "along the deviation"
    there = moved(honest, sent, robust)
    assert there > 0
    others = [moved(honest, mean - gamma * deviation, robust) for gamma in GAMMAS]
    assert there == pytest.approx(max(others), rel=1e-3)
    if kind in ("multi-Krum", "mixing"):
        assert gammas[0] < max(GAMMAS) / 2, "what the rule leaves out is not sent"


def test_alone_the_adaptive_attack_is_honest() -> None:
    assert Attack(fleet("adaptive"), 0).poisoned(HONEST[:1]).tolist() == HONEST[0].tolist()


def test_a_backdoor_is_in_half_of_the_examples_and_its_goal_in_all_others_classes() -> None:
    attack = Attack(fleet("backdoor"), 0)
    x = np.linspace(0, 1, 6 * 5 * 5, dtype=np.float32).reshape(6, 1, 5, 5)
    honest = Examples(x.copy(), np.array([3, 0, 2, 1, 0, 2]))
    found = attack.examples(attack.devices[0], honest, lambda: 9)
    assert found.y.tolist() == [0, 0, 0, 1, 0, 2]
    assert (found.x[::2, :, 2:, 2:] == 1).all()
    assert np.array_equal(found.x[::2, :, :2], x[::2, :, :2])
    assert np.array_equal(found.x[::2, :, :, :2], x[::2, :, :, :2])
    assert np.array_equal(found.x[1::2], x[1::2])
    assert np.array_equal(honest.x, x), "honest devices have the same arrays"
    goal = attack.goal(honest)
    assert goal is not None
    assert goal.y.tolist() == [0, 0, 0, 0]
    assert (goal.x[..., 2:, 2:] == 1).all()
    assert np.array_equal(goal.x[:, :, :2], x[[0, 2, 3, 5], :, :2])
    assert Attack(fleet("scale"), 0).goal(honest) is None
    assert Attack(fleet("backdoor", 0.0), 0).goal(honest) is None


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (np.zeros((2, 4), np.int64), np.zeros(2, np.int64), "arrays of pixels"),  # words
        (np.zeros(2, np.float32), np.zeros(2, np.int64), "arrays of pixels"),
        (np.zeros((2, 4), np.float32), np.zeros(2, np.float32), "class numbers"),
    ],
)
def test_what_cannot_be_marked_is_said(x: Any, y: Any, said: str) -> None:
    attack = Attack(fleet("backdoor"), 0)
    with pytest.raises(ConfigError, match=said):
        attack.examples(attack.devices[0], Examples(x, y), lambda: 9)


def test_a_backdoor_succeeds_where_nothing_is_done_and_its_success_is_measured() -> None:
    settings = config(
        run={"workload": "digits", "updates_max": 150, "virtual_s_max": 0.0, "evaluate_every_versions": 50},
        fleet={"clients": 10, "examples_per_client": 120, "attackers": 0.3, "attack": "backdoor"},
        client={"learning_rate": 0.1, "epochs": 2, "batch_size": 10},
    )
    result = simulate(settings)
    before, after = (result.history[at].metrics["attack_success"] for at in (0, -1))
    assert before is not None
    assert after is not None
    assert before < 0.5
    assert after > 0.6
    assert accuracy(result) > 0.6, "what bears no mark is told apart"
    none = {"run": {"updates_max": 2}, "fleet": {"attackers": 0.0}}
    honest = simulate(merge([("", settings.to_json()), ("", none)]))
    assert "attack_success" not in honest.history[-1].metrics


def test_the_fraction_is_kept_exactly_and_drawn_by_the_seed() -> None:
    draws = {hostile_devices(fleet("scale"), seed) for seed in range(20)}
    assert len(draws) > 10
    assert {len(d) for d in draws} == {4}
    assert hostile_devices(fleet("scale", 0.0), 3) == ()


def test_only_colluders_need_help_and_honest_devices_need_nothing() -> None:
    hostile = hostile_devices(fleet("alie", 0.5), 1)
    attack = Attack(fleet("alie", 0.5), 1)
    found = attack.helpers(hostile[3])
    assert (found[0], len(found), len(set(found))) == (hostile[3], 4, 4)
    assert set(found) <= set(hostile)
    assert all(attack.helpers(d) == [] for d in range(20) if d not in hostile)
    assert Attack(fleet("scale", 0.5), 1).helpers(hostile[3]) == [hostile[3]]


def test_labels_are_turned_for_the_hostile_alone() -> None:
    attack = Attack(fleet("label_flip"), 0)
    honest = Examples(np.zeros((3, 1)), np.array([0, 4, 9]))
    (bad, *_), good = attack.devices, next(d for d in range(20) if d not in attack.devices)
    assert attack.examples(bad, honest, lambda: 9).y.tolist() == [9, 5, 0]
    assert attack.examples(good, honest, lambda: 9) is honest


def test_those_that_flood_are_fast() -> None:
    table = fleet("flood")
    before, after = speed_profile(table, 0), hurried(speed_profile(table, 0), table, 0)
    ratio = before.step_time_s / after.step_time_s
    assert sorted(set(ratio.tolist())) == [1.0, FLOOD]
    assert np.flatnonzero(ratio > 1).tolist() == list(hostile_devices(table, 0))


def run(attack: str, robust: dict[str, Any], step_time_s: float = 0.1, virtual_s: float = 15.0) -> Result:
    """Twenty devices, four of them hostile, and FedBuff with K = 10."""
    hostile = {"clients": 20, "attackers": 0.2 if attack else 0.0, "attack": attack or "scale"}
    base = config(
        run={"virtual_s_max": virtual_s},
        fleet={**hostile, "step_time_s": step_time_s},
        robust=robust,
        client={"learning_rate": 0.3},
    ).to_json()
    return simulate(merge([("base", base), ("K", {"strategy": {"buffer_size": 10}})]))


def accuracy(result: Result) -> float:
    assert result.final_accuracy is not None
    return result.final_accuracy


RECOMMENDED = {"rule": "multi_krum", "attackers": 0.3, "clip": 2.0}


def test_under_attack_the_mean_falls_apart_and_the_recommended_rule_does_not() -> None:
    clean = accuracy(run("", {}))
    assert clean > 0.65
    assert accuracy(run("", RECOMMENDED)) > clean - 0.02, "it costs little where nobody attacks"
    for attack in ("sign_flip", "scale", "ipm", "alie"):
        assert accuracy(run(attack, RECOMMENDED)) > clean - 0.03, attack
    for attack in ("sign_flip", "ipm"):
        assert accuracy(run(attack, {})) < clean - 0.2, attack


@pytest.mark.parametrize("strategy", ["fedbuff", "teasq"])
def test_a_rule_hears_little_of_the_hostile_and_says_so(strategy: str, tmp_path: Path) -> None:
    own = {"buffer_size": 8} if strategy == "fedbuff" else {"concurrency_fraction": 1.0, "cache_size": 8}
    settings = config(
        strategy,
        run={"virtual_s_max": 20.0, "updates_max": 200},
        fleet={"clients": 20, "attackers": 0.2, "attack": "scale"},
        robust={"rule": "multi_krum", "attackers": 0.4},
    )
    settings = merge([("base", settings.to_json()), ("own", {"strategy": own})])
    found = simulate(settings, tmp_path)
    hostile = {f"device-{i:04d}" for i in hostile_devices(settings.fleet, settings.run.seed)}
    of = {client: share.heard for client, share in found.clients.items() if share.heard is not None}
    bad, good = [of[c] for c in of if c in hostile], [of[c] for c in of if c not in hostile]
    assert 3 * np.mean(bad) < np.mean(good) > 0.6

    told: dict[str, list[float]] = {}
    held: list[str] = []  # whose updates wait for a version, in their order
    for event in events(tmp_path, "decided", "published"):
        if event["kind"] == "published":
            assert [client for client, _ in event["heard"]] == held
            assert sum(share for _, share in event["heard"]) == 8 - (8 - 3) // 2, "n - f of its table"
            held = []
            for client, share in event["heard"]:
                told.setdefault(client, []).append(share)
        elif event["verdict"] != "rejected":
            held.append(event["client"])
    assert {client: np.mean(shares) for client, shares in told.items()} == pytest.approx(of)
    assert replay_run(tmp_path).matches


def test_where_there_is_no_rule_nobody_says_who_was_heard(tmp_path: Path) -> None:
    found = simulate(config(run={"virtual_s_max": 10.0}), tmp_path)
    assert all("heard" not in event for event in events(tmp_path, "published"))
    assert {share.heard for share in found.clients.values()} == {None}


def test_no_numbers_are_rejected_and_put_their_senders_into_quarantine() -> None:
    found = run("nan", {"flaws_max": 2})
    assert found.updates_rejected == 4 * 2
    assert found.updates_applied > 50


def test_a_bounded_share_holds_a_flood_back() -> None:
    hostile = {f"device-{i:04d}" for i in hostile_devices(FleetTable(clients=20, attackers=0.2), 0)}

    def share(result: Result) -> float:
        sent = {c: row.updates for c, row in result.clients.items()}
        return sum(n for c, n in sent.items() if c in hostile) / sum(sent.values())

    flooded, bounded = run("flood", {}, 1.0, 30.0), run("flood", {"buffer_max": 1}, 1.0, 30.0)
    assert share(flooded) > 0.5
    assert share(bounded) <= 0.4, "four of the ten places of a buffer"


def test_an_attack_replays_and_does_not_depend_on_who_trains(tmp_path: Path) -> None:
    settings = config(
        run={"virtual_s_max": 20.0},
        fleet={"attackers": 0.5, "attack": "alie"},
        robust={"rule": "krum", "buffer_max": 2, "clip": 3.0},
    )
    serial = simulate(settings, tmp_path)
    parallel = simulate(settings, workers=1)
    assert (serial.model_sha256, serial.journal_sha256) == (parallel.model_sha256, parallel.journal_sha256)
    assert replay_run(tmp_path).matches


def test_an_attack_is_seen_in_the_journal_as_any_update(tmp_path: Path) -> None:
    settings = config("fedasync", fleet={"attackers": 0.5, "attack": "scale"})
    simulate(settings, tmp_path, app=Ones())
    assert {e["verdict"] for e in events(tmp_path, "decided")} == {"published"}
