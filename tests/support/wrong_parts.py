"""Parts that are wrong, each in a way of its own, for the kits to notice; another process can import them."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from anabranch.client.local import LocalServer, LocalTransport
from anabranch.client.messages import HeartbeatAnswer, PushAnswer
from anabranch.client.outbox import UpdateEntry
from anabranch.compress.quantisers import NOT_SENT
from anabranch.compress.stage import Coded, Dense, Role, StageContext, Stream, ValuesStage, take
from anabranch.core.effects import Refused
from anabranch.core.engine.strategy import AsyncStrategy, Context, Plan, Refusal, State, Step, published
from anabranch.core.errors import InvalidUpdate
from anabranch.core.limits import Limits
from anabranch.core.model.params import ParamSpec, Vector, add_scaled, dense
from anabranch.core.model.updates import Ask, Decision, LocalPlan, Reason, Task, Update, Verdict
from anabranch.server.store.base import Mark, RunInfo
from anabranch.server.store.memory import MemoryStore
from anabranch.strategies.robust.rows import Floats, Rows
from anabranch.strategies.schedulers.scheduler import OpenScheduler


@dataclass(frozen=True)
class Remembered:
    number: int = 0
    model: Vector | None = None
    table: dict[str, int] = field(default_factory=dict)


class Plain(AsyncStrategy):
    """Half of each update is added; what is wrong comes in a subclass."""

    name: ClassVar[str] = "wrong"
    state_type: ClassVar[type[Any]] = Remembered

    def init(self, vector: Vector) -> State:
        return Remembered()

    def next(self, state: State, vector: Vector) -> State:
        return replace(state, number=state.number + 1)

    def weight(self, update: Update) -> float:
        return 0.5

    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        weight = self.weight(update)
        add_scaled(vector, weight, update.delta)
        return Step(self.next(state, vector), vector, published(context.staleness, weight))


class KeepsTheModel(Plain):
    """Momentum by the model itself: none until a restart, some in the first step after one."""

    def next(self, state: State, vector: Vector) -> State:
        if state.model is not None:
            vector += np.float32(0.1) * (vector - state.model)
        return replace(state, model=vector)


class NumbersAsKeys(Plain):
    """From the fifth update on."""

    def next(self, state: State, vector: Vector) -> State:
        table = {state.number: 1} if state.number > 4 else {}
        return Remembered(state.number + 1, None, table)


class DenseAlone(Plain):
    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        added: Any = update.delta
        return Step(state, vector + np.float32(0.5) * added, published(context.staleness, 0.5))


class WritesTheUpdate(Plain):
    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        if isinstance(update.delta, np.ndarray):
            update.delta[:] *= 0.5
        return super().step(state, vector, update, context)


class Counting(Plain):
    """Four at a time; a task that is lost holds its place for ever."""

    def admit(self, state: State, ask: Ask, context: Context) -> Refusal | None:
        return Refusal(Reason.AT_CAPACITY, "four train") if state.number >= 4 else None

    def plan(self, state: State, ask: Ask, local: LocalPlan, context: Context) -> Plan:
        return Plan(replace(state, number=state.number + 1), local)

    def next(self, state: State, vector: Vector) -> State:
        return replace(state, number=max(0, state.number - 1))


class CountsInSelf(Plain):
    """A device's rank, as it was first seen: the second time all are known."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def weight(self, update: Update) -> float:
        return 1 / (1 + self.seen.setdefault(update.client_id, len(self.seen)))


class ByHash(Plain):
    def weight(self, update: Update) -> float:
        return 1 / (1 + hash(update.client_id) % 1_000_003)


class InTheOrderOfASet(Plain):
    """Of the order of a set of a hundred texts its first eight: of two processes never the same."""

    def weight(self, update: Update) -> float:
        return 1 / (1 + float("0." + "".join({f"{number:02}" for number in range(100)})[:16]))


class Normalises(Plain):
    def weight(self, update: Update) -> float:
        return 1 / float(np.linalg.norm(dense(update.delta)))


class KeepsAll(Plain):
    def next(self, state: State, vector: Vector) -> State:
        return Remembered(state.number + 1, None, {**state.table, f"u{state.number}": 1})


