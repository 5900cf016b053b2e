"""Runs with every fault on: one seed, one run; strategies in turn, all else as the seed draws it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from fleets import config

from anabranch.core import events as ev
from anabranch.core.config.faults import length_s
from anabranch.core.config.tables import Config, merge
from anabranch.core.errors import StoreFull
from anabranch.core.rng import rank
from anabranch.core.snapshot import state_digest
from anabranch.simulation.promises import Promises
from anabranch.simulation.run import Simulation, open_simulation
from anabranch.simulation.world import Order
from anabranch.strategies.robust.registry import BUILT_IN as RULES

T = TypeVar("T")

STRATEGIES = ["fedasync", "fedavg", "fedbuff", "fedprox", "qafel", "asyncdrop", "teasq", "teasq_drop"]
UNTIL_S, ENDS_S = 60.0, 155.0
ALL = {
    "loss": 0.05,
    "duplication": 0.05,
    "reordering": 0.05,
    "delay": 0.1,
    "delay_s": 2.0,
    "timeout_s": 4.0,
    "partition_every_s": 30.0,
    "swizzle_every_s": 25.0,
    "device_crash_every_s": 60.0,
    "server_crash_every_s": 20.0,
    "server_down_s": 3.0,
    "commit_s": 0.05,
    "skew_s": 100.0,
    "drift": 0.05,
    "until_s": UNTIL_S,
}
SHAPES = ["fixed", "uniform", "exponential", "lognormal", "pareto"]
ROUNDS = ("fedavg", "fedprox")
GATHERING = [name for name in STRATEGIES if name not in ("fedasync", "asyncdrop")]  # they may have a rule
UPLINKS = [
    "auto",
    "raw",
    "ef(0.9)|topk(0.1)|int8|gaps|zstd",
    "ef(0.9)|threshold(0.1,4)|bf16|gaps|zstd",
    "int4(256)|zstd",
    "mask(0.2)|int8",
]
DOWNLINKS = ["auto", "raw", "log(1,8)", "log(0.5)", "int8|zstd"]
# Rounds that ask all devices, since whom a round of few asks is left to chance; places for many at a time;
# a buffer that a few devices fill.
MANY_PLACES: dict[str, Callable[[int], dict[str, Any]]] = {
    "fedavg": lambda clients: {"clients_per_round": clients * 4 // 5},
    "fedprox": lambda clients: {"clients_per_round": clients * 4 // 5},
    "qafel": lambda clients: {"buffer_size": max(2, clients // 5)},
    "teasq": lambda _: {"concurrency_fraction": 0.5, "cache_size": 3},
    "teasq_drop": lambda _: {"concurrency_fraction": 0.5, "cache_size": 3},
}
MADE_MIN = 3  # versions, in the roughest run
ATTACKS = ["none", "none", "nan", "scale", "flood"]
ORDERS_EVERY_S, ORDERS_LAST_S, OPERATOR_RETRIES_S = 15.0, 5.0, 1.0


@dataclass(frozen=True)
class Proved:
    """What a run came to."""

    digests: tuple[str, str, str]
    events: int
    versions: int
    applied: int
    restarts: int
    faults: dict[str, int]
    orders: int
    barred: int


def rough(seed: int, clients: int = 50, **faults: Any) -> Config:
    """Everything goes wrong, and what the seed says besides."""
    draw = partial(_drawn, seed)
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    rule = draw("rule", ("none", *RULES)) if strategy in GATHERING else "none"
    # Values of every size are for a rule; whoever sends none at all is found out in any case.
    attack = draw("attack", [a for a in ATTACKS if rule != "none" or a in ("none", "nan")])
    params = MANY_PLACES[strategy](clients) if strategy in MANY_PLACES else {}
    base = config(
        strategy,
        run={"seed": seed, "virtual_s_max": ENDS_S},
        fleet={
            "clients": clients,
            "examples_per_client": 32,
            "step_time_s": 3.5,
            "up_mbps": 1.0,
            "availability": draw("availability", [1.0, 1.0, 1.0, 0.8]),
            "availability_period_s": 40.0,
            "dropout": draw("dropout", [0.0, 0.0, 0.1]),
            "attackers": 0.0 if attack == "none" else 0.1,
            "attack": "nan" if attack == "none" else attack,
        },
        server={
            "lease_s": 20.0,
            "lease_min_s": 8.0,
            "concurrency": 0 if strategy in ROUNDS else draw("concurrency", [0, 0, clients // 3]),
            "staleness_max": draw("staleness", [0, 0, 20]),
            "snapshot_every_updates": 40,
        },
        robust={"rule": rule, "flaws_max": 3, "clip": draw("clip", ["auto", 0.0, 3.0])},
        uplink={"codec": draw("uplink", UPLINKS)},
        downlink={"codec": draw("downlink", DOWNLINKS)},
        client={"retry_cap_s": 8.0},
        faults={**ALL, "delay_shape": draw("shape", SHAPES), **faults},
    )
    return merge([("base", base.to_json()), ("strategy", {"strategy": params})])


def restored(settings: Config, snapshot_every_updates: int) -> Config:
    """The same with a server that dies often, and that a snapshot is there of when it comes back."""
    more = {
        "server": {"snapshot_every_updates": snapshot_every_updates},
        "faults": {"server_crash_every_s": 5.0},
    }
    return merge([("settings", settings.to_json()), ("restored", more)])


class Note(Protocol):
    """Somebody who looks on at a run."""

    def end(self) -> None:
        """The run is over."""
        ...


def prove(settings: Config, every: int = 1, notes: Sequence[Callable[[Simulation], Note]] = ()) -> Proved:
    """Run, with every promise looked at after every event; operators meddle. `notes`: who else looks on."""
    with open_simulation(settings) as simulation:
        promises, operator = Promises(simulation, every), Operator(simulation, settings.run.seed)
        taken = [take(simulation) for take in notes]
        simulation.run()
        promises.check_end(simulation.clock.now - settings.faults.until_s)
        for note in taken:
            note.end()
        assert not operator.open, "an order was never answered"
        result, engine = simulation.result(0.0), simulation.engine
        assert simulation.faults is not None
        return Proved(
            digests=(result.model_sha256, result.journal_sha256, state_digest(engine)),
            events=promises.checker.events,
            versions=engine.version,
            applied=engine.counters.applied,
            restarts=promises.restarts,
            faults=dict(simulation.faults.counts + promises.counts),
            orders=operator.given,
            barred=len(engine.guard.quarantined),
        )


def prove_twice(seed: int) -> Proved:
    """The run of a seed, and the same again: to the bit. For a worker process."""
    try:
        proved = prove(rough(seed))
        again = prove(rough(seed), every=1000)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    assert proved == again, f"seed {seed} has two histories"
    assert proved.versions > MADE_MIN, f"seed {seed} made {proved.versions} versions"
    return proved


class Operator:
    """Pauses the run, puts devices into quarantine, and takes both back before the faults are over.

    One order at a time: what has no answer is given again. `open`: how many there are without an answer. What
    was taken back is so again after the server has lost the newest part of its log.
    """

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.given = self.open = 0
        self._taken_back: list[Order] = []
        simulation.world.taken_back.append(lambda _, __: self._look_again())
        self._clock, self._server, self._seed = simulation.clock, simulation.server, seed
        self._names = [device.client_id for device in simulation.devices]
        self._plan(0)

    def _plan(self, number: int) -> None:
        """The next episode: an order, and some time later the opposite."""
        at_s = self._clock.now + self._lasts_s("gap", number, ORDERS_EVERY_S)
        if at_s >= UNTIL_S:
            return
        do, undo = self._orders(number)
        takes_s = self._lasts_s("length", number, ORDERS_LAST_S)

        def later() -> None:
            at_s = max(self._clock.now, min(UNTIL_S, self._clock.now + takes_s))
            self._clock.at(at_s, lambda: self._give(undo, lambda: self._undone(undo, number)))

        self._clock.at(at_s, lambda: self._give(do, later))

    def _undone(self, undo: Order, number: int) -> None:
        self._taken_back.append(undo)
        self._plan(number + 1)

    def _look_again(self) -> None:
        for undo in self._taken_back:
            self._clock.at(self._clock.now, partial(self._give, undo, lambda: None))

    def _orders(self, number: int) -> tuple[Order, Order]:
        if rank(self._seed, "operator", "pause", number) < 0.5:
            return ev.Paused, ev.Resumed
        name = _drawn(self._seed, f"client {number}", self._names)
        return (lambda now: ev.Quarantined(now, name, "a drill")), lambda now: ev.Released(now, name)

    def _give(self, order: Order, then: Callable[[], None]) -> None:
        """Until it is answered, and then go on. A late copy comes before the next order, and is no harm."""
        self.given, self.open = self.given + 1, self.open + 1
        answered: list[object] = []

        def ask() -> None:
            if not answered:
                self._server.order(order, heard)
                self._clock.at(self._clock.now + OPERATOR_RETRIES_S, ask)

        def heard(effects: object) -> None:
            if isinstance(effects, StoreFull):
                return
            answered.append(effects)
            if len(answered) == 1:
                self.open -= 1
                then()

        ask()

    def _lasts_s(self, what: str, number: int, mean_s: float) -> float:
        return length_s("exponential", mean_s, rank(self._seed, "operator", what, number))


def _drawn(seed: int, what: str, choices: Sequence[T]) -> T:
    """One of these, by the seed."""
    return choices[int(rank(seed, "rough", what) * len(choices))]
