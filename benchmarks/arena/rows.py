"""Who meets in the arena: strategies with the grid of each, and what their updates travel by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.arena.cells import EVALUATIONS, Cell
from benchmarks.arena.endings import (
    HORIZON,
    Closing,
    CosineBuffer,
    CosineRounds,
    CosineTasks,
    DecayingBuffer,
    let_in,
)
from benchmarks.arena.tuning import Axis, Grid, Setting
from benchmarks.studies import Point, Tables

HORIZON_S = 200.0  # of virtual time: some 37 rounds of devices of which the slowest takes 0.5 s a step
CAP = 20  # devices that train at a time, of those that do not say otherwise
RAW, SPARSE, OWN, UP = "raw", "sparse", "own", "own up"
CHAINS: dict[str, Tables] = {
    RAW: {},
    SPARSE: {
        "uplink": {"codec": "ef(0.9)|topk(0.1)|int8|gaps|zstd"},
        "downlink": {"codec": "log(1)"},
    },
    OWN: {},
    UP: {"downlink": {"codec": "log(1)"}},
}


@dataclass(frozen=True)
class Row:
    """A strategy with a chain.

    `times`: how many horizons its runs have. `at_once`: devices that train at a time, 0: all. `like`: the
    row at whose best point it is run, without a tuning of its own; empty: it is tuned.
    """

    strategy: str
    chain: str
    grid: Grid
    params: Mapping[str, Any]
    times: float = 1.0
    at_once: int = CAP
    like: str = ""

    @property
    def name(self) -> str:
        """As it is asked for."""
        return f"{self.strategy}/{self.chain}"

    def grid_in(self, cell: Cell) -> Grid:
        """Its grid with the learning rates that a cell's model bears."""
        share = RATES_OF.get(cell.workload, 1.0)
        return Grid(
            tuple(
                replace(axis, values=tuple(share * value for value in axis.values))
                if axis.setting == RATES.setting
                else axis
                for axis in self.grid.axes
            )
        )

    def point(self, cell: Cell, setting: Setting, share: float = 1.0) -> Point:
        """A run of it in a cell, as long as this share of its time."""
        let_in(self.params.get("name", ""))
        horizon_s = HORIZON_S * self.times * share
        until = {"virtual_s_max": horizon_s, "evaluate_every_s": HORIZON_S * self.times / EVALUATIONS}
        tables: dict[str, Any] = {
            "run": until,
            "server": {"concurrency": self.at_once},
            "strategy": dict(self.params),
        }
        if cell.faults == "leavers" and "deadline_s" in self.params:
            tables["strategy"]["deadline_s"] = DEADLINES_S[self.chain][cell.links]
        if HORIZON in self.params:
            tables["strategy"][HORIZON] = horizon_s
        for axis, value in zip(self.grid.axes, setting, strict=True):
            *way, key = axis.setting.split(".")
            table = tables
            for name in way:
                table[name] = table = dict(table.get(name, {}))
            table[key] = round(value) if axis.whole else value
        return Point(self.name, (*cell.tables, CHAINS[self.chain], tables), {})


RATES = Axis("client.learning_rate", (0.1, 0.2, 0.4, 0.8))
# Of them, what a workload begins with: at 0.4 and more every row diverged on the convolution.
RATES_OF = {"fashion-mnist": 0.5}


def _whole(key: str, *values: float) -> Axis:
    return Axis(f"strategy.{key}", values, least=1, most=80, whole=True)


def _values(key: str, *values: float, most: float = 1e9) -> Axis:
    return Axis(f"strategy.{key}", values, most=most)


def _rows(
    strategy: str,
    beside: Axis,
    *chains: str,
    times: float = 1.0,
    at_once: int = CAP,
    **params: Any,
) -> list[Row]:
    """A row for each chain; `name` among the parameters is the strategy's own where the row's is another."""
    named = {"name": strategy} | params
    return [Row(strategy, chain, Grid((RATES, beside)), named, times, at_once) for chain in chains]


