"""What the delta log sends of a move, by its own account of the rule: 0.6 of a unit, and it goes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anabranch.compress.delta_log import DeltaLog, apply
from anabranch.core.model.params import ParamSpec

SPEC = ParamSpec.of({"w": np.zeros((64, 64), np.float32)})
START = np.random.default_rng(1).normal(0.0, 1.0, SPEC.size).astype(np.float32)


@pytest.mark.parametrize("step", [0.5, 1.0, 2.0])
def test_a_move_of_less_than_six_tenths_of_a_unit_waits(step: float) -> None:
    log = DeltaLog(SPEC, step)
    before = log.init(START)
    moves = np.random.default_rng(2).uniform(-0.05, 0.05, SPEC.size).astype(np.float32)
    wanted = before.replica + moves
    after = log.publish(before, 1, wanted, ())
    lack = (wanted - before.replica).astype(np.float64)
    unit = 2.0 ** round(math.log2(step * math.sqrt(float((lack**2).mean()))))
    parts = np.abs(lack) / unit  # how many units a coordinate lacks
    sent = np.abs(after.replica.astype(np.float64) - before.replica) / unit
    clear = np.abs(parts - np.floor(parts) - 0.6) > 1e-3  # float32 decides the others
    whole = np.floor(parts) + (parts - np.floor(parts) > 0.6)
    np.testing.assert_allclose(sent[clear], whole[clear], atol=1e-6)
    assert {0.0, 1.0} <= set(whole[clear].tolist())


def test_the_unit_is_one_root_mean_square_unless_said_otherwise() -> None:
    states = [log.publish(log.init(START), 1, START * 2, ()) for log in (DeltaLog(SPEC), DeltaLog(SPEC, 1.0))]
    assert states[0].entries[0].tobytes() == states[1].entries[0].tobytes()


def test_a_leap_over_more_units_than_a_message_can_say_starts_a_new_lineage() -> None:
    """One of 4,096 values leaps by 10^6, which is 6 x 10^10 units."""
    log, w = DeltaLog(SPEC, 1e-9), START.copy()
    w[7] = 1e6
    state = log.publish(log.init(START), 1, w, ())
    assert (state.first, state.entries) == (1, [])
    assert float(np.abs(state.replica - w).max()) <= 2.0**-10 * 1e6


def test_a_new_lineage_keeps_no_replica_for_a_strategy_that_mixes_no_models() -> None:
    for keeps in (False, True):
        log = DeltaLog(SPEC, keeps_replicas=keeps)
        state = log.restart(log.init(START), 1, START, [0])
        assert list(state.kept) == ["0"] * keeps


def test_buffers_come_to_the_bit_there_and_back() -> None:
    """They are on no grid: values that no unit divides, and a zero below zero."""
    spec = ParamSpec.of(
        {"w": np.zeros((8, 8), np.float32), "mean": np.zeros(6, np.float32)}, buffers=("mean",)
    )
    log, mean = DeltaLog(spec), spec.slices["mean"]
    first, second = np.random.default_rng(3).normal(0.0, 1.0, (2, spec.size)).astype(np.float32)
    second[mean] = [1e-30, -0.0, 1e20, first[mean][3], 0.1, -0.1]
    start = log.init(first)
    after = log.publish(start, 1, second, ())
    for state, model in ((start, first), (after, second)):
        assert state.replica[mean].tobytes() == model[mean].tobytes()
    there = apply(start.replica, after.entries[-1].data, log.layout)
    assert there.tobytes() == after.replica.tobytes()
    back = DeltaLog(spec).replica(after, 0)
    assert back is not None
    assert back.tobytes() == start.replica.tobytes()
