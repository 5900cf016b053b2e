"""A codec stage of one's own: of every value its sign, of all of them one magnitude. About a bit a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from anabranch.compress.quantisers import NOT_SENT
from anabranch.compress.stage import Coded, Dense, Role, StageContext, Stream, ValuesStage, take
from anabranch.core.errors import InvalidUpdate


@dataclass(frozen=True)
class Signs(ValuesStage):
    name: ClassVar[str] = "signs"
    number: ClassVar[int] = 200  # on the wire: 128 to 255 are for stages of others

    def raw_max(self, k: int, n: int) -> int:
        return 4 + (k + 7) // 8

    def encode(self, value: Dense, context: StageContext) -> Coded:
        x = value.gather()
        if not np.isfinite(x).all():
            raise InvalidUpdate(NOT_SENT)
        scale = np.abs(x).mean(dtype=np.float64).astype("<f4")
        streams = {Role.SCALES: scale.tobytes(), Role.SIGNS: np.packbits(x < 0).tobytes()}
        return Coded(x.size, {role: Stream.of(data) for role, data in streams.items()})

    def decode(self, coded: Coded, context: StageContext) -> Dense:
        (scale,) = np.frombuffer(take(coded, Role.SCALES, 4), "<f4")
        signs = np.frombuffer(take(coded, Role.SIGNS, (coded.k + 7) // 8), np.uint8)
        if not (np.isfinite(scale) and scale >= 0):
            raise InvalidUpdate("the magnitude of all values is not one")
        return Dense.of(np.where(np.unpackbits(signs, count=coded.k), -scale, scale).astype(np.float32))