class ChangesWhatItHolds(Plain):
    def step(self, state: State, vector: Vector, update: Update, context: Context) -> Step:
        step = super().step(state, vector, update, context)
        held = Decision(Verdict.HELD, context.staleness, 0.5)
        return step if state.number % 2 else replace(step, vector=None, decision=held)


class GrowsBeyondNumbers(Plain):
    def weight(self, update: Update) -> float:
        return 1e38


class AnothersNumber(Plain):
    def weight(self, update: Update) -> Any:
        return np.float32(0.5)


@dataclass(frozen=True)
class Halves(ValuesStage):
    """Right: half floats of the largest value, and that."""

    name: ClassVar[str] = "halves"
    number: ClassVar[int] = 204

    def raw_max(self, k: int, n: int) -> int:
        return 4 + 2 * k

    def encode(self, value: Dense, context: StageContext) -> Coded:
        x = value.gather()
        if not np.isfinite(x).all():
            raise InvalidUpdate(NOT_SENT)
        scale = np.abs(x).max()
        codes = (x / (scale or 1)).astype("<f2")
        streams = {Role.SCALES: scale.astype("<f4").tobytes(), Role.CODES: codes.tobytes()}
        return Coded(x.size, {role: Stream.of(data) for role, data in streams.items()})

    def decode(self, coded: Coded, context: StageContext) -> Dense:
        (scale,) = np.frombuffer(take(coded, Role.SCALES, 4), "<f4")
        codes = np.frombuffer(take(coded, Role.CODES, 2 * coded.k), "<f2")
        return Dense.of(codes.astype(np.float32) * scale)


@dataclass(frozen=True)
class Unscaled(Halves):
    """A tenth of what was sent."""

    name: ClassVar[str] = "unscaled"
    number: ClassVar[int] = 201

    def decode(self, coded: Coded, context: StageContext) -> Dense:
        return Dense.of(super().decode(coded, context).gather() * np.float32(0.1))


@dataclass(frozen=True)
class Nothing(Halves):
    name: ClassVar[str] = "nothing"
    number: ClassVar[int] = 202

    def decode(self, coded: Coded, context: StageContext) -> Dense:
        return Dense.of(np.zeros_like(super().decode(coded, context).gather()))


@dataclass(frozen=True)
class Backwards(Halves):
    """The values arrive in another order."""

    name: ClassVar[str] = "backwards"
    number: ClassVar[int] = 203

    def decode(self, coded: Coded, context: StageContext) -> Dense:
        return Dense.of(super().decode(coded, context).gather()[::-1].copy())


@dataclass(frozen=True)
class UnitRows:
    """A rule that takes of each row its direction alone."""

    name: ClassVar[str] = "unit_rows"
    remembers: ClassVar[bool] = False

    def combine(self, rows: Rows, before: Floats) -> Floats:
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = rows.mean(1 / rows.distances(np.zeros(rows.size)))
        return found


@dataclass(frozen=True)
class Paces:
    """Of each device."""

    of: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LetsAllIn(OpenScheduler):
    """With tasks as the strategy has them; what is wrong comes in others."""

    name: ClassVar[str] = "lets_all_in"


@dataclass(frozen=True)
class ChangesPaces(OpenScheduler):
    """The state that it was given, which may be that of a snapshot under way."""

    name: ClassVar[str] = "changes_paces"
    state_type: ClassVar[type[Any]] = Paces

    def init(self) -> Any:
        return Paces()

    def plan(self, state: Any, ask: Ask, plan: Plan, context: Context) -> Plan:
        state.of[ask.client_id] = context.version
        return Plan(state, plan.local, plan.uplink)


@dataclass(frozen=True)
class OtherRates(OpenScheduler):
    name: ClassVar[str] = "other_rates"

    def plan(self, state: Any, ask: Ask, plan: Plan, context: Context) -> Plan:
        return Plan(state, replace(plan.local, learning_rate=1.0), plan.uplink)


@dataclass(frozen=True)
class LetsNobodyIn(OpenScheduler):
    name: ClassVar[str] = "lets_nobody_in"

    def admit(self, state: Any, ask: Ask, context: Context) -> Refusal | None:
        return Refusal(Reason.NOT_SELECTED, "no")


@dataclass(frozen=True)
class WaitsForTheFirst(OpenScheduler):
    name: ClassVar[str] = "waits_for_the_first"

    def admit(self, state: Any, ask: Ask, context: Context) -> Refusal | None:
        return (
            None if ask.client_id == min(context.clients) else Refusal(Reason.NOT_SELECTED, "the first one")
        )


