"""Simulated fleets with sub-models: one history however it is run, and bytes and times as counted by hand."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fleets import config as plain
from fleets import events, recorded
from proving import in_slices

from anabranch.core import events as ev
from anabranch.core.config.tables import Config, merge
from anabranch.core.effects import Granted
from anabranch.core.engine.ledger import TRAIN_S
from anabranch.core.model.params import ParamSpec
from anabranch.core.model.submodels import UnitMap
from anabranch.core.model.updates import Task, Update
from anabranch.reports.journal_files import JournalReader
from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate

ROUGH = {"dropout": 0.2, "availability": 0.7, "availability_period_s": 15.0, "up_mbps": 1.0}
FLEET = {"clients": 6, "examples_per_client": 64}
TEASQ_DROP = {"concurrency_fraction": 0.8, "cache_size": 2}
HALVES = {"name": "random", "drop": 0.5}
SYNTHETIC = 20 * 32 + 32 + 32 * 10 + 10


def config(strategy: str = "asyncdrop", params: Any = None, **tables: Any) -> Config:
    """Twenty-five virtual seconds, unless a table says otherwise: some updates to each device."""
    tables["run"] = {"virtual_s_max": 25.0, **tables.get("run", {})}
    return merge([("base", plain(strategy, **tables).to_json()), ("params", {"strategy": params or {}})])


CASES: dict[str, Config] = {  # as long as it takes until each kind of event has happened
    "asyncdrop": config(fleet=ROUGH),
    "asyncdrop, random": config(
        submodel={"name": "random", "drop": 0.5, "coverage_versions": 5}, run={"virtual_s_max": 12.0}
    ),
    "asyncdrop, compressed": config(
        uplink={"codec": "ef(0.9)|topk(0.1)|int8|gaps|zstd"}, downlink={"codec": "log(1,8)"}, fleet=ROUGH
    ),
    "asyncdrop, parts of the log": config(
        submodel=HALVES, downlink={"codec": "log(1,8)", "parts": "own"}, fleet=ROUGH
    ),
    "teasq_drop": config("teasq_drop", TEASQ_DROP, fleet=ROUGH, run={"virtual_s_max": 60.0}),
    "teasq_drop, widths": config("teasq_drop", TEASQ_DROP, submodel={"name": "fedrolex"}),
    "fedavg, ist": config("fedavg", submodel={"name": "ist"}, run={"virtual_s_max": 60.0}, fleet=ROUGH),
}


def digests(result: Result) -> tuple[str, str]:
    return result.model_sha256, result.journal_sha256


WITH_PROVE = ("asyncdrop, random", "asyncdrop, compressed", "teasq_drop")  # others have the parts of these


@pytest.mark.parametrize("name", in_slices(CASES, WITH_PROVE))
def test_one_seed_has_one_history(name: str, tmp_path: Path) -> None:
    result, expected = recorded(CASES[name], tmp_path)
    assert result.updates_applied > 10
    assert result.coverage
    for way in ("payloads", "simulation"):
        outcome = replay_run(tmp_path)
        assert (outcome.matches, outcome.way, outcome.state_sha256) == (True, way, expected)
        (tmp_path / "payloads.zip").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", ["asyncdrop, parts of the log", pytest.param("fedavg, ist", marks=pytest.mark.prove)]
)
def test_processes_give_the_serial_digests(name: str) -> None:
    assert digests(simulate(CASES[name], workers=1)) == digests(simulate(CASES[name]))


# --- by hand -------------------------------------------------------------------------------------


class Notebook:
    """What was granted and what arrived, by device, in order."""

    def __init__(self) -> None:
        self.granted: dict[str, list[Task]] = defaultdict(list)
        self.arrived: dict[str, list[Update]] = defaultdict(list)

    def observe(self, event: ev.Event, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Granted):
                self.granted[effect.task.client_id].append(effect.task)
        if isinstance(event, ev.UpdateArrived):
            self.arrived[event.update.client_id].append(event.update)


def watched(settings: Config, out: Path | None = None) -> tuple[Notebook, Result, ParamSpec]:
    notebook = Notebook()
    with open_simulation(settings, out) as simulation:
        simulation.world.observers.append(notebook.observe)
        simulation.run()
        return notebook, simulation.result(0.0), simulation.engine.spec


def part_of(task: Task | Update) -> UnitMap:
    assert isinstance(task.submodel, UnitMap)
    return task.submodel


def size_by_hand(task: Task | Update) -> int:
    """Values of a part of the synthetic model with this many hidden units."""
    (kept,) = part_of(task).kept
    return 20 * len(kept) + len(kept) + len(kept) * 10 + 10


@pytest.mark.parametrize("planner", ["hetero", "heterofl", "fjord"])
def test_bytes_are_those_of_the_parts(planner: str, tmp_path: Path) -> None:
    widths = [0.75, 0.5, 0.25]
    notebook, result, _ = watched(config(submodel={"name": planner, "widths": widths}), tmp_path)
    updates = list(itertools.chain(*notebook.arrived.values()))
    assert result.uplink_bytes == sum(4 * size_by_hand(u) for u in updates)
    assert result.uplink_bytes == result.uplink_bytes_raw > 0
    assert len({size_by_hand(u) for u in updates}) == (1 if planner == "hetero" else 3)
    down: dict[str, list[int]] = defaultdict(list)
    for event in events(tmp_path, "downloaded"):
        down[event["client"]].append(event["bytes"])
    for client, sizes in down.items():
        tasks = notebook.granted[client]
        assert len(tasks) - len(sizes) in (0, 1)  # the last may be under way
        assert sizes == [4 * size_by_hand(task) for task in tasks[: len(sizes)]]
    assert result.downlink_bytes == sum(map(sum, down.values()))
    assert result.downlink_bytes_full_equivalent == 4 * SYNTHETIC * sum(map(len, down.values()))
    kept = [e["kept"] for e in events(tmp_path, "trained")]
    assert len(kept) == result.updates_applied
    assert sum(map(sum, kept)) == sum(len(part_of(u).kept[0]) for u in updates)


def test_on_the_delta_log_only_the_uplink_is_of_parts() -> None:
    settings = config(uplink={"codec": "int8(64)|zstd"}, downlink={"codec": "log(1)"})
    notebook, result, _ = watched(settings)
    updates = list(itertools.chain(*notebook.arrived.values()))
    assert result.uplink_bytes_raw == sum(4 * size_by_hand(u) for u in updates)
    assert 0 < result.uplink_bytes < result.uplink_bytes_raw / 2
    assert result.downlink_bytes < result.downlink_bytes_full_equivalent / 2


def test_devices_of_the_log_say_what_parts_they_have(tmp_path: Path) -> None:
    """By hand from their tasks: the newest at the end, one that a later one covers left out."""
    own = {"codec": "log(1)", "parts": "own"}
    notebook, result, spec = watched(config(submodel=HALVES, downlink=own), tmp_path)
    held: dict[str, list[tuple[int, frozenset[int], Any]]] = {}
    said = 0
    tasks = {task.task_id: task for granted in notebook.granted.values() for task in granted}
    for _, record in JournalReader(tmp_path).records():
        if record["kind"] != "asked" or record["task_id"] not in tasks:
            continue
        client, task = record["client_id"], tasks[record["task_id"]]
        parts = held.setdefault(client, [])
        assert record.get("holds_parts", []) == [[v, {"kept": text}] for v, _, text in parts]
        said += len(parts)
        kept = frozenset(part_of(task).kept[0])
        parts[:] = [one for one in parts if not one[1] <= kept]
        parts.append((task.base_version, kept, [bits.hex() for bits in part_of(task).bits]))
        del parts[:-8]
    assert said > 10
    assert result.downlink_bytes < result.downlink_bytes_full_equivalent / 3
    assert spec.size == SYNTHETIC


def test_smaller_models_take_less_virtual_time_exactly(tmp_path: Path) -> None:
    """On one device the same task is drawn the same time, whatever is trained in it."""

    def times_s(**submodel: Any) -> dict[tuple[str, int], float]:
        """Seconds of training of each device's first tasks."""
        notebook, _, _ = watched(config(submodel=submodel, fleet={**FLEET, "speed": "lognormal"}))
        return {
            (client, task): update.metrics[TRAIN_S]
            for client, updates in notebook.arrived.items()
            for task, update in enumerate(updates[:5])
        }

    whole, half = times_s(name="none"), times_s(name="random", drop=0.5)
    shared = whole.keys() & half.keys()
    assert len(shared) >= 20
    assert len(set(whole.values())) > 5
    cost = (16 * 31 + 10) / SYNTHETIC
    assert {at: half[at] for at in shared} == {at: whole[at] * cost for at in shared}


