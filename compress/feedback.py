"""Error feedback on the uplink: what a codec left out of one update is added to the device's next.

| symbol | name            | meaning                                                       |
|--------|-----------------|---------------------------------------------------------------|
| Delta  | delta           | the result of the task                                        |
| e      | memory.residual | what earlier updates left out                                 |
| beta   | decay           | how much of it still counts                                   |
| z      |                 | what shall be sent                                            |
| z'     |                 | what the server decodes                                       |

    z = Delta + beta e              on the coordinates of the task; e stays as it is on the others
    e <- z - z'                     0 on buffers, which travel as they are

A new memory is *pending* until the server has answered: an update that was applied (published or held) puts
it in the place of the old one, a rejected one leaves the old one. e is forgotten when the device's base
has moved on by more than `AGE_MAX` versions, and the whole of it is cut to 10 times the mean length of its
updates.

`momentum` before a chain has the same memory, of another kind: see `compress/momentum.py`.

Source: EF14 (Seide et al. 2014; Karimireddy et al., ICML 2019). The decay is this project's: undecayed, old
residuals of devices that train rarely were no better than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from anabranch.compress.codec import Codec
from anabranch.compress.layout import Layout
from anabranch.compress.momentum import momentum
from anabranch.compress.registry import codec_of, make_codec
from anabranch.compress.ring import RingNumbers
from anabranch.core.errors import InvalidUpdate, UnknownCodec
from anabranch.core.model.arrays import inner
from anabranch.core.model.chains import FEEDBACK, MOMENTUM, parse_chain, payload_codec
from anabranch.core.model.params import ParamSpec, SparseVector, Vector
from anabranch.core.model.submodels import Submodel, gathered, scatter

AGE_MAX = 50  # versions
LENGTH_MAX = 10.0  # lengths of a mean update
EWMA = 0.1  # weight of the newest length


@dataclass(frozen=True, eq=False)
class Memory:
    """What a device keeps from one update to the next.

    `residual`: e, or m of `momentum`, float32 (spec.size,), or empty without either. `base_version`: that of
    the update that it was written after. `length_mean`: of the updates' Euclidean lengths. `notes`: what the
    stages remember (`Codec.encode`).
    """

    residual: Vector
    base_version: int
    length_mean: float = 0.0
    notes: Mapping[str, float] = field(default_factory=dict)


class Uplink:
    """A task's codec for updates: `raw`, a chain, or `ef(0.9)|` and one, or `momentum(0.5)` and one, or none.

    Raises `UnknownCodec`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.decay: float | None = None
        self.share: float | None = None
        first, *rest = text.split("|")
        name = parse_chain(text)[0].name
        if name == FEEDBACK:
            self.decay = _decay(first, rest)
        elif name == MOMENTUM:
            self.share = _share(first, rest)
        self.codec: Codec = make_codec(payload_codec(text))
        if name in (FEEDBACK, MOMENTUM) and isinstance(self.codec, RingNumbers):
            raise UnknownCodec(
                f"codec {self.text!r}: an update under a mask is this task's alone, leave {name} out"
            )

    def encode(
        self,
        delta: Vector,
        spec: ParamSpec,
        submodel: Submodel | None,
        memory: Memory | None,
        seed: int,
        base_version: int,
    ) -> tuple[bytes, Memory | None]:
        """The payload of a delta, (covered coordinates,), and the memory that is then pending.

        None: there is nothing to remember. Raises `InvalidUpdate` where the delta is not finite.
        """
        layout, notes = Layout.of(spec, submodel), {} if memory is None else dict(memory.notes)
        if self.decay is None and self.share is None:
            data = self.codec.encode(delta, layout, seed, notes)
            return data, Memory(np.empty(0, np.float32), base_version, notes=notes) if notes else None
        if not np.isfinite(delta).all():
            raise InvalidUpdate("the delta has values that are not finite: the training has diverged")
        kept, length_mean = self._carried(memory, spec, base_version)
        z = self._wanted(delta, gathered(kept, submodel))
        if layout.exact.size:  # buffers are of the newest data, and nothing is left out of them
            layout.exact.scatter(layout.exact.gather(delta), z)
        data = self.codec.encode(z, layout, seed, notes)
        if self.share is not None:
            scatter(z.astype(np.float32, copy=False), kept, submodel)
            return data, Memory(kept, base_version, notes=notes)
        length = _length(delta)
        length_mean = length if length_mean == 0.0 else (1 - EWMA) * length_mean + EWMA * length
        sent = self.codec.decode(data, layout)
        if isinstance(sent, SparseVector):
            z[sent.indices] -= sent.values
        else:
            z -= sent
        scatter(z.astype(np.float32, copy=False), kept, submodel)
        return data, Memory(_cut(kept, LENGTH_MAX * length_mean), base_version, length_mean, notes)

    def _wanted(self, delta: Vector, before: Vector) -> Vector:
        """What shall be sent, before the codec: z, or m of `momentum`; a new array."""
        if self.share is not None:
            return momentum(delta, before, self.share)
        z = delta.copy()
        z += np.float32(self.decay) * before
        return z

    def _carried(self, memory: Memory | None, spec: ParamSpec, base_version: int) -> tuple[Vector, float]:
        """A copy of e or m, zero where there is none that counts, and the mean length."""
        if memory is None or memory.residual.size != spec.size:
            return np.zeros(spec.size, np.float32), 0.0
        if not 0 <= base_version - memory.base_version <= AGE_MAX:
            return np.zeros(spec.size, np.float32), memory.length_mean
        return memory.residual.copy(), memory.length_mean


def uplink_of(text: str) -> Uplink:
    """The uplink that `[uplink] codec` names. Raises `ConfigError`."""
    with codec_of("uplink.codec", text):
        return Uplink(text)


def _argument(stage: str) -> float:
    """The one number of a stage; -1, which no stage takes, where it has none or several."""
    (parsed,) = parse_chain(stage)
    try:
        return float(parsed.arguments[0]) if len(parsed.arguments) == 1 else -1.0
    except ValueError:
        return -1.0


def _share(stage: str, rest: list[str]) -> float:
    share = _argument(stage)
    if not 0 <= share < 1 or any(text.partition("(")[0] == FEEDBACK for text in rest):
        raise UnknownCodec(
            f"codec {'|'.join((stage, *rest))}: write momentum(share)|chain with a share from 0 to less than "
            "1, such as momentum(0.5)|int8, and no ef: a device has one memory"
        )
    return share


def _decay(stage: str, rest: list[str]) -> float:
    decay = _argument(stage)
    if not 0 <= decay <= 1 or not rest:
        raise UnknownCodec(
            f"codec {stage}: write ef(decay)|chain with a decay from 0 to 1, such as ef(0.9)|int4"
        )
    return decay


def _length(x: Vector) -> float:
    """Euclidean, in float64: squares of large float32 values would overflow."""
    return math.sqrt(inner(x, x))


def _cut(residual: Vector, length_max: float) -> Vector:
    length = _length(residual)
    return residual * np.float32(length_max / length) if length > length_max else residual
