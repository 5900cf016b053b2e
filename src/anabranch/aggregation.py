"""`aggregate`: a strategy's arithmetic in one call, through the real engine, without a network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from anabranch.compress.registry import MASKING
from anabranch.core import events as ev
from anabranch.core.config.tables import Config, StrategyTable, merge
from anabranch.core.effects import Decided, Effect, Refused
from anabranch.core.engine.cohorts import Cohorts
from anabranch.core.engine.settings import EngineSettings
from anabranch.core.engine.strategy import Strategy
from anabranch.core.errors import ConfigError, InvalidUpdate
from anabranch.core.model.chains import RAW
from anabranch.core.model.params import ParamSpec, Vector
from anabranch.core.model.submodels import Coordinates, Submodel
from anabranch.core.model.updates import Ask, Capability, find_flaw
from anabranch.core.model.updates import Update as CoreUpdate
from anabranch.core.rng import stream
from anabranch.core.secagg.ring import SEED_BYTES, Numbers
from anabranch.core.secagg.sums import mask_sum
from anabranch.host.build import WHOLE, Blueprint
from anabranch.host.parts import ENGINE_PARTS
from anabranch.host.run import NoLine, Run
from anabranch.host.secagg import mask_sum_arrived
from anabranch.strategies.fedavg import FedAvg
from anabranch.strategies.phased import Phased
from anabranch.strategies.scheduled import SCHEDULER_KEY, unscheduled
from anabranch.strategies.teasq import Teasq
from anabranch.support.code import let_in
from anabranch.support.shelf import ScratchShelf

Array = npt.NDArray[Any]

# What the fields of an update are that are no arrays, and how that is said.
KINDS: tuple[tuple[str, type[Any], str], ...] = (
    ("client", str, "text"),
    ("task", str, "text"),
    ("base_version", Integral, "a whole number"),
)
NO_NOISE = bytes(32)  # the key of a keeper's noise, where it adds none


@dataclass(frozen=True)
class Update:
    """What a device sends back.

    Either `delta` (trained minus base) or `model` (the trained weights), by tensor name. `submodel`
    maps a tensor's name to the sorted flat indices (C order) that the update covers; the tensor then
    has one value for each index. A tensor that `submodel` does not name is whole if it was sent,
    and not covered if it was not.
    """

    client: str
    task: str
    base_version: int
    examples: int = 1
    delta: Mapping[str, Array] | None = None
    model: Mapping[str, Array] | None = None
    submodel: Mapping[str, Array] | None = None


@dataclass(frozen=True)
class AggregationStep:
    """What became of one update: `decision` is `published`, `held` or `rejected`, for a `reason` if rejected.

    `version` is the newest one after it, `staleness` how many versions there were since the update's base,
    and `weight` the factor that the strategy gives it; None of a rejected one.
    """

    version: int
    decision: str
    staleness: int
    weight: float | None
    reason: str


@dataclass(frozen=True)
class Aggregation:
    """The model after all updates, its version, and one step for each update, in their order."""

    model: dict[str, Array]
    version: int
    steps: tuple[AggregationStep, ...]


def aggregate(
    strategy: str,
    params: Mapping[str, Any],
    model: Mapping[str, Array],
    updates: Iterable[Update],
    robust: Mapping[str, Any] | None = None,
    secagg: Mapping[str, Any] | None = None,
) -> Aggregation:
    """Apply updates one after the other to version 0, `model`, by a strategy of this name and `params`.

    Any version that earlier updates of the same call have made may be an update's base. The clock
    does not advance, so no deadline passes, and every client of the call is selected for every
    round. An update whose values cannot be used is a rejected step. `robust` has keys of the
    `[robust]` table: the rule that replaces the mean, and the clip.

    `secagg` has keys of the `[secagg]` table: the model is then what a run with masked sums would have
    made. Updates are cut, rounded at random (the same way at every call) and masked as devices do it.
    Keepers of the names given take the masks off each sum as soon as it is full.

    Tensors are arrays of numpy or torch; what comes back are arrays of numpy, of the model's shapes and
    dtypes.

    Raises `ConfigError` for an unknown strategy, parameter or rule; `InvalidUpdate` for a model that
    is no dict of arrays, holds no float tensor or values that are not finite, and for an update whose
    fields are of the wrong type, or that has both or neither of `delta` and `model`.
    """
    _check_call(strategy, params, updates)
    tables = {"robust": robust or {}, "secagg": secagg or {}}
    config = merge([("aggregate", WHOLE), ("tables", tables)])
    config = replace(config, strategy=StrategyTable(strategy, params))
    let_in(config, ENGINE_PARTS)
    return _Driver(config, model, list(updates)).run()


def _check_call(strategy: Any, params: Any, updates: Any) -> None:
    """Raises `ConfigError` and `InvalidUpdate`, naming the argument."""
    if not isinstance(strategy, str):
        what = f"a {type(strategy).__name__}"
        raise ConfigError(
            f"strategy is {what}: give its name, such as 'fedasync', and its parameters as params"
        )
    if not isinstance(params, Mapping):
        raise ConfigError(
            f"params is a {type(params).__name__}: give a dict of the strategy's, {{}} for none"
        )
    if not isinstance(updates, Iterable):
        raise InvalidUpdate(f"updates is a {type(updates).__name__}: give a list of Update(...)")


def _check_fields(u: Any) -> None:
    if not isinstance(u, Update):
        raise InvalidUpdate(
            f"updates has a {type(u).__name__}: give Update(client, task, base_version, ...) each"
        )
    for name, kind, what in KINDS:
        value = getattr(u, name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InvalidUpdate(f"update of task {u.task!r}: {name} must be {what}, not {value!r}")
    if (u.delta is None) == (u.model is None):
        raise InvalidUpdate(f"update of task {u.task!r}: give either delta or model")
    for name in ("delta", "model", "submodel"):
        value = getattr(u, name)
        if not isinstance(value, Mapping | None):
            what = type(value).__name__
            raise InvalidUpdate(
                f"update of task {u.task!r}: {name} is a {what}: give a dict of arrays by name"
            )


def _array(name: str, given: Any) -> Array:
    """Of numpy, or of torch wherever it lies. Raises `InvalidUpdate`."""
    try:
        return np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    except (TypeError, ValueError) as error:
        raise InvalidUpdate(
            f"tensor {name!r} is a {type(given).__name__} that is no array: {error}"
        ) from error


def _for_all(strategy: Strategy, updates: Sequence[Update]) -> Strategy:
    """A strategy that lets everybody take part: here the updates say who does."""
    strategy = unscheduled(strategy)
    if isinstance(strategy, FedAvg):
        clients = len({u.client for u in updates})
        over = max(strategy.over_selection, clients / strategy.clients_per_round)
        return replace(strategy, over_selection=over)
    if isinstance(strategy, Phased):
        opened = [_opened(part, updates) for part in strategy.parts]
        tables: list[Mapping[str, Any]] = [
            {**{key: value for key, value in table.items() if key != SCHEDULER_KEY}, **own}
            for table, own in zip(strategy.phases, opened, strict=True)
        ]
        return replace(strategy, phases=tables)
    if isinstance(strategy, Teasq):
        return replace(strategy, concurrency_fraction=float(max(1, len(updates))))
    return strategy


def _opened(part: Any, updates: Sequence[Update]) -> dict[str, Any]:
    """The parameters of a phase's strategy that let everybody take part."""
    opened, part = _for_all(part, updates), unscheduled(part)
    names = [f.name for f in fields(part)]
    return {name: getattr(opened, name) for name in names if getattr(opened, name) != getattr(part, name)}


