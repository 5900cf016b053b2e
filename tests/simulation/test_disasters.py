"""Runs in which the server's machine fails too: its clock is set, its disk is full, torn, or put back.

Every promise is kept, and what was noted from outside agrees (`disasters.py`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from disasters import NOTES, disastrous, prove_disaster
from fleets import Ones, config, events
from rough import prove
from safetensors import safe_open

from anabranch.cli.summary import summary
from anabranch.core.clock import EventClock
from anabranch.core.config.tables import Config
from anabranch.core.engine.engine import Engine
from anabranch.core.engine.sessions import Sessions
from anabranch.core.errors import LogLost, ReplayMismatch, StoreFull
from anabranch.core.journal import Record
from anabranch.core.model.params import Vector
from anabranch.host import held
from anabranch.host.chain import Mark
from anabranch.reports.models import BEST
from anabranch.simulation.clock import VirtualClock
from anabranch.simulation.disk import Disk, _read
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import RunProgress, open_simulation
from anabranch.simulation.server_time import SteppedTime
from anabranch.workloads.app import Examples

SHORT = 12
LONG, AT_ONCE = int(os.environ.get("ANABRANCH_PROVE_SEEDS", "500")), 100
EVERY_DISASTER = {
    "clock-step",
    "disk-full",
    "not-written",
    "torn-tail",
    "lost-tail",
    "restore",
    "restored",
    "device-copy",
}


@pytest.mark.parametrize("seed", range(SHORT))
def test_every_promise_is_kept_whatever_fails(seed: int) -> None:
    prove_disaster(seed)


def test_every_disaster_happens() -> None:
    assert set(prove_disaster(3).faults) >= EVERY_DISASTER


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(1000, 1000 + LONG, AT_ONCE))
def test_hundreds_of_seeds(first: int, figure: Callable[[str], None]) -> None:
    seeds, began = range(first, min(first + AT_ONCE, 1000 + LONG)), time.monotonic()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
        proofs = list(workers.map(prove_disaster, seeds))
    found: Counter[str] = Counter()
    for proved in proofs:
        found.update(proved.faults)
    figure(
        f"{len(seeds)} seeds with disasters in {time.monotonic() - began:.0f} s: "
        f"{sum(p.events for p in proofs)} events, {sum(p.applied for p in proofs)} updates, "
        f"{sum(p.restarts for p in proofs)} restarts; {dict(sorted(found.items()))}"
    )
    assert set(found) >= EVERY_DISASTER


def test_a_seed_has_one_history_with_all_its_disasters() -> None:
    first = prove(disastrous(101, 8), 50)
    assert prove(disastrous(101, 8), 50) == first
    assert prove(disastrous(101, 8, clock_step_every_s=0.0), 50).digests != first.digests


# --- the proof has teeth -------------------------------------------------------------------------


def test_leases_that_go_by_the_wall_clock_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_wall(self: EventClock) -> float:
        self._began = max(self._began, self._wall())
        return self._began

    monkeypatch.setattr(EventClock, "now", by_wall)
    with pytest.raises(AssertionError, match="apart from the true one"):
        prove(disastrous(2, 8), 50, NOTES)


def test_answers_before_the_write_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Disk.append

    def careless(disk: Disk, record: Record, payload: bytes | memoryview | None = None) -> None:
        with suppress(StoreFull):
            honest(disk, record, payload)

    monkeypatch.setattr(Disk, "append", careless)
    with pytest.raises((ReplayMismatch, LogLost, AssertionError)):
        prove(disastrous(2, 8), 50, NOTES)


def test_a_torn_write_that_stays_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "_cut", lambda disk: list(_read(disk._log)))
    with pytest.raises((LogLost, AssertionError)):
        prove(disastrous(3, 8), 50, NOTES)


def test_a_log_that_lost_what_was_acknowledged_unseen_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mark, "lost", lambda mark, end: 0)
    with pytest.raises(AssertionError, match="lost without a word"):
        prove(disastrous(2, 8), 50, NOTES)


def test_devices_that_take_a_number_for_a_name_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "is_base", lambda *_: True)
    with pytest.raises(AssertionError, match="is trained from another version"):
        prove(disastrous(3, 8), 50, NOTES)


def test_copies_that_take_each_others_tasks_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "refusal", lambda *_: None)
    with pytest.raises(AssertionError, match="which lives"):
        prove(disastrous(1, 8), 50, NOTES)


# --- the parts -----------------------------------------------------------------------------------


def test_the_time_of_events_goes_on_whatever_the_clock_is_set_to() -> None:
    clock = VirtualClock()
    time = SteppedTime(clock)
    seen: list[tuple[float, float]] = []

    def look() -> None:
        seen.append((clock.now, time.now()))

    for at_s, by_s in ((1.0, -500.0), (2.0, 90.0), (3.0, 1e6)):
        clock.at(at_s, lambda by_s=by_s: time.step(by_s))  # type: ignore[misc]
        clock.at(at_s + 0.5, look)
    clock.run()
    assert [now for now, _ in seen] == pytest.approx([at for _, at in seen])
    assert time.steps == 3
    assert time.moment(time.now() + 7.0) == pytest.approx(clock.now + 7.0)
    assert time.moment(time.now() - 7.0) == clock.now


def test_a_server_that_comes_back_believes_its_clock_if_that_can_be() -> None:
    clock = VirtualClock()
    time = SteppedTime(clock)
    for at_s, by_s in ((10.0, -100.0), (20.0, 300.0), (30.0, 1e9)):
        clock.at(at_s, lambda by_s=by_s: time.step(by_s))  # type: ignore[misc]
    clock.run(until_s=15.0)
    time.restart(last=12.0)  # the clock shows less: as if the server had not been away
    assert time.now() == pytest.approx(12.0)
    clock.run(until_s=25.0)
    time.restart(last=time.now())  # it shows 225
    assert time.now() == pytest.approx(225.0)
    clock.run(until_s=35.0)
    last = time.now()
    time.restart(last)  # nobody is away for so long
    assert time.now() == pytest.approx(last)
    assert [time.true(at) for at in (5.0, 12.0, 225.0 + 3.0)] == pytest.approx([5.0, 15.0, 28.0])


class Swinging(Ones):
    """Better and worse again from version to version: the best is somewhere on the way."""

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": swing(model["w"])}


def swing(w: npt.NDArray[np.float32]) -> float:
    return float(37 * w.mean() % 1)


@pytest.mark.parametrize(("seed", "snapshots"), [(0, 500), (1, 500), (3, 500), (0, 3), (1, 3), (3, 3)])
def test_what_a_run_leaves_is_of_what_was_not_taken_back(seed: int, snapshots: int, tmp_path: Path) -> None:
    run = {"virtual_s_max": 20.0, "seed": seed, "evaluate_every_versions": 1}
    faults = {"restore_every_s": 6.0, "restore_age_s": 5.0, "server_down_s": 1.0}
    tables = {"fleet": {"examples_per_client": 0}, "server": {"snapshot_every_updates": snapshots}}
    settings = config("fedasync", run=run, **tables, faults=faults)
    with open_simulation(settings, tmp_path, Swinging()) as simulation:
        simulation.run()
        result = simulation.result(0.0)
        simulation.leave(result, tmp_path)
        counters = simulation.engine.counters
    gone = [event["updates_left_out"] for event in events(tmp_path, "taken_back")]
    assert result.updates_left_out == sum(gone) > 0
    assert result.updates_applied - result.updates_left_out == counters.applied
    best = max(result.history, key=lambda point: (point.accuracy, -point.version))
    with safe_open(tmp_path / BEST, "np") as file:
        assert int(file.metadata()["version"]) == best.version
        assert swing(file.get_tensor("w")) == best.accuracy == result.best_value
    assert f"{sum(gone)} of them left out by losses of its server" in summary(result, None)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_run_that_ends_while_its_server_is_down_has_come_to_what_was_put_back(
    interrupted: bool, tmp_path: Path
) -> None:
    """By its journal, which the backup has cut: whoever replays that comes to the result."""
    faults = {"restore_every_s": 6.0, "restore_age_s": 5.0, "server_down_s": 1e6}
    run = {"virtual_s_max": 30.0, "seed": 1, "evaluate_every_versions": 1}
    settings = config("fedasync", run=run, fleet={"examples_per_client": 0}, faults=faults)
    with open_simulation(settings, tmp_path, Swinging()) as simulation:
        if interrupted:
            simulation.clock.at(29.0, _interrupt)
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            simulation.run()
        result = simulation.result(0.0, "interrupted" if interrupted else "finished")
        simulation.leave(result, tmp_path)
    (gone,) = [event["updates_left_out"] for event in events(tmp_path, "taken_back")]
    assert result.updates_left_out == gone > 0
    assert result.versions == result.updates_applied - gone > 0, "each makes one"
    replayed = replay_run(tmp_path, Swinging())
    assert (replayed.version, replayed.model_sha256) == (result.versions, result.model_sha256)
    assert replayed.matches


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(4))
def test_no_run_goes_back_further_than_its_disk_says(seed: int) -> None:
    """What the disk said at any time since it went back last binds it: the models of before may be gone."""
    faults = {"restore_every_s": 6.0, "server_crash_every_s": 5.0, "server_down_s": 1.0, "lost_tail": 0.5}
    run = {"virtual_s_max": 60.0, "seed": seed}
    settings = config("fedasync", run=run, server={"snapshot_every_updates": 5}, faults=faults)
    with open_simulation(settings, app=Swinging()) as simulation:
        disk, said, went = simulation.world.disk, [0], list[tuple[int, int]]()
        assert disk is not None
        beside = simulation.clock.beside

        def note() -> None:
            beside()
            said.append(disk.oldest_version())

        def back(engine: Engine, _: int) -> None:
            went.append((max(said), engine.version))
            said[:] = [disk.oldest_version()]

        simulation.clock.beside = note
        simulation.world.taken_back.append(back)
        simulation.run()
    assert len(went) > 1
    assert all(bound <= version for bound, version in went)
    assert max(bound for bound, _ in went) > 0, "it says something"


class Rising(Ones):
    """Most versions are the best so far."""

    def evaluate(self, model: dict[str, Any], examples: Examples) -> dict[str, float]:
        return {"accuracy": float(model["w"].mean())}


def test_models_that_were_the_best_before_the_snapshot_are_let_go() -> None:
    run = {"versions_max": 60, "evaluate_every_versions": 1}
    tables = {"fleet": {"examples_per_client": 0}, "server": {"snapshot_every_updates": 5}}
    were_best: list[weakref.ref[Vector]] = []

    def tell(progress: RunProgress) -> None:
        if progress.evaluated:
            assert simulation.best.model is not None
            were_best.append(weakref.ref(simulation.best.model))

    settings = config("fedasync", run=run, **tables, faults={"restore_every_s": 1e6})
    with open_simulation(settings, app=Rising(), progress=tell) as simulation:
        simulation.run()
        gc.collect()
        alive = sum(model() is not None for model in were_best)
    assert len(were_best) > 50
    assert alive <= 10, "those since the snapshot, and what the server has in hand"


def test_a_fault_that_is_off_is_no_part_of_a_configuration() -> None:
    plain, stepped = config(), config(faults={"clock_step_every_s": 9.0})
    assert "clock_step_every_s" not in plain.to_json()["faults"]
    assert plain.to_json(every_table=True)["faults"]["clock_step_s"] == 3600.0
    assert stepped.to_json()["faults"]["clock_step_every_s"] == 9.0
    assert Config.from_json(stepped.to_json()) == stepped
    assert stepped.faults.on
    assert not plain.faults.on
