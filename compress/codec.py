"""What a codec is, and the one that changes nothing.

A codec turns the covered values of a model into bytes and back. Sizes come from the layout, never from
the message, and are checked before anything is allocated. A codec is written as text, such as `raw`
or `topk(0.1)|int8(256)|gaps|zstd`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Protocol

import numpy as np

from anabranch.compress.layout import Layout
from anabranch.core.errors import InvalidUpdate
from anabranch.core.model.params import Delta, Vector

Notes = MutableMapping[str, float]  # what the stages of a codec remember, by name


class Codec(Protocol):
    """`decode(encode(x, layout), layout)` gives x, exactly or within the codec's stated error."""

    text: str

    def encode(self, x: Vector, layout: Layout, seed: int = 0, notes: Notes | None = None) -> bytes:
        """The bytes of x, shape (layout.size,). Raises `InvalidUpdate` where x is not finite.

        `seed` is what random rounding and masks draw from. `notes` is what a stage remembers from one
        update of a device to its next; it is read and written.
        """
        ...

    def decode(self, data: bytes | memoryview, layout: Layout) -> Delta:
        """The values, all checked; sparse where most are zero. Raises `InvalidUpdate` or `TooLarge`."""
        ...

    def bytes_max(self, layout: Layout) -> int:
        """More bytes than this cannot be an encoded vector of the layout."""
        ...


class Raw:
    """Little-endian values, one after the other. Exact."""

    text = "raw"

    def encode(
        self,
        x: Vector,
        layout: Layout,  # noqa: ARG002
        seed: int = 0,  # noqa: ARG002
        notes: Notes | None = None,  # noqa: ARG002
    ) -> bytes:
        """See `Codec`."""
        return x.astype(x.dtype.newbyteorder("<"), copy=False).tobytes()

    @staticmethod
    def lent(x: Vector) -> memoryview:
        """The same bytes where they lie. x must be the caller's alone: nobody may write on it any more.

        Whoever tries to by x finds it read-only; a view that was made before would still change the bytes.
        """
        x.flags.writeable = False
        return x.astype(x.dtype.newbyteorder("<"), copy=False).data.cast("B")

    def decode(self, data: bytes | memoryview, layout: Layout) -> Vector:
        """A read-only view of the bytes. Raises `InvalidUpdate` on a wrong length."""
        expected = self.bytes_max(layout)
        if len(data) != expected:
            raise InvalidUpdate(
                f"payload has {len(data)} bytes, {layout.size} values of {layout.dtype} need {expected}"
            )
        return np.frombuffer(data, layout.dtype.newbyteorder("<")).astype(layout.dtype, copy=False)

    def bytes_max(self, layout: Layout) -> int:
        """Exactly these."""
        return layout.size * layout.dtype.itemsize
