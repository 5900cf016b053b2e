"""Strategies that remember every device: paths by the history of all updates, what fits, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long_lists import lists_up_to
from machines import SPEC, Bench, part
from rollbacks import World

from anabranch.core.config.tables import merge
from anabranch.core.effects import Granted, Refused, RolledBackTo
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.invariants import violations
from anabranch.core.engine.robust import RobustTable
from anabranch.core.engine.shelf import Shelved
from anabranch.core.engine.strategy import Context
from anabranch.core.errors import ConfigError, StoreCorrupt
from anabranch.core.limits import KIB, MIB
from anabranch.core.model.params import ParamSpec, SparseVector, Vector, dense
from anabranch.core.model.updates import Reason, Update, Verdict
from anabranch.core.snapshot import restore, state_digest, take_snapshot
from anabranch.host.build import Blueprint
from anabranch.strategies.ace import ACE
from anabranch.strategies.memory import PLACES, Kept
from anabranch.strategies.registry import make_strategy
from anabranch.support.shelf import FolderRows, MemoryRows, RowPlace, RowShelf, ScratchShelf

Array = np.ndarray[Any, np.dtype[np.float64]]
FLEET = "abcde"  # of which the last one never sends anything


@dataclass(frozen=True)
class Sent:
    """An update of the history: whose it is, the version it started from, its values."""

    client: str
    base: int
    delta: Array


def bench_of(name: str, params: dict[str, Any], **settings: Any) -> Bench:
    """A bench whose strategy has a bound of staleness, which is a setting of the engine's as well."""
    bench = Bench(name, **settings)
    bench.engine.strategy = make_strategy(name, params)
    return bench


def history(bench: Bench, count: int, seed: int = 7) -> tuple[list[Sent], list[Array]]:
    """Updates of four devices, the fast ones more often, of all ages; and the model after each."""
    rng, sent, models = np.random.default_rng(seed), [], []
    bench.enrol(*FLEET)
    held: dict[str, str] = {}
    for number in range(count):
        for client in FLEET[:-1]:
            if client not in held:
                held[client] = f"t{number}-{client}"
                bench.ask(client, held[client], now=float(number))
        client = str(rng.choice(list(FLEET[:-1]), p=[0.5, 0.3, 0.1, 0.1]))
        task = held.pop(client)
        base = bench.engine.ledger.tasks[task].base_version
        delta = rng.integers(-64, 65, 4) / 16.0  # that float32 has exactly
        bench.push(client, task, delta, now=float(number))
        sent.append(Sent(client, base, delta))
        models.append(bench.engine.vector.astype(np.float64))
    return sent, models


def newest(sent: Sequence[Sent], client: str) -> Array:
    """What a device sent last, zeros if nothing."""
    return next((s.delta for s in reversed(sent) if s.client == client), np.zeros(4))


# --- CA2FL -----------------------------------------------------------------------------------


def calibrated(sent: Sequence[Sent], size: int, rate: float, set_with_version: bool = False) -> Array:
    """The model after these updates: every version looked up anew in what was sent before it."""
    w = np.zeros(4)
    for end in range(size, len(sent) + 1, size):
        before = sent[: end - size]
        cached = np.mean([newest(before, client) for client in FLEET], axis=0)
        fresh = [
            sent[i].delta - newest(before if set_with_version else sent[:i], sent[i].client)
            for i in range(end - size, end)
        ]
        w = w + rate * (cached + np.mean(fresh, axis=0))
    return w


@pytest.mark.parametrize(("size", "rate"), [(1, 1.0), (3, 0.5), (4, 1.0), (10, 0.25)])
def test_ca2fl_by_its_history(size: int, rate: float) -> None:
    sent, models = history(Bench("ca2fl", buffer_size=size, server_lr=rate), 60)
    assert len({s.client for s in sent}) == 4
    for number, model in enumerate(models, 1):
        np.testing.assert_allclose(model, calibrated(sent[:number], size, rate), rtol=1e-5, atol=1e-4)


