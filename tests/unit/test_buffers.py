"""Buffers: what an update says of them, and what becomes of them under each policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.engine.buffers import (
    AVERAGE,
    LATEST,
    LOCAL,
    Buffers,
    Covered,
    DeviceBuffers,
    matching,
    policy_of,
)
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Context, State, Step
from anabranch.core.errors import ConfigError
from anabranch.core.model.params import ParamSpec, SparseVector, Vector, dense
from anabranch.core.model.submodels import Coordinates, unit_map
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import Ask, Capability, Update
from anabranch.strategies.fedbuff import FedBuff

TENSORS: dict[str, Any] = {
    "weight": np.zeros((3, 2), np.float32),
    "mean": np.array([0.0, 1.0, 2.0], np.float32),
    "bias": np.zeros(3, np.float32),
    "var": np.array([1.0, 2.0, 4.0], np.float32),
    "seen": np.array(0),
}
GROUPS = (UnitGroup("hidden", 3, tuple(Member(name, 0) for name in ("weight", "mean", "bias", "var"))),)
SPEC = ParamSpec.of(TENSORS, GROUPS, ("mean", "var"))
VECTOR = SPEC.flatten(TENSORS)


def update(delta: Any, submodel: Any = None) -> Update:
    return Update("u", "t", "c", 0, 1, delta, submodel)


def test_the_spec_says_where_they_are() -> None:
    assert SPEC.buffer_places.tolist() == [6, 7, 8, 12, 13, 14]
    assert ParamSpec.from_json(SPEC.to_json()) == SPEC
    plain = ParamSpec.of(TENSORS, GROUPS)
    assert SPEC.layout_hash == plain.layout_hash, "models with the same tensors can be averaged"
    assert ParamSpec.from_json(plain.to_json()) == plain, "a manifest of an earlier release"
    assert "buffers" not in plain.to_json()
    assert isinstance(ParamSpec.of(TENSORS).to_json(), list)


@pytest.mark.parametrize("names", [("seen",), ("strange",), ("mean", "mean")])
def test_names_that_are_no_float_tensors_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is not the name of one float tensor"):
        ParamSpec.of(TENSORS, (), names)


def test_which_of_them_a_part_of_the_model_covers() -> None:
    part = unit_map(SPEC, [(0, 2)])
    assert part.small.buffers == SPEC.buffers
    covered = Covered.of(SPEC, part)
    assert covered.which.tolist() == [0, 2, 3, 5]
    np.testing.assert_array_equal(VECTOR[part.indices][covered.at], [0.0, 2.0, 1.0, 4.0])
    covered = Covered.of(SPEC, Coordinates(np.array([1, 7, 13])))
    assert (covered.at.tolist(), covered.which.tolist()) == ([1, 2], [1, 4])
    assert Covered.of(SPEC, Coordinates(np.array([0, 1]))).at.size == 0


def test_a_device_tells_what_it_has_reached() -> None:
    delta = np.full(SPEC.size, -0.5, np.float32)
    told, own = DeviceBuffers(SPEC).told(VECTOR, delta, None, b"")
    np.testing.assert_array_equal(told[SPEC.buffer_places], VECTOR[SPEC.buffer_places] - 0.5)
    np.testing.assert_array_equal(told[:6], -0.5)
    assert own == b""


def test_a_device_keeps_its_own_and_tells_nothing() -> None:
    device, part = DeviceBuffers(SPEC, LOCAL), unit_map(SPEC, [(0, 2)])
    assert device.start(VECTOR, None, b"") is VECTOR
    given = VECTOR[part.indices]
    told, own = device.told(given, np.full(part.size, -0.5, np.float32), part, b"")
    assert not told[Covered.of(SPEC, part).at].any()
    found = device.start(VECTOR, None, own)
    np.testing.assert_array_equal(found[6:9], [-0.5, 1.0, 1.5])  # the second it has never trained
    np.testing.assert_array_equal(found[12:], [0.5, 2.0, 3.5])
    np.testing.assert_array_equal(found[:6], VECTOR[:6])
    np.testing.assert_array_equal(device.start(given, part, own), found[part.indices])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mixes", [False, True])
def test_a_strategy_gets_differences(sparse: bool, mixes: bool) -> None:
    buffers = Buffers(SPEC, AVERAGE, VECTOR)
    sent = np.zeros(SPEC.size, np.float32)
    sent[:2], sent[SPEC.buffer_places] = 0.25, [1.0, 1.0, 1.0, 3.0, 3.0, 3.0]
    base = VECTOR + np.float32(1.0) if mixes else None
    delta = SparseVector(np.flatnonzero(sent)[::-1], sent[sent != 0][::-1], sent.size) if sparse else sent
    given, reached = buffers.given(update(delta), VECTOR, base)
    found, before = dense(given.delta), VECTOR if base is None else base
    np.testing.assert_array_equal(found[:2], 0.25)
    np.testing.assert_array_equal((before + found)[SPEC.buffer_places], sent[SPEC.buffer_places])
    assert reached is not None
    np.testing.assert_array_equal(dense(delta), sent)  # the update itself stays as it is


def test_the_published_ones_are_within_what_there_was() -> None:
    buffers = Buffers(SPEC, AVERAGE, VECTOR)
    part = unit_map(SPEC, [(0, 2)])
    for value in (5.0, -1.0):
        _, reached = buffers.given(update(np.full(part.size, value, np.float32), part), VECTOR, None)
        buffers.count(reached)
    far = np.full(SPEC.size, 100.0, np.float32)
    buffers.publish(far)
    np.testing.assert_array_equal(far[SPEC.buffer_places], [5, 1, 5, 5, 2, 5])  # one unit was in no update
    assert (far[:6] == 100).all()
    again = np.full(SPEC.size, -100.0, np.float32)
    buffers.publish(again)
    np.testing.assert_array_equal(again[SPEC.buffer_places], far[SPEC.buffer_places])  # nothing came since


@pytest.mark.parametrize(("policy", "expected"), [(LATEST, [2, 1, 2, 2, 2, 2]), (LOCAL, [0, 1, 2, 1, 2, 4])])
def test_the_newest_or_none(policy: str, expected: list[float]) -> None:
    buffers, part = Buffers(SPEC, policy, VECTOR), unit_map(SPEC, [(0, 2)])
    for value in (7.0, 2.0):
        given, reached = buffers.given(update(np.full(part.size, value, np.float32), part), VECTOR, None)
        buffers.count(reached)
    if policy == LOCAL:
        assert not dense(given.delta)[Covered.of(SPEC, part).at].any()
    model = np.full(SPEC.size, 0.5, np.float32)
    buffers.publish(model)
    np.testing.assert_array_equal(model[SPEC.buffer_places], expected)


@pytest.mark.parametrize("mixes", [False, True])
def test_whoever_only_looks_at_bases_gets_differences_from_the_newest_model(mixes: bool) -> None:
    """And who mixes with them gets differences from the model that the device started from."""
    given = []

    class Looking(FedBuff):
        @property
        def needs_base(self) -> bool:
            return True

        @property
        def mixes_models(self) -> bool:
            return mixes

        def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
            given.append(dense(update.delta)[SPEC.buffer_places].tolist())
            return super().step(state, vector, update, context)

    engine = Engine(SPEC, Looking(buffer_size=1), EngineSettings(), VECTOR)
    for client in "ab":
        engine.handle(ev.Enrolled(0.0, client, Capability()))
        engine.handle(ev.TaskAsked(0.0, Ask(client, f"t-{client}")))
    start = VECTOR[SPEC.buffer_places]
    for client, reached in (("a", 10.0), ("b", 4.0)):
        delta = np.zeros(SPEC.size, np.float32)
        delta[SPEC.buffer_places] = reached
        sent = Update(f"u-{client}", f"t-{client}", client, 0, 1, delta)
        engine.handle(ev.UpdateArrived(1.0, sent, ev.Payload("00" * 32, delta.nbytes)))
        newest = start if client == "a" else np.full(6, 10.0)
        assert given.pop() == (reached - (start if mixes else newest)).tolist()
    assert engine.version == 2


def test_patterns_find_the_names_of_floats() -> None:
    tensors = {**TENSORS, "bn.running_var": np.ones(2), "bn.running_steps": np.array(3)}
    assert matching(tensors, ["*running_*", "me?n"]) == ("mean", "bn.running_var")
    assert matching(tensors, []) == ()


def test_the_settings() -> None:
    assert Config().model.buffers == policy_of(Config().to_json()) == AVERAGE
    assert "model" not in Config().to_json(), "the journals of unchanged runs stay what they were"
    assert "model" in Config().to_json(every_table=True)
    local = merge([("test", {"model": {"buffers": LOCAL}})])
    assert policy_of(local.to_json()) == LOCAL
    assert Config.from_json(local.to_json()) == local
    with pytest.raises(ConfigError, match=r"model\.buffers must be one of average, latest, local"):
        merge([("test", {"model": {"buffers": "sum"}})])