# Where devices leave. A round would wait for them until their leases have ended, and come to nothing.
# The slowest takes 5 s; on a narrow link some 4 more for whole values, and no more than one for sparse ones.
DEADLINES_S = {RAW: {"compute": 6.0, "link": 12.0}, SPARSE: {"compute": 6.0, "link": 6.5}}
ROUNDS: dict[str, Any] = {"name": "fedavg", "over_selection": 1.0, "deadline_s": 0.0}
COHORTS = Axis("strategy.clients_per_round", (10, 20, 40), least=1, most=100, whole=True)
SIZES = (5, 10, 20)
# As a published reimplementation of DiLoCo sets them; the device's rate is tuned beside them.
NESTEROV: dict[str, Any] = {"outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.9}}
# By a look at the tuning seeds.
FREE: dict[str, Any] = {"outer": {"name": "schedule_free", "lr": 3.0, "momentum": 0.8}}
GROWTHS = _values("growth", 0.01, 0.02, 0.04, most=0.9)

TUNED = [
    *_rows("fedavg", COHORTS, RAW, SPARSE, at_once=0, **ROUNDS),
    *_rows("fedavg, Nesterov", COHORTS, RAW, SPARSE, at_once=0, **ROUNDS, **NESTEROV),
    *_rows("fedbuff, Nesterov", _whole("buffer_size", *SIZES), RAW, SPARSE, name="fedbuff", **NESTEROV),
    *_rows("fedasync", _values("alpha", 0.2, 0.4, 0.8, most=1.0), RAW, SPARSE),
    *_rows("fedbuff", _whole("buffer_size", *SIZES), RAW, SPARSE),
    *_rows("fedbuff, all at once", _whole("buffer_size", 10, 20, 40), RAW, SPARSE, at_once=0, name="fedbuff"),
    *_rows("annealed", GROWTHS, RAW, SPARSE, buffer_size=5),
    *_rows("annealed from 10", GROWTHS, RAW, name="annealed", buffer_size=10),
    *_rows("annealed, Nesterov", _whole("buffer_size", 10, 20, 40), RAW, name="annealed", **NESTEROV),
    *_rows("annealed, schedule-free", _whole("buffer_size", *SIZES), RAW, SPARSE, name="annealed", **FREE),
    *_rows("teasq", _whole("cache_size", *SIZES), RAW, SPARSE, cap=CAP, kept=1.0, bits=32),
    *_rows("teasq, its schedule", _whole("cache_size", *SIZES), OWN, name="teasq", cap=CAP),
    *_rows("qafel", _whole("buffer_size", *SIZES), OWN),
    *_rows("port", _whole("buffer_size", *SIZES), RAW, SPARSE),
    *_rows("fadas", _values("server_lr", 0.01, 0.03, 0.1), RAW, SPARSE, buffer_size=10),
    *_rows("ca2fl", _whole("buffer_size", *SIZES), RAW, SPARSE),
    *_rows("ace", _values("server_lr", 0.03, 0.1, 0.3), RAW),
    *_rows("aced", _values("server_lr", 0.03, 0.1, 0.3), RAW, staleness_max=300),
    *_rows("fedasmu", _values("scale", 3.0, 10.0, 30.0), RAW),
    *_rows("fedfa", _whole("window_size", *SIZES), RAW),
    *_rows("fedcompass", _values("alpha", 0.3, 0.6, 0.9, most=1.0), RAW, at_once=0),
    *_rows("delayed_nesterov", _values("server_lr", 0.1, 0.3, 1.0), RAW, buffer_size=10),
]
# Schedulers, each at its own most important setting; sizes between those that the rows above are tuned to.
EQUAL_TIME: dict[str, Any] = {"scheduler": {"name": "equal_time"}}
TASK_S = _values("scheduler.task_s", 1.25, 2.5, 5.0)
FEDLUCK = {"name": "fedluck", "steps_max": 40, "bits": 8, "feedback_decay": 0.9, "down": 0.1}
STEPS = Axis("client.steps", (2, 5, 10), least=1, most=100, whole=True)  # alike for all: beside equal times
TUNED += [
    *_rows("fedbuff, steps tuned", STEPS, RAW, SPARSE, name="fedbuff", buffer_size=5),
    *_rows("annealed, schedule-free, steps tuned", STEPS, RAW, name="annealed", buffer_size=10, **FREE),
    *_rows(
        "fedavg, Nesterov, steps tuned",
        STEPS,
        RAW,
        SPARSE,
        at_once=0,
        **ROUNDS,
        **NESTEROV,
        clients_per_round=40,
    ),
    *_rows("fedbuff, 40 at a time, steps tuned", STEPS, RAW, at_once=40, name="fedbuff", buffer_size=10),
    *_rows(
        "fedbuff, Nesterov, 40 at a time, steps tuned",
        STEPS,
        RAW,
        at_once=40,
        name="fedbuff",
        buffer_size=20,
        **NESTEROV,
    ),
    *_rows(
        "annealed, schedule-free, 40 at a time, steps tuned",
        STEPS,
        RAW,
        at_once=40,
        name="annealed",
        buffer_size=10,
        **FREE,
    ),
    *_rows("fedbuff, equal time", TASK_S, RAW, SPARSE, name="fedbuff", buffer_size=5, **EQUAL_TIME),
    *_rows(
        "annealed, schedule-free, equal time",
        TASK_S,
        RAW,
        name="annealed",
        buffer_size=10,
        **FREE,
        **EQUAL_TIME,
    ),
    *_rows(
        "fedavg, Nesterov, equal time",
        TASK_S,
        RAW,
        at_once=0,
        **ROUNDS,
        **NESTEROV,
        **EQUAL_TIME,
        clients_per_round=40,
    ),
    *_rows(
        "fedbuff, fedluck",
        _values("scheduler.period_s", 2.5, 5.0, 10.0),
        UP,
        name="fedbuff",
        buffer_size=5,
        scheduler=FEDLUCK,
    ),
]
# Who trains at a time is tuned too, for runs of half the time: what rounds come to in all of it is the mark.
HALF, GROWTH = 0.5, 0.04  # `growth` by a look at tuning seeds; its default, 0.02, is too slow for so many
NUMBERS = Axis("server.concurrency", (20, 40, 80), least=1, most=100, whole=True)
NUMBERED = Grid((Axis("client.learning_rate", (0.2, 0.4)), _whole("buffer_size", 10, 20), NUMBERS))
TUNED += [
    Row(f"{row}, 20 to 80 at a time, half as long", RAW, NUMBERED, more, HALF)
    for row, more in (
        ("fedbuff", {"name": "fedbuff"}),
        ("fedbuff, Nesterov", {"name": "fedbuff"} | NESTEROV),
        ("annealed", {"name": "annealed", "growth": GROWTH}),
        ("annealed, Nesterov", {"name": "annealed"} | NESTEROV),
        ("annealed, schedule-free", {"name": "annealed"} | FREE),
    )
]
TUNED.append(Row("annealed, schedule-free, 20 to 80 at a time", RAW, NUMBERED, {"name": "annealed"} | FREE))
# With tuned steps, and less momentum than rounds bear: by a look at tuning seeds.
MILDER: dict[str, Any] = {"outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.8}}
STEPPED = Grid((Axis("client.learning_rate", (0.2, 0.4)), replace(STEPS, values=(1, 2)), NUMBERS))
TUNED.append(
    Row(
        "fedbuff, Nesterov 0.8, 20 to 80 at a time, steps tuned, half as long",
        RAW,
        STEPPED,
        {"name": "fedbuff", "buffer_size": 20} | MILDER,
        HALF,
    )
)
# Beside rounds with momentum: the same server and as many points; who is late is not waited for.
SHORT_STEPS = replace(STEPS, values=(1, 2, 5))
WAVES: dict[str, Any] = {"name": "waves"} | NESTEROV
TUNED += [
    Row(f"waves, Nesterov, steps tuned{name}", RAW, Grid((RATES, SHORT_STEPS)), WAVES, times, at_once=0)
    for name, times in (("", 1.0), (", half as long", HALF))
]
# How long a round waits for the slow and for who has left, beside who is drawn for it or for how many steps.
MEMBERS = replace(COHORTS, values=(20, 40))
TUNED += [
    Row(
        f"fedavg, Nesterov, {beside}deadline tuned",
        chain,
        Grid((Axis("client.learning_rate", (0.2, 0.4)), axis, _values("deadline_s", *deadlines_s))),
        ROUNDS | NESTEROV | {"clients_per_round": 40},
        at_once=0,
    )
    for beside, chain, axis, deadlines_s in (
        ("", RAW, MEMBERS, (2.0, 4.0, 8.0)),
        ("", SPARSE, MEMBERS, (2.0, 4.0, 8.0)),
        ("steps and ", RAW, replace(STEPS, values=(2, 5)), (1.0, 2.0, 4.0)),
    )
]
# How a run ends: a rate that falls, of buffers, rounds and devices, and rounds at last.
KNOWN: dict[str, Any] = {HORIZON: HORIZON_S}  # a run's own is written over it
FALLING: dict[str, Any] = {"name": CosineBuffer.name} | KNOWN
ROUNDS_FALLING = ROUNDS | {"name": CosineRounds.name} | KNOWN | NESTEROV
FIFTH: dict[str, Any] = {"scheduler": {"name": "capped", "fraction": CAP / 100}}  # as CAP, for a phase alone
LAST_ROUNDS = {"strategy": "fedavg", "clients_per_round": 40, "over_selection": 1.0, "deadline_s": 0.0}
LAST = _values("last", 0.1, 0.2, 0.4, most=0.9)
TUNED += [
    *_rows("fedbuff, cosine", _whole("buffer_size", *SIZES), RAW, **FALLING),
    *_rows(
        "fedbuff, decaying",
        _values("decay", 0.003, 0.01, 0.03),
        RAW,
        name=DecayingBuffer.name,
        buffer_size=5,
    ),
    *_rows(
        "fedbuff, devices' cosine",
        _whole("buffer_size", *SIZES),
        RAW,
        name=CosineTasks.name,
        **KNOWN,
    ),
    *_rows("fedavg, Nesterov, cosine", COHORTS, RAW, at_once=0, **ROUNDS_FALLING),
    *(
        row
        for name, times in (("", 1.0), (", half as long", HALF))
        for row in _rows(
            f"annealed, then rounds{name}",
            LAST,
            RAW,
            times=times,
            at_once=0,
            name=Closing.name,
            phases=[{"strategy": "annealed", "buffer_size": 5} | FIFTH, LAST_ROUNDS | NESTEROV],
            **KNOWN,
        )
    ),
]
LONG = 3.0  # times as long: what a strategy comes to that is given the time
ROWS = [
    *TUNED,
    *(
        replace(row, strategy=f"{row.strategy}, {LONG:g} times as long", times=LONG, like=row.name)
        for row in TUNED
        if row.name in ("fedavg/raw", "fedbuff/raw", "annealed/raw")
    ),
]
REFERENCE = "fedavg/raw"
# Every rule, as every cell is to have it by each of its chains. Other rows are of a question.
RULES = (
    *(
        "fedavg",
        "fedavg, Nesterov",
        "fedbuff",
        "fedbuff, Nesterov",
        "fedasync",
        "teasq",
        "teasq, its schedule",
    ),
    *("qafel", "port", "fadas", "ca2fl", "ace", "aced", "fedasmu", "fedfa", "fedcompass", "delayed_nesterov"),
    *("annealed", "annealed, schedule-free", "waves, Nesterov, steps tuned"),
)
MATRIX = [row for row in ROWS if row.strategy in RULES]