def test_a_fleet_with_smaller_models_is_further_after_the_same_time() -> None:
    whole, half, quarter = (
        simulate(config(submodel=table, fleet={"latency_s": 0.0, "step_time_s": 1.0})).updates_applied
        for table in (
            {"name": "none"},
            {"name": "random", "drop": 0.5},
            {"name": "random", "drop": 0.75},
        )
    )
    assert 1.7 * whole < half
    assert 1.7 * half < quarter


# --- independent subnet training -----------------------------------------------------------------


@pytest.mark.prove
def test_ist_costs_a_quarter_of_the_bytes_and_hardly_any_accuracy() -> None:
    def run(**tables: Any) -> Result:
        base: dict[str, dict[str, Any]] = {
            "run": {"workload": "digits", "versions_max": 60, "evaluate_every_versions": 0},
            "fleet": {"clients": 4, "split": "iid"},
            "strategy": {
                "name": "fedavg",
                "clients_per_round": 4,
                "over_selection": 1.0,
                "deadline_s": 0.0,
            },
            "client": {"epochs": 3, "learning_rate": 0.3},
        }
        return simulate(merge([("base", base), ("test", tables)]))

    whole, parts = run(), run(submodel={"name": "ist", "parts": 4})
    assert whole.versions == parts.versions == 60
    assert parts.uplink_bytes <= 0.26 * whole.uplink_bytes
    assert parts.downlink_bytes <= 0.26 * whole.downlink_bytes
    assert whole.final_accuracy is not None
    assert parts.final_accuracy is not None
    assert whole.final_accuracy > 0.95
    assert parts.final_accuracy >= whole.final_accuracy - 0.015
    for c in parts.coverage:  # every unit was in exactly one part of every round
        assert sum(map(sum, c.trained)) == c.units * 60
        assert {sum(row) for row in c.trained} == {units * 60 for units in c.row_units}
