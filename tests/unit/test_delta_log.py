"""The delta log: exact, bounded, and it never loses what tasks train from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from broadcasting import SPEC, WIDE, Run, motion, tensors

from anabranch.compress import delta_log
from anabranch.compress import grid as grid_module
from anabranch.compress.delta_log import DeltaLog, DeltaLogState, apply, moved
from anabranch.compress.grid import LEVEL_MAX, Grid, Message, message_bytes_max, read_message, write_message
from anabranch.compress.layout import MAIN, SMALL, Layout
from anabranch.core.effects import Decided
from anabranch.core.errors import AnabranchError, ConfigError, InvalidUpdate
from anabranch.core.journal import from_record, to_record
from anabranch.core.kernels import plain
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.updates import Reason, Verdict
from anabranch.core.rules import NEWEST
from anabranch.core.snapshot import Snapshot, restore, state_digest, take_snapshot

GOLDEN = Path(__file__).parents[1] / "golden" / "delta_log.json"
LAYOUT = Layout.of(SPEC)
NO_FLIPS = np.empty(0, np.uint32)
START = SPEC.flatten(tensors())
MAIN_GROUP, SMALL_GROUP = LAYOUT.groups


def history(log: DeltaLog, moves: list[Vector], start: Vector = START) -> tuple[list[DeltaLogState], Vector]:
    """The states of versions 0, 1, ..., and the last model."""
    w, states = start.copy(), [log.init(start)]
    for move in moves:
        w = w + move
        states.append(log.publish(states[-1], states[-1].version + 1, w, ()))
    return states, w


def bits(vector: Vector) -> bytes:
    return vector.tobytes()


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("filled", [0.0, 0.001, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("largest", [1, 200, 300, LEVEL_MAX])
def test_a_message_comes_back_whatever_its_form(filled: float, largest: int) -> None:
    rng = np.random.default_rng(3)
    grids = []
    for group, exponent in zip(LAYOUT.groups, (-12, 100), strict=True):
        levels = rng.integers(-largest, largest + 1, group.size, dtype=np.int32)
        grids.append(Grid(np.where(rng.random(group.size) < filled, levels, 0).astype(np.int32), exponent))
    data = write_message(Message(grids, NO_FLIPS), LAYOUT)
    assert len(data) <= message_bytes_max(LAYOUT)
    for found, grid in zip(read_message(data, LAYOUT).grids, grids, strict=True):
        assert found.exponent == grid.exponent
        assert np.array_equal(found.levels, grid.levels)


def test_a_grid_follows_from_its_values_alone() -> None:
    values = np.array([0.5, -1.25, 0.0, 3.0], np.float32)
    fine, coarse = Grid.of(values, -20), Grid.of(values, -2)
    assert fine.exponent == coarse.exponent == -2
    assert fine.levels.tolist() == coarse.levels.tolist() == [2, -5, 0, 12]
    assert bits(fine.values()) == bits(values)
    assert Grid.of(np.zeros(3, np.float32), -7).levels.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("form", "data"), list(enumerate(json.loads(GOLDEN.read_text()))))
def test_messages_of_every_form_decode_for_ever(form: int, data: str) -> None:
    spec = ParamSpec.of({"w": np.zeros((20, 25), np.float32), "b": np.zeros(3, np.float32)})
    main, small = read_message(bytes.fromhex(data), Layout.of(spec)).grids
    i = np.arange(500)
    expected = (i * 7919 % 11 - 5) * (i % 7 == 0) * (1 + 299 * (i % 5 == 0))
    assert bytes.fromhex(data)[0] == form
    assert (main.exponent, small.exponent) == (-12, -15)
    assert np.array_equal(main.levels, expected)
    assert small.levels.tolist() == [-3, 0, 70000]


@pytest.mark.parametrize("levels", [LEVEL_MAX + 1, -LEVEL_MAX - 1])
@pytest.mark.parametrize("filled", [1, SPEC.size])
def test_a_level_that_float32_has_not_is_refused(levels: int, filled: int) -> None:
    grids = [Grid(np.zeros(group.size, np.int32), 0) for group in LAYOUT.groups]
    grids[0].levels[:filled] = levels
    with pytest.raises(InvalidUpdate, match="level"):
        read_message(write_message(Message(grids, NO_FLIPS), LAYOUT), LAYOUT)


@pytest.mark.parametrize("exponent", [-101, 101, 2**31 - 1])
def test_an_exponent_out_of_range_is_refused(exponent: int) -> None:
    grids = [Grid(np.ones(group.size, np.int32), exponent) for group in LAYOUT.groups]
    with pytest.raises(InvalidUpdate, match="exponent"):
        read_message(write_message(Message(grids, NO_FLIPS), LAYOUT), LAYOUT)


def test_a_message_that_leads_out_of_float32_is_refused() -> None:
    grids = [Grid(np.full(group.size, LEVEL_MAX, np.int32), 100) for group in LAYOUT.groups]
    held = np.full(SPEC.size, 3.4e38, np.float32)
    with pytest.raises(InvalidUpdate, match="finite"):
        apply(held, write_message(Message(grids, NO_FLIPS), LAYOUT), LAYOUT)
    assert float(held.max()) == float(held.min()) == np.float32(3.4e38)


def test_every_cut_or_flipped_message_is_refused() -> None:
    log = DeltaLog(SPEC)
    states, _ = history(log, motion(2))
    held, good = states[1].replica, states[2].entries[-1].tobytes()
    before = bits(held)
    rng = np.random.default_rng(5)
    for _ in range(300):
        bad = bytearray(good)
        bad[int(rng.integers(1, len(bad)))] ^= 1 << int(rng.integers(8))
        with pytest.raises(AnabranchError):
            apply(held, bytes(bad), LAYOUT)
        with pytest.raises(AnabranchError):
            apply(held, good[: int(rng.integers(len(good)))], LAYOUT)
    with pytest.raises(InvalidUpdate):
        apply(held, b"\x09" + good[1:], LAYOUT)
    assert bits(held) == before


# --- exactness -------------------------------------------------------------------------------


def test_replay_squash_and_any_order_give_the_same_bits() -> None:
    log = DeltaLog(SPEC)
    states, _ = history(log, [m for s in (1e-3, 1e-4, 1e-2, 1e-5) for m in motion(8, scale=s)])
    newest = states[-1]
    rng = np.random.default_rng(1)
    for b in (newest.first, newest.first + 1, 17, 31):
        entries = newest.entries[b - newest.first :]
        expected = bits(newest.replica)
        for order in (range(len(entries)), rng.permutation(len(entries)), reversed(range(len(entries)))):
            p = states[b].replica
            for i in order:
                p = apply(p, entries[i].data, LAYOUT)
            assert bits(p) == expected
        assert bits(apply(states[b].replica, log.squash(newest, 32, b), LAYOUT)) == expected


@pytest.mark.parametrize("elements", [1, 7, 100])
def test_blocks_change_nothing(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = np.array([1.0, 1e-3, 30.0, 0.0], np.float32)
    moves = [scale * move for move, scale in zip(motion(4), scales, strict=True)]
    whole, _ = history(DeltaLog(SPEC), moves)
    for module in (delta_log, grid_module):
        monkeypatch.setattr(module, "loops", plain)  # which have blocks
    monkeypatch.setattr(plain, "BLOCK", elements)
    pieces, _ = history(DeltaLog(SPEC), moves)
    for one, other in zip(whole, pieces, strict=True):
        assert bits(one.replica) == bits(other.replica)
        assert [e.tobytes() for e in one.entries] == [e.tobytes() for e in other.entries]


def test_old_replicas_come_back_by_subtracting_whoever_asks() -> None:
    log = DeltaLog(SPEC)
    states, _ = history(log, motion(20))
    for forgetful in (log, DeltaLog(SPEC)):
        for v in (0, 19, 7, 8, 20):
            p = forgetful.replica(states[-1], v)
            assert p is not None
            assert bits(p) == bits(states[v].replica)
    assert log.replica(states[-1], 21) is None


def test_what_is_remembered_of_one_history_is_not_told_of_another() -> None:
    log = DeltaLog(SPEC)
    ours, _ = history(log, motion(4, seed=1))
    theirs, _ = history(log, motion(4, seed=2))
    for v in range(4):
        p, q = log.replica(ours[-1], v), log.replica(theirs[-1], v)
        assert p is not None
        assert q is not None
        assert bits(p) == bits(ours[v].replica)
        assert bits(q) == bits(theirs[v].replica)


def test_no_replica_has_a_negative_zero() -> None:
    log = DeltaLog(SPEC)
    state = log.init(-1e-9 * np.abs(START) + np.eye(1, SPEC.size, dtype=np.float32)[0])
    assert not np.signbit(state.replica).any()
    assert bits(apply(START * 0, log.snapshot(state, 0), LAYOUT)) == bits(state.replica)


def test_no_state_is_written_in_place() -> None:
    log = DeltaLog(SPEC)
    state = log.init(START)
    before, w = bits(state.replica), START + 0.25
    log.publish(state, 1, w, ())
    assert bits(state.replica) == before
    assert bits(w) == bits(START + 0.25)


def test_a_snapshot_depends_on_its_version_alone() -> None:
    log = DeltaLog(SPEC)
    states, _ = history(log, [*motion(3), *motion(3, scale=1e-6)])
    assert log.snapshot(states[-1], 3) == log.snapshot(states[3], 3)
    zeros = np.zeros(SPEC.size, np.float32)
    assert bits(apply(zeros, log.snapshot(states[-1], 6), LAYOUT)) == bits(states[6].replica)


def test_a_float64_model_has_float32_replicas() -> None:
    log = DeltaLog(WIDE)
    start = WIDE.flatten(tensors(np.float64))
    state = log.publish(log.init(start), 1, start + 1e-3, ())
    for v in (0, 1):
        p = log.replica(state, v)
        assert p is not None
        assert p.dtype == np.float64
        assert np.array_equal(p, p.astype(np.float32))


# --- what it costs, what it lags -------------------------------------------------------------


def test_a_snapshot_and_a_message_cost_clearly_less_than_the_vector() -> None:
    spec = ParamSpec.of({"w": np.zeros((200, 100), np.float32)})
    log, start = DeltaLog(spec), np.random.default_rng(0).normal(0, 0.1, spec.size).astype(np.float32)
    states, _ = history(log, motion(20, spec.size), start)
    assert len(log.snapshot(states[-1], 20)) < 0.5 * 4 * spec.size
    assert states[-1].entries[-1].size < 0.1 * 4 * spec.size


@pytest.mark.parametrize("step", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["noise", "uniform", "one"])
def test_the_lag_is_at_most_six_moves(step: float, kind: str) -> None:
    """For step <= 1: |lag_i| <= 0.6 * 2^e <= 0.6 sqrt(2) step rms(d), so lag <= 0.85 (lag + move)."""
    moves = {
        "noise": motion(60),
        "uniform": [np.full(SPEC.size, 1e-3, np.float32)] * 60,
        "one": [np.eye(1, SPEC.size, 5, dtype=np.float32)[0] * np.float32(1e-3)] * 60,
    }[kind]
    log = DeltaLog(SPEC, step)
    state, w = log.init(START), START
    state = log.publish(log.publish(state, 1, w, ()), 2, w, ())  # what rounding version 0 left
    bound = 6 * max(float(np.linalg.norm(m)) for m in moves) + float(np.linalg.norm(w - state.replica))
    for v, move in enumerate(moves, start=3):
        w = w + move
        state = log.publish(state, v, w, ())
        assert float(np.linalg.norm(w - state.replica)) <= bound


def test_a_model_at_rest_is_reached_to_the_floor() -> None:
    log = DeltaLog(SPEC)
    state = log.init(START)
    for v in range(1, 60):
        state = log.publish(state, v, START, ())
    for group, floor in zip(LAYOUT.groups, state.floor, strict=True):
        assert float(np.abs(group.gather(START - state.replica)).max()) <= 0.61 * 2.0**floor
    assert floor <= -20


@pytest.mark.parametrize("step", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_differences_that_are_alike_are_sent_whatever_the_step(step: float, spread: float) -> None:
    """Though none is over 0.6 units of two root mean squares: each publish brings p nearer, to the grid."""
    spec, rng = ParamSpec.of({"w": np.zeros((16, 16), np.float32)}), np.random.default_rng(2)
    log = DeltaLog(spec, step=step)
    for size in np.exp2(np.linspace(0, 1, 40, endpoint=False)):
        w = size * (1 + spread * rng.random(256)) * rng.choice([-1, 1], 256)
        w = w.astype(np.float32)
        states = [log.init(np.zeros(256, np.float32))]
        for version in range(1, 30):
            states.append(log.publish(states[-1], version, w, ()))
        lags = [float(np.linalg.norm(w - state.replica)) for state in states]
        grid = 0.6 * 2.0 ** states[-1].floor[0] * 16
        assert all(after < before or before <= grid for before, after in pairwise(lags))
        assert lags[-1] <= grid


def test_in_a_run_of_an_older_release_nothing_is_sent_of_them() -> None:
    """So that its log leads to what it led to."""
    spec = ParamSpec.of({"w": np.zeros((16, 16), np.float32)})
    w, first = np.full(256, 1.1, np.float32), np.zeros(256, np.float32)
    moved_by = [DeltaLog(spec, step=2.0, rules=rules) for rules in (0, NEWEST)]
    found = [log.publish(log.init(first), 1, w, ()).replica.any() for log in moved_by]
    assert found == [False, True]


def test_small_tensors_have_the_finer_unit() -> None:
    assert (MAIN_GROUP.name, SMALL_GROUP.name) == (MAIN, SMALL)
    log = DeltaLog(SPEC)
    states, _ = history(log, motion(5))
    main, small = read_message(states[-1].entries[-1].data, LAYOUT).grids
    assert main.exponent - small.exponent in (2, 3, 4)


# --- bounds ----------------------------------------------------------------------------------


def test_the_log_holds_so_many_versions() -> None:
    log = DeltaLog(SPEC, versions_max=5)
    states, _ = history(log, motion(12))
    newest = states[-1]
    assert (newest.first, len(newest.entries)) == (7, 5)
    assert log.replica(newest, 6) is None
    oldest = log.replica(newest, 7)
    assert oldest is not None
    assert bits(oldest) == bits(states[7].replica)


def test_the_log_takes_no_more_memory_than_two_models() -> None:
    log = DeltaLog(SPEC, step=1e-4)  # nearly two bytes a value in each message
    states, _ = history(log, motion(30))
    assert sum(e.size for e in states[-1].entries) <= 8 * SPEC.size
    assert 0 < len(states[-1].entries) < 30


@pytest.mark.parametrize("moves", [30, 3])
def test_a_base_that_a_task_needs_outlives_the_log(moves: int) -> None:
    log = DeltaLog(SPEC, versions_max=4, keeps_replicas=True)
    w, state = START.copy(), log.init(START)
    first = state.replica
    for v, move in enumerate(motion(moves), start=1):
        w = w + move * (1000 if v == moves else 1)  # the last starts a new lineage
        state = log.publish(state, v, w, [0])
    base = log.replica(state, 0)
    assert base is not None
    assert bits(base) == bits(first)
    assert log.replica(log.publish(state, moves + 1, w, []), 0) is None


def test_a_model_that_outgrows_its_grid_starts_a_new_lineage() -> None:
    log = DeltaLog(SPEC)
    states, w = history(log, motion(3))
    state = log.publish(states[-1], 4, 100 * w, ())
    assert (state.first, state.version, state.entries) == (4, 4, [])
    assert log.replica(state, 3) is None
    assert float(np.abs(100 * w - state.replica).max()) <= 2.0**-10 * float(np.abs(100 * w).max())
    state = log.publish(state, 5, 100 * w, ())
    assert state.first == 4


def test_biases_that_start_from_zero_have_room_to_grow() -> None:
    w = START.copy()
    SMALL_GROUP.scatter(np.zeros(SMALL_GROUP.size, np.float32), w)
    log = DeltaLog(SPEC)
    state = log.init(w)
    state = log.publish(state, 1, START, ())
    assert state.first == 0


@pytest.mark.parametrize("start", [0.0, 1e-42, 1e-30, 1e20])
def test_extreme_models_stay_exact(start: float) -> None:
    log = DeltaLog(SPEC)
    states, _ = history(log, motion(4, scale=max(start, 1e-40) / 10), np.full(SPEC.size, start, np.float32))
    newest = states[-1]
    assert bits(apply(np.zeros(SPEC.size, np.float32), log.snapshot(newest, 4), LAYOUT)) == bits(
        newest.replica
    )


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38])
def test_a_value_that_no_grid_has_is_brought_within(value: float) -> None:
    log, w = DeltaLog(SPEC), START.copy()
    w[3] = value
    for state in (log.init(w), log.publish(log.init(START), 1, w, ())):
        assert np.isfinite(state.replica).all()
    assert np.isfinite(log.publish(state, 2, START, ()).replica).all()


@pytest.mark.parametrize(("step", "versions"), [(0.0, 128), (2.5, 128), (-1.0, 128), (1.0, 0)])
def test_senseless_settings_are_refused(step: float, versions: int) -> None:
    with pytest.raises(ConfigError, match="downlink"):
        DeltaLog(SPEC, step, versions)


def test_back_and_forth_is_where_it_was() -> None:
    states, _ = history(DeltaLog(SPEC), motion(2))
    message = read_message(states[-1].entries[-1].data, LAYOUT)
    there = moved(states[1].replica, message, LAYOUT)
    assert bits(moved(there, message, LAYOUT, back=True)) == bits(states[1].replica)


# --- in the engine ---------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fedbuff", "fedasync"])
def test_a_restored_and_a_replayed_engine_go_on_with_the_same_digest(strategy: str) -> None:
    run = Run("log(1,4)", strategy)
    moves = motion(14)
    waiting = run.ask()
    run.publish(*moves[:7])
    taken = take_snapshot(run.engine)
    taken = Snapshot(json.loads(json.dumps(taken.meta)), taken.arrays)
    cut = len(run.events)
    run.publish(*moves[7:])
    run.push(waiting, moves[0])
    resumed = restore(taken, run.spec, run.strategy, run.settings, run.fresh().broadcast)
    for event in run.events[cut:]:
        resumed.handle(event)
    replayed = run.fresh()
    for event in run.events:
        record = json.loads(json.dumps(to_record(event)))
        replayed.handle(from_record(record, run.spec, lambda payload, _: run.deltas[payload.sha256]))
    assert state_digest(resumed) == state_digest(run.engine)
    assert state_digest(replayed) == state_digest(run.engine)


@pytest.mark.parametrize("codec", ["log", "log(2)", "log(0.5,3)", "int8"])
def test_the_base_of_a_stale_task_is_what_its_device_decoded(codec: str) -> None:
    run = Run(codec, "fedasync", alpha=0.5)
    run.publish(*motion(3))
    held = run.fetch(None)
    task = run.ask()
    run.publish(*motion(9, seed=1))
    base = run.replica(task.base_version)
    assert base is not None
    assert bits(base) == bits(held[1])
    before = run.engine.vector.copy()
    delta = motion(1, seed=2)[0]
    (decided, *_) = run.push(task, delta)
    assert isinstance(decided, Decided)
    a = decided.receipt.decision.weight
    assert a is not None
    expected = (1 - a) * before.astype(np.float64) + a * (held[1] + delta)
    assert np.allclose(run.engine.vector, expected, rtol=0, atol=1e-6)
    assert run.replica(task.base_version) is not None or codec != "log"


def test_no_update_is_refused_for_a_lost_base() -> None:
    """Zero weights are the worst start: version 1 is a new lineage."""
    run = Run("log(1,2)", "fedasync", start=np.zeros(SPEC.size, np.float32))
    tasks = [run.ask() for _ in range(6)]
    for task, delta in zip(tasks, motion(6), strict=True):
        (decided, *_) = run.push(task, delta)
        assert decided.receipt.decision.verdict is not Verdict.REJECTED
        assert decided.receipt.decision.reason is not Reason.BASE_GONE
    assert len(run.engine.broadcast_state.kept) <= 1
    run.publish(*motion(8))
    assert run.engine.broadcast_state.kept == {}
