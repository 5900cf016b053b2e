"""FedFa: its path by a reference of plain lists, its identities, what is remembered, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from machines import Bench, decision, part

import anabranch
from anabranch.core.engine.robust import RobustTable
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Reason
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy

START = [0.5, -1.0, 2.0]


def sent(count: int, seed: int = 8) -> list[tuple[int, list[float]]]:
    """Base versions, up to four old, and deltas."""
    rng = np.random.default_rng(seed)
    return [(t - int(rng.integers(0, min(4, t) + 1)), rng.standard_normal(3).tolist()) for t in range(count)]


def aggregated(updates: list[tuple[int, list[float]]], size: int) -> Any:
    made = [
        anabranch.Update(f"c{t % 3}", f"t{t}", base, 1 + t, {"w": np.array(delta)})
        for t, (base, delta) in enumerate(updates)
    ]
    return anabranch.aggregate("fedfa", {"window_size": size}, {"w": np.array(START)}, made)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_golden_path(size: int) -> None:
    updates, versions, models = sent(20), [START], []
    for t, (base, delta) in enumerate(updates, 1):
        models.append([w + d for w, d in zip(versions[base], delta, strict=True)])
        newest = models[-size:]
        versions.append([sum(model[j] for model in newest) / len(newest) for j in range(3)])
        found = aggregated(updates[:t], size)
        assert found.version == t
        np.testing.assert_allclose(found.model["w"], versions[-1], rtol=1e-12)


def test_a_window_of_one_is_what_the_newest_device_has_reached() -> None:
    updates = sent(9)
    fedasync = {"alpha": 1.0, "staleness": {"name": "constant"}}
    made = [
        anabranch.Update("a", f"t{t}", base, 1, {"w": np.array(d)}) for t, (base, d) in enumerate(updates)
    ]
    other = anabranch.aggregate("fedasync", fedasync, {"w": np.array(START)}, made)
    np.testing.assert_allclose(aggregated(updates, 1).model["w"], other.model["w"], rtol=1e-12)


def test_one_who_has_left_the_window_has_left_nothing_in_the_model() -> None:
    bench = Bench("fedfa", window_size=2)
    bench.enrol("huge", "a", "b")
    for client in ("huge", "a", "b"):
        bench.ask(client, client)
    assert decision(bench.push("huge", "huge", (1e30, -1e30, 0, 1e30))).weight == 0.5
    bench.push("a", "a", (1, 2, 3, 4))
    assert bench.engine.vector.max() > 1e29
    bench.push("b", "b", (3, 0, 1, 2))
    assert bench.engine.vector.tolist() == [2, 1, 2, 3]


def test_a_snapshot_goes_on_alike() -> None:
    bench = Bench("fedfa", window_size=3)
    bench.enrol("a", "b")
    bench.ask("b", "late")
    for n in range(4):
        bench.work("a", f"t{n}", (n, -1, 0.5, 2))
    again, engine = Bench("fedfa", window_size=3), bench.engine
    again.engine = restore(take_snapshot(engine), engine.spec, engine.strategy, engine.settings)
    for each in (bench, again):
        each.push("b", "late", (9, -9, 9, 9))
        each.work("a", "last", (3, -1, 4, 1))
    assert bench.engine.version == 6
    assert state_digest(again.engine) == state_digest(bench.engine)


def test_parts_of_a_model_are_refused() -> None:
    bench = Bench("fedfa", any_submodel=True)
    bench.enrol("a")
    bench.ask("a", "t")
    assert decision(bench.push("a", "t", (1, 2), submodel=part(0, 3))).reason is Reason.NO_SUBMODELS


@pytest.mark.parametrize(
    ("params", "table", "words"),
    [
        ({"window_size": 0}, RobustTable(), "window_size must be at least 1"),
        ({}, RobustTable(rule="median"), "'fedfa' gathers no buffer that takes one"),
    ],
)
def test_what_it_cannot_have_is_named(params: dict[str, Any], table: RobustTable, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy("fedfa", params, table)
