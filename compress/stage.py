"""What passes from stage to stage of a chain: dense values, sparse values, streams of bytes.

Encoding goes down the table, decoding up. A stage states what it accepts and what it emits, so a chain
that makes no sense is refused when it is built.

| type   | what it holds                                                                |
|--------|------------------------------------------------------------------------------|
| Dense  | all n values of a group                                                      |
| Sparse | k of them, with their indices                                                |
| Coded  | streams of bytes; the indices too, until a stage has made a stream of them   |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import numpy as np

from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.params import Indices, Vector

OTHERS = range(128, 256)  # the numbers on the wire that are nobody's: for stages of others
BLOCK = 1 << 17  # values that are worked on at a time; a multiple of every block of a quantiser


class Role(IntEnum):
    """What a stream holds. The numbers are on the wire."""

    INDEX = 1
    CODES = 2
    SCALES = 3
    SIGNS = 4
    MAGNITUDES = 5
    STEP = 6
    SEED = 7
    VALUES = 8
    PLANE_0 = 9
    PLANE_1 = 10
    PLANE_2 = 11
    PLANE_3 = 12


@dataclass
class Stream:
    """Bytes, and after an entropy coder its number and the length before it (0: not coded)."""

    data: bytes | memoryview
    raw_len: int
    coder: int = 0

    @classmethod
    def of(cls, data: bytes | memoryview) -> Stream:
        """Bytes as they are."""
        return cls(data, len(data))


@dataclass(frozen=True)
class Dense:
    """`size` float32 values, that is n, in arrays of `BLOCK` (the last may be shorter).

    An array of `blocks()` is valid until the next is asked for: what works block by block stays in a
    core's own cache, and nothing of the model's size is made.
    """

    size: int
    blocks: Callable[[], Iterator[Vector]]

    @classmethod
    def of(cls, values: Vector) -> Dense:
        """All the values of an array (n,)."""
        return cls(values.size, lambda: (values[at : at + BLOCK] for at in range(0, values.size, BLOCK)))

    def gather(self) -> Vector:
        """All of them, shape (size,); a new array."""
        out = np.empty(self.size, np.float32)
        for start, block in zip(range(0, self.size, BLOCK), self.blocks(), strict=True):
            out[start : start + block.size] = block
        return out


@dataclass(frozen=True)
class Sparse:
    """Indices (k,), strictly increasing, and float32 values (k,). `seed`: the indices follow from it."""

    indices: Indices
    values: Vector
    seed: int | None = None

    def blocks(self) -> Iterator[Vector]:
        """The values as `Dense` has them."""
        return (self.values[start : start + BLOCK] for start in range(0, self.values.size, BLOCK))

    @property
    def size(self) -> int:
        """The number k."""
        return self.values.size


@dataclass
class Coded:
    """k values as streams. `indices` (k,) is None where all n values are there, or not decoded yet."""

    k: int
    streams: dict[Role, Stream] = field(default_factory=dict)
    indices: Indices | None = None


Value = Dense | Sparse | Coded


@dataclass
class StageContext:
    """One group: n values, the seed of the task, and what the stages remember (`Codec.encode`)."""

    n: int
    seed: int = 0
    notes: MutableMapping[str, float] = field(default_factory=dict)


class Stage(Protocol):
    """One step of a chain. `number` and `version` are on the wire and never change their meaning."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int]
    accepts: ClassVar[tuple[type[Any], ...]]

    def emits(self, accepted: type[Any]) -> type[Any]:
        """The type that comes out for a type that goes in."""
        ...

    def encode(self, value: Any, context: StageContext) -> Any:
        """One step towards the bytes."""
        ...

    def decode(self, value: Any, context: StageContext) -> Any:
        """One step back, everything checked. Raises `InvalidUpdate` or `TooLarge`."""
        ...

    def values_max(self, n: int) -> int:
        """The most values out of n that the stage lets through."""
        ...

    def raw_max(self, k: int, n: int) -> int:
        """The most bytes, before an entropy coder, that the stage makes of k values of n."""
        ...


class StreamStage:
    """The habits of a stage that makes streams of all values: a base class; the contract is `Stage`."""

    name: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int] = 1
    accepts: ClassVar[tuple[type[Any], ...]] = (Coded,)

    def emits(self, accepted: type[Any]) -> type[Any]:  # noqa: ARG002 - the contract's
        """Streams."""
        return Coded

    def values_max(self, n: int) -> int:
        """All of them."""
        return n


class ValuesStage(StreamStage):
    """Those of one that takes dense values: for stages of others, at their place in a chain."""

    place: ClassVar[str] = "values"
    accepts: ClassVar[tuple[type[Any], ...]] = (Dense,)


def take(coded: Coded, role: Role, length: int) -> bytes | memoryview:
    """A stream of exactly this length. Raises `InvalidUpdate`."""
    stream = coded.streams.pop(role, None)
    if stream is None:
        raise InvalidUpdate(f"payload lacks the stream {role.name.lower()}")
    if stream.coder or len(stream.data) != length:
        raise InvalidUpdate(
            f"stream {role.name.lower()} has {len(stream.data)} bytes, the manifest needs {length}"
        )
    return stream.data
