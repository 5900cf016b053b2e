"""AsyncDrop, teasq_drop and IST: identities, reductions, and the exact theory of IST."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import decision

import anabranch
from anabranch.core import events as ev
from anabranch.core.config.tables import merge
from anabranch.core.effects import Granted
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Context
from anabranch.core.journal import from_record, to_record
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.core.model.submodels import Coordinates, UnitMap
from anabranch.core.model.updates import Ask, Capability, Reason, Task, Update, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.strategies.registry import make_strategy
from anabranch.strategies.submodels.registry import make_planner
from anabranch.testing.models import GROUPS, SPEC, line, tensors

Array = npt.NDArray[Any]
SIZE = 12


class Fleet:
    """An engine with a planner, and devices that answer at once."""

    def __init__(self, spec: ParamSpec, start: Array, strategy: str, **tables: Any) -> None:
        config = merge([("test", {"strategy": {"name": strategy, **tables.pop("params", {})}, **tables})])
        self.strategy = make_strategy(config.strategy.name, config.strategy.params)
        self.settings = EngineSettings.of(config)
        self.planner = make_planner(spec, self.strategy, config)
        self.engine = Engine(spec, self.strategy, self.settings, start, None, self.planner)
        self.spec, self.events = spec, []  # type: ignore[var-annotated]
        self.count = 0

    def do(self, event: ev.Event) -> list[Any]:
        self.events.append(event)
        return self.engine.handle(event)

    def enrol(self, *clients: str) -> None:
        for client in clients:
            self.do(ev.Enrolled(0.0, client, Capability()))

    def ask(self, client: str, now: float = 0.0) -> Task:
        self.count += 1
        effects = self.do(ev.TaskAsked(now, Ask(client, f"t{self.count}")))
        return next(e for e in effects if isinstance(e, Granted)).task

    def answer(self, task: Task, delta: Array, now: float = 1.0, **changes: Any) -> list[Any]:
        fields: dict[str, Any] = {
            "update_id": f"u-{task.task_id}",
            "task_id": task.task_id,
            "client_id": task.client_id,
            "base_version": task.base_version,
            "examples": 1,
            "delta": delta.astype(self.spec.vector_dtype),
            "submodel": task.submodel,
            "local_steps": 1,
        }
        update = Update(**(fields | changes))
        return self.do(ev.UpdateArrived(now, update, ev.Payload(f"{self.count:064x}", 4 * update.delta.size)))


def deltas(task: Task, seed: int, size: int) -> Array:
    count = size if task.submodel is None else task.submodel.size
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# --- AsyncDrop -----------------------------------------------------------------------------------


def test_asyncdrop_that_drops_nothing_is_fedasync_with_a_constant_half_bit_for_bit() -> None:
    start = SPEC.flatten(tensors())
    runs = []
    for strategy, params in (
        ("asyncdrop", {}),
        ("fedasync", {"alpha": 0.5, "rho": 0.0, "staleness": {"name": "constant"}}),
    ):
        fleet = Fleet(SPEC, start, strategy, params=params, submodel={"name": "random", "drop": 0.0})
        fleet.enrol("a", "b", "c")
        tasks = [fleet.ask(c) for c in "abc"]
        for i in range(12):
            task = tasks[i % 3]
            assert task.submodel is None
            fleet.answer(task, deltas(task, i, SPEC.size))
            tasks[i % 3] = fleet.ask(task.client_id)
        runs.append(fleet.engine.vector.tobytes())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["random", "hetero", "heterofl", "fedrolex", "fjord"])
def test_outside_the_map_nothing_changes_and_inside_models_are_mixed(name: str) -> None:
    start = SPEC.flatten(tensors())
    fleet = Fleet(SPEC, start, "asyncdrop", params={"alpha": 0.25}, submodel={"name": name, "widths": [0.5]})
    fleet.enrol("a", "b")
    old, fresh = fleet.ask("a"), fleet.ask("b")
    for task, seed in ((fresh, 1), (old, 2)):
        assert isinstance(task.submodel, UnitMap)
        before, delta = fleet.engine.vector.copy(), deltas(task, seed, SPEC.size)
        assert decision(fleet.answer(task, delta)).verdict is Verdict.PUBLISHED
        at = task.submodel.indices
        outside = np.setdiff1d(np.arange(SPEC.size), at)
        assert np.array_equal(fleet.engine.vector[outside], before[outside])
        expected = 0.75 * before[at] + 0.25 * (start[at] + delta)
        np.testing.assert_allclose(fleet.engine.vector[at], expected, rtol=1e-6, atol=1e-7)
        for versions, kept in zip(fleet.engine.planner_state.touched, task.submodel.kept, strict=True):
            assert {int(versions[unit]) for unit in kept} == {fleet.engine.version}


def test_one_device_without_staleness_moves_by_alpha_delta() -> None:
    start = SPEC.flatten(tensors())
    fleet = Fleet(SPEC, start, "asyncdrop")
    fleet.enrol("a")
    task = fleet.ask("a")
    assert task.submodel is not None
    fleet.answer(task, np.ones(task.submodel.size))
    expected = start.copy()
    expected[task.submodel.indices] += 0.5
    np.testing.assert_allclose(fleet.engine.vector, expected, atol=1e-6)


def test_the_slow_leave_out_what_has_changed_least_and_the_fast_what_has_changed_most() -> None:
    spec, n = line(16), 16
    fleet = Fleet(spec, np.zeros(n), "asyncdrop", submodel={"coverage_versions": 0, "drop": 0.5})
    fleet.enrol("fast", "slow")
    for _ in range(2):  # the speeds become known: the coordinates' own changes are 0, 1, 2, ...
        for client, train_s in (("fast", 1.0), ("slow", 9.0)):
            task = fleet.ask(client)
            assert task.submodel is not None
            fleet.answer(task, np.zeros(task.submodel.size), metrics={"train_s": train_s})
    fleet.engine.vector[:] = np.arange(n)
    kept = {c: fleet.ask(c).submodel.kept[0] for c in ("fast", "slow")}  # type: ignore[union-attr]
    assert kept == {"fast": tuple(range(8)), "slow": tuple(range(8, 16))}


@pytest.mark.parametrize("strategy", ["asyncdrop", "teasq_drop", "fedavg"])
@pytest.mark.parametrize("foreign", ["none", "other units", "coordinates"])
def test_another_map_than_the_task_s_changes_nothing(strategy: str, foreign: str) -> None:
    start = SPEC.flatten(tensors())
    fleet = Fleet(SPEC, start, strategy, submodel={"name": "hetero"})
    fleet.enrol("a")
    task = fleet.ask("a")
    assert isinstance(task.submodel, UnitMap)
    others = tuple(tuple(range(1, 1 + len(kept))) for kept in task.submodel.kept)
    maps: dict[str, Any] = {
        "none": None,
        "other units": UnitMap(SPEC, others if others != task.submodel.kept else ((0,), (0,))),
        "coordinates": Coordinates(task.submodel.indices.copy()),
    }
    before, state = fleet.engine.vector.copy(), fleet.engine.planner_state
    size = SPEC.size if maps[foreign] is None else maps[foreign].size
    found = decision(fleet.answer(task, np.ones(size), submodel=maps[foreign]))
    assert (found.verdict, found.reason) == (Verdict.REJECTED, Reason.WRONG_SUBMODEL)
    assert np.array_equal(fleet.engine.vector, before)
    assert all(
        np.array_equal(a, b) for a, b in zip(fleet.engine.planner_state.touched, state.touched, strict=True)
    )


@pytest.mark.parametrize("name", ["random", "hetero", "fedrolex", "ist"])
def test_a_snapshot_and_a_replay_go_on_as_if_nothing_had_happened(name: str) -> None:
    start = SPEC.flatten(tensors())
    tables: dict[str, Any] = {"submodel": {"name": name, "parts": 2}}
    fleet = Fleet(SPEC, start, "asyncdrop", **tables)
    fleet.enrol("a", "b")
    bytes_of: dict[str, Array] = {}
    for i in range(10):
        task = fleet.ask("ab"[i % 2], now=float(i))
        delta = deltas(task, i, SPEC.size)
        fleet.answer(task, delta, now=float(i), metrics={"train_s": 1.0 + i % 2})
        bytes_of[f"{fleet.count:064x}"] = delta
    fleet.ask("a", now=11.0)  # a live task with its map
    again = restore(take_snapshot(fleet.engine), SPEC, fleet.strategy, fleet.settings, None, fleet.planner)
    assert state_digest(again) == state_digest(fleet.engine)
    new = Fleet(SPEC, start, "asyncdrop", **tables)
    new.count = fleet.count
    for event in fleet.events:
        record = to_record(event)
        new.do(from_record(record, SPEC, lambda payload, _: bytes_of[payload.sha256]))
    assert state_digest(new.engine) == state_digest(fleet.engine)
    assert new.ask("b", now=12.0).submodel == fleet.ask("b", now=12.0).submodel


# --- teasq_drop ----------------------------------------------------------------------------------


def cached(count: int, seed: int, parts: bool) -> list[tuple[int, int, Array, Array | None]]:
    """(base version, examples, delta, covered coordinates) of updates of versions 0 to 5 at version 5."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        where = np.flatnonzero(rng.random(SIZE) < 0.6) if parts else None
        if where is not None and not where.size:
            where = np.array([3])
        values = rng.standard_normal(SIZE if where is None else where.size)
        found.append((int(rng.integers(0, 6)), int(rng.integers(1, 500)), values, where))
    return found