class _Masks:
    """What devices and keepers do of masked sums; `seeds`: of each update, one a keeper, in their order."""

    def __init__(self, cohorts: Cohorts) -> None:
        self.cohorts, self.terms = cohorts, cohorts.terms
        self.seeds: dict[str, list[bytes]] = {}

    def hide(self, update_id: str, delta: Vector) -> Numbers:
        """A device's: what it sends."""
        seeds = self.seeds[update_id] = [os.urandom(SEED_BYTES) for _ in self.terms.keepers]
        return self.terms.ring.sent(delta, stream(0, "rounding", update_id).random(delta.size), seeds)

    def answers(self) -> Iterator[ev.MaskSumArrived]:
        """The keepers': for each sum that waits."""
        for place, keeper in enumerate(self.terms.keepers):
            for cohort in self.cohorts.wanted(keeper):
                seeds = [(self.seeds[member.update_id][place], member.weight) for member in cohort.members]
                numbers = mask_sum(self.terms, seeds, NO_NOISE)
                yield mask_sum_arrived(self.terms, 0.0, cohort.number, keeper, numbers)[0]


class _Driver:
    """Opens every task at the version it names, then pushes the updates in their order."""

    def __init__(self, config: Config, model: Mapping[str, Array], updates: Sequence[Update]) -> None:
        given: Any = model
        if not isinstance(given, Mapping):
            raise InvalidUpdate(f"model is a {type(given).__name__}: give a dict of arrays by name")
        tensors = {name: _array(name, a) for name, a in model.items()}
        self.spec = ParamSpec.of(tensors)
        if not self.spec.size:
            raise InvalidUpdate("model: there is no float tensor to aggregate")
        for u in updates:
            _check_fields(u)
        self.frozen = {name: a.copy() for name, a in self.spec.frozen(tensors).items()}
        self.updates = updates
        settings = EngineSettings(
            tasks_per_client=max(1, len(updates)), lease_s=np.inf, any_submodel=True, clip=config.robust.clip
        )
        if not np.isfinite(self.spec.flatten(tensors)).all():
            raise InvalidUpdate("model: there are values that are not finite")
        blueprint = Blueprint.of(config, self.spec, masks=config.secagg.on, shelf=ScratchShelf())
        strategy = _for_all(blueprint.strategy, updates)
        if config.secagg.on:
            settings = settings.masked(config)
        self.engine = replace(blueprint, strategy=strategy, settings=settings).engine(tensors)
        self.masks = None if self.engine.cohorts is None else _Masks(self.engine.cohorts)
        self.host = Run(self.engine, NoLine())
        self.bases: dict[int, Vector] = {}
        self.wanted = {u.base_version for u in updates}
        self.refused: dict[str, Refused] = {}

    def run(self) -> Aggregation:
        capability = Capability(codecs=(RAW, MASKING))
        for client in dict.fromkeys(u.client for u in self.updates):
            self._handle(ev.Enrolled(0.0, client, capability))
        self._open_tasks()
        steps = tuple(self._push(i, u) for i, u in enumerate(self.updates))
        return Aggregation(self.spec.unflatten(self.engine.vector, self.frozen), self.engine.version, steps)

    def _handle(self, event: ev.Event) -> list[Effect]:
        return self.host.take(event).effects

    def _open_tasks(self) -> None:
        """Ask for every task that starts from the version reached now."""
        version = self.engine.version
        if version in self.wanted and version not in self.bases:
            self.bases[version] = self.engine.vector.copy()
        for u in self.updates:
            known = u.task in self.engine.ledger.tasks or u.task in self.refused
            if u.base_version == version and not known and not self.engine.ledger.receipt_of_task(u.task):
                self._ask(u)

    def _ask(self, u: Update) -> None:
        for effect in self._handle(ev.TaskAsked(0.0, Ask(u.client, u.task))):
            if isinstance(effect, Refused):
                self.refused[u.task] = effect

    def _push(self, number: int, u: Update) -> AggregationStep:
        before = self.engine.version
        if u.base_version > before or u.base_version < 0:  # never granted: let the engine say so
            self._ask(u)
        if (refused := self.refused.get(u.task)) is not None:
            return AggregationStep(before, "rejected", 0, None, f"{refused.reason}: {refused.detail}")
        event = self._event(number, u)
        decided = next(e for e in self._handle(event) if isinstance(e, Decided))
        if self.masks is not None:
            for answer in self.masks.answers():
                self._handle(answer)
        if self.engine.version != before:
            self._open_tasks()
        d = decided.receipt.decision
        reason = f"{d.reason}: {d.detail}" if d.reason else ""
        return AggregationStep(self.engine.version, d.verdict.value, d.staleness, d.weight, reason)

    def _event(self, number: int, u: Update) -> ev.UpdateArrived:
        delta, submodel, flaw = np.empty(0, self.spec.vector_dtype), None, ""
        try:
            delta, submodel = self._decode(u)
            flaw = find_flaw(self.spec, delta, u.examples, submodel) or ""
            if self.masks is not None and submodel is None and not flaw:
                delta = self.masks.hide(f"update-{number}", delta)
        except (InvalidUpdate, ValueError, TypeError) as error:
            flaw = str(error)
        core = CoreUpdate(
            f"update-{number}", u.task, u.client, int(u.base_version), u.examples, delta, submodel
        )
        return ev.UpdateArrived(0.0, core, ev.Payload("", delta.nbytes), flaw)

    def _decode(self, u: Update) -> tuple[Vector, Submodel | None]:
        """The flat delta against the base, and the flat coordinates of a sub-model."""
        values = u.delta if u.delta is not None else u.model
        assert values is not None
        where = self._coordinates(u, values)
        parts = [self._part(name, values, i) for name, i in where.items()]
        delta = np.concatenate(parts).astype(self.spec.vector_dtype)
        indices = np.concatenate(list(where.values()))
        if u.model is not None:
            base = self.bases.get(u.base_version)
            if base is None:
                raise InvalidUpdate(f"base_version {u.base_version} does not exist")
            delta = delta - base[indices]
        whole = u.submodel is None
        return delta, None if whole else Coordinates(indices)

    def _coordinates(self, u: Update, values: Mapping[str, Array]) -> dict[str, npt.NDArray[np.int64]]:
        """The vector's coordinates that each sent tensor covers."""
        submodel = u.submodel or {}
        if foreign := sorted({*values, *submodel} - {t.name for t in self.spec.tensors}):
            raise InvalidUpdate(f"tensor {foreign[0]!r} is not in the model")
        found = {}
        for name, s in self.spec.slices.items():
            if name in submodel:
                local = _array(name, submodel[name])
                if local.size and local.dtype.kind not in "iu":
                    raise InvalidUpdate(f"submodel of tensor {name!r}: indices must be integers")
                if local.size and not (local.min() >= 0 and local.max() < s.stop - s.start):
                    raise InvalidUpdate(
                        f"submodel of tensor {name!r}: indices must be within 0..{s.stop - s.start - 1}"
                    )
                found[name] = s.start + local.reshape(-1).astype(np.int64)
            elif name in values:
                found[name] = np.arange(s.start, s.stop)
            elif u.submodel is None:
                raise InvalidUpdate(f"tensor {name!r} is missing: send every float tensor, or a submodel")
        if not found:
            raise InvalidUpdate("the update covers no coordinate")
        return found

    def _part(self, name: str, values: Mapping[str, Array], coordinates: npt.NDArray[np.int64]) -> Array:
        if name not in values:
            raise InvalidUpdate(f"tensor {name!r} is in the submodel but was not sent")
        part = _array(name, values[name])
        if part.dtype.kind not in "fiub":
            raise InvalidUpdate(f"tensor {name!r} is {part.dtype}: real numbers are needed")
        expected = next(t.shape for t in self.spec.tensors if t.name == name)
        if coordinates.size == int(np.prod(expected, dtype=np.int64)) and part.shape == expected:
            return part.reshape(-1)
        if part.size != coordinates.size or (part.ndim != 1 and part.shape != expected):
            raise InvalidUpdate(
                f"tensor {name!r} has shape {part.shape}, needed is {expected} or ({coordinates.size},)"
            )
        return part.reshape(-1)
