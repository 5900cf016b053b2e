"""FedASMU: golden weights, its path by a reference of plain numbers, its bounds, parts, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import Bench, decision

import anabranch
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.strategy import Context
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Reason, Update, Verdict
from anabranch.strategies.fedasmu import FedASMU
from anabranch.strategies.registry import make_strategy


def weight(of: FedASMU, t: int, o: int) -> float:
    """Alpha of an update that makes version t, and would make o were nobody else there."""
    update = Update("u", "t", "a", o - 1, 1, np.zeros(1))
    return of.weight(update, Context(0.0, t - 1, 0, (), 0, t - o))


def test_golden_weights() -> None:
    found = [
        weight(FedASMU(scale=1.0, staleness_power=1.0), t, o)
        for t, o in ((1, 1), (10, 10), (10, 8), (100, 90))
    ]
    assert found == pytest.approx([0.5, 0.240253, 0.095358, 0.009009], abs=1e-6)


def test_age_takes_nothing_of_the_floor() -> None:
    of = FedASMU(mu=2.0, scale=3.0, staleness_power=2.0, floor=0.25)
    assert weight(of, 1, 1) == pytest.approx(2 * 3.25 / (1 + 2 * 3.25))
    assert weight(of, 4, 2) == pytest.approx(2 * (3 / 2 / 9 + 0.25) / (1 + 2 * (3 / 2 / 9 + 0.25)))
    assert weight(of, 10**12, 1) == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize(
    "params", [{}, {"mu": 0.5, "scale": 4.0, "staleness_power": 0.5, "floor": 0.1}], ids=["plain", "others"]
)
@pytest.mark.parametrize("parts", [False, True])
def test_golden_path(params: dict[str, float], parts: bool) -> None:
    said = {"mu": 1.0, "scale": 10.0, "staleness_power": 0.5, "floor": 0.0, **params}
    rng, versions, updates = np.random.default_rng(4), [[0.5, -1.0]], []
    for t in range(1, 25):
        base = t - 1 - int(rng.integers(0, min(4, t - 1) + 1))
        at = [int(rng.integers(2))] if parts and t % 3 else [0, 1]
        delta = rng.standard_normal(len(at))
        xi = said["scale"] * t**0.5 / (t * (t - base) ** said["staleness_power"]) + said["floor"]
        alpha = said["mu"] * xi / (1 + said["mu"] * xi)
        now = list(versions[-1])
        for place, value in zip(at, delta, strict=True):
            now[place] = (1 - alpha) * now[place] + alpha * (versions[base][place] + value)
        versions.append(now)
        covered = {"w": np.array(at)} if len(at) == 1 else None
        updates.append(anabranch.Update("a", f"t{t}", base, 1, {"w": delta}, submodel=covered))
        found = anabranch.aggregate("fedasmu", params, {"w": np.array(versions[0])}, updates)
        assert found.version == t
        np.testing.assert_allclose(found.model["w"], now, rtol=1e-12)


def test_what_is_older_than_its_bound_is_not_used() -> None:
    bench = Bench("fedasmu", staleness_max=1)
    bench.enrol("a", "b", "c")
    bench.ask("b", "later")
    bench.work("a", "t0")
    bench.ask("c", "late")
    bench.work("a", "t1")
    before = bench.engine.vector.copy()
    told = decision(bench.push("b", "later"))
    assert (told.verdict, told.reason) == (Verdict.REJECTED, Reason.STALE)
    assert bench.engine.vector.tolist() == before.tolist()
    assert decision(bench.push("c", "late")).verdict is Verdict.PUBLISHED


@pytest.mark.parametrize(
    ("params", "table", "words"),
    [
        ({"mu": 0.0}, RobustTable(), "mu must be greater than 0"),
        ({"scale": 0.0}, RobustTable(), "scale must be greater than 0"),
        ({"staleness_power": -1.0}, RobustTable(), "staleness_power must not be negative"),
        ({"floor": -0.1}, RobustTable(), "floor must not be negative"),
        ({"staleness_max": -1}, RobustTable(), "staleness_max must not be negative"),
        ({}, RobustTable(rule="krum"), "'fedasmu' gathers no buffer that takes one"),
    ],
)
def test_what_it_cannot_have_is_named(params: dict[str, Any], table: RobustTable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("fedasmu", params, table)
