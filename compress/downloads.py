"""What a device gets that asks for a version: the cheapest that leads there from what it holds.

| codec         | payload                                                        | leads from         |
|---------------|----------------------------------------------------------------|--------------------|
| `raw`         | the vector as it is, the frozen tensors                        | nothing            |
| a chain       | the vector through the chain, the frozen tensors               | nothing            |
| `logsnapshot` | one message of the delta log, from zero; the frozen tensors    | nothing            |
| `logsum`      | one message: the sum of all since the held version             | the held version   |
| `loglist`     | 4 count, then 4 length and the bytes of each message since     | the held version   |

Numbers are little-endian. A device that lacks a stage gets `raw`: the same values, more bytes.

Where a run has parts travel by the log (`own_parts`), a device of a sub-model gets that part only: `raw`,
`logsnapshot` and `logsum` are then of the part's shapes, and a sum leads from whatever the device holds of
it, which may be of several versions (`core/model/holdings.py`), and from zero where it holds nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import field, replace

import numpy as np

from anabranch.compress.delta_log import DeltaLog, DeltaLogState, apply
from anabranch.compress.direct import DirectDownlink
from anabranch.compress.grid import message_bytes_max
from anabranch.compress.layout import Layout
from anabranch.compress.model import decode_model, frozen_tail, split_tail
from anabranch.compress.recent import Recent, remembered
from anabranch.compress.registry import make_codec
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.loan import Loan
from anabranch.core.errors import InvalidUpdate, TooLarge
from anabranch.core.model.arrays import Array, to_bytes
from anabranch.core.model.chains import RAW, lacks
from anabranch.core.model.holdings import Holdings, usable
from anabranch.core.model.params import ParamSpec, Tensors, Vector, digest
from anabranch.core.model.submodels import TensorSet, UnitMap, gathered, scatter
from anabranch.core.model.updates import is_finite
from anabranch.core.unwritten import dataclass

SNAPSHOT, SUM, LIST = "logsnapshot", "logsum", "loglist"
PARTS = "logparts"  # what a device says that can do with a part of the log
LENGTH = struct.Struct("<I")
MESSAGES_MAX = 1 << 10
RECENT_BYTES_MAX = 64 << 20  # of encoded payloads


@dataclass(frozen=True)
class Download:
    """A payload, its `body` and then its `tail`, and how to read it.

    `vector_sha256` is the digest of the decoded vector, empty where the payload's own says as much.
    `part_only`: it is a model of the wanted sub-model's shapes. `loan`: what `body` is a view of, where that
    is the engine's own; who keeps the bytes keeps this object.
    """

    version: int
    codec: str
    body: bytes | memoryview
    from_version: int | None
    vector_sha256: str
    part_only: bool = False
    tail: bytes = b""
    loan: Loan | None = field(default=None, repr=False, compare=False)

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return len(self.body) + len(self.tail)

    @property
    def data(self) -> bytes:
        """The payload in one, a copy."""
        return b"".join((self.body, self.tail))

    def read(self, size_bytes: int, offset: int) -> memoryview:
        """Bytes of the payload from a place on, at most so many, and none only at its end; no copy."""
        part, start = self.body, offset
        if offset >= len(self.body):
            part, start = self.tail, offset - len(self.body)
        return memoryview(part)[start : start + size_bytes]


Make = Callable[[], Download]


class Downloads:
    """The payloads of one model. `frozen` are the tensors that no device changes.

    `own_parts`: see the module.
    """

    def __init__(self, spec: ParamSpec, frozen: Tensors, own_parts: bool = False) -> None:
        self.spec, self.own_parts = spec, own_parts
        self._frozen = dict(frozen)
        self._tail = frozen_tail(spec, frozen)
        self._made: Recent[bytes] = Recent(RECENT_BYTES_MAX)

    def offer(
        self,
        engine: Engine,
        version: int,
        holds: Holdings,
        codecs: Collection[str] | None = None,
        part: UnitMap | TensorSet | None = None,
    ) -> Make | None:
        """How to make the cheapest payload of a version for a device that holds others; None: not held.

        `codecs` are the stages that it can decode; None stands for all that there are. Of a `part` only that
        is sent, unless the run or the device has versions go whole. To be called where the engine may be
        read; what comes back may be called in any thread. Equal arguments make equal bytes.
        """
        broadcast, state = engine.broadcast, engine.broadcast_state
        if isinstance(broadcast, DeltaLog):
            if not self.takes_parts(codecs):
                part, holds = None, holds if isinstance(holds, int) else None
            return self._log(broadcast, state, version, holds, codecs, part)
        if isinstance(broadcast, DirectDownlink):
            return self._direct(engine, broadcast, version, codecs)
        if (vector := engine.base(version)) is None:
            return None
        if part is not None:
            cut = gathered(vector, part)
            return lambda: self._part(version, part, cut)
        if version == engine.version:
            return self.exact(engine)
        return lambda: self._raw(version, vector)  # an old base, on which nobody writes

    @property
    def tail_bytes(self) -> int:
        """Of a whole model's frozen tensors, where they do not travel apart."""
        return len(self._tail)

    def takes_parts(self, codecs: Collection[str] | None) -> bool:
        """Whether a device that knows these stages gets parts of a delta log."""
        return self.own_parts and (codecs is None or not lacks(codecs, PARTS))

    def exact(self, engine: Engine) -> Make:
        """The server's own model to the bit, for whoever observes."""
        version, loan = engine.version, engine.lend()
        return lambda: replace(self._raw(version, loan.vector), loan=loan)

    def _raw(self, version: int, vector: Vector) -> Download:
        return Download(version, RAW, to_bytes(vector), None, "", tail=self._tail)

    def _part(self, version: int, submodel: UnitMap | TensorSet, part: Vector) -> Download:
        tail = frozen_tail(submodel.small, self._frozen)
        return Download(version, RAW, to_bytes(part), None, "", part_only=True, tail=tail)

    def _direct(
        self, engine: Engine, broadcast: DirectDownlink, version: int, codecs: Collection[str] | None
    ) -> Make | None:
        replica = broadcast.replica(engine.broadcast_state, version)
        text = broadcast.codec_at(version)
        if version != engine.version:
            return None if replica is None else lambda: self._raw(version, replica)
        loan = engine.lend()

        def make() -> Download:
            data = remembered(self._made, version, lambda: broadcast.encoded(version, loan.vector))
            decoded = broadcast.decoded(version, data)
            if codecs is not None and lacks(codecs, text):
                return self._raw(version, decoded)
            return Download(version, text, data + self._tail, None, digest(decoded))

        return make

    def _log(
        self,
        log: DeltaLog,
        state: DeltaLogState,
        version: int,
        holds: Holdings,
        codecs: Collection[str] | None,
        part: UnitMap | TensorSet | None,
    ) -> Make | None:
        if log.place(state, version) is None:
            kept = log.replica(state, version)
            return None if kept is None else lambda: self._as_it_is(version, kept, part)
        if codecs is not None and lacks(codecs, "log"):
            return lambda: self._as_it_is(version, _known(log.replica(state, version)), part)
        base = _base(log, state, version, holds)
        if part is None and not isinstance(base, tuple):
            return lambda: self._from_log(log, state, version, base)
        return lambda: self._from_mosaic(log, state, version, base, part)

    def _as_it_is(self, version: int, replica: Vector, part: UnitMap | TensorSet | None) -> Download:
        if part is None:
            return self._raw(version, replica)
        return self._part(version, part, gathered(replica, part))

    def _from_log(self, log: DeltaLog, state: DeltaLogState, version: int, holds: int | None) -> Download:
        sha256 = digest(_known(log.replica(state, version)))
        if holds is not None:
            codec, data = self._delta(log, state, version, holds)
            # A snapshot is hardly ever under half a byte a value, so most are not made to be compared.
            if 2 * len(data) <= self.spec.size or len(data) <= len(self._snapshot(log, state, version)):
                return Download(version, codec, data, holds, sha256)
        return Download(version, SNAPSHOT, self._snapshot(log, state, version), None, sha256)

    def _from_mosaic(
        self,
        log: DeltaLog,
        state: DeltaLogState,
        version: int,
        base: Holdings,
        part: UnitMap | TensorSet | None,
    ) -> Download:
        """A part from whatever is held, or all from parts: what each device wants is its own."""
        new = gathered(_known(log.replica32(state, version)), part)
        sha256 = digest(new.astype(self.spec.vector_dtype, copy=False))

        def message(of: Holdings) -> bytes:
            old = gathered(self._mosaic(log, state, of), part)
            return log.step_between(new, old, state.floor, part)

        def snapshot() -> bytes:
            tail = self._tail if part is None else frozen_tail(part.small, self._frozen)
            return remembered(self._made, (version, None, part), lambda: message(None) + tail)

        only = part is not None
        if base is not None:
            data = remembered(self._made, (version, base, part), lambda: message(base))
            if 2 * len(data) <= new.size or len(data) <= len(snapshot()):
                first = base if isinstance(base, int) else base[0].version
                return Download(version, SUM, data, first, sha256, only)
        return Download(version, SNAPSHOT, snapshot(), None, sha256, only)

    def _mosaic(self, log: DeltaLog, state: DeltaLogState, base: Holdings) -> Vector:
        """What a device has, float32 (size,); zero where it has nothing."""
        if isinstance(base, int):
            return _known(log.replica32(state, base))
        found, lacking = np.zeros(self.spec.size, np.float32), np.ones(self.spec.size, np.bool_)
        newest_first = (base or ())[::-1]
        replicas = log.replicas_back(state, (held.version for held in newest_first))
        for held in newest_first:  # no replica has a name here: one is in memory at a time
            _fill(found, lacking, next(replicas), held.part)
        return found

    def _delta(self, log: DeltaLog, state: DeltaLogState, version: int, holds: int) -> tuple[str, bytes]:
        entries = state.entries[log.place(state, holds) : log.place(state, version)]
        if len(entries) == 1:
            return SUM, entries[0].tobytes()
        squashed = remembered(self._made, (version, holds), lambda: log.squash(state, version, holds))
        listed = LENGTH.size * (1 + len(entries)) + sum(entry.size for entry in entries)
        if len(squashed) <= listed or len(entries) > MESSAGES_MAX:
            return SUM, squashed
        parts = [LENGTH.pack(len(entries))]
        for entry in entries:
            parts += [LENGTH.pack(entry.size), entry.tobytes()]
        return LIST, b"".join(parts)

    def _snapshot(self, log: DeltaLog, state: DeltaLogState, version: int) -> bytes:
        return remembered(self._made, version, lambda: log.snapshot(state, version) + self._tail)


