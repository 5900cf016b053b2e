"""Compressed runs: the same digests however they are run, and devices that have what the server thinks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Ones, events, recorded
from fleets import config as plain
from proving import in_slices

from anabranch.compress.downloads import Downloads, apply_download
from anabranch.compress.registry import stages
from anabranch.core.config.tables import Config, merge
from anabranch.core.model.params import Vector
from anabranch.reports.result import Result
from anabranch.simulation.executors.base import Job
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate


def config(strategy: str = "fedbuff", params: Any = None, **tables: Any) -> Config:
    """Twelve virtual seconds, unless a table says otherwise: some twelve updates to each device."""
    tables["run"] = {"virtual_s_max": 12.0, **tables.get("run", {})}
    return merge([("base", plain(strategy, **tables).to_json()), ("params", {"strategy": params or {}})])


TEASQ = {"concurrency_fraction": 0.8, "cache_size": 2, "decay_every": 3, "kept": 0.25}
ROUGH = {
    "clients": 6,
    "examples_per_client": 64,
    "dropout": 0.2,
    "availability": 0.8,
    "availability_period_s": 20.0,
}
CASES: dict[str, Any] = {
    "robust": config("teasq", TEASQ),
    "paper": config("teasq", {**TEASQ, "mode": "paper"}),
    "robust, mixing": config("teasq", {**TEASQ, "alpha": 0.5}),
    "a rough fleet": config("teasq", TEASQ, fleet=ROUGH, run={"virtual_s_max": 60.0}),
    "qafel": config("qafel", {"buffer_size": 2}),
    "fedasync on the log": config(
        "fedasync",
        uplink={"codec": "ef(0.9)|topk(0.1)|int8|gaps|zstd"},
        downlink={"codec": "log(1,8)"},
    ),
    "published seldom": config(
        "fedasync",
        uplink={"codec": "int8"},
        downlink={"codec": "log(1,8)", "publish_every_versions": 3},
        fleet=ROUGH,
        run={"virtual_s_max": 60.0},
    ),
    "published seldom, cached": config("teasq", TEASQ, downlink={"publish_every_versions": 2}),
    "powers of two": config("fedbuff", uplink={"codec": "ef(0.9)|e3m0(64)|zstd"}),
    "a threshold": config("fedbuff", uplink={"codec": "ef(0.9)|threshold(0.1,4)|bf16|gaps|zstd"}),
}


def digests(result: Result) -> tuple[str, str]:
    return result.model_sha256, result.journal_sha256


# Whose codecs and settings others have too.
WITH_PROVE = ("robust", "robust, mixing", "published seldom, cached", "powers of two")


@pytest.mark.parametrize("name", in_slices(CASES, WITH_PROVE))
def test_one_seed_has_one_history(name: str, tmp_path: Path) -> None:
    result, expected = recorded(CASES[name], tmp_path)
    assert result.updates_applied > 10
    assert 0 < result.uplink_bytes < result.uplink_bytes_raw
    outcome = replay_run(tmp_path)
    assert outcome.matches
    assert outcome.state_sha256 == expected
    (tmp_path / "payloads.zip").unlink()
    assert replay_run(tmp_path).matches


def test_processes_give_the_serial_digests() -> None:
    settings = CASES["fedasync on the log"]
    assert digests(simulate(settings, workers=1)) == digests(simulate(settings))


@pytest.mark.parametrize("name", ["robust", "paper", "fedasync on the log", "published seldom"])
def test_a_device_trains_from_what_it_decodes_which_the_server_computes_with(name: str) -> None:
    """From the bytes that lead there from nothing; the server may not have that any more."""
    decoded: dict[int, Vector] = {}
    seen = replicas = 0
    with open_simulation(CASES[name]) as simulation:
        engine, train = simulation.engine, simulation.executor.train

        def observe(*_: Any) -> None:
            version = engine.offered
            if version not in decoded:
                make = Downloads(engine.spec, {}).offer(engine, version, None, stages())
                assert make is not None
                made = make()
                decoded[version] = apply_download(engine.spec, made.codec, made.data, None, None)[0]

        def begun(job: Job) -> Any:
            nonlocal seen, replicas
            expected, held = decoded[job.task.base_version], engine.base(job.task.base_version)
            assert job.vector.tobytes() == expected.tobytes()
            assert not np.array_equal(job.vector, engine.vector)
            if held is not None:
                assert held.tobytes() == expected.tobytes()
                replicas += 1
            seen += 1
            return train(job)

        simulation.executor.train = begun  # type: ignore[method-assign]
        simulation.world.observers.append(observe)
        simulation.run()
        assert min(seen, replicas) > 10


def test_the_log_costs_a_fraction_of_whole_models() -> None:
    result = simulate(config("teasq", TEASQ))
    assert result.downlink_bytes < result.downlink_bytes_full_equivalent / 3
    kept = [step.uplink.split("|")[1] for step in result.compression]
    assert kept == ["topk(0.25)", "topk(0.5)"]
    assert [step.why for step in result.compression] == ["start", "schedule"]


def test_raw_said_aloud_changes_nothing() -> None:
    said = config(uplink={"codec": "raw"}, downlink={"codec": "raw"})
    assert simulate(said).model_sha256 == simulate(config()).model_sha256


def test_a_diverged_training_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    class Diverging(Ones):
        def train(self, model: Any, examples: Any, plan: Any, seed: int) -> Any:
            model["w"] += np.inf if seed % 4 == 0 else 1.0
            return {}

    settings = config("teasq", TEASQ)
    result = simulate(settings, tmp_path, app=Diverging())
    assert result.updates_applied > 5
    assert result.updates_rejected == 0
    assert any(e["end"] == "dropped" for e in events(tmp_path, "lease_ended"))


def test_results_without_the_new_fields_are_still_read(tmp_path: Path) -> None:
    data = simulate(config()).to_json()
    for name in ("uplink_bytes_raw", "downlink_bytes_full_equivalent", "compression"):
        del data[name]
    old = Result.from_json(data)
    assert (old.uplink_bytes_raw, old.compression) == (0, ())
    assert dataclasses.replace(old, seed=1).seed == 1
