"""What travels between server and device, as plain data: asks, tasks, updates and decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.core.content import kind_of
from anabranch.core.errors import InvalidUpdate
from anabranch.core.kernels.chosen import loops
from anabranch.core.later import LATER_KEY
from anabranch.core.limits import DEFAULT_LIMITS, Limits
from anabranch.core.model.holdings import HeldPart, Holdings
from anabranch.core.model.mapped import PASS_VALUES, passes
from anabranch.core.model.params import Delta, Indices, ParamSpec, SparseVector, Vector
from anabranch.core.model.submodels import Submodel

NO_WIDTH = "must be above 0 and at most 1, the share of the model's units that the device can train"


@dataclass(frozen=True)
class Capability:
    """What a device says of itself. Zero means unknown.

    `memory_bytes` is its machine's, for whoever looks at the fleet. `width_max` is how much of a model it can
    train, as whoever runs it has said: a share of the units of each group, in (0, 1]; 1 is the whole model.
    """

    examples: int = 0
    memory_bytes: int = 0
    up_bps: float = 0.0
    down_bps: float = 0.0
    accelerator: str = "cpu"
    codecs: tuple[str, ...] = ("raw",)
    width_max: float = field(default=1.0, metadata=LATER_KEY)


def is_width(value: object) -> bool:
    """Whether a device may say so of itself."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


@dataclass(frozen=True)
class Ask:
    """A device applies for a task. `task_id` is made by the device, so a repeated ask is harmless.

    `holds_version` is what the device has whole, `holds_parts` what it has instead: see `holdings.py`.
    `session`, `succeeds`: which process of the device asks, see `sessions.py`; the log has nothing of it.
    """

    client_id: str
    task_id: str
    holds_version: int | None = None
    session: str = field(default="", compare=False)
    succeeds: str = field(default="", compare=False)
    holds_parts: tuple[HeldPart, ...] = field(default=(), compare=False)

    @property
    def holds(self) -> Holdings:
        """Both in one."""
        return self.holds_parts or self.holds_version


@dataclass(frozen=True)
class LocalPlan:
    """What a device shall compute: data only, never code. Zero steps means whole epochs."""

    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    learning_rate: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0


class TaskState(StrEnum):
    """`LEASED` holds a slot; an `EXPIRED` one does not, yet its late update may still count."""

    LEASED = "leased"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Task:
    """One lease: this client trains from this version until `expires_at` (seconds, server time)."""

    task_id: str
    client_id: str
    base_version: int
    granted_at: float
    expires_at: float
    lease_s: float
    seed: int
    local: LocalPlan
    uplink: str = "raw"
    submodel: Submodel | None = None
    state: TaskState = TaskState.LEASED
    progress: float = 0.0


@dataclass(frozen=True)
class Update:
    """The result of a task, decoded: `delta` against the model of `base_version` that the device had.

    `delta` is the full vector, or, with a submodel, has one value for each of its indices. It is a
    `SparseVector` where most of these values are zero. On buffers it has the values that were reached, until
    the engine makes differences of them (`buffers.py`).
    """

    update_id: str
    task_id: str
    client_id: str
    base_version: int
    examples: int
    delta: Delta
    submodel: Submodel | None = None
    local_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def where(self) -> slice | Indices:
        """Index of the covered coordinates: the maths of a strategy is written on `w[u.where]`."""
        return slice(None) if self.submodel is None else self.submodel.indices


class Verdict(StrEnum):
    """What became of an update when it arrived."""

    PUBLISHED = "published"  # folded, and a new version came of it
    HELD = "held"  # folded into a buffer, or waiting for its round
    REJECTED = "rejected"  # left the model and the strategy untouched


class Reason(StrEnum):
    """Short names for why an update or an ask was not taken; the text beside it has the numbers."""

    NONE = ""
    STALE = "stale"
    FUTURE_BASE = "future_base"
    WRONG_BASE = "wrong_base"
    OTHER_BASE = "other_base"
    BASE_GONE = "base_gone"
    DUPLICATE_TASK = "duplicate_task"
    UNKNOWN_TASK = "unknown_task"
    INVALID = "invalid"
    NO_SUBMODELS = "no_submodels"
    WRONG_SUBMODEL = "wrong_submodel"
    ROUND_OVER = "round_over"
    RUN_FINISHED = "run_finished"
    PAUSED = "paused"
    AT_CAPACITY = "at_capacity"
    LAPSED = "lapsed"
    ANOTHER_SESSION = "another_session"
    NOT_SELECTED = "not_selected"
    UNKNOWN_CLIENT = "unknown_client"
    NO_MASKS = "no_masks"
    OVER_SHARE = "over_share"
    TOO_FAST = "too_fast"
    QUARANTINED = "quarantined"


