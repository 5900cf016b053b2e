"""Units, and maps of sub-models: which coordinates they cover, how they travel, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.compress.layout import Layout
from anabranch.core.errors import ConfigError, InvalidUpdate, ManifestMismatch
from anabranch.core.model import blocks, submodels
from anabranch.core.model.params import ParamSpec, SparseVector
from anabranch.core.model.submodels import (
    Coordinates,
    UnitMap,
    add_to_part,
    gathered,
    scatter,
    share_of,
    submodel_from_json,
    unit_map,
    unit_map_of_bits,
)
from anabranch.core.model.units import GROUPS_MAX, MEMBERS_MAX, UNITS_MAX, Member, UnitGroup, check_groups
from anabranch.protos import convert
from anabranch.protos.v1 import model_pb2 as model
from anabranch.testing.models import CELLS, GROUPS, HIDDEN, SPEC, line, tensors

FLOATS = {n: a for n, a in tensors().items() if a.dtype.kind == "f"}


@st.composite
def maps(draw: Any) -> UnitMap:
    kept = [sorted(draw(st.sets(st.integers(0, g.size - 1), min_size=1))) for g in SPEC.groups]
    return unit_map(SPEC, kept)


def by_hand(kept: UnitMap) -> dict[str, Any]:
    """The smaller tensors, cut with numpy's own indexing."""
    hidden, cells = (list(k) for k in kept.kept)
    pixels = [2 * u + i for u in hidden for i in range(2)]
    gates = [g * CELLS + c for g in range(4) for c in cells]
    a = FLOATS
    return {
        "hidden.weight": a["hidden.weight"][hidden],
        "hidden.bias": a["hidden.bias"][hidden],
        "out.weight": a["out.weight"][:, pixels],
        "lstm.weight_hh": a["lstm.weight_hh"][np.ix_(gates, cells)],
        "lstm.bias": a["lstm.bias"][gates],
        "out.bias": a["out.bias"],
    }


@given(maps())
def test_the_share_of_a_part_is_that_of_its_numbers(kept: UnitMap) -> None:
    numbers = sum(a.size for a in by_hand(kept).values())
    assert share_of(kept) == pytest.approx(numbers / sum(a.size for a in FLOATS.values()))
    assert share_of(None) is share_of(Coordinates(np.array([1]))) is None


@given(maps())
def test_the_coordinates_are_those_of_the_tensors_cut_by_hand(kept: UnitMap) -> None:
    vector = SPEC.flatten(tensors())
    expected = by_hand(kept)
    small = kept.small.unflatten(vector[kept.indices])
    assert kept.size == kept.indices.size == kept.small.size
    for name, array in expected.items():
        assert np.array_equal(small[name], array), name


@given(maps())
def test_the_coordinates_of_a_map_are_in_order_each_once_and_within_the_model(kept: UnitMap) -> None:
    kept.check(SPEC)
    Coordinates(kept.indices).check(SPEC)
    assert kept.indices.tolist() == sorted(set(kept.indices.tolist()) & set(range(SPEC.size)))