ADMITTED = itertools.count()


@dataclass(frozen=True)
class EverySecondAsk(OpenScheduler):
    name: ClassVar[str] = "every_second_ask"

    def admit(self, state: Any, ask: Ask, context: Context) -> Refusal | None:
        return None if next(ADMITTED) % 2 else Refusal(Reason.NOT_SELECTED, "the next one")


class Local(LocalTransport):
    """A device's way; what is wrong comes in a subclass."""


class AnswersNothing(Local):
    def push(self, entry: UpdateEntry) -> Any:
        super().push(entry)


class Pickles(Local):
    """As it goes over a socket: a copy is made as pickle makes one."""

    def push(self, entry: UpdateEntry) -> PushAnswer:
        return super().push(deepcopy(entry))


class BeatsInVain(Local):
    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        return super().heartbeat(task_id, 0.0)


class ItsOwnTasks(Local):
    def ask(self, ask: Ask, spec: ParamSpec) -> Task | Refused:
        return super().ask(replace(ask, task_id=f"mine-{ask.task_id}"), spec)


class OneAnswer(Local):
    """The answer of the latest call lies in one place, where the first calls of two threads meet."""

    def __init__(self, server: LocalServer, client_id: str) -> None:
        super().__init__(server, client_id)
        self._meet, self._there, self._answer = threading.Barrier(2), threading.Barrier(2), None

    def fetch(self, *args: Any, **more: Any) -> Any:
        return self._taken(super().fetch(*args, **more))

    def query_upload(self, update_id: str) -> Any:
        return self._taken(super().query_upload(update_id))

    def _taken(self, answer: Any) -> Any:
        self._answer = answer
        with suppress(threading.BrokenBarrierError):
            self._meet.wait()
            found = self._answer
            self._there.wait()
            self._meet.abort()
            return found
        return answer


class DropsShort(Local):
    def drop(self, task_id: str, why: str, diverged: bool = False) -> None:
        if diverged:
            raise TypeError("drop() takes 3 positional arguments but 4 were given")
        super().drop(task_id, why)


class OneConnection(Local):
    """Its connection is cut while `dead` is above 0; a failure has it opened anew."""

    dead: ClassVar[int] = 0

    def heartbeat(self, task_id: str, progress: float) -> HeartbeatAnswer:
        if OneConnection.dead:
            self.fails()
            raise ConnectionError("broken pipe")
        return super().heartbeat(task_id, progress)

    def fails(self) -> None:
        OneConnection.dead -= 1


class DeadConnection(OneConnection):
    def fails(self) -> None:
        pass


class Sends:
    """A tracker whose thread goes on until somebody says otherwise."""

    name: ClassVar[str] = "sends"
    over: ClassVar[threading.Event] = threading.Event()

    def start(self, run: Any) -> None:
        threading.Thread(target=self.over.wait).start()

    def metrics(self, version: int, values: Any) -> None:
        pass

    def finish(self, result: Any) -> None:
        pass


class Keeps(MemoryStore):
    """In a place, whole after each call."""

    def __init__(self, place: dict[str, Any]) -> None:
        super().__init__(Limits(inline_bytes_max=64))
        self.place = place
        self.books, self.blobs.payloads = deepcopy(place.get("kept", (self.books, self.blobs.payloads)))

    def keep(self) -> None:
        self.place["kept"] = deepcopy((self.books, self.blobs.payloads))

    def start(self, info: RunInfo) -> RunInfo:
        found = super().start(info)
        self.keep()
        return found

    def append(self, *args: Any) -> list[int | None]:
        found = super().append(*args)
        self.keep()
        return found

    def acknowledge(self, mark: Mark) -> None:
        super().acknowledge(mark)
        self.keep()


class KeepsAtItsEnd(Keeps):
    def append(self, *args: Any) -> list[int | None]:
        return MemoryStore.append(self, *args)

    def acknowledge(self, mark: Mark) -> None:
        MemoryStore.acknowledge(self, mark)

    def close(self) -> None:
        self.keep()
        super().close()


class NeverRenews(Keeps):
    def renew(self) -> None:
        raise NotImplementedError
