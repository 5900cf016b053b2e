"""The models that are in use: one copy of a version, however many devices train from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakValueDictionary

from anabranch.compress.delta_log import DeltaLog
from anabranch.compress.downloads import Download, Downloads, apply_download, base_of
from anabranch.compress.model import full_bytes
from anabranch.compress.registry import stages
from anabranch.core.engine.engine import Engine
from anabranch.core.model.growing import needed_for
from anabranch.core.model.holdings import HeldPart, Holdings, has
from anabranch.core.model.params import Tensors, Vector
from anabranch.core.model.submodels import Submodel, TensorSet, UnitMap
from anabranch.core.unwritten import dataclass
from anabranch.host.held import HeldModel, heads_of


@dataclass(frozen=True, eq=False)
class Model:
    """A version as the devices decode it: `vector` (size,)."""

    version: int
    vector: Vector


@dataclass(frozen=True, eq=False)
class Offer:
    """A model on its way to one device: the bytes that this takes on the wire, 0 where it has it.

    `part_only`: the device gets no more of it than its task covers; `adds` is that part where it goes beside
    what the device has, as those of a delta log do. `head` names the version where the number
    may not do; `from_heads` are of what the bytes lead from, empty where that is nothing; `whole_bytes` are
    those that lead from nothing, for who has something else.
    """

    model: Model
    payload_bytes: int
    part_only: bool = False
    head: str = ""
    from_heads: str = ""
    whole_bytes: int = 0
    adds: HeldPart | None = None


class Versions:
    """The version that devices get, the engine's newest or the one that it published last, and its own.

    A model lives as long as somebody holds it, and the engine may write on its own vector meanwhile.
    The bytes are those of the payload that a live server would send.
    """

    def __init__(self, engine: Engine, frozen: Tensors, own_parts: bool = False) -> None:
        self.engine = engine
        self._frozen, self._own_parts = frozen, own_parts
        self._downloads = Downloads(engine.spec, frozen, own_parts)
        self._in_use: WeakValueDictionary[int, Model] = WeakValueDictionary()
        # Of the version that devices get, by what one holds and needs.
        self._sizes: dict[tuple[Holdings, UnitMap | TensorSet | None], int] = {}
        self._sized_version = -1

    def go_back(self) -> None:
        """The engine is of an earlier version: what was made of later ones is of another history."""
        self._downloads = Downloads(self.engine.spec, self._frozen, self._own_parts)
        self._in_use = WeakValueDictionary()
        self._sizes, self._sized_version = {}, -1

    def named(
        self, offer: Offer, holds: Holdings, submodel: Submodel | None, head_of: Callable[[int], str]
    ) -> Offer:
        """The offer to a device that holds this, with the heads by which it can tell what that is."""
        version = offer.model.version
        whole = self.offer(None, submodel if offer.adds else None).payload_bytes
        adds = offer.adds and replace(offer.adds, head=head_of(version))
        known = offer.adds is not None or not offer.part_only
        leads = known and (not offer.payload_bytes or base_of(self.engine, version, holds) is not None)
        heads = heads_of(holds, lambda held: head_of(held.version)) if leads else ""
        return replace(offer, head=head_of(version), from_heads=heads, whole_bytes=whole, adds=adds)

    @property
    def version(self) -> int:
        """The engine's."""
        return self.engine.version

    def offer(self, holds: Holdings, submodel: Submodel | None = None) -> Offer:
        """What devices get now, for one that holds this and has a task of `submodel`."""
        version = self.engine.offered
        if self._sized_version != version:
            self._sizes, self._sized_version = {(version, None): 0}, version
        model = self._kept()
        part = needed_for(submodel)
        if part is not None and self.engine.broadcast is None and holds != version:
            return Offer(model, full_bytes(part.small), part_only=True)
        if not self._adds:
            holds, part = holds if isinstance(holds, int) else None, None
        adds = None if part is None else HeldPart(version, part)  # also where it is there: see `named`
        if has(holds, version, part):
            return Offer(model, 0, adds=adds)
        if (holds, part) not in self._sizes:
            self._sizes[holds, part] = self._download(holds, part).size_bytes
        return Offer(model, self._sizes[holds, part], adds is not None, adds=adds)

    @property
    def _adds(self) -> bool:
        """Whether parts are of a delta log."""
        return self._own_parts and isinstance(self.engine.broadcast, DeltaLog)

    def held(self, head: str = "") -> HeldModel[Model]:
        """What a device has that has built what devices get; `head` where its number may not do."""
        model = self._kept()
        return HeldModel(model.version, head, model if head else None)

    def exact(self) -> Model:
        """The server's own model of this moment, to the bit."""
        return Model(self.engine.version, self.engine.vector.copy())

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
            whole = self._download(None, None)
            replica, _ = apply_download(engine.spec, whole.codec, whole.data, None, None)
            self._sizes[None, None] = whole.size_bytes
        return Model(engine.offered, replica)

    def _download(self, holds: Holdings, part: UnitMap | TensorSet | None) -> Download:
        make = self._downloads.offer(self.engine, self.engine.offered, holds, stages(), part)
        assert make is not None, "what devices get is always held"
        return make()