@given(maps(), st.integers(1, 9), st.randoms(use_true_random=False))
def test_blocks_do_what_the_coordinates_do(kept: UnitMap, elements: int, random: Any) -> None:
    for part in (kept, Coordinates(kept.indices)):
        with pytest.MonkeyPatch.context() as patch:  # many blocks of a small model
            patch.setattr(blocks, "BLOCK", elements)
            patch.setattr(submodels, "BLOCK", elements)
            vector, x = SPEC.flatten(tensors()), np.linspace(-1, 3, kept.size, dtype=np.float32)
            assert np.array_equal(gathered(vector, part), vector[kept.indices])
            found, expected = vector.copy(), vector.copy()
            add_to_part(found, 0.3, x, part)
            expected[kept.indices] += np.float32(0.3) * x
            assert found.tobytes() == expected.tobytes()
            at = np.array(random.sample(range(kept.size), kept.size // 2), np.int64)
            assert np.array_equal(part.places(at), kept.indices[at])
            add_to_part(found, 0.7, SparseVector(at, x[at], kept.size), part)
            expected[kept.indices[at]] += np.float32(0.7) * x[at]
            assert found.tobytes() == expected.tobytes()
            scatter(x, found, part)
            expected[kept.indices] = x
            assert found.tobytes() == expected.tobytes()


@given(maps(), st.sets(st.sampled_from(sorted(FLOATS))))
def test_what_a_map_covers_of_some_tensors(kept: UnitMap, names: set[str]) -> None:
    inside = np.zeros(SPEC.size, np.bool_)
    for name in names:
        inside[SPEC.slices[name]] = True
    at, places = kept.covered(names)
    assert np.array_equal(at, np.flatnonzero(inside[kept.indices]))
    assert np.array_equal(places, kept.indices[at])


def test_the_union_of_complementary_maps_is_the_whole_model() -> None:
    first = unit_map(SPEC, [range(5), [0]])
    second = unit_map(SPEC, [range(5, HIDDEN), [1, 2]])
    both = np.union1d(first.indices, second.indices)
    # Only what links a unit of one map with a unit of the other is in neither.
    links = {"lstm.weight_hh"}
    for name, where in SPEC.slices.items():
        covered = np.isin(np.arange(where.start, where.stop), both)
        assert covered.all() == (name not in links), name
    whole = unit_map(SPEC, [range(HIDDEN), range(CELLS)])
    assert np.array_equal(whole.indices, np.arange(SPEC.size))
    assert whole.small.tensors == SPEC.tensors


@given(maps())
def test_a_map_there_and_back(kept: UnitMap) -> None:
    assert unit_map_of_bits(SPEC, kept.bits) == kept
    assert submodel_from_json(json.loads(json.dumps(kept.to_json())), SPEC) == kept
    message = convert.submodel_to_proto(kept)
    assert message is not None
    assert convert.submodel_from_proto(message, SPEC) == kept
    assert message.ByteSize() <= 2 * len(SPEC.groups) + sum(len(bits) for bits in kept.bits)


def test_groups_travel_with_the_manifest_and_are_no_part_of_the_layout() -> None:
    assert convert.manifest_from_proto(convert.manifest_to_proto(SPEC)) == SPEC
    assert ParamSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC
    plain = ParamSpec.of(tensors())
    assert plain.layout_hash == SPEC.layout_hash
    assert plain != SPEC
    assert ParamSpec.from_json(plain.to_json()) == plain
    message = convert.manifest_to_proto(SPEC)
    message.groups[0].size = 7
    with pytest.raises(
        ManifestMismatch, match=r"group 'hidden': axis 0 of tensor 'hidden\.weight' is 8 long"
    ):
        convert.manifest_from_proto(message)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([[0, 1]], "1 groups of units were given, the model has 2"),
        ([[], [0]], "group 'hidden': units must be strictly increasing, at least one, within 0..7"),
        ([[0, 0], [0]], "group 'hidden'.*strictly increasing"),
        ([[1, 0], [0]], "group 'hidden'.*strictly increasing"),
        ([[0], [CELLS]], r"group 'lstm'.*within 0\.\.2"),
        ([[-1], [0]], "group 'hidden'.*within"),
    ],
)
def test_maps_that_cannot_be(kept: Any, words: str) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        unit_map(SPEC, kept)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kept": [b"\x01"]}, "1 groups"),
        ({"kept": [b"\x01", b"\x01", b"\x01"]}, "3 groups"),
        ({"kept": [b"\x01\x00", b"\x01"]}, "group 'hidden': 8 units need 1 bytes, not 2"),
        ({"kept": [b"", b"\x01"]}, "group 'hidden': 8 units need 1 bytes, not 0"),
        ({"kept": [b"\x00", b"\x01"]}, "group 'hidden'.*at least one"),
        ({"kept": [b"\x01", b"\x08"]}, "group 'lstm'.*within 0..2"),
        ({"kept": [b"\x01", b"\x01"], "starts": [0], "lengths": [1]}, "one of them"),
    ],
)
def test_maps_on_the_wire_that_cannot_be(message: Any, words: str) -> None:
    with pytest.raises(InvalidUpdate, match=words):
        convert.submodel_from_proto(model.SubmodelMap(**message), SPEC)