# What a device that runs our code and learns, on a link that checks its bytes, never sends.
FLAWS = frozenset(
    (Reason.INVALID, Reason.WRONG_BASE, Reason.FUTURE_BASE, Reason.NO_SUBMODELS, Reason.WRONG_SUBMODEL)
)


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict with its reasons. An expected refusal is a value, never an exception.

    `staleness` = version before the update was applied - base version (>= 0; 0 is fresh).
    `weight` is the factor the strategy's paper gives the update; None when it was rejected.
    """

    verdict: Verdict
    staleness: int = 0
    weight: float | None = None
    reason: Reason = Reason.NONE
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the server remembers of an update for ever: resending gets the same answer.

    `sha256` is its payload's digest: see `events.Payload`. It and `client_id` are empty in receipts of
    before they were kept.
    """

    update_id: str
    task_id: str
    version: int
    decision: Decision
    client_id: str = ""
    sha256: str = ""

    def conflict(self, client_id: str, task_id: str = "", sha256: str = "") -> str:
        """Why an update of the same id is another one, or nothing. What is empty is not compared."""
        known = (self.client_id, self.task_id, self.sha256)
        given = (client_id, task_id, sha256)
        named = ["of another client", "of another task", "with other bytes"]
        if self.sha256 and sha256 and kind_of(self.sha256) != kind_of(sha256):
            named[-1] = f"by its {kind_of(self.sha256)} digest, which a resend repeats"
        other = [n for n, k, g in zip(named, known, given, strict=True) if k and g and k != g]
        if not other:
            return ""
        return f"update {self.update_id!r} was decided before, {' and '.join(other)}: an id is used once"


def find_flaw(
    spec: ParamSpec,
    delta: npt.NDArray[Any] | SparseVector,
    examples: int,
    submodel: Submodel | None,
    limits: Limits = DEFAULT_LIMITS,
) -> str | None:
    """Why these values may not be applied, or None. Names the tensor; reads, never writes."""
    if not isinstance(examples, int | np.integer) or not 1 <= examples <= limits.examples_max:
        most = limits.examples_max
        return f"examples is {examples!r}: an update must come of at least 1 example, at most {most}"
    try:
        if submodel is not None:
            submodel.check(spec)
    except InvalidUpdate as error:
        return str(error)
    expected = spec.size if submodel is None else submodel.size
    shape = (delta.size,) if isinstance(delta, SparseVector) else delta.shape
    if shape != (expected,):
        return f"delta has shape {shape}, the manifest needs ({expected},)"
    values = delta.values if isinstance(delta, SparseVector) else delta
    if values.dtype.kind == "u":  # numbers of a ring: all are good ones
        return None
    if values.dtype != spec.vector_dtype:
        return f"delta is {values.dtype}, the manifest needs {spec.vector_dtype}"
    return _bad_values(spec, delta, submodel, limits.delta_abs_max)


def is_finite(values: Vector) -> bool:
    """Whether all are numbers, and none is infinite."""
    return is_within(values, float(np.finfo(values.dtype).max))


def is_within(values: Vector, most: float) -> bool:
    """Whether no magnitude is over `most`; what is not a number is."""
    if values.size <= PASS_VALUES:
        return _block_within(values, most)
    return all(_block_within(values[at], most) for at in passes(values))


def _block_within(values: Vector, most: float) -> bool:
    if values.dtype != np.float32:  # NaN passes through min and max
        return values.size == 0 or (float(values.min()) >= -most and float(values.max()) <= most)
    return loops.top(values) <= _bits(most)


@lru_cache(maxsize=64)
def _bits(most: float) -> int:
    """Those of a bound, rounded to a float32: by them magnitudes are in order, and what is none is above."""
    return int(np.float32(most).view(np.uint32))


def _bad_values(spec: ParamSpec, x: Delta, submodel: Submodel | None, abs_max: float) -> str | None:
    delta = x.values if isinstance(x, SparseVector) else x
    abs_max = min(abs_max, float(np.finfo(delta.dtype).max))  # one beyond would be infinite, and let that in
    if is_within(delta, abs_max):
        return None
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~(np.abs(delta) <= abs_max))
    first = int(x.indices[bad[0]]) if isinstance(x, SparseVector) else int(bad[0])
    first = first if submodel is None else int(submodel.places(np.array([first]))[0])
    what = "are not finite" if not np.isfinite(delta[bad]).all() else f"are over {abs_max:g}"
    return f"delta has {bad.size} values that {what}, the first in tensor {spec.name_at(first)!r}"
