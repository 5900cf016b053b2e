"""What becomes of a model in training when the server's comes in, some steps after the snapshot was sent.

| symbol | name     | meaning                                                  |
|--------|----------|----------------------------------------------------------|
| w      | live     | the weights as they are now, steps after the snapshot    |
| w_s    | snapshot | what was sent                                            |
| w_PS   | center   | the server's model once it had taken the snapshot        |
| a      | weight   | how far towards the server, in (0, 1]                    |

    delta          w <- w + a (w_PS - w_s)        the steps that were taken meanwhile are kept whole
    interpolation  w <- (1 - a) w + a w_PS        they are scaled by 1 - a; Streaming DiLoCo's `blend`
    replacement    w <- w_PS                      they are lost

The elastic force and the interpolation are those of ShadowEASGD (Zheng et al., arXiv 2003.03477, after
Zhang, Choromanska and LeCun, NIPS 2015); the delta form is that of hivemind's `delta_rule_averaging`. With a
server that mixes each update by the same a, w_PS <- (1 - a) w_PS + a w_s, the delta form conserves
(1 - a) w_PS + sum_i w_i but for the local steps: tests/property/test_conservation.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from anabranch.core.errors import ConfigError
from anabranch.core.model.live import LiveWeights
from anabranch.core.model.params import Indices, Vector

DELTA, PAPER_INTERPOLATION, BLEND = "delta", "paper-interpolation", "blend"


class Merge(Protocol):
    """A rule. It is applied by the thread that trains, between two steps."""

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:
        """Change `live` in place; the others are (spec.size,)."""
        ...


@dataclass(frozen=True)
class ElasticDelta:
    """The delta form. Local optimizer state stays as it is, under every rule."""

    weight: float = 0.5

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:
        """Steps taken since the snapshot are kept whole."""
        live.add(center.dtype.type(self.weight) * (center - snapshot))


@dataclass(frozen=True)
class PaperInterpolation:
    """The paper's rule to the letter, for comparisons: it works like a learning rate scaled by 1 - a."""

    weight: float = 0.5

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:  # noqa: ARG002
        """The fraction a of what was learned since the snapshot is lost."""
        live.add(center.dtype.type(self.weight) * (center - live.flat()))


@dataclass(frozen=True, eq=False)
class WithBuffers:
    """A rule for weights; buffers, at the places `at`, go the part `pull` of the way to the server's.

    So they stay between values that somebody had: no rule may go beyond them (`core/engine/buffers.py`).
    """

    rule: Merge
    at: Indices
    pull: float

    def apply(self, live: LiveWeights, snapshot: Vector, center: Vector) -> None:
        """See `Merge`."""
        if not self.at.size:
            self.rule.apply(live, snapshot, center)
            return
        change = center.dtype.type(self.pull) * (center[self.at] - live.flat()[self.at])
        self.rule.apply(_Replaced(live, self.at, change), snapshot, center)


class _Replaced:
    """Live weights, some of which change otherwise than is said."""

    def __init__(self, live: LiveWeights, at: Indices, change: Vector) -> None:
        self._live, self._at, self._change = live, at, change

    def flat(self) -> Vector:
        """See `LiveWeights`."""
        return self._live.flat()

    def add(self, change: Vector) -> None:
        """See `LiveWeights`."""
        change = change.copy()
        change[self._at] = self._change
        self._live.add(change)


def make_merge(name: str, weight: float) -> Merge:
    """The rule of `client.merge` and `client.merge_weight`. Raises `ConfigError`."""
    if not 0 < weight <= 1:
        raise ConfigError(f"client.merge_weight must be in (0, 1], not {weight!r}")
    if name == DELTA:
        return ElasticDelta(weight)
    if name in (PAPER_INTERPOLATION, BLEND):
        return PaperInterpolation(weight)
    raise ConfigError(f"client.merge must be {DELTA}, {PAPER_INTERPOLATION} or {BLEND}, not {name!r}")
