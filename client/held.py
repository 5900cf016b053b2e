"""What a device has of its run's models, kept on its disk: a version, or parts; and how others are fetched.

After a restart the version that is on the disk need not be fetched again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.client.base_model import BaseModel
from anabranch.client.frozen import FrozenFiles
from anabranch.client.messages import GrantedTask
from anabranch.client.records import Record, read_record, write_record
from anabranch.client.state import HELD
from anabranch.client.summary import AgentSummary
from anabranch.client.telling import OnEvent, tell_failed
from anabranch.client.trainer import LocalTrainer
from anabranch.client.transport import Transport
from anabranch.compress.downloads import SNAPSHOT, SUM
from anabranch.compress.model import full_bytes
from anabranch.core.errors import AnabranchError, InvalidUpdate, ManifestMismatch, TooLarge, UnknownVersion
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import HeldPart, Holdings, has
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import Coordinates, Submodel, scatter, submodel_from_json
from anabranch.core.model.updates import Task
from anabranch.host.first import FirstModel
from anabranch.host.held import NOTHING, HeldModel

log = logging.getLogger(__name__)

VECTOR, FROZEN, PARTS = "vector", "frozen/", "parts"
NAMELESS = (
    "version %d was kept here by an older release, which kept its number and not its name: it is fetched anew"
)
LOST = (
    "version %d that is here is not the server's of that number, whose data were put back, say: "
    "it is fetched anew"
)


def keep_model(
    state_dir: Path, model: BaseModel, run_id: str, spec: ParamSpec, parts: tuple[HeldPart, ...] = ()
) -> None:
    """Write the model in the place of an older one. It is a cache, so nothing waits for the disk.

    `parts`: those that it is of, where it is no version.
    """
    frozen = {f"{FROZEN}{name}": array for name, array in model.frozen.items()}
    # A release that knows no parts would take them for the version: of one without a head it fetches anew.
    head = "" if parts else model.head
    facts = {"version": model.version, "head": head, "run_id": run_id, "layout_hash": spec.layout_hash}
    if parts:
        facts[PARTS] = [[*held.to_json(), held.head] for held in parts]
    write_record(state_dir / HELD, Record({VECTOR: model.vector, **frozen}, facts), durable=False)


def kept_model(state_dir: Path, run_id: str, spec: ParamSpec) -> BaseModel | None:
    """The version of this run, or None: see `kept`."""
    held = kept(state_dir, run_id, spec)
    return None if held.parts else held.model


def kept(state_dir: Path, run_id: str, spec: ParamSpec) -> HeldModel[BaseModel]:
    """What there is of this run: nothing also where that has arrays of other shapes."""
    record = read_record(state_dir / HELD)
    if record is None or (record.facts["run_id"], record.facts["layout_hash"]) != (run_id, spec.layout_hash):
        return NOTHING
    frozen = {n.removeprefix(FROZEN): a for n, a in record.arrays.items() if n.startswith(FROZEN)}
    came = () if spec.apart else [t for t in spec.tensors if not t.aggregated]
    # An earlier release kept a number as a row of one: such a model is fetched anew.
    if any(t.shape != frozen[t.name].shape for t in came):
        return NOTHING
    parts = tuple(_held_part(row, spec) for row in record.facts.get(PARTS, ()))
    # An earlier release knew no heads: such a model is fetched anew.
    head = parts[-1].head if parts else str(record.facts.get("head", ""))
    model = BaseModel(int(record.facts["version"]), record.arrays[VECTOR], frozen, head=head)
    return HeldModel(model.version, head, model, parts)


def _held_part(row: Any, spec: ParamSpec) -> HeldPart:
    version, part, head = row
    found = submodel_from_json(part, spec)
    assert not isinstance(found, Coordinates), "such a part is never held"
    return HeldPart(int(version), found, str(head))


class HeldModels:
    """Fetches what tasks start from. Bytes are counted in `summary`, `tell` hears of them."""

    def __init__(
        self,
        local: LocalTrainer,
        transport: Transport,
        state_dir: Path,
        clock: Callable[[], float],
        summary: AgentSummary,
        tell: OnEvent,
    ) -> None:
        self._local, self._transport, self._state_dir = local, transport, state_dir
        self._clock, self._summary, self._tell = clock, summary, tell
        self._files = FrozenFiles(state_dir)
        self._run_id, self._frozen_sha256 = "", ""
        self._tried: FirstModel | None = None
        self._held: HeldModel[BaseModel] = NOTHING

    @property
    def holds(self) -> Holdings:
        """The version that is here whole, or the parts that are."""
        return self._held.holds

    def join(self, run_id: str, frozen_sha256: str = "", first: FirstModel | None = None) -> None:
        """Versions are this run's from now on; `frozen_sha256`, `first`: see `Enrolment`.

        Raises `ManifestMismatch` where what is frozen is not served, and is not here.
        """
        if run_id != self._run_id:
            self._held = kept(self._state_dir, run_id, self._local.spec)
        if frozen_sha256 != self._frozen_sha256:
            self._local.apart = None
        self._run_id, self._frozen_sha256 = run_id, frozen_sha256
        if first is not None and first != self._tried and self._held is NOTHING:
            self._tried = first  # what did not come out once never will
            self._build(first)
        if not self._local.frozen_served:
            self._have_frozen()  # who has it not is told at once

    def _build(self, first: FirstModel) -> None:
        """Have version 0 without a download; where it comes out as another, it will be fetched."""
        began = self._clock()
        try:
            model = self._local.build(first)
        except AnabranchError as error:
            log.warning("%s; what tasks start from is fetched", error)
            tell_failed(self._tell, "build", error, again=False)
            return
        self._held = HeldModel(model.version, model.head, model)
        keep_model(self._state_dir, model, self._run_id, self._local.spec)
        self._tell("built", version=model.version, took_s=self._clock() - began)

    def get(self, task: Task) -> BaseModel:
        """What a task starts from. Raises the errors of `Transport.fetch`, `InvalidUpdate` and `TooLarge`.

        A number alone is no name: where the run was restored from a backup, what is held may be a lost
        version of the same number, and is fetched anew. `UnknownVersion` where what comes is not the task's,
        `ManifestMismatch` where it is another run's.
        """
        self._have_frozen()
        head = task.base_head if isinstance(task, GrantedTask) else ""
        if self._held.version == task.base_version:
            held, self._held = self._held, self._held.known_as(head)
            if self._held.model is None:
                log.warning(LOST if held.head else NAMELESS, task.base_version)
            elif not self._held.parts:
                return self._held.model
            elif has(self._held.holds, task.base_version, part := needed_for(task.submodel)):
                return self._held.model.cut(part)
        model, adds = self._fetched(task.base_version, task.submodel)
        if head and model.head != head:
            raise UnknownVersion(
                f"version {task.base_version} that the server gave is not that of the task, which is of "
                "another history: ask anew"
            )
        self._summary.downlink_bytes_full_equivalent += full_bytes(self._local.spec)
        before = self._held
        if adds:
            came = HeldPart(model.version, model.submodel, model.head)
            self._held = before.with_part(came, self._with(model))
        else:
            self._held = before.after(model.version, model.head, model, model.submodel is not None)
        if self._held is not before and self._held.model is not None:
            kept_now, parts = self._held.model, self._held.parts
            keep_model(self._state_dir, kept_now, self._run_id, self._local.spec, parts)
        return model

    def _with(self, part: BaseModel) -> BaseModel:
        """All that is held, a new array, once this part has come; zero where nothing is."""
        spec, held = self._local.spec, self._held.model
        vector = np.zeros(spec.size, part.vector.dtype) if held is None else held.vector.copy()
        scatter(part.vector, vector, part.submodel)
        return BaseModel(part.version, vector, part.frozen, head=part.head)

    def _have_frozen(self) -> None:
        """What travels apart, before the first training of a run."""
        if not self._frozen_sha256 or self._local.apart is not None:
            return
        local, began = self._local, self._clock()
        own, served = local.own_frozen, local.frozen_served
        found = self._files.get(self._transport, local.spec, self._frozen_sha256, own, served)
        local.apart = found.tensors
        if found.size_bytes:
            self._summary.downlink_bytes += found.size_bytes
            self._summary.downlink_bytes_full_equivalent += found.size_bytes
            self._tell("fetched_frozen", size_bytes=found.size_bytes, took_s=self._clock() - began)

    def _fetched(self, version: int, submodel: Submodel | None) -> tuple[BaseModel, bool]:
        """A version, by what leads there from what is here, or else whole or a part.

        And whether it is a part of a delta log, beside which what is here stays.
        """
        began, held = self._clock(), self._held.model
        layout_hash = self._local.spec.layout_hash
        fetched = self._transport.fetch(layout_hash, version, holds=self.holds, submodel=submodel)
        size = len(fetched.data)
        self._summary.downlink_bytes += size
        if fetched.run_id not in ("", self._run_id):
            # One that knows this device from before gives it tasks, and what it signs would be of the other.
            raise ManifestMismatch(f"run {fetched.run_id} is served by now, and no longer {self._run_id}")
        try:
            model = self._local.decode(fetched, held, submodel, self._held.parts)
        except (InvalidUpdate, TooLarge) as error:
            if held is None:
                raise
            # What the device has is not what it was: it goes on from nothing.
            tell_failed(self._tell, "decode", error, again=True)
            self._held = NOTHING
            return self._fetched(version, submodel)
        took_s = self._clock() - began
        self._tell(
            "fetched", version=version, size_bytes=size, took_s=took_s, from_version=fetched.from_version
        )
        return model, fetched.part_only and fetched.codec in (SUM, SNAPSHOT)