@given(st.lists(st.permutations("abcd"), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_when_ca2fl_remembers_makes_no_difference_unless_a_device_comes_twice(
    buffers: list[list[str]], size: int, comes_twice: bool
) -> None:
    """Each h_i with its update, as here, or all of a buffer with the version, as its paper may be read."""
    bench = Bench("ca2fl", buffer_size=size)
    bench.enrol(*FLEET)
    sent: list[Sent] = []
    for n, clients in enumerate(buffers):
        for i, client in enumerate([clients[0], *clients[: size - 1]] if comes_twice else clients[:size]):
            sent.append(Sent(client, bench.engine.version, np.full(4, 2.0 ** len(sent) / 64)))
            bench.work(client, f"t{n}-{i}", sent[-1].delta)
    here, there = (calibrated(sent, size, 1.0, set_with_version) for set_with_version in (False, True))
    np.testing.assert_allclose(bench.engine.vector, here, rtol=1e-5)
    assert np.array_equal(here, there) == (size == 1 or not comes_twice)


def test_golden_ca2fl() -> None:
    """Four devices, two updates a version: h is .75, 1, .5 after them."""
    bench = Bench("ca2fl", buffer_size=2)
    bench.enrol(*"0123")
    reached, mean = [], []
    buffers = [[("0", 1), ("1", 2)], [("0", 3), ("2", -1)], [("1", 1), ("0", 2)]]
    for n, buffer in enumerate(buffers):
        for client, value in buffer:
            bench.work(client, f"t{n}{client}", (value,) * 4)
        reached.append(float(bench.engine.vector[0]))
        mean.append(float(bench.engine.state.total[0]) / 4)
    assert (reached, mean) == ([1.5, 2.75, 2.75], [0.75, 1.0, 0.5])


def test_ca2fl_of_the_whole_fleet_is_the_mean_of_what_it_sends() -> None:
    """With K = N, and one of each device in every buffer, the memory corrects nothing."""
    mine = Bench("ca2fl", buffer_size=3, server_lr=0.5)
    plain = Bench("fedbuff", buffer_size=3, server_lr=0.5, staleness={"name": "constant"})
    for bench in (mine, plain):
        bench.enrol(*"abc")
        for n in range(12):
            bench.work("abc"[n % 3], f"t{n}", (n, -n, 0.5 * n, 1))
    np.testing.assert_allclose(mine.engine.vector, plain.engine.vector, rtol=1e-6)


def test_a_flushed_buffer_is_divided_by_what_it_has() -> None:
    bench = Bench("ca2fl", buffer_size=3, flush_s=5.0, lease_s=100.0)
    bench.enrol("a", "b")
    bench.work("a", "t0", (4, 4, 4, 4), now=1.0)
    bench.tick(6.0)
    bench.work("b", "t1", (2, 2, 2, 2), now=7.0)
    bench.tick(12.0)
    assert bench.engine.vector.tolist() == [4 + (4 / 2 + 2)] * 4


def test_nothing_stays_of_an_update_that_was_replaced() -> None:
    """One of 10^9 is remembered, then one of 1: in float32 the sum would be off by 64 for ever."""
    bench = Bench("ca2fl", buffer_size=1)
    bench.enrol("a", "b")
    bench.work("b", "t0", (0.3, 0.3, 0.3, 0.3))
    for n, value in enumerate((1e9, 1.0), 1):
        bench.work("a", f"t{n}", (value,) * 4)
    assert bench.engine.state.total.tolist() == pytest.approx([1.3] * 4, rel=1e-6)


# --- ACE and ACED ----------------------------------------------------------------------------


def engaged(sent: Sequence[Sent], rate: float, bound: int) -> tuple[list[Array], int, int]:
    """The model after each update, all looked up anew; how many were late, how many had left."""
    w, models, late, left = np.zeros(4), [], 0, 0
    taken: list[Sent] = []
    for s in sent:
        version = len(taken)
        if bound and version - s.base > bound:
            late += 1
        else:
            taken.append(s)
            last = {each.client: each for each in taken}.values()
            counting = [each.delta for each in last if not bound or version - each.base <= bound]
            left += len(last) - len(counting)
            w = w + rate * np.mean(counting, axis=0)
        models.append(w)
    return models, late, left


@pytest.mark.parametrize(
    ("name", "params", "bound"),
    [("ace", {}, 0), ("ace", {"server_lr": 1.0}, 0), ("aced", {}, 100), ("aced", {"staleness_max": 6}, 6)],
)
def test_ace_by_its_history(name: str, params: dict[str, Any], bound: int) -> None:
    bench = bench_of(name, params)
    sent, models = history(bench, 60)
    expected, late, left = engaged(sent, params.get("server_lr", 0.1), bound)
    assert (late > 0, left > 0) == (bound == 6, bound == 6)
    assert bench.engine.version == 60 - late
    for model, its in zip(models, expected, strict=True):
        np.testing.assert_allclose(model, its, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["ace", "aced"])
def test_golden_ace(name: str) -> None:
    """U = 1, 2, 3 is there when w = 5; of gradients, which updates are the opposite of."""
    bench = Bench(name, start=np.full(4, 5.45, np.float32))
    bench.enrol(*"012")
    reached = []
    for n, (client, gradient) in enumerate([("0", 1), ("1", 2), ("2", 3), ("0", 0.5), ("0", 0.2), ("2", -1)]):
        bench.work(client, f"t{n}", (-gradient,) * 4)
        reached.append(float(bench.engine.vector[0]))
    assert reached[2:] == pytest.approx([5.0, 4.816667, 4.643333, 4.603333], abs=1e-6)


def test_ace_of_one_device_is_a_buffer_of_one() -> None:
    mine = Bench("ace", server_lr=0.3)
    plain = Bench("fedbuff", buffer_size=1, server_lr=0.3)
    for bench in (mine, plain):
        bench.enrol("a")
        for n in range(9):
            bench.work("a", f"t{n}", (n, -1, 0.1 * n, 3))
    np.testing.assert_allclose(mine.engine.vector, plain.engine.vector, rtol=1e-6)


def test_what_is_too_old_for_aced_counts_never_again_and_takes_no_memory() -> None:
    """Bound 2: at version 3 the first update of b, of version 0, is left out; of b a new one counts."""
    bench = bench_of("aced", {"server_lr": 1.0, "staleness_max": 2})
    bench.enrol("a", "b")
    bench.work("b", "t0", (8, 8, 8, 8))
    reached = [bench.engine.vector[0]]
    for n in range(3):
        bench.work("a", f"t{n + 1}", (2, 2, 2, 2))
        reached.append(bench.engine.vector[0])
    assert reached == [8, 8 + 5, 13 + 5, 18 + 2]
    left = bench.engine.state.kept["b"]
    assert (left.delta.size, left.counts, left.base_version) == (0, False, 0)
    bench.work("b", "t4", (4, 4, 4, 4))
    assert bench.engine.vector[0] == 20 + 3
    assert bench.engine.state.total.tolist() == [6.0] * 4


@given(
    sent=lists_up_to(60, st.tuples(st.integers(0, 6), st.integers(0, 4))),
    bound=st.integers(1, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_who_counts_for_aced_is_found_without_a_look_at_all_devices(
    sent: list[tuple[int, int]], bound: int, data: st.DataObject
) -> None:
    """As by a look at all; also after starts, on snapshots that have the devices in any order."""
    bench = bench_of("aced", {"server_lr": 1.0, "staleness_max": bound})
    devices = [f"d{n}" for n in range(7)]
    bench.enrol(*devices)
    newest_of: dict[str, tuple[float, int]] = {}  # all that were taken, and the versions they started from
    tasks: dict[str, tuple[str, int]] = {}
    model = 0.0
    for number, (device, late) in enumerate(sent, start=1):
        client = devices[device]
        if client not in tasks:
            bench.ask(client, f"t{number}")
            tasks[client] = f"t{number}", bench.engine.version
        if late and len(tasks) < 6:  # it trains on, and others' come first
            continue
        task, base = tasks.pop(client)
        version, value = bench.engine.version, float(number)
        bench.push(client, task, (value,) * 4)
        if version - base <= bound:
            newest_of[client] = value, base
            model += float(np.mean([v for v, b in newest_of.values() if version - b <= bound]))
        state = bench.engine.state
        oldest = bench.engine.version - 1 - bound
        assert {c for c, k in state.kept.items() if k.counts} == {
            c for c, (_, b) in newest_of.items() if b >= oldest
        }
        np.testing.assert_allclose(bench.engine.vector, model, rtol=1e-4)
        assert len(vars(state.ages)["_oldest"]) <= bound + 1
        if data.draw(st.booleans()):
            bench.engine = started_again(bench, data.draw(st.permutations(sorted(state.kept))))


def started_again(bench: Bench, order: Sequence[str]) -> Engine:
    """What comes of a snapshot that has the devices in this order, as one of an older release may."""
    taken = take_snapshot(bench.engine)
    meta = json.loads(json.dumps(taken.meta))
    kept = meta["strategy"]["kept"]
    meta["strategy"]["kept"] = {client: kept[client] for client in order}
    strategy, given = bench.engine.strategy, bench.engine.settings
    return restore(replace(taken, meta=meta), SPEC, strategy, given, shelf=bench.engine.shelf)


class LookedThrough(dict[str, Kept]):
    """A memory of which no more than single devices may be looked at, once it is `closed`."""

    closed = False

    def __iter__(self) -> Iterator[str]:
        assert not self.closed
        return super().__iter__()

    def items(self) -> Any:
        """All devices."""
        assert not self.closed
        return super().items()

    def values(self) -> Any:
        """All devices."""
        assert not self.closed
        return super().values()


def test_aced_looks_at_all_devices_once_after_a_start() -> None:
    strategy = make_strategy("aced", {"staleness_max": 3})
    kept = LookedThrough({f"d{n}": Kept(np.full(4, float(n)), n // 4) for n in range(20)})  # bases 0 to 4
    state: Any = replace(strategy.init(np.zeros(4)), kept=kept, total=np.full(4, float(sum(range(20)))))
    vector = np.zeros(4)
    for number in range(12):
        version = 4 + number
        update = Update(f"u{number}", f"t{number}", "d7", version, 1, np.ones(4))
        state = strategy.step(state, vector, update, Context(1.0, version, 0, (), spec=SPEC)).state
        kept.closed = True
    kept.closed = False
    assert [client for client, last in kept.items() if last.counts] == ["d7"]
    assert state.total.tolist() == [1.0] * 4


def test_a_state_of_other_versions_counts_by_them() -> None:
    """Bound 2, and all numbers are higher by 100: at version 102 a's of 100 counts, b's of 99 does not."""
    strategy = make_strategy("aced", {"staleness_max": 2, "server_lr": 1.0})
    state: Any = replace(strategy.init(np.zeros(1)), total=np.array([3.0]))
    state.kept.update(a=Kept(np.array([1.0]), 0), b=Kept(np.array([2.0]), -1))
    assert len(state.ages) == 2
    state = strategy.shifted(state, 100)
    context = Context(1.0, 102, 0, ("c",), spec=ParamSpec.of({"w": np.zeros(1)}))
    state = strategy.step(
        state, vector := np.zeros(1), Update("u", "t", "c", 102, 1, np.ones(1)), context
    ).state
    assert (vector.tolist(), len(state.ages)) == ([1.0], 2)
    assert [client for client, last in state.kept.items() if last.counts] == ["a", "c"]


def test_an_update_that_is_too_old_for_aced_is_not_used() -> None:
    bench = bench_of("aced", {"staleness_max": 2})
    bench.enrol("a", "b")
    bench.ask("b", "late")
    for n in range(3):
        bench.work("a", f"t{n}")
    before = bench.engine.vector.tolist()
    (decided, *_) = bench.push("b", "late")
    told = decided.receipt.decision
    assert (told.verdict, told.reason, told.staleness) == (Verdict.REJECTED, Reason.STALE, 3)
    assert bench.engine.vector.tolist() == before
    assert "b" not in bench.engine.state.kept


@pytest.mark.parametrize("bases", [(0, 0, 0, 0), (0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_updates_that_leave_together_leave_in_the_order_of_their_names(bases: tuple[int, ...]) -> None:
    """A store may give the memory back in another one, and sums depend on it: 0.1, 1e16 and their like."""
    strategy = make_strategy("aced", {"staleness_max": 2})
    values = {"a": 0.1, "b": 1e16, "c": -1e16, "d": 0.7}
    expected = 3.0
    for value in (*values.values(), -1.0):  # the last one comes
        expected -= value
    for names in ("abcd", "dcba", "cadb"):
        state: Any = strategy.init(np.zeros(1))
        kept = {name: Kept(np.array([values[name]]), bases["abcd".index(name)]) for name in names}
        state = replace(state, kept=kept, total=np.array([3.0]))
        context = Context(1.0, 10, 0, ("e",), spec=ParamSpec.of({"w": np.zeros(1)}))
        step = strategy.step(state, np.zeros(1), Update("u", "t", "e", 10, 1, np.ones(1)), context)
        assert step.state.total.tolist() == [expected]


# --- all that remember -------------------------------------------------------------------------

REMEMBERING: list[tuple[str, dict[str, Any]]] = [
    (name, {**params, "memory": place})
    for name, params in (("ca2fl", {"buffer_size": 3}), ("ace", {}), ("aced", {"staleness_max": 8}))
    for place in PLACES
]
each = pytest.mark.parametrize(
    ("name", "params"), REMEMBERING, ids=[f"{name}-{params['memory']}" for name, params in REMEMBERING]
)


def place_bytes(params: dict[str, Any]) -> int:
    """What a device takes of the server's memory."""
    return KIB + (16 if params["memory"] == "ram" else 0)


@each
def test_it_goes_on_from_a_snapshot_in_the_middle(name: str, params: dict[str, Any]) -> None:
    bench = bench_of(name, params)
    history(bench, 20)
    snapshot = take_snapshot(bench.engine)
    assert ("strategy/kept/a/delta/values" in snapshot.arrays) == (params["memory"] == "ram")
    assert bool(snapshot.holds) == (params["memory"] == "disk")
    again = bench_of(name, params)
    shelf = bench.engine.shelf
    again.engine = restore(snapshot, SPEC, bench.engine.strategy, bench.engine.settings, shelf=shelf)
    for one in (bench, again):
        for n in range(4):
            one.work("abcd"[n], f"later-{n}", (n, 1, -1, 2), now=100.0)
    assert state_digest(again.engine) == state_digest(bench.engine)


@each
def test_a_sparse_update_is_remembered_as_the_whole_one_would_be(name: str, params: dict[str, Any]) -> None:
    strategy, ends = make_strategy(name, params), []
    for is_sparse in (False, True):
        vector, version = np.zeros(4, np.float32), 0
        state = strategy.init(vector)
        shelf = RowShelf(MemoryRows())
        for n in range(12):
            delta = np.array([0, n, 0, -1], np.float32)
            sent = SparseVector(np.array([3, 1]), delta[[3, 1]], 4) if is_sparse else delta
            context = Context(1.0, version, 0, ("a", "b"), spec=SPEC, shelf=shelf)
            update = Update(f"u{n}", f"t{n}", "ab"[n % 2], version, 1, sent)
            step = strategy.step(state, vector, update, context)
            state, version = step.state, version + (step.vector is not None)
        ends.append(vector.tolist())
    assert ends[0] == ends[1] != [0.0] * 4


def test_what_is_remembered_is_never_larger_than_all_numbers() -> None:
    """An index and a value are twelve bytes: a third of 99 numbers takes what all of them do."""

    def kept(count: int) -> Any:
        delta = SparseVector(np.arange(count), np.ones(count, np.float32), 99)
        update = Update("u", "t", "a", 3, 1, delta)
        return ACE().with_newest({}, update, Context(1.0, 3, 0))["a"]

    few, many = kept(32), kept(33)
    assert isinstance(few.delta, SparseVector)
    assert isinstance(many.delta, np.ndarray)
    assert many.delta.tolist() == [1.0] * 33 + [0.0] * 66
    assert (few.base_version, dense(few.delta).sum()) == (3, 32.0)


@each
def test_a_full_memory_gives_no_task_to_more_devices(name: str, params: dict[str, Any]) -> None:
    """Two places, and two devices that were both asked for more when one was left: the later one is told."""
    bench = bench_of(name, {**params, "memory_bytes_max": 2 * place_bytes(params)})
    bench.enrol(*"abcd")
    bench.work("a", "t0")
    for client in "bc":
        bench.ask(client, f"{client}0")
    assert bench.engine.ledger.live == 2
    bench.push("b", "b0")
    before = state_digest(bench.engine)
    (decided, *_) = bench.push("c", "c0")
    told = decided.receipt.decision
    assert (told.verdict, told.reason) == (Verdict.REJECTED, Reason.NOT_SELECTED)
    assert "strategy.memory_bytes_max has room for the updates of 2 devices" in told.detail
    assert set(bench.engine.state.kept) == {"a", "b"}
    assert before != state_digest(bench.engine), "the rejection is remembered"
    (refused,) = bench.ask("d", "d0")
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.NOT_SELECTED
    (granted,) = bench.ask("a", "a1")
    assert isinstance(granted, Granted)


@each
def test_a_rollback_forgets_whom_it_leaves_out(name: str, params: dict[str, Any]) -> None:
    world = World(name, params, {})
    world.enrol()
    world.play([("abcd"[n % 4], n % 3, 0.25 * n) for n in range(24)])
    assert "b" in world.engine.state.kept
    effects = world.roll_back(0, 0, "b")
    assert set(world.engine.state.kept) == {"a", "c", "d"}
    assert [e.version for e in effects if isinstance(e, RolledBackTo)] == [world.engine.version]
    assert violations(world.engine) == []
    world.play([("acd"[n % 3], 1, 1.0) for n in range(9)])
    assert violations(world.engine) == []


@each
def test_a_fleet_that_does_not_fit_does_not_begin(name: str, params: dict[str, Any]) -> None:
    def begin(bytes_max: int, clients: int) -> Blueprint:
        table = {"name": name, **params, "memory_bytes_max": bytes_max}
        return Blueprint.of(merge([("t", {"strategy": table, "fleet": {"clients": clients}})]), SPEC)

    takes = 1000 * place_bytes(params)
    assert begin(takes, 1000).strategy.name == name
    remedy = "set strategy.memory = 'disk'.*" if params["memory"] == "ram" else ": set it to that"
    words = f"memory_bytes_max is {takes - 1}.*fleet.clients = 1000 .*4 numbers.*{takes}.*{remedy}.*'fadas'"
    with pytest.raises(ConfigError, match=words):
        begin(takes - 1, 1000)


@each
def test_the_memory_of_a_phase_must_fit_as_well(name: str, params: dict[str, Any]) -> None:
    phases = [
        {"strategy": "fedbuff", "until_updates": 5},
        {"strategy": name, **params, "memory_bytes_max": KIB},
    ]
    config = merge([("t", {"strategy": {"name": "phased", "phases": phases}})])
    with pytest.raises(ConfigError, match=r"memory_bytes_max is 1024, but the updates of fleet\.clients = 8"):
        Blueprint.of(config, SPEC)


@each
def test_parts_of_a_model_and_rules_are_refused(name: str, params: dict[str, Any]) -> None:
    bench = bench_of(name, params, any_submodel=True)
    bench.enrol("a")
    bench.ask("a", "t")
    (decided, *_) = bench.push("a", "t", (1, 2), submodel=part(0, 3))
    assert decided.receipt.decision.reason is Reason.NO_SUBMODELS
    with pytest.raises(ConfigError, match=f"{name!r} gathers no buffer that takes one"):
        make_strategy(name, params, RobustTable(rule="median"))


@each
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"server_lr": 0.0}, "server_lr must be greater than 0"),
        ({"memory_bytes_max": 0}, "memory_bytes_max must be at least 1"),
        ({"memory": "tape"}, "strategy.memory must be one of ram, disk, not 'tape'"),
        ({"staleness": {"name": "constant"}}, "unknown key in .strategy.*'staleness'"),
        ({"outer": {"name": "sgd"}}, "such as 'fedbuff' or 'fedavg'"),
    ],
)
def test_bad_parameters_name_the_field_and_the_fix(
    name: str, params: dict[str, Any], said: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_strategy(name, {**params, **said})
    made: Any = make_strategy(name, params)
    assert made.memory_bytes_max == 256 * MIB


# --- on a disk -----------------------------------------------------------------------------------

KINDS = [("ca2fl", {"buffer_size": 3}), ("ace", {}), ("aced", {"staleness_max": 8})]
finite = st.floats(-1e6, 1e6, width=32)


def lived(
    name: str, params: dict[str, Any], rows: RowPlace, deltas: Sequence[tuple[str, SparseVector | Vector]]
) -> list[bytes]:
    """The model after each of these updates, as bytes."""
    strategy, shelf = make_strategy(name, params), RowShelf(rows)
    vector, version, models = np.zeros(4, np.float32), 0, []
    state = strategy.init(vector)
    for n, (client, delta) in enumerate(deltas):
        context = Context(1.0, version, 0, tuple("abcd"), spec=SPEC, shelf=shelf)
        step = strategy.step(state, vector, Update(f"u{n}", f"t{n}", client, version, 1, delta), context)
        state, version = step.state, version + (step.vector is not None)
        models.append(vector.tobytes())
    kept = len([one for one in state.kept.values() if one.counts])
    shelf.flush()
    assert len(rows.names()) <= kept  # a row of what was replaced is gone; equal ones are one row
    return models


@pytest.mark.parametrize(("name", "params"), KINDS)
@given(
    history=st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(finite, min_size=4, max_size=4), st.booleans()),
        max_size=24,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_memory_on_disk_comes_to_the_same_bits(
    name: str, params: dict[str, Any], history: list[tuple[str, list[float], bool]]
) -> None:
    deltas: list[tuple[str, SparseVector | Vector]] = [
        (client, SparseVector(np.array([2]), np.array(values[:1], np.float32), 4))
        if is_sparse
        else (client, np.array(values, np.float32))
        for client, values, is_sparse in history
    ]
    in_memory = lived(name, {**params, "memory": "ram"}, MemoryRows(), deltas)
    with TemporaryDirectory() as folder:
        assert lived(name, {**params, "memory": "disk"}, FolderRows(Path(folder)), deltas) == in_memory


@pytest.mark.parametrize(("name", "params"), KINDS)
def test_golden_paths_are_those_of_a_memory_on_disk(name: str, params: dict[str, Any]) -> None:
    """The same models, and of the state all but where the numbers are."""
    ends = []
    for place in PLACES:
        bench = bench_of(name, {**params, "memory": place})
        _, models = history(bench, 40)
        state = bench.engine.state
        ages = {client: kept.base_version for client, kept in state.kept.items()}
        ends.append((np.array(models).tobytes(), state.total.tobytes(), ages))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("name", "params"), KINDS)
def test_a_rollback_comes_to_the_same_bits_wherever_the_memory_is(name: str, params: dict[str, Any]) -> None:
    ends = []
    for place in PLACES:
        world = World(name, {**params, "memory": place}, {})
        world.enrol()
        world.play([("abcd"[n % 4], n % 3, 0.3 * n) for n in range(24)])
        world.roll_back(7, 0, "b")
        world.play([("acd"[n % 3], 1, 0.7) for n in range(9)])
        ends.append(world.engine.vector.tobytes())
        kept = [one for one in world.engine.state.kept.values() if one.counts]
        if place == "disk":
            named = {one.delta.sha256 for one in kept if isinstance(one.delta, Shelved)}
            world.shelf.flush()  # what nobody refers to goes with the next call
            assert world.shelf.rows.names() == named
    assert ends[0] == ends[1]


def test_a_store_without_a_shelf_is_refused() -> None:
    config = merge([("t", {"strategy": {"name": "ace", "memory": "disk"}})])
    tensors = {"w": np.zeros(4, np.float32)}
    with pytest.raises(ConfigError, match=r"strategy\.memory = 'disk' needs a store that has a shelf"):
        Blueprint.of(config, SPEC).engine(tensors)
    assert Blueprint.of(config, SPEC, shelf=ScratchShelf()).engine(tensors).version == 0


def test_a_reference_without_a_shelf_is_no_state() -> None:
    bench = bench_of("ace", {"memory": "disk"})
    history(bench, 5)
    snapshot = take_snapshot(bench.engine)
    with pytest.raises(StoreCorrupt, match=r"lies on a shelf \(strategy\.memory\), and here is none"):
        restore(snapshot, SPEC, bench.engine.strategy, bench.engine.settings)
