"""Between protobuf messages and core types: the only file that touches both.

What comes from a peer is checked here for form (ids, digests, ranges); what it means is checked by
the engine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from anabranch.core.content import BLAKE3, RAW_BYTES, from_raw, to_raw
from anabranch.core.errors import ConfigError, InvalidUpdate, ManifestMismatch, TooLarge, WireError
from anabranch.core.ids import checked_id
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.holdings import PARTS_MAX, HeldPart, Holdings
from anabranch.core.model.params import ParamSpec, TensorSpec
from anabranch.core.model.stages import ModelStage
from anabranch.core.model.submodels import (
    CoordinateRuns,
    Submodel,
    TensorSet,
    UnitMap,
    tensor_set_of_bits,
    unit_map_of_bits,
)
from anabranch.core.model.units import Member, UnitGroup
from anabranch.core.model.updates import (
    NO_WIDTH,
    Capability,
    Decision,
    LocalPlan,
    Reason,
    Task,
    Verdict,
    is_width,
)
from anabranch.core.secagg.cohort import Cohort, CohortMember
from anabranch.core.secagg.ring import BOX_BYTES, BOXES_BYTES
from anabranch.core.secagg.terms import Terms
from anabranch.protos.v1 import devices_pb2 as devices
from anabranch.protos.v1 import keepers_pb2 as keepers
from anabranch.protos.v1 import model_pb2 as model

PROTOCOL_VERSION = 1
KEEPERS_MAX = 16  # that an update has boxes for
MEMBERS_AT_ONCE = 256  # of a cohort in one message: below 4 MiB
CODECS_MAX, CODEC_CHARS_MAX = 64, 64  # stages that a device may name, letters of each
_CODEC = re.compile(r"[a-z][a-z0-9_.-]*(?::[0-9]+)?").fullmatch


def checked_digest(data: bytes, name: str) -> str:
    """A SHA-256 as hex. Raises `InvalidUpdate`, naming the field."""
    if len(data) != 32:
        raise InvalidUpdate(f"{name} must be the 32 bytes of a SHA-256, not {len(data)} bytes")
    return data.hex()


def checked_payload_digest(part: model.Part, name: str) -> str:
    """The one digest that an update's part has, as `core.content` writes it.

    Raises `InvalidUpdate`, naming the field.
    """
    if not part.blake3:
        return checked_digest(part.sha256, f"{name}.sha256")
    if part.sha256:
        raise InvalidUpdate(f"{name} has sha256 and blake3: send one of them")
    if len(part.blake3) != RAW_BYTES:
        raise InvalidUpdate(
            f"{name}.blake3 must be the {RAW_BYTES} bytes of a BLAKE3, not {len(part.blake3)} bytes"
        )
    return from_raw(BLAKE3, part.blake3)


def set_payload_digest(part: model.Part, digest: str) -> None:
    """The inverse of `checked_payload_digest`. Raises `ConfigError` for an unknown algorithm."""
    algorithm, raw = to_raw(digest)
    setattr(part, algorithm, raw)


def checked_count(value: int, name: str, most: int = 2**53) -> int:
    """A count that databases and JSON can hold. Raises `InvalidUpdate`, naming the field."""
    if value > most:
        raise InvalidUpdate(f"{name} must be at most {most}, not {value}")
    return value


def checked_codecs(names: Collection[str], name: str) -> tuple[str, ...]:
    """The stages that a device has, as `name:version`. Raises `InvalidUpdate`, naming the field."""
    if len(names) > CODECS_MAX or any(len(codec) > CODEC_CHARS_MAX or not _CODEC(codec) for codec in names):
        raise InvalidUpdate(
            f"{name}: at most {CODECS_MAX} stages, names of 1 to {CODEC_CHARS_MAX} small letters and digits,"
            " such as 'topk:1'"
        )
    return tuple(names)


# --- the model ---------------------------------------------------------------------------------


def manifest_to_proto(spec: ParamSpec, frozen_sha256: str = "") -> model.Manifest:
    """The manifest of a spec; `frozen_sha256` (hex) is of what travels apart, where something does."""
    tensors = [
        model.Tensor(name=t.name, shape=t.shape, dtype=t.dtype, frozen=t.is_float and not t.trained)
        for t in spec.tensors
    ]
    groups = [
        model.UnitGroup(
            name=g.name,
            size=g.size,
            members=[
                model.UnitMember(tensor=m.tensor, axis=m.axis, outer=m.outer, inner=m.inner)
                for m in g.members
            ],
        )
        for g in spec.groups
    ]
    return model.Manifest(
        tensors=tensors,
        sha256=bytes.fromhex(spec.layout_hash),
        groups=groups,
        buffers=spec.buffers,
        frozen_sha256=bytes.fromhex(frozen_sha256),
        stages=[model.ModelStage(blocks=stage.blocks, head=stage.head) for stage in spec.stages],
    )


def manifest_from_proto(message: model.Manifest) -> ParamSpec:
    """The spec of a manifest.

    Raises `ManifestMismatch` if its hash is not that of its tensors, or groups, buffers or stages do not fit
    them.
    """
    groups = tuple(
        UnitGroup(g.name, g.size, tuple(Member(m.tensor, m.axis, m.outer, m.inner) for m in g.members))
        for g in message.groups
    )
    try:
        tensors = tuple(TensorSpec(t.name, tuple(t.shape), t.dtype, not t.frozen) for t in message.tensors)
        stages = tuple(ModelStage(stage.blocks, stage.head) for stage in message.stages)
        spec = ParamSpec(tensors, groups, tuple(message.buffers), stages)
    except (ConfigError, TypeError) as error:  # numpy raises the latter for a dtype that is none
        raise ManifestMismatch(f"the manifest was damaged on the way: {error}") from error
    if spec.apart and len(message.frozen_sha256) != hashlib.sha256().digest_size:
        raise ManifestMismatch(
            f"the manifest's frozen_sha256 has {len(message.frozen_sha256)} bytes: floats are frozen, so "
            "it must be a SHA-256"
        )
    if spec.layout_hash != message.sha256.hex():
        raise ManifestMismatch("the manifest's hash is not that of its tensors: it was damaged on the way")
    return spec


def check_manifest(sha256: bytes, spec: ParamSpec) -> None:
    """Raises `ManifestMismatch` unless the peer speaks of this model."""
    if sha256.hex() != spec.layout_hash:
        raise ManifestMismatch(
            f"manifest {sha256.hex()[:16] or '(none)'} is not this run's {spec.layout_hash[:16]}, "
            "of another model: take the run's own App, and enrol again"
        )


def submodel_to_proto(submodel: Submodel | None) -> model.SubmodelMap | None:
    """Bits of the kept units or of the tensors, or runs of coordinates."""
    if submodel is None:
        return None
    if isinstance(submodel, UnitMap):
        return model.SubmodelMap(kept=submodel.bits)
    if isinstance(submodel, TensorSet):
        return model.SubmodelMap(tensors=submodel.bits)
    runs = CoordinateRuns.of(submodel)
    return model.SubmodelMap(starts=runs.starts.tolist(), lengths=runs.lengths.tolist())


def submodel_from_proto(message: model.SubmodelMap, spec: ParamSpec) -> Submodel:
    """The sub-model of a message about the model `spec`, of one who is believed. Raises `InvalidUpdate`."""
    part = part_from_proto(message, spec)
    return part.coordinates if isinstance(part, CoordinateRuns) else part


def part_from_proto(message: model.SubmodelMap, spec: ParamSpec) -> UnitMap | TensorSet | CoordinateRuns:
    """What a message about the model `spec` says is covered, in no more memory. Raises `InvalidUpdate`."""
    runs = bool(message.starts or message.lengths)
    if runs + bool(message.kept) + bool(message.tensors) > 1:
        raise InvalidUpdate("submodel: give kept units, tensors or runs of coordinates, one of them")
    if message.tensors:
        return tensor_set_of_bits(spec, message.tensors)
    return unit_map_of_bits(spec, message.kept) if message.kept else _runs(message, spec.size)


def held_parts_to_proto(holdings: Holdings) -> list[devices.HeldPart]:
    """Of a device that has parts; of one that has a version whole, `holds_version` says it."""
    parts = holdings if isinstance(holdings, tuple) else ()
    return [devices.HeldPart(version=p.version, submodel=submodel_to_proto(p.part)) for p in parts]


def holdings_from_proto(
    message: devices.AskTaskRequest | devices.FetchModelRequest, spec: ParamSpec
) -> Holdings:
    """What the device of a request has. Raises `InvalidUpdate`."""
    if not message.holds_parts:
        return message.holds_version if message.HasField("holds_version") else None
    if len(message.holds_parts) > PARTS_MAX or message.HasField("holds_version"):
        raise InvalidUpdate(
            f"holds_parts: {len(message.holds_parts)} parts, where at most {PARTS_MAX} are known and no "
            "holds_version beside them"
        )
    found: list[HeldPart] = []
    for held in message.holds_parts:
        part = part_from_proto(held.submodel, spec) if held.HasField("submodel") else None
        if isinstance(part, CoordinateRuns):
            raise InvalidUpdate("holds_parts: a part is of units or of tensors, not of runs of coordinates")
        if found and held.version < found[-1].version:
            raise InvalidUpdate("holds_parts: no version may be below one before it")
        found.append(HeldPart(held.version, part))
    return tuple(found)


def _runs(message: model.SubmodelMap, size: int) -> CoordinateRuns:
    if len(message.starts) != len(message.lengths) or not message.starts:
        raise InvalidUpdate("submodel: starts and lengths must be equally many, at least one")
    if max(message.starts) >= size or max(message.lengths) > size:  # before numpy sees uint64 values
        raise InvalidUpdate(f"submodel: a run leaves the coordinates 0..{size - 1}")
    starts, lengths = np.asarray(message.starts, np.int64), np.asarray(message.lengths, np.int64)
    ends = starts + lengths
    if bool(np.any(lengths < 1)) or int(ends[-1]) > size or bool(np.any(starts[1:] <= ends[:-1])):
        raise InvalidUpdate("submodel: runs must be sorted, not empty, not touching, and in range")
    return CoordinateRuns(starts, lengths)


# --- tasks -------------------------------------------------------------------------------------


def capability_from_proto(message: devices.Capability) -> Capability:
    """What a device says of itself. Raises `InvalidUpdate` for what is no number or no list of stages."""
    if not (math.isfinite(message.up_bps) and math.isfinite(message.down_bps)):
        raise InvalidUpdate("capability.up_bps and down_bps must be finite: send 0 where unknown")
    return Capability(
        examples=checked_count(message.examples, "capability.examples"),
        memory_bytes=checked_count(message.memory_bytes, "capability.memory_bytes"),
        up_bps=max(0.0, message.up_bps),
        down_bps=max(0.0, message.down_bps),
        accelerator=message.accelerator[:32] or "cpu",
        codecs=checked_codecs(message.codecs, "capability.codecs"),
        width_max=_checked_width(message),
    )


def _checked_width(message: devices.Capability) -> float:
    """The widest part, as the device says it; of one that says nothing the whole model."""
    if not message.HasField("width_max"):
        return 1.0
    if not is_width(message.width_max):
        raise InvalidUpdate(f"capability.width_max {NO_WIDTH}, not {message.width_max:g}")
    return message.width_max


def capability_to_proto(capability: Capability) -> devices.Capability:
    """The inverse of `capability_from_proto`."""
    c = capability
    return devices.Capability(
        examples=c.examples,
        memory_bytes=c.memory_bytes,
        up_bps=c.up_bps,
        down_bps=c.down_bps,
        accelerator=c.accelerator,
        codecs=c.codecs,
        width_max=c.width_max if c.width_max < 1 else None,
    )


def plan_to_proto(plan: LocalPlan) -> model.LocalPlan:
    """The local plan."""
    return model.LocalPlan(
        epochs=plan.epochs,
        steps=plan.steps,
        batch_size=plan.batch_size,
        learning_rate=plan.learning_rate,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        proximal_mu=plan.proximal_mu,
    )


def plan_from_proto(message: model.LocalPlan) -> LocalPlan:
    """The inverse of `plan_to_proto`."""
    return LocalPlan(
        epochs=message.epochs,
        steps=message.steps,
        batch_size=message.batch_size,
        learning_rate=message.learning_rate,
        momentum=message.momentum,
        weight_decay=message.weight_decay,
        proximal_mu=message.proximal_mu,
    )


def task_to_proto(task: Task, part: model.Part) -> devices.Task:
    """A task whose model travels as one part."""
    return devices.Task(
        task_id=task.task_id,
        base_version=task.base_version,
        base_kind=model.BASE_KIND_VERSION,
        seed=task.seed,
        lease_s=task.lease_s,
        expires_at_s=task.expires_at,
        local=plan_to_proto(task.local),
        uplink=model.Encoding(codec=task.uplink),
        submodel=submodel_to_proto(task.submodel),
        parts=[part],
    )


def task_from_proto(message: devices.Task, client_id: str, spec: ParamSpec) -> Task:
    """The task as the device keeps it, of the model `spec`. Raises `InvalidUpdate`."""
    if message.base_kind != model.BASE_KIND_VERSION:
        raise InvalidUpdate(f"task {message.task_id!r}: base_kind {message.base_kind} is not known here")
    if not 0 < message.lease_s < math.inf:
        raise InvalidUpdate(
            f"task {message.task_id!r}: lease_s must be above 0 and finite, not {message.lease_s!r}"
        )
    submodel = submodel_from_proto(message.submodel, spec) if message.HasField("submodel") else None
    return Task(
        task_id=message.task_id,
        client_id=client_id,
        base_version=message.base_version,
        granted_at=message.expires_at_s - message.lease_s,
        expires_at=message.expires_at_s,
        lease_s=message.lease_s,
        seed=message.seed,
        local=plan_from_proto(message.local),
        uplink=message.uplink.codec,
        submodel=submodel,
    )


def check_payload_size(size_bytes: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """A declared size within the cap. Raises `TooLarge`."""
    if size_bytes > limits.payload_bytes_max:
        raise TooLarge(f"payload of {size_bytes} bytes is over the cap of {limits.payload_bytes_max}")
    return size_bytes


def check_frozen_size(size_bytes: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """A declared size of frozen tensors within their cap. Raises `TooLarge`."""
    if size_bytes > limits.frozen_bytes_max:
        raise TooLarge(
            f"frozen tensors of {size_bytes} bytes: limits.frozen_bytes_max is {limits.frozen_bytes_max}"
        )
    return size_bytes


# --- decisions ---------------------------------------------------------------------------------


def decision_to_proto(decision: Decision) -> model.Decision:
    """The decision."""
    return model.Decision(
        verdict=decision.verdict.value,
        staleness=decision.staleness,
        weight=decision.weight,
        reason=decision.reason.value,
        detail=decision.detail,
    )


def decision_from_proto(message: model.Decision) -> Decision:
    """The inverse of `decision_to_proto`; reasons of a newer server become `invalid` with the detail."""
    if message.verdict not in {v.value for v in Verdict}:
        raise WireError(f"verdict {message.verdict!r} is not known here: install the server's version")
    known = message.reason in {r.value for r in Reason}
    return Decision(
        verdict=Verdict(message.verdict),
        staleness=message.staleness,
        weight=message.weight if message.HasField("weight") else None,
        reason=Reason(message.reason) if known else Reason.INVALID,
        detail=message.detail if known else f"{message.reason}: {message.detail}",
    )


# --- masked sums -------------------------------------------------------------------------------


def seals_to_proto(seals: Mapping[str, str]) -> list[model.Seal]:
    """The boxes of an update (keepers to base64), as they are in what is signed."""
    return [
        model.Seal(keeper=bytes.fromhex(keeper), box=base64.b64decode(box))
        for keeper, box in sorted(seals.items())
    ]


def seals_from_proto(seals: Iterable[model.Seal]) -> dict[str, str]:
    """The inverse, of what a device has sent. Raises `InvalidUpdate`."""
    found: dict[str, str] = {}
    for seal in seals:
        keeper = checked_digest(seal.keeper, "seals.keeper")
        if len(seal.box) not in BOXES_BYTES or keeper in found or len(found) == KEEPERS_MAX:
            raise InvalidUpdate(
                f"seals: a box of {BOX_BYTES} bytes for each keeper, {KEEPERS_MAX} keepers at most"
            )
        found[keeper] = base64.b64encode(seal.box).decode()
    return found


def cohort_to_proto(cohort: Cohort) -> Iterator[keepers.UnmaskRequest]:
    """What is asked of a keeper, in messages of some members each."""
    head = keepers.CohortHead(
        run_id=cohort.run_id,
        number=cohort.number,
        version=cohort.version,
        terms_json=json.dumps(cohort.terms.to_json()),
        members=len(cohort.members),
    )
    yield keepers.UnmaskRequest(head=head)
    for start in range(0, len(cohort.members), MEMBERS_AT_ONCE):
        some = cohort.members[start : start + MEMBERS_AT_ONCE]
        yield keepers.UnmaskRequest(members=[_member_to_proto(member) for member in some])


def _member_to_proto(member: CohortMember) -> keepers.CohortMember:
    return keepers.CohortMember(
        signed=member.signed,
        signature=member.signature,
        certificate=member.certificate,
        base_head=bytes.fromhex(member.base_head),
        arrived_version=member.arrived_version,
        weight=member.weight,
    )


def cohort_from_proto(head: keepers.CohortHead, members: Iterable[keepers.CohortMember]) -> Cohort:
    """The inverse of `cohort_to_proto`. Raises `InvalidUpdate`, `ConfigError` for the terms."""
    try:
        terms = Terms.from_json(json.loads(head.terms_json))
    except (ValueError, RecursionError):
        raise InvalidUpdate("terms_json is no JSON") from None
    return Cohort(
        run_id=checked_id(head.run_id, "run_id"),
        number=checked_count(head.number, "number"),
        version=checked_count(head.version, "version"),
        terms=terms,
        members=tuple(
            CohortMember(
                signed=m.signed,
                signature=m.signature,
                certificate=m.certificate,
                base_head=m.base_head.hex(),
                arrived_version=checked_count(m.arrived_version, "arrived_version"),
                weight=m.weight,
            )
            for m in members
        ),
    )