def base_of(engine: Engine, version: int, holds: Holdings) -> Holdings:
    """What of a device's holdings a payload of a version may lead from, by what changed since."""
    log, state = engine.broadcast, engine.broadcast_state
    return _base(log, state, version, holds) if isinstance(log, DeltaLog) else None


def _base(log: DeltaLog, state: DeltaLogState, version: int, holds: Holdings) -> Holdings:
    """What the log has of it."""
    last = version if isinstance(holds, tuple) else version - 1  # who has it whole fetches nothing
    return usable(holds, lambda held: held <= last and log.place(state, held) is not None)


def apply_download(
    spec: ParamSpec,
    codec: str,
    data: bytes | memoryview,
    from_version: int | None,
    held: tuple[int, Vector] | None,
    part: UnitMap | TensorSet | None = None,
) -> tuple[Vector, dict[str, Array] | None]:
    """The vector (spec.size,) of a payload, a new array, and the frozen tensors where it has them.

    `held` is the version that the device has, with its vector. With a `part` of the model `spec` it is that
    part's values, (part.size,), which come back, and those of the held vector. Raises `InvalidUpdate`,
    `TooLarge` or `UnknownCodec`. That the vector has the announced digest is for the caller to check.
    """
    small = spec if part is None else part.small
    layout, frozen = Layout.of(spec, part), None
    if codec in (SUM, LIST):
        if held is None or held[0] != from_version:
            raise InvalidUpdate(f"payload leads from version {from_version}, which is not held")
        if held[1].shape != (small.size,):
            raise InvalidUpdate(
                f"the held vector has shape {held[1].shape}, the manifest needs ({small.size},)"
            )
        vector = held[1].astype(np.float32)
        for message in [memoryview(data)] if codec == SUM else _messages(data, layout):
            vector = apply(vector, message, layout)
    elif codec == SNAPSHOT:
        message, frozen = split_tail(small, data)
        vector = apply(np.zeros(small.size, np.float32), message, layout)
    else:
        decoded, frozen = decode_model(make_codec(codec), small, data)
        vector = np.array(decoded)
        if not is_finite(vector):
            raise InvalidUpdate("the model has values that are not finite")
    return vector.astype(spec.vector_dtype, copy=False), frozen


