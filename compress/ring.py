"""Masked updates as bytes: whole numbers modulo 2^r, little-endian, one after the other. Exact.

`ring(r,v)` stands alone: what is masked looks like noise, and no stage could make it smaller. v, the bits of
a value before it is masked, is nothing that decoding needs: it is in the run's terms. Any bits are valid
numbers, so there is nothing to check but the length.
"""

from __future__ import annotations

import numpy as np

from anabranch.compress.codec import Notes
from anabranch.compress.layout import Layout
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.secagg.ring import RING_BITS, Numbers, chain_of, dtype_of


class RingNumbers:
    """A `Codec` of numbers modulo 2^bits. Raises `UnknownCodec`."""

    def __init__(self, bits: int, value_bits: int) -> None:
        if bits not in RING_BITS or not 2 <= value_bits <= bits:
            raise UnknownCodec(
                f"codec ring({bits},{value_bits}): numbers of 32 or 16 bits, of which a value has 2 or more"
            )
        self.text, self.dtype = chain_of(bits, value_bits), dtype_of(bits)

    def encode(
        self,
        x: Numbers,
        layout: Layout,
        seed: int = 0,  # noqa: ARG002
        notes: Notes | None = None,  # noqa: ARG002
    ) -> bytes:
        """See `Codec`. Raises `InvalidUpdate` for all but numbers of this ring: they are masked before."""
        if x.dtype != self.dtype or x.shape != (layout.size,):
            raise InvalidUpdate(
                f"{self.text} takes {layout.size} masked numbers ({self.dtype}), not {x.shape} of {x.dtype}: "
                "it is the codec of runs with [secagg]"
            )
        return x.tobytes()

    def decode(self, data: bytes | memoryview, layout: Layout) -> Numbers:
        """A read-only view of the bytes. Raises `InvalidUpdate` on a wrong length."""
        if len(data) != (expected := self.bytes_max(layout)):
            raise InvalidUpdate(f"payload has {len(data)} bytes, {layout.size} numbers need {expected}")
        return np.frombuffer(data, self.dtype)

    def bytes_max(self, layout: Layout) -> int:
        """Exactly these."""
        return layout.size * self.dtype.itemsize
