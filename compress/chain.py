"""Stages one after the other: a codec. `main` goes through them, `small` is rounded at most."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import count
from typing import Any

import numpy as np

from anabranch.compress import wire
from anabranch.compress.layout import MAIN, Group, Layout
from anabranch.compress.quantisers import BFloat16, Float32
from anabranch.compress.stage import BLOCK, OTHERS, Coded, Dense, Sparse, Stage, StageContext, Value
from anabranch.core.errors import AppError, InvalidUpdate, TooLarge, UnknownCodec
from anabranch.core.limits import DEFAULT_LIMITS
from anabranch.core.model.arrays import read_only
from anabranch.core.model.params import Delta, SparseVector, Vector
from anabranch.core.model.updates import is_within
from anabranch.core.parts import answer_text, is_looked_at

ROUNDED: tuple[Stage, ...] = (BFloat16(),)
EXACT: tuple[Stage, ...] = (Float32(),)


class Chain:
    """A `Codec` of typed stages. They compute in float32, for a float64 model too.

    Raises `UnknownCodec` where the stages do not fit together.
    """

    def __init__(self, text: str, stages: tuple[Stage, ...]) -> None:
        self.text, self.stages = text, stages
        self._others = ", ".join(stage.name for stage in stages if stage.number in OTHERS)
        self._encoded = count(1)
        # Values that main has as they are stay so in the small group: `f32` alone is the identity.
        self._small = EXACT if any(isinstance(stage, Float32) for stage in stages) else ROUNDED
        kind: type[Any] = Dense
        for stage in stages:
            if kind not in stage.accepts:
                wanted = " or ".join(_WORDS[accepted] for accepted in stage.accepts)
                raise UnknownCodec(
                    f"codec {text!r}: {stage.name} needs {wanted} and would get {_WORDS[kind]}: "
                    "write selection, values, indices, entropy coder, in this order"
                )
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
            stages = self._stages(group)
            context = StageContext(group.size, seed, {} if notes is None else notes)
            value: Value = _dense(x, group, shown=bool(self._others))
            for stage in stages:
                value = _answered(stage, "encode", stage.encode(value, context))
            assert isinstance(value, Coded), "a chain ends in bytes"
            parts.append(wire.WireGroup(stages, value))
            wire.check_bounds(parts[-1], group.size)
        data = wire.write(parts, layout, layout.tail(x))
        if self._others and is_looked_at(next(self._encoded)):
            self._check_decoding(data, x, layout)
        return data

    def decode(self, data: bytes | memoryview, layout: Layout) -> Delta:
        """See `Codec`."""
        body, exact = layout.split(data)
        parts = wire.read(body, layout, [self._stages(group) for group in layout.groups])
        values = [_decoded(p, group) for p, group in zip(parts, layout.groups, strict=True)]
        if any(isinstance(value, Sparse) for value in values):
            return _sparse(values, exact, layout)
        out = np.empty(layout.size, layout.dtype)
        for value, group in zip(values, layout.groups, strict=True):
            _scatter(value, group, out)
        layout.exact.scatter(exact, out)
        return out

    def bytes_max(self, layout: Layout) -> int:
        """See `Codec`."""
        return (
            wire.HEAD.size
            + wire.CRC.size
            + sum(wire.bytes_max(self._stages(group), group.size) for group in layout.groups)
            + layout.tail_bytes
        )

    def _check_decoding(self, data: bytes, x: Vector, layout: Layout) -> None:
        """Raises `AppError` where a server would refuse what x was encoded to, and would not refuse x.

        Each update would be refused, and the run given up as one that diverges.
        """
        try:
            found = self.decode(data, layout)
        except (InvalidUpdate, TooLarge) as error:
            raise AppError(self._not_decoded(str(error))) from error
        values = found.values if isinstance(found, SparseVector) else found
        most = DEFAULT_LIMITS.delta_abs_max
        if is_within(x, most) and not is_within(values, most):
            what = f"values that are not finite, or over {most:g}"
            raise AppError(self._not_decoded(what))

    def _not_decoded(self, what: str) -> str:
        return (
            f"codec stage {self._others!r}: what {self.text!r} encodes it decodes to nothing of use: {what}"
        )

    def _stages(self, group: Group) -> tuple[Stage, ...]:
        return self.stages if group.name == MAIN else self._small


_WORDS = {Dense: "all values", Sparse: "chosen values", Coded: "bytes"}


def _dense(x: Vector, group: Group, shown: bool = False) -> Dense:
    """The group's elements of x as float32: views of x where they can be, copies of a block elsewhere.

    `shown`: read-only, as stages of others might write to them; what is left out of x is remembered.
    """

    def blocks() -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, group.size), np.float32)
        for start in range(0, group.size, BLOCK):
            stop = min(start + BLOCK, group.size)
            parts = [x[piece] for piece in group.pieces(start, stop)]
            if len(parts) == 1 and x.dtype == np.float32:
                yield parts[0]
                continue
            with np.errstate(over="ignore"):  # of float64; what is infinite then is refused by the quantiser
                np.concatenate(parts, out=scratch[: stop - start])
            yield scratch[: stop - start]

    return Dense(group.size, (lambda: map(read_only, blocks())) if shown else blocks)


def _decoded(part: wire.WireGroup, group: Group) -> Dense | Sparse:
    value: Value = part.coded
    context = StageContext(group.size)
    for stage in reversed(part.stages):
        value = _answered(stage, "decode", stage.decode(value, context))
    if part.coded.streams:
        names = ", ".join(role.name.lower() for role in part.coded.streams)
        raise InvalidUpdate(f"payload has streams that its codec does not know: {names}")
    assert not isinstance(value, Coded), "decoding ends in values"
    needed = value.indices.size if isinstance(value, Sparse) else group.size
    if value.size != needed:
        raise InvalidUpdate(f"payload has {value.size} values, the manifest needs {needed}")
    return value


def _answered(stage: Stage, method: str, found: Any) -> Value:
    """What a stage answers, if another one can take it. Raises `AppError`: it may be somebody's own."""
    if isinstance(found, Value):
        return found
    raise AppError(
        f"codec stage {stage.name!r}: {method} must return Dense, Sparse or Coded, not {answer_text(found)}"
    )


def _sparse(values: list[Dense | Sparse], exact: Vector, layout: Layout) -> SparseVector:
    """One sparse vector of all groups; the values of a dense one are all there."""
    total = sum(value.size for value in values) + exact.size
    indices, found, at = np.empty(total, np.int64), np.empty(total, layout.dtype), 0
    for value, group in zip(values, layout.groups, strict=True):
        own = slice(at, at + value.size)
        indices[own] = group.places(value.indices) if isinstance(value, Sparse) else group.all_places
        found[own] = value.values if isinstance(value, Sparse) else value.gather()
        at = own.stop
    if exact.size:
        indices[at:], found[at:] = layout.exact.all_places, exact
    return SparseVector(indices, found, layout.size)


def _scatter(value: Dense | Sparse, group: Group, out: Vector) -> None:
    for start, block in zip(range(0, value.size, BLOCK), value.blocks(), strict=True):
        at = 0
        for piece in group.pieces(start, start + block.size):
            out[piece] = block[at : at + piece.stop - piece.start]
            at += piece.stop - piece.start
