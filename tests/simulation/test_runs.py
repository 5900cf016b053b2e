"""What a run keeps while devices drop out, go off and come back: every invariant, every budget."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Diverging, Ones, config, events

from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import Decided, Granted, Published, Refused, SessionEffect, SetTimer
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.errors import ConfigError
from anabranch.core.model.updates import Ask, Decision, LocalPlan, Reason, Receipt, Task, Update, Verdict
from anabranch.reports.html import REPORT_FILE
from anabranch.reports.result import Result
from anabranch.simulation.checkers import Checker
from anabranch.simulation.devices import Device
from anabranch.simulation.run import RunProgress, open_simulation, simulate
from anabranch.workloads.app import Examples, Shard
from anabranch.workloads.synthetic import Synthetic

STRATEGIES = ["asyncdrop", "fedasync", "fedavg", "fedbuff", "fedprox", "teasq_drop"]
ROUGH = {"dropout": 0.3, "availability": 0.6, "availability_period_s": 20.0, "up_mbps": 1.0}


def checked(settings: Config, app: Any = None, version_within_s: float = 0.0) -> tuple[Result, Engine]:
    """The run, with every invariant looked at after every event."""
    with open_simulation(settings, app=app) as simulation:
        checker = Checker(simulation.engine, version_within_s=version_within_s)
        simulation.world.observers.append(checker.observe)
        simulation.run()
        assert checker.events > 50
        return simulation.result(0.0), simulation.engine


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(2, 20))]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_invariants_on_a_rough_fleet(strategy: str, seed: int) -> None:
    settings = config(
        strategy,
        run={"seed": seed, "virtual_s_max": 120.0},
        fleet={**ROUGH, "step_time_s": 1.0},
        server={"lease_s": 4.0, "lease_min_s": 2.0, "staleness_max": 6, "concurrency": seed % 2 and 4},
    )
    result, engine = checked(settings)
    assert result.versions > 2
    assert engine.counters.leases_lost > 0


@pytest.mark.parametrize("availability", [1.0, 0.5])
def test_leavers_go_for_good_and_the_others_go_on(tmp_path: Path, availability: float) -> None:
    away = {"availability": availability, "availability_period_s": 10.0, "dropout": 0.1, "step_time_s": 0.5}
    run = {"virtual_s_max": 200.0}
    settings = config("fedasync", run=run, fleet={"clients": 20, "leavers": 0.5, **away})
    simulate(settings, tmp_path, app=Ones())
    last: dict[str, float] = {}
    for event in events(tmp_path, "granted", "decided"):
        last[event["client"]] = event["time_s"]
    stayed = [client for client, time_s in last.items() if time_s > 180.0]
    assert 5 <= len(stayed) <= 15
    gone = [time_s for client, time_s in last.items() if client not in stayed]
    assert min(gone) < 60.0 < max(gone)


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox"])
@pytest.mark.parametrize("seed", SEEDS[1:4])
def test_rounds_go_on_when_devices_vanish(strategy: str, seed: int) -> None:
    settings = config(
        strategy,
        run={"seed": seed, "virtual_s_max": 900.0},
        fleet={"clients": 12, "dropout": 0.5, "availability_period_s": 120.0},
    )
    result, _ = checked(settings, Ones(), version_within_s=100.0)  # five deadlines
    assert result.versions > 30


def test_a_vanished_device_loses_its_lease(tmp_path: Path) -> None:
    settings = config(
        run={"virtual_s_max": 300.0},
        fleet={"dropout": 0.4, "availability_period_s": 60.0},
        server={"lease_s": 10.0},
    )
    simulate(settings, tmp_path, app=Ones())
    ends = {e["end"] for e in events(tmp_path, "lease_ended")}
    assert ends == {"expired", "superseded"}
    back = [e["client"] for e in events(tmp_path, "vanished")]
    assert max(back.count(c) for c in set(back)) > 1, "a device comes back, and may vanish again"


def test_an_update_that_was_answered_unheard_is_sent_again_and_counts_once(tmp_path: Path) -> None:
    settings = config(
        "fedasync",
        run={"virtual_s_max": 400.0},
        fleet={"availability": 0.7, "availability_period_s": 20.0, "latency_s": 1.0},
    )
    result = simulate(settings, tmp_path, app=Ones())
    assert len(events(tmp_path, "resent")) > 3
    assert len(events(tmp_path, "decided")) == result.updates_applied + result.updates_rejected
    assert checked(settings, Ones())[0].model_sha256 == result.model_sha256


def test_a_further_device_changes_nothing_for_the_others(tmp_path: Path) -> None:
    def lives(clients: int) -> list[tuple[str, str, float]]:
        out = tmp_path / str(clients)
        # Without latency, for a device that has the newest version already does not fetch it.
        fleet = {**ROUGH, "clients": clients, "speed": "fadas-mild", "latency_s": 0.0}
        simulate(config(fleet=fleet), out, app=Ones())
        kinds = ("granted", "vanished", "decided")
        return [(e["client"], e["kind"], e["time_s"]) for e in events(out, *kinds)]

    few, more = lives(4), lives(5)
    assert few == [e for e in more if e[0] != "device-0004"]
    assert len(few) < len(more)


def test_skipping_the_wait_between_asks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(Device):
        """Waits in the queue of events for its time to ask again."""

        def _obey(self, effect: SessionEffect, now: float) -> None:
            match effect:
                case SetTimer("retry", at):
                    self._clock.at(at, lambda: self._hear(ev.TimerFired(at, "retry")))
                case _:
                    super()._obey(effect, now)

    settings = config("fedavg", run={"virtual_s_max": 200.0}, fleet={"clients": 12})
    skipping = simulate(settings, app=Ones())
    monkeypatch.setattr("anabranch.simulation.run.Device", Patient)
    assert simulate(settings, app=Ones()).journal_sha256 == skipping.journal_sha256


@pytest.mark.parametrize(
    ("budget", "reached"),
    [
        ({"versions_max": 5}, lambda r: r.versions == 5),
        ({"updates_max": 7}, lambda r: r.updates_applied == 7),
        ({"virtual_s_max": 12.5}, lambda r: 10.0 < r.virtual_s <= 12.5),
    ],
)
def test_a_budget_ends_the_run(budget: dict[str, Any], reached: Any) -> None:
    result = simulate(config(run={"virtual_s_max": 0.0, **budget}), app=Ones())
    assert reached(result)


def test_a_run_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match=r"run\.virtual_s_max"):
        simulate(config(run={"virtual_s_max": 0.0}))


def test_updates_that_are_not_finite_are_refused() -> None:
    result, engine = checked(config(), Diverging())
    assert (result.versions, result.updates_applied) == (0, 0)
    assert result.rejections == {Reason.INVALID.value: engine.counters.rejected}


def test_evaluation_by_time_by_version_and_at_the_end() -> None:
    def measured(**run: Any) -> list[int]:
        settings = config("fedasync", run={"virtual_s_max": 30.0, **run})
        return [p.version for p in simulate(settings, app=Ones()).history]

    last = measured()[-1]
    assert measured() == [last]
    assert measured(evaluate_every_versions=40) == [
        0,
        *range(40, last + 1, 40),
        *([last] if last % 40 else []),
    ]
    assert len(measured(evaluate_every_s=10.0)) == 4


def test_progress_and_folder(tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    settings = config(run={"evaluate_every_s": 10.0, "evaluate_on": "validation"})
    result = simulate(settings, tmp_path, progress=seen.append)
    measured = [(p.accuracy, p.loss) for p in seen if p.evaluated]
    assert measured == [(p.accuracy, p.loss) for p in result.history]
    assert seen[-1].version == result.versions
    assert Result.read(tmp_path) == result
    assert (tmp_path / REPORT_FILE).stat().st_size > 1000
    assert result.final_accuracy is not None
    assert result.final_accuracy > (result.history[0].accuracy or 0.0) + 0.2


def test_a_split_by_speed_gets_the_speed_groups() -> None:
    """Of who is slower the number is higher, and of those that are as fast it is one."""
    took_s: dict[int, float] = {}
    told: dict[int, tuple[int, ...]] = {}

    class Told(Synthetic):
        def data(self, shard: Shard) -> Examples:
            if shard.role == "train":
                told[shard.index] = shard.speed_groups
            return super().data(shard)

    def observe(event: ev.Event, _: Any) -> None:
        if isinstance(event, ev.UpdateArrived):
            steps = event.update.local_steps
            took_s[int(event.update.client_id[-4:])] = event.update.metrics[TRAIN_S] / steps

    fleet = {"split": "speed-shards", "clients": 16, "examples_per_client": 0}
    with open_simulation(config(fleet=fleet), app=Told()) as simulation:
        simulation.world.observers.append(observe)
        simulation.run()
    (groups,) = set(told.values())
    assert took_s.keys() == told.keys() == set(range(16))
    pairs = sorted({(groups[i], round(step_s, 6)) for i, step_s in took_s.items()})
    assert len(pairs) == len(set(groups)) > 3
    assert [step_s for _, step_s in pairs] == sorted({step_s for _, step_s in pairs})


def test_the_checker_has_teeth() -> None:
    with open_simulation(config(), app=Ones()) as simulation:
        engine = simulation.engine
        tick = ev.Ticked(1.0)
        ask = Ask("device-0000", "t")
        with pytest.raises(AssertionError, match="version 2 after 0"):
            Checker(engine).observe(tick, [Published(2, engine.vector, ())])
        with pytest.raises(AssertionError, match="refused ask was journalled"):
            Checker(engine).observe(ev.TaskAsked(1.0, ask), [Refused(ask, Reason.PAUSED, "", (0.0, 1.0))])
        with pytest.raises(AssertionError, match="time went back"):
            Checker(engine).observe(ev.Ticked(-1.0), [])
        with pytest.raises(AssertionError, match="no new version for"):
            Checker(engine, version_within_s=5.0).observe(ev.Ticked(6.0), [])
        checker = Checker(engine)
        engine.version = 1
        with pytest.raises(AssertionError, match="without being published"):
            checker.observe(tick, [])


TAKEN = Decision(Verdict.HELD, 0, 1.0)


@pytest.mark.parametrize(
    ("decisions", "version", "said"),
    [
        ([(TAKEN, False), (TAKEN, False)], 0, "update u decided twice"),
        ([(TAKEN, True)], 0, "update u decided twice"),
        ([(Decision(Verdict.REJECTED, 0, 1.0, Reason.STALE), False)], 0, "a rejected update has a weight"),
        ([(TAKEN, False)], 2, "staleness 0"),
        ([(replace(TAKEN, staleness=1), False)], 0, "staleness 1"),
        ([(replace(TAKEN, staleness=3), False)], 3, "staleness over 2"),
        ([(replace(TAKEN, verdict=Verdict.PUBLISHED, staleness=1), False)], 1, "staleness 1"),
        *(
            ([(replace(TAKEN, weight=weight), False)], 0, f"weight {weight} of an applied update")
            for weight in (None, 0.0, -1.0, math.nan, math.inf)
        ),
        ([(TAKEN, False), (TAKEN, True)], 0, ""),
        ([(replace(TAKEN, staleness=2), False)], 2, ""),
        ([(Decision(Verdict.REJECTED, 0, None, Reason.STALE), False)], 3, ""),
    ],
)
def test_the_checker_looks_at_decisions(
    decisions: list[tuple[Decision, bool]], version: int, said: str
) -> None:
    event = ev.UpdateArrived(1.0, Update("u", "t", "c", 0, 1, np.zeros(4)), ev.Payload("", 0))
    effects = [Decided("c", Receipt("u", "t", version, one), 1, again) for one, again in decisions]
    with open_simulation(config(server={"staleness_max": 2}), app=Ones()) as simulation:
        checker = Checker(simulation.engine)
        if not said:
            checker.observe(event, effects)
            return
        with pytest.raises(AssertionError, match=f"{said}$"):
            checker.observe(event, effects)


def test_the_checker_knows_what_versions_are_made_of_and_tasks_begin_with() -> None:
    with open_simulation(config(), app=Ones()) as simulation:
        engine, tick = simulation.engine, ev.Ticked(1.0)
        with pytest.raises(AssertionError, match=r"updates \['u'\] were folded in twice"):
            Checker(engine).observe(tick, [Published(n, engine.vector, ("u", f"u{n}")) for n in (1, 2)])
        task = Task("t", "c", 1, 0.0, 9.0, 9.0, 0, LocalPlan())
        with pytest.raises(AssertionError, match="a task from an old version"):
            Checker(engine).observe(tick, [Granted(task)])
        Checker(engine).observe(tick, [Granted(task, again=True)])
        engine.ledger.live = 1
        with pytest.raises(AssertionError, match="0 live tasks, but 1 counted"):
            Checker(engine).observe(tick, [])
