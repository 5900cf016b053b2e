"""What is frozen of a model: the vector without it, the layout's hash, the wire, and the bytes apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from anabranch.compress.codec import Raw
from anabranch.compress.layout import Layout
from anabranch.compress.model import (
    decode_model,
    encode_model,
    frozen_apart,
    frozen_sha256,
    frozen_size_bytes,
    frozen_tail,
    full_bytes,
    read_frozen,
)
from anabranch.core.errors import ConfigError, InvalidUpdate, ManifestMismatch
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.params import ParamSpec, TensorSpec
from anabranch.core.model.submodels import unit_map
from anabranch.core.model.units import Member, UnitGroup
from anabranch.protos import convert
from anabranch.server.manifest import check_frozen

MODEL: dict[str, npt.NDArray[Any]] = {
    "base": np.arange(6, dtype=np.float64).reshape(2, 3),
    "seen": np.array(7, np.int64),
    "head": np.array([[0.5, -1.0], [2.0, 4.0]], np.float32),
    "scale": np.array(3.0, np.float16),
}
SPEC = ParamSpec.of(MODEL, trained=["head"])
ALL = ParamSpec.of(MODEL)


def test_the_vector_has_what_is_trained() -> None:
    assert (SPEC.size, SPEC.vector_dtype.name, list(SPEC.slices)) == (4, "float32", ["head"])
    assert SPEC.flatten(MODEL).tolist() == [0.5, -1.0, 2.0, 4.0]
    back = SPEC.unflatten(np.zeros(4, np.float32), SPEC.frozen(MODEL))
    assert [back[n].tobytes() == a.tobytes() for n, a in MODEL.items()] == [True, True, False, True]
    assert list(back) == list(MODEL)


def test_all_trained_is_as_if_nothing_were_said() -> None:
    """The hash is that of names, shapes and dtypes, as releases before this one had it."""
    told = ParamSpec.of(MODEL, trained=["base", "head", "scale"])
    entries = [["base", [2, 3], "float64"], ["seen", [], "int64"], ["head", [2, 2], "float32"]]
    layout = [*entries, ["scale", [], "float16"]]
    assert told == ALL
    assert told.to_json() == layout
    assert told.layout_hash == hashlib.sha256(json.dumps(layout).encode()).hexdigest()
    assert (told.apart, frozen_size_bytes(told), frozen_apart(told, MODEL)) == (False, 0, b"")
    assert frozen_sha256(told, MODEL) == ""
    assert frozen_tail(told, MODEL) == np.int64(7).tobytes(), "an integer comes with each model"


def test_what_is_trained_is_of_the_layout() -> None:
    other = ParamSpec.of(MODEL, trained=["head", "scale"])
    assert len({SPEC.layout_hash, ALL.layout_hash, other.layout_hash}) == 3
    assert len({Layout.of(spec).fingerprint for spec in (SPEC, ALL, other)}) == 3
    assert ParamSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC


def test_what_is_frozen_comes_apart_and_with_nothing_else() -> None:
    apart = b"".join(MODEL[name].tobytes() for name in ("base", "seen", "scale"))
    assert frozen_apart(SPEC, MODEL) == apart
    assert frozen_sha256(SPEC, MODEL) == hashlib.sha256(apart).hexdigest()
    assert (frozen_size_bytes(SPEC), full_bytes(SPEC)) == (48 + 8 + 2, 16)
    data = encode_model(Raw(), SPEC, SPEC.flatten(MODEL), SPEC.frozen(MODEL))
    assert data == MODEL["head"].tobytes()
    assert decode_model(Raw(), SPEC, data)[1] == {}
    found = read_frozen(SPEC, apart)
    assert {n: a.tobytes() for n, a in found.items()} == {n: MODEL[n].tobytes() for n in found}
    assert list(found) == ["base", "seen", "scale"]


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(change: int) -> None:
    with pytest.raises(InvalidUpdate, match=r"have \d+ bytes, the manifest needs 58"):
        read_frozen(SPEC, bytes(58 + change))


def test_a_manifest_tells_of_it() -> None:
    sha256 = frozen_sha256(SPEC, MODEL)
    message = convert.manifest_to_proto(SPEC, sha256)
    assert [t.frozen for t in message.tensors] == [True, False, False, True]
    assert message.frozen_sha256.hex() == sha256
    assert convert.manifest_from_proto(message) == SPEC
    assert not any(t.frozen for t in convert.manifest_to_proto(ALL).tensors)
    message.tensors[0].frozen = False
    with pytest.raises(ManifestMismatch, match="hash is not that of its tensors"):
        convert.manifest_from_proto(message)
    with pytest.raises(ManifestMismatch, match="frozen_sha256 has 0 bytes"):
        convert.manifest_from_proto(convert.manifest_to_proto(SPEC))


@pytest.mark.parametrize("name", ["seen", "nothing"])
def test_only_float_tensors_of_the_model_are_trained(name: str) -> None:
    with pytest.raises(ConfigError, match=f"trained: '{name}' is not the name of a float tensor"):
        ParamSpec.of(MODEL, trained=["head", name])


def test_a_layout_with_another_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 'w' is marked"):
        TensorSpec.from_json(["w", [2], "float32", "warm"])


def test_units_do_not_run_through_what_is_frozen() -> None:
    rows = UnitGroup("rows", 2, (Member("base", 0), Member("head", 0)))
    with pytest.raises(ConfigError, match=r"run through 'base', which is frozen: cut what is trained"):
        ParamSpec.of(MODEL, [rows], trained=["head"])


def test_a_part_has_what_is_frozen_whole() -> None:
    spec = ParamSpec.of(MODEL, [UnitGroup("rows", 2, (Member("head", 0),))], trained=["head"])
    part = unit_map(spec, [[1]])
    assert [(t.shape, t.trained) for t in part.small.tensors] == [
        ((2, 3), False),
        ((), True),
        ((1, 2), True),
        ((), False),
    ]
    assert (part.small.apart, part.indices.tolist()) == (True, [2, 3])


def test_more_than_the_cap_is_refused() -> None:
    check_frozen(SPEC, replace(DEFAULT_LIMITS, frozen_bytes_max=58))
    check_frozen(ALL, replace(DEFAULT_LIMITS, frozen_bytes_max=1))
    with pytest.raises(ConfigError, match=r"58 bytes, more than limits.frozen_bytes_max = 57: raise that"):
        check_frozen(SPEC, replace(DEFAULT_LIMITS, frozen_bytes_max=57))
