"""Between messages and core types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import (
    OUTCOMES,
    AnabranchError,
    InvalidUpdate,
    ManifestMismatch,
    TooLarge,
    WireError,
)
from anabranch.core.model.params import ParamSpec, TensorSpec
from anabranch.core.model.submodels import CoordinateRuns, Coordinates
from anabranch.core.model.updates import Capability, Decision, LocalPlan, Reason, Task, Verdict
from anabranch.protos import convert
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import model_pb2 as model

SPEC = ParamSpec.of({"w": np.zeros((2, 3), np.float32), "n": np.zeros((), np.int64)})


def flat(size: int) -> ParamSpec:
    return ParamSpec.of({"w": np.zeros(size, np.float32)})


def test_a_manifest_there_and_back_and_a_damaged_one() -> None:
    message = convert.manifest_to_proto(SPEC)
    assert convert.manifest_from_proto(message) == SPEC
    message.tensors[0].shape[0] = 7
    with pytest.raises(ManifestMismatch, match="damaged"):
        convert.manifest_from_proto(message)


def test_a_foreign_manifest() -> None:
    convert.check_manifest(bytes.fromhex(SPEC.layout_hash), SPEC)
    with pytest.raises(ManifestMismatch, match="enrol again"):
        convert.check_manifest(b"", SPEC)


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_submodel_travels_as_runs(indices: Any) -> None:
    submodel = Coordinates(np.array(sorted(indices), np.int64))
    message = convert.submodel_to_proto(submodel)
    assert message is not None
    assert np.array_equal(convert.submodel_from_proto(message, flat(201)).indices, submodel.indices)
    runs = convert.part_from_proto(message, flat(201))
    assert isinstance(runs, CoordinateRuns)
    assert runs.are(submodel)
    for other in (None, Coordinates(submodel.indices + 1), Coordinates(np.arange(submodel.size + 1))):
        assert not runs.are(other)


def test_what_is_held_is_named_in_no_more_memory_than_its_message() -> None:
    size = 10**13  # as numbers no machine holds them
    spec = ParamSpec((TensorSpec("w", (size,), "float32"),))
    whole = model.SubmodelMap(starts=[0], lengths=[size])
    ask = devices.AskTaskRequest(holds_parts=[devices.HeldPart(submodel=whole)])
    with pytest.raises(InvalidUpdate, match="not of runs of coordinates"):
        convert.holdings_from_proto(ask, spec)


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ([], []),
        ([0], []),
        ([0], [0]),
        ([5, 0], [1, 1]),
        ([0, 2], [2, 1]),
        ([0, 1], [2, 1]),
        ([9], [2]),
        ([2**63], [1]),
        ([0], [2**63]),
        ([1], [2**64 - 1]),
    ],
)
def test_runs_that_cannot_be(starts: Any, lengths: Any) -> None:
    with pytest.raises(InvalidUpdate, match="submodel"):
        convert.submodel_from_proto(model.SubmodelMap(starts=starts, lengths=lengths), flat(10))


@pytest.mark.parametrize("submodel", [None, Coordinates(np.array([0, 1, 4]))])
def test_a_task_there_and_back(submodel: Any) -> None:
    plan = LocalPlan(2, 7, 64, 0.1, 0.9, 1e-4, 0.3)
    task = Task("t", "c", 5, 100.0, 160.0, 60.0, 2**63 - 1, plan, "topk(0.1)|int8", submodel)
    back = convert.task_from_proto(convert.task_to_proto(task, model.Part()), "c", SPEC)
    assert replace(back, submodel=None) == replace(task, submodel=None)
    if submodel is None:
        assert back.submodel is None
    else:
        assert back.submodel is not None
        assert back.submodel.indices.tolist() == submodel.indices.tolist()


@pytest.mark.parametrize(
    "decision",
    [
        Decision(Verdict.PUBLISHED, 3, 0.25),
        Decision(Verdict.HELD, 0, 0.0),
        Decision(Verdict.REJECTED, 9, None, Reason.STALE, "staleness 9 is over the bound"),
    ],
)
def test_a_decision_there_and_back(decision: Any) -> None:
    assert convert.decision_from_proto(convert.decision_to_proto(decision)) == decision


def test_a_verdict_of_a_newer_server_is_an_error_that_says_so() -> None:
    with pytest.raises(WireError, match="'maybe' is not known here"):
        convert.decision_from_proto(model.Decision(verdict="maybe"))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_bandwidth_that_is_no_number(value: float) -> None:
    with pytest.raises(InvalidUpdate, match="must be finite"):
        convert.capability_from_proto(devices.Capability(up_bps=value))


def test_a_reason_of_a_newer_server_is_kept_in_words() -> None:
    message = model.Decision(verdict="rejected", reason="moonphase", detail="full")
    decision = convert.decision_from_proto(message)
    assert (decision.reason, decision.detail) == (Reason.INVALID, "moonphase: full")


def test_a_capability_there_and_back() -> None:
    capability = Capability(10, 2**33, 1e6, 2e6, "cuda", ("raw", "zstd"))
    assert convert.capability_from_proto(convert.capability_to_proto(capability)) == capability


@pytest.mark.parametrize("codecs", [("int8:1",) * 65, ("x" * 65,), ("",)])
def test_stages_that_are_none(codecs: tuple[str, ...]) -> None:
    with pytest.raises(InvalidUpdate, match=r"capability.codecs: at most 64 stages"):
        convert.capability_from_proto(devices.Capability(codecs=codecs))


def test_digests_and_sizes() -> None:
    assert convert.checked_digest(bytes(32), "sha256") == "00" * 32
    with pytest.raises(InvalidUpdate, match="sha256 must be"):
        convert.checked_digest(b"short", "sha256")
    with pytest.raises(TooLarge, match="over the cap"):
        convert.check_payload_size(2**40)


def test_a_part_of_an_update_has_one_digest() -> None:
    for digest in ("ab" * 32, "blake3-" + "cd" * 32):
        part = model.Part()
        convert.set_payload_digest(part, digest)
        assert (part.sha256 or part.blake3).hex() == digest[-64:]
        assert convert.checked_payload_digest(part, "parts[0]") == digest
    for bad, why in (
        (model.Part(), r"parts\[0\].sha256 must be the 32 bytes"),
        (model.Part(blake3=b"short"), r"parts\[0\].blake3 must be the 32 bytes of a BLAKE3, not 5"),
        (model.Part(sha256=bytes(32), blake3=bytes(32)), "send one of them"),
    ):
        with pytest.raises(InvalidUpdate, match=why):
            convert.checked_payload_digest(bad, "parts[0]")


def test_every_leaf_of_the_error_tree_has_an_outcome() -> None:
    def leaves(cls: type[AnabranchError]) -> list[type[AnabranchError]]:
        below = cls.__subclasses__()
        return [leaf for sub in below for leaf in leaves(sub)] if below else [cls]

    assert all(
        leaf in OUTCOMES for leaf in leaves(AnabranchError) if leaf.__module__.startswith("anabranch.core")
    )