BASES = np.random.default_rng(9).standard_normal((6, SIZE))
PLAIN = ParamSpec.of({"w": np.zeros(SIZE)})


def stepped(strategy: str, params: Any, updates: Any, sparse: bool = False) -> Array:
    """The model after the updates, all at version 5 and in one cache."""
    made = make_strategy(strategy, params)
    vector: Array = BASES[5].copy()
    state = made.init(vector)
    for i, (base, examples, delta, where) in enumerate(updates):
        submodel = None if where is None else Coordinates(where)
        sent: Any = delta
        if sparse:
            chosen = np.flatnonzero(delta > 0)
            sent = SparseVector(chosen, delta[chosen], delta.size)
        update = Update(f"u{i}", f"t{i}", f"c{i}", base, examples, sent, submodel)
        context = Context(0.0, 5, 0, ("c",) * 20, staleness=5 - base, base=BASES[base], spec=PLAIN)
        step = made.step(state, vector, update, context)
        state, vector = step.state, vector if step.vector is None else step.vector
    return vector


def by_coordinate(updates: Any, alpha: float, server_lr: float, a: float = 0.5) -> Array:
    """The definition of `teasq_drop.py`, one coordinate after the other."""
    w: Array = BASES[5].copy()
    for j in range(SIZE):
        covering = [
            (base, n, (BASES[base][j], delta[j if where is None else int(np.flatnonzero(where == j)[0])]))
            for base, n, delta, where in updates
            if where is None or j in where
        ]
        if not covering:
            continue
        weights = [(6 - base) ** -a * n for base, n, _ in covering]
        s = (sum(5 - base for base, _, _ in covering) / len(covering) + 1) ** -a
        mean = sum(k * d for k, (_, _, (_, d)) in zip(weights, covering, strict=True)) / sum(weights)
        if alpha:
            bases = sum(k * b for k, (_, _, (b, _)) in zip(weights, covering, strict=True)) / sum(weights)
            w[j] = (1 - alpha * s) * w[j] + alpha * s * (bases + mean)
        else:
            w[j] += server_lr * s * mean
    return w


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([0.0, 0.6]))
def test_teasq_drop_is_its_definition_on_every_coordinate(count: int, seed: int, alpha: float) -> None:
    updates = cached(count, seed, parts=True)
    params = {"cache_size": count, "alpha": alpha, "server_lr": 0.7}
    expected = by_coordinate(updates, alpha, 0.7)
    np.testing.assert_allclose(stepped("teasq_drop", params, updates), expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(0, 2**31), st.sampled_from([0.0, 0.6]))
