"""`calibrate`: a fleet that is known is simulated, and must be found again in the log that it has left."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import anabranch as ab
from anabranch.api.simulating import Callback
from anabranch.core.errors import ConfigError, DataError, FolderMissing
from anabranch.host.idle import idle
from anabranch.simulation.attacks import FLOOD, hostile_devices
from anabranch.strategies.registry import strategy_of

STEPS_S, LATENCIES_S, RATES = (0.02, 0.11, 0.05), (0.03, 0.2, 0.07), (4.0, 0.5, 0.0)
KNOWN = ab.Measured(STEPS_S, latencies_s=LATENCIES_S, up_mbps=RATES, down_mbps=RATES)
TRAINING = ab.Training(steps=4)


def simulated(
    speed: ab.Measured,
    updates: int = 60,
    settings: dict[str, Any] | None = None,
    callbacks: Iterable[Callback] = (),
) -> ab.Run:
    """Devices that never wait for a place; each version is new, so that each task has its download."""
    return ab.simulate(
        "synthetic",
        strategy="fedasync",
        fleet=ab.Fleet(clients=len(speed.step_times_s), speed=speed),
        training=TRAINING,
        until=ab.Until(updates=updates),
        settings={"run.evaluate_every_versions": 1000, **(settings or {})},
        callbacks=callbacks,
    )


def test_a_known_fleet_is_found_again() -> None:
    found = ab.calibrate(simulated(KNOWN))
    assert [d.name for d in found.devices] == ["device-0000", "device-0001", "device-0002"]
    assert sum(d.updates for d in found.devices) == 60
    assert [d.step_time_s for d in found.devices] == pytest.approx(STEPS_S)
    assert [d.latency_s for d in found.devices] == pytest.approx(LATENCIES_S)
    assert [d.mbps for d in found.devices][:2] == pytest.approx(RATES[:2], rel=0.05)
    assert found.devices[2].mbps == 0, "without a limit"
    assert [d.spread for d in found.devices] == pytest.approx([0, 0, 0], abs=1e-9)
    assert found.silent == ()


def test_a_model_that_comes_with_its_task_is_not_asked_for() -> None:
    run = simulated(KNOWN, settings={"fleet.fetch": "unasked", "fleet.latency_s": 9.0})
    first = run.events("granted")[0]
    travel_s = LATENCIES_S[0] + 8e-6 * run.result.model_bytes / RATES[0]
    assert run.events("downloaded")[0]["time_s"] == pytest.approx(first["time_s"] + travel_s)
    found = ab.calibrate(run)
    assert found.config.fleet.fetch == "unasked"
    assert [d.latency_s for d in found.devices] == pytest.approx(LATENCIES_S)
    assert [d.mbps for d in found.devices][:2] == pytest.approx(RATES[:2], rel=0.05)
    assert not list(idle(found.config, strategy_of(found.config))), "each device has its own"


def test_who_holds_the_version_already_has_a_shorter_way() -> None:
    """Of twelve updates a version most tasks have no download: half of the latencies, and of the bytes."""
    run = simulated(KNOWN, settings={"strategy.name": "fedbuff", "strategy.buffer_size": 12})
    assert len(run.events("downloaded")) < len(run.events("granted")) / 2
    assert [d.latency_s for d in ab.calibrate(run).devices] == pytest.approx(LATENCIES_S)


def test_a_run_that_was_stopped_is_foretold_as_far_as_it_went() -> None:
    def stop(progress: ab.RunProgress) -> None:
        if progress.updates >= 20:
            raise ab.StopRun

    often = {"run.evaluate_every_versions": 5}  # progress is told of at each, and else by the clock
    found = ab.calibrate(simulated(KNOWN, callbacks=[stop], settings=often))
    assert found.run.result.updates_applied < found.config.run.updates_max == 60, "its own budget"
    seconds = found.foretell()[0]
    assert seconds.foretold == pytest.approx(seconds.measured, rel=0.02)


def test_the_fleet_foretells_the_run_that_it_was_found_in() -> None:
    figures = {f.name: f for f in ab.calibrate(simulated(KNOWN)).foretell()}
    assert set(figures) == {"seconds to the last version", "mean staleness"}
    for figure in figures.values():
        assert figure.measured > 0
        assert figure.foretold == pytest.approx(figure.measured, rel=0.02)
        assert figure.error == pytest.approx(figure.foretold / figure.measured - 1)


def test_the_target_is_foretold_where_the_run_has_come_to_it() -> None:
    run = simulated(KNOWN, settings={"run.target_accuracy": 0.3, "run.evaluate_every_versions": 1})
    assert run.result.time_to_target_s is not None
    named = {f.name: f for f in ab.calibrate(run).foretell()}
    assert named["seconds to the target"].foretold == pytest.approx(run.result.time_to_target_s, rel=0.1)


def test_step_times_that_vary_are_found_to() -> None:
    speed = ab.Measured((0.1, 0.1), spreads=(0.4, 0.0))
    varying, even = ab.calibrate(simulated(speed, updates=400)).devices
    assert varying.spread == pytest.approx(0.4, abs=0.06)
    assert varying.step_time_s == pytest.approx(0.1, rel=0.05)
    assert even.spread == pytest.approx(0.0, abs=1e-9)


def test_a_device_that_was_never_done_is_left_out_and_named() -> None:
    found = ab.calibrate(simulated(ab.Measured((0.02, 1e4)), updates=12))
    assert [d.name for d in found.devices] == ["device-0000"]
    assert found.silent == ("device-0001",)
    assert found.config.fleet.clients == 1


def test_what_waits_for_a_place_is_not_far_away() -> None:
    """One trains at a time: whoever has waited is asked again, but that is no latency of the link."""
    speed = ab.Measured((0.5, 0.5, 0.5), latencies_s=(0.01, 0.01, 0.01))
    run = simulated(speed, updates=30, settings={"server.concurrency": 1})
    figures = {f.name: f for f in ab.calibrate(run).foretell()}
    seconds = figures["seconds to the last version"]
    assert seconds.foretold == pytest.approx(seconds.measured, rel=0.15)


def test_the_file_is_the_run_s_settings_with_the_fleet_found(tmp_path: Path) -> None:
    found = ab.calibrate(simulated(KNOWN))
    config = ab.load_config(found.save(tmp_path / "fleet.toml"))
    assert config.fleet.speed == "measured"
    assert config.fleet.step_times_s == pytest.approx(STEPS_S)
    assert config.fleet.latencies_s == pytest.approx(LATENCIES_S)
    assert (config.strategy.name, config.client.steps, config.run.updates_max) == ("fedasync", 4, 60)


def test_steps_of_sub_models_are_not_cheaper_once_more() -> None:
    quarter = {"submodel.name": "fedrolex", "submodel.widths": [0.25]}
    run, whole = simulated(KNOWN, settings=quarter), simulated(KNOWN)
    found = ab.calibrate(run)
    step_s = {event["client"]: event["metrics"]["train_s"] / 4 for event in run.events("decided")}
    assert max(step_s.values()) < 0.5 * max(STEPS_S), "a quarter costs less"
    assert [d.step_time_s for d in found.devices] == pytest.approx([step_s[d.name] for d in found.devices])
    seconds = found.foretell()[0]
    assert seconds.foretold == pytest.approx(seconds.measured, rel=0.02)
    assert not list(idle(found.config, strategy_of(found.config)))
    assert ab.calibrate(whole).config.fleet.submodel_step == whole.config.fleet.submodel_step == "operations"


def test_attackers_in_haste_are_not_hurried_once_more() -> None:
    run = simulated(KNOWN, settings={"fleet.attack": "flood", "fleet.attackers": 0.34})
    found = ab.calibrate(run)
    hostile = hostile_devices(run.config.fleet, run.config.run.seed)
    expected = [step_s / (FLOOD if i in hostile else 1) for i, step_s in enumerate(STEPS_S)]
    assert len(hostile) == 1
    assert [d.step_time_s for d in found.devices] == pytest.approx(expected)
    assert found.config.fleet.step_times_s == pytest.approx(STEPS_S), "the simulator hurries it by itself"
    seconds = found.foretell()[0]
    assert seconds.foretold == pytest.approx(seconds.measured, rel=0.02)


def test_a_run_s_folder_will_do(tmp_path: Path) -> None:
    simulated(KNOWN).save(tmp_path / "run")
    assert len(ab.calibrate(tmp_path / "run").devices) == 3
    with pytest.raises(FolderMissing):
        ab.calibrate(tmp_path / "none")


def test_a_run_without_updates_says_nothing() -> None:
    with pytest.raises(DataError, match="how long its training took"):
        ab.calibrate(simulated(ab.Measured((1e4,)), settings={"run.virtual_s_max": 1.0}))


@pytest.mark.parametrize("place", ["workload", "strategy", "attack"])
def test_code_that_a_folder_names_is_not_run_unasked(tmp_path: Path, place: str) -> None:
    """The folder is another's: that it was simulated here, in this process, is no word of its reader."""
    folder = simulated(KNOWN, updates=6).save(tmp_path / "run").folder
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(lines[0])
    table, key = {"strategy": ("strategy", "name"), "attack": ("fleet", "attack")}.get(place, ("run", place))
    first["config"][table][key] = f"{tmp_path}/stranger.py:Stranger"
    first["config"]["fleet"]["attackers"] = 0.34
    (tmp_path / "stranger.py").write_text("raise SystemExit('it was run')\n", encoding="utf-8")
    (folder / "journal.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"which is code: look at it, then say --load-code"):
        ab.calibrate(folder).foretell()
    if place == "attack":  # whose haste the settings hang on
        with pytest.raises(ConfigError, match="which is code: look at it"):
            ab.calibrate(folder).save(tmp_path / "fleet.toml")
