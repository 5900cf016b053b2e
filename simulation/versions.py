"""The models that are in use: one copy of a version, however many devices train from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from anabranch.compress.downloads import Download, Downloads, apply_download, downloads_lead_from
from anabranch.compress.model import full_bytes
from anabranch.compress.registry import stages
from anabranch.core.engine.engine import Engine
from anabranch.core.model.growing import needed_for
from anabranch.core.model.params import Tensors, Vector
from anabranch.core.model.submodels import Submodel
from anabranch.host.held import HeldModel


@dataclass(frozen=True, eq=False)
class Model:
    """A version as the devices decode it: `vector` (size,)."""

    version: int
    vector: Vector


@dataclass(frozen=True, eq=False)
class Offer:
    """A model on its way to one device: the bytes that this takes on the wire, 0 where it has it.

    `part_only`: the device gets no more of it than its task covers. `head` names the version where the number
    may not do; `from_head` is of what the bytes lead from, empty where that is nothing; `whole_bytes` are
    those of the whole model, for who has something else.
    """

    model: Model
    payload_bytes: int
    part_only: bool = False
    head: str = ""
    from_head: str = ""
    whole_bytes: int = 0


class Versions:
    """The version that devices get, the engine's newest or the one that it published last, and its own.

    A model lives as long as somebody holds it, and the engine may write on its own vector meanwhile.
    The bytes are those of the payload that a live server would send.
    """

    def __init__(self, engine: Engine, frozen: Tensors) -> None:
        self.engine = engine
        self._frozen = frozen
        self._downloads = Downloads(engine.spec, frozen)
        self._in_use: WeakValueDictionary[int, Model] = WeakValueDictionary()
        self._sizes: dict[int | None, int] = {}  # of the version that devices get, by what one holds
        self._sized_version = -1

    def go_back(self) -> None:
        """The engine is of an earlier version: what was made of later ones is of another history."""
        self._downloads = Downloads(self.engine.spec, self._frozen)
        self._in_use = WeakValueDictionary()
        self._sizes, self._sized_version = {}, -1

    def named(self, offer: Offer, holds: int | None, head_of: Callable[[int], str]) -> Offer:
        """The offer to a device that holds a version, with the heads by which it can tell what that is."""
        version = offer.model.version
        whole = self.offer(None).payload_bytes
        leads = holds is not None and not offer.part_only and (not offer.payload_bytes or self._leads(holds))
        return replace(
            offer, head=head_of(version), from_head=head_of(holds or 0) if leads else "", whole_bytes=whole
        )

    def _leads(self, holds: int) -> bool:
        return downloads_lead_from(self.engine, self.engine.offered, holds)

    @property
    def version(self) -> int:
        """The engine's."""
        return self.engine.version

    def offer(self, holds: int | None, submodel: Submodel | None = None) -> Offer:
        """What devices get now, for one that holds another version, or none, and has a task of `submodel`."""
        version = self.engine.offered
        if self._sized_version != version:
            self._sizes, self._sized_version = {version: 0}, version
        model = self._kept()
        part = needed_for(submodel)
        if part is not None and self.engine.broadcast is None and holds != version:
            return Offer(model, full_bytes(part.small), part_only=True)
        if holds not in self._sizes:
            self._sizes[holds] = len(self._download(holds).data)
        return Offer(model, self._sizes[holds])

    def held(self, head: str = "") -> HeldModel[Model]:
        """What a device has that has built what devices get; `head` where its number may not do."""
        model = self._kept()
        return HeldModel(model.version, head, model if head else None)

    def exact(self) -> Model:
        """The server's own model of this moment, to the bit."""
        return Model(self.engine.version, self.engine.vector.copy())

    def in_use(self) -> list[int]:
        """The versions that somebody holds."""
        return sorted(self._in_use)

    def _kept(self) -> Model:
        """The version that devices get, one copy for all."""
        version = self.engine.offered
        model = self._in_use.get(version)
        if model is None:
            model = self._in_use[version] = self._decoded()
        return model

    def _decoded(self) -> Model:
        engine = self.engine
        replica = None
        if engine.broadcast is not None:
            replica = engine.broadcast.replica(engine.broadcast_state, engine.offered)
        if replica is None:
            whole = self._download(None)
            replica, _ = apply_download(engine.spec, whole.codec, whole.data, None, None)
            self._sizes[None] = len(whole.data)
        return Model(engine.offered, replica)

    def _download(self, holds: int | None) -> Download:
        make = self._downloads.offer(self.engine, self.engine.offered, holds, stages())
        assert make is not None, "what devices get is always held"
        return make()