def test_a_sparse_update_counts_as_the_dense_one_with_zeros(count: int, seed: int, alpha: float) -> None:
    updates = cached(count, seed, parts=True)
    params = {"cache_size": count, "alpha": alpha}
    zeroed = [(b, n, np.where(d > 0, d, 0.0), w) for b, n, d, w in updates]
    found = stepped("teasq_drop", params, updates, sparse=True)
    np.testing.assert_allclose(found, stepped("teasq_drop", params, zeroed), rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("how", ["no maps", "maps of everything"])
def test_with_whole_models_teasq_drop_is_teasq(alpha: float, how: str) -> None:
    updates = cached(5, 3, parts=False)
    params = {"cache_size": 5, "alpha": alpha}
    mine = updates if how == "no maps" else [(b, n, d, np.arange(SIZE)) for b, n, d, _ in updates]
    found = stepped("teasq_drop", params, mine)
    np.testing.assert_allclose(found, stepped("teasq", params, updates), rtol=1e-12)


def test_with_a_cache_of_one_and_no_staleness_weight_teasq_drop_is_asyncdrop() -> None:
    for seed in range(8):
        updates = cached(1, seed, parts=True)
        found = stepped("teasq_drop", {"cache_size": 1, "alpha": 0.5, "a": 0.0}, updates)
        np.testing.assert_allclose(found, stepped("asyncdrop", {"alpha": 0.5}, updates), rtol=1e-12)


def test_with_whole_models_equal_examples_and_no_staleness_weight_teasq_drop_is_fedbuff() -> None:
    updates = [(b, 7, d, w) for b, _, d, w in cached(4, 5, parts=False)]
    found = stepped("teasq_drop", {"cache_size": 4, "a": 0.0}, updates)
    constant = {"buffer_size": 4, "staleness": {"name": "constant"}}
    np.testing.assert_allclose(found, stepped("fedbuff", constant, updates), rtol=1e-12)


# --- rounds with sub-models ----------------------------------------------------------------------


def test_fedavg_averages_each_coordinate_over_those_that_cover_it() -> None:
    model = {"w": np.zeros(4, np.float32)}
    sent = [
        ("a", 1, [1, 1], [0, 1]),
        ("b", 3, [5, 5], [1, 2]),
    ]
    updates = [
        anabranch.Update(c, c, 0, n, {"w": np.array(d, np.float32)}, submodel={"w": np.array(at)})
        for c, n, d, at in sent
    ]
    result = anabranch.aggregate("fedavg", {"clients_per_round": 2}, model, updates)
    assert result.model["w"].tolist() == [1, 4, 5, 0]
    whole = anabranch.Update("b", "b", 0, 3, {"w": np.full(4, 5, np.float32)})
    for both in ([updates[0], whole], [whole, updates[0]]):
        result = anabranch.aggregate("fedavg", {"clients_per_round": 2}, model, both)
        assert result.model["w"].tolist() == [4, 4, 5, 5]


def ist(spec: ParamSpec, start: Array, parts: int) -> Fleet:
    fleet = Fleet(
        spec,
        start,
        "fedavg",
        params={"clients_per_round": parts, "over_selection": 1.0},
        submodel={"name": "ist", "parts": parts},
    )
    fleet.enrol(*(f"c{i}" for i in range(parts)))
    return fleet


def test_a_round_of_ist_without_training_changes_nothing_and_every_unit_has_one_owner() -> None:
    start = SPEC.flatten(tensors())
    fleet = ist(SPEC, start, 3)
    for _ in range(4):
        tasks = [fleet.ask(f"c{i}") for i in range(3)]
        for g, group in enumerate(GROUPS):
            owned = [u for t in tasks for u in t.submodel.kept[g]]  # type: ignore[union-attr]
            assert sorted(owned) == list(range(group.size))
        for task in tasks:
            assert task.submodel is not None
            fleet.answer(task, np.zeros(task.submodel.size))
    assert fleet.engine.version == 4
    assert fleet.engine.vector.tobytes() == start.tobytes()


def test_what_all_parts_share_is_averaged_and_what_one_owns_is_copied_back() -> None:
    fleet = ist(SPEC, SPEC.flatten(tensors()), 2)
    before = fleet.engine.vector.copy()
    tasks = [fleet.ask(f"c{i}") for i in range(2)]
    for i, task in enumerate(tasks):
        assert task.submodel is not None
        fleet.answer(task, np.full(task.submodel.size, 1.0 + i))
    moved = SPEC.unflatten(fleet.engine.vector - before)
    np.testing.assert_allclose(moved["out.bias"], 1.5, rtol=1e-5)
    for i, task in enumerate(tasks):
        own = list(task.submodel.kept[0])  # type: ignore[union-attr]
        np.testing.assert_allclose(moved["hidden.weight"][own], 1.0 + i, rtol=1e-5)


def quadratic(seed: int, n: int) -> tuple[Array, Array]:
    """f(x) = x' L x / 2 - b' x: L symmetric positive definite, not diagonal."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((n, n)) / np.sqrt(n)
    return root @ root.T + 0.5 * np.eye(n), rng.standard_normal(n)


def train_ist(matrix: Array, b: Array, rounds: int, rate: float) -> Array:
    """Every device has one coordinate, scaled by n as the theory does, and takes a step of rate / n."""
    n = b.size
    spec = ParamSpec.of({"w": np.zeros(n)}, line(n).groups)
    fleet = ist(spec, np.ones(n), n)
    for _ in range(rounds):
        x = fleet.engine.vector
        for task in [fleet.ask(f"c{k}") for k in range(n)]:
            assert isinstance(task.submodel, UnitMap)
            (i,) = task.submodel.kept[0]
            gradient = n * (matrix[i, i] * n * x[i] - b[i])  # of f(C x) at its own coordinate: C = n e e'
            fleet.answer(task, np.array([-rate / n * gradient]))
    return fleet.engine.vector


def test_ist_converges_to_the_wrong_point_that_its_theory_predicts() -> None:
    n = 6
    matrix, b = quadratic(4, n)
    x = train_ist(matrix, b, 200, rate=0.1)
    predicted = b / (n * np.diag(matrix))
    optimum = np.linalg.solve(matrix, b)
    assert np.linalg.norm(x - predicted) / np.linalg.norm(predicted) < 1e-8
    assert np.linalg.norm(x - optimum) / np.linalg.norm(optimum) > 0.5


def test_where_zero_is_the_optimum_ist_finds_it() -> None:
    matrix, _ = quadratic(4, 6)
    assert np.linalg.norm(train_ist(matrix, np.zeros(6), 200, rate=0.1)) < 1e-6
