"""What the delta log sends of a move, by its own account of the rule: 0.6 of a unit, and it goes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anabranch.compress.delta_log import DeltaLog
from anabranch.core.params import ParamSpec

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