def test_a_model_without_units_has_no_maps_and_a_foreign_one_is_refused() -> None:
    with pytest.raises(InvalidUpdate, match="no groups of units"):
        unit_map(ParamSpec.of(tensors()), [[0]])
    with pytest.raises(InvalidUpdate, match="those of another model"):
        unit_map(line(4), [[0]]).check(SPEC)
    with pytest.raises(InvalidUpdate, match="those of another model"):
        unit_map(SPEC, [[0], [0]]).check(ParamSpec.of(tensors()))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([UnitGroup("g", 4, (Member("hidden.bias", 0),))], "axis 0 of tensor 'hidden.bias' is 8 long"),
        ([UnitGroup("g", 8, (Member("hidden.bias", 1),))], "has no Member"),
        ([UnitGroup("g", 8, (Member("hidden.bias", 0, inner=0),))], "has no Member"),
        ([UnitGroup("g", 8, (Member("count", 0),))], "no float tensor 'count'"),
        ([UnitGroup("g", 8, (Member("none", 0),))], "no float tensor 'none'"),
        ([UnitGroup("g", 8, ())], "1 to .* members"),
        ([UnitGroup("g", 0, (Member("hidden.bias", 0),))], "1 to .* units"),
        ([GROUPS[0], GROUPS[0]], "two groups 'hidden'"),
        ([GROUPS[0], UnitGroup("g", 8, (Member("hidden.bias", 0),))], "'hidden' and 'g' share axis 0"),
        ([UnitGroup("g", 8, (Member("hidden.bias", 0), Member("hidden.bias", 0)))], "named twice"),
    ],
)
def test_groups_that_do_not_fit_the_model(groups: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ParamSpec.of(tensors(), groups)


def test_there_are_not_too_many_groups_members_and_units() -> None:
    shapes = {"w": (1,) * (GROUPS_MAX + 1), "long": (UNITS_MAX + 1, UNITS_MAX)}
    one = [UnitGroup(str(axis), 1, (Member("w", axis),)) for axis in range(GROUPS_MAX + 1)]
    members = tuple(Member("w", axis) for axis in range(MEMBERS_MAX + 1))
    check_groups(tuple(one[:GROUPS_MAX]), shapes)
    check_groups((UnitGroup("g", 1, members[:-1]),), shapes)
    check_groups((UnitGroup("g", UNITS_MAX, (Member("long", 1),)),), shapes)
    for groups, words in (
        (tuple(one), f"{GROUPS_MAX + 1} groups are over the cap of {GROUPS_MAX}"),
        ((UnitGroup("g", 1, members),), f"1 to {MEMBERS_MAX} members"),
        ((UnitGroup("g", UNITS_MAX + 1, (Member("long", 0),)),), f"1 to {UNITS_MAX} units"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_groups(groups, shapes)


@given(maps())
def test_a_part_is_laid_out_as_its_coordinates_are(kept: UnitMap) -> None:
    by_units, by_indices = Layout.of(SPEC, kept), Layout.of(SPEC, Coordinates(kept.indices))
    assert (by_units.groups, by_units.size) == (by_indices.groups, by_indices.size)
    assert by_units.size == kept.size


def test_a_payload_of_another_part_is_not_taken_for_this_one() -> None:
    swapped = ParamSpec.of(tensors(), [replace(GROUPS[0], name="other"), GROUPS[1]])
    layouts = [
        Layout.of(SPEC),
        Layout.of(SPEC, unit_map(SPEC, [(0, 1), (0,)])),
        Layout.of(SPEC, unit_map(SPEC, [(0, 2), (0,)])),
        Layout.of(SPEC, unit_map(SPEC, [(0, 1), (2,)])),
        Layout.of(swapped, unit_map(swapped, [(0, 1), (0,)])),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert len({layout.size for layout in layouts[1:]}) == 1