def _messages(data: bytes | memoryview, layout: Layout) -> list[memoryview]:
    view = memoryview(data)
    most = message_bytes_max(layout)
    (count,) = _length(view, 0)
    if not 1 <= count <= MESSAGES_MAX:
        raise TooLarge(f"payload of {count} messages: at most {MESSAGES_MAX}")
    at, found = LENGTH.size, []
    for _ in range(count):
        (size,) = _length(view, at)
        at += LENGTH.size
        if size > most or at + size > len(view):
            raise InvalidUpdate(f"payload ends after {len(view)} bytes, in the middle of a message")
        found.append(view[at : at + size])
        at += size
    if at != len(view):
        raise InvalidUpdate(f"payload goes on for {len(view) - at} bytes after its end")
    return found


def _length(view: memoryview, at: int) -> tuple[int]:
    if at + LENGTH.size > len(view):
        raise InvalidUpdate(f"payload ends after {len(view)} bytes, in the middle of a length")
    (length,) = LENGTH.unpack_from(view, at)
    return (int(length),)


def _fill(found: Vector, lacking: Array, replica: Vector, part: UnitMap | TensorSet | None) -> None:
    """Write a part of a replica where `found` has nothing yet: what a later part has counts."""
    values = gathered(found, part)
    np.copyto(values, gathered(replica, part), where=gathered(lacking, part))
    scatter(values, found, part)
    scatter(np.zeros_like(lacking, shape=values.size), lacking, part)


def _known(replica: Vector | None) -> Vector:
    assert replica is not None, "the version is in the log"
    return replica
