"""Stages one after the other: a codec. The `main` group goes through them, the `small` one is bf16."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import numpy as np

from anabranch.compress import wire
from anabranch.compress.layout import MAIN, Group, Layout
from anabranch.compress.quantisers import BFloat16
from anabranch.compress.stage import Coded, Context, Dense, Sparse, Stage, Value
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.params import Delta, SparseVector, Vector

SMALL_STAGES: tuple[Stage, ...] = (BFloat16(),)


class Chain:
    """A `Codec` of typed stages. They compute in float32, for a float64 model too.

    Raises `UnknownCodec` where the stages do not fit together.
    """

    def __init__(self, text: str, stages: tuple[Stage, ...]) -> None:
        self.text, self.stages = text, stages
        kind: type[Any] = Dense
        for stage in stages:
            if kind not in stage.accepts:
                raise UnknownCodec(f"codec {text!r}: {stage.name} cannot come after {_words(kind)}")
            kind = stage.emits(kind)
        if kind is not Coded:
            raise UnknownCodec(f"codec {text!r} does not end in bytes: add a quantiser such as int8(256)")

    def encode(
        self, x: Vector, layout: Layout, seed: int = 0, notes: MutableMapping[str, float] | None = None
    ) -> bytes:
        """See `Codec`."""
        if x.shape != (layout.size,):
            raise InvalidUpdate(f"values have shape {x.shape}, the manifest needs ({layout.size},)")
        parts = []
        for group in layout.groups:
            values = np.asarray(group.gather(x), np.float32)
            _check_finite(values)
            stages = self._stages(group)
            context = Context(group.size, seed, {} if notes is None else notes)
            value: Value = Dense(values)
            for stage in stages:
                value = stage.encode(value, context)
            assert isinstance(value, Coded), "a chain ends in bytes"
            parts.append(wire.Part(stages, value))
        return wire.write(parts, layout)

    def decode(self, data: bytes | memoryview, layout: Layout) -> Delta:
        """See `Codec`."""
        parts = wire.read(data, layout, [self._stages(group) for group in layout.groups])
        values = [self._decode(p, group) for p, group in zip(parts, layout.groups, strict=True)]
        if any(isinstance(value, Sparse) for value in values):
            return _merged(values, layout)
        out = np.empty(layout.size, layout.dtype)
        for value, group in zip(values, layout.groups, strict=True):
            group.scatter(value.values, out)
        return out

    def bytes_max(self, layout: Layout) -> int:
        """See `Codec`."""
        groups = sum(wire.bytes_max(self._stages(group), group.size) for group in layout.groups)
        return wire.HEAD.size + wire.CRC.size + groups

    def _stages(self, group: Group) -> tuple[Stage, ...]:
        return self.stages if group.name == MAIN else SMALL_STAGES

    def _decode(self, part: wire.Part, group: Group) -> Dense | Sparse:
        value: Value = part.coded
        context = Context(group.size)
        for stage in reversed(part.stages):
            value = stage.decode(value, context)
        if part.coded.streams:
            names = ", ".join(role.name.lower() for role in part.coded.streams)
            raise InvalidUpdate(f"payload has streams that its codec does not know: {names}")
        assert not isinstance(value, Coded), "decoding ends in values"
        if isinstance(value, Dense) and value.values.size != group.size:
            raise InvalidUpdate(f"payload has {value.values.size} values, the manifest needs {group.size}")
        return value


def _merged(values: list[Dense | Sparse], layout: Layout) -> SparseVector:
    """One sparse vector of all groups; the values of a dense one are all there."""
    places, found = [], []
    for value, group in zip(values, layout.groups, strict=True):
        indices = value.indices if isinstance(value, Sparse) else np.arange(group.size)
        places.append(group.places(indices))
        found.append(value.values)
    merged = found[0] if len(found) == 1 else np.concatenate(found)
    where = places[0] if len(places) == 1 else np.concatenate(places)
    return SparseVector(where, merged.astype(layout.dtype, copy=False), layout.size)


def _check_finite(values: Vector) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total = values.sum() if values.size else np.float32(0)
    if not np.isfinite(total) and not np.isfinite(values).all():
        raise InvalidUpdate("values that are not finite are not sent: the training has diverged")


def _words(kind: type[Any]) -> str:
    return {Dense: "all values", Sparse: "chosen values", Coded: "bytes"}[kind]
