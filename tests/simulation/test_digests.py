"""The same configuration gives the same digests, whoever trains; and a folder replays."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from contents import named, package
from fleets import Broken, Ones, config, recorded

from anabranch.core import content
from anabranch.core.errors import AppError, ConfigError, DataError, StoreCorrupt
from anabranch.core.model.params import digest
from anabranch.host.build import Blueprint
from anabranch.reports.journal_files import PAYLOADS
from anabranch.reports.result import Result
from anabranch.simulation.executors.processes import ProcessesExecutor
from anabranch.simulation.problem import ProblemSource
from anabranch.simulation.replay import replay_run
from anabranch.simulation.run import open_simulation, simulate

ROUGH = {"dropout": 0.2, "availability": 0.7, "availability_period_s": 15.0, "up_mbps": 1.0}
STRATEGIES = ["fedasync", "fedavg", "fedbuff", "fedprox"]


def digests(result: Result) -> tuple[str, str]:
    return result.model_sha256, result.journal_sha256


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_seed_gives_the_same_run(strategy: str, tmp_path: Path) -> None:
    settings = config(strategy, fleet=ROUGH)
    written, again = simulate(settings, tmp_path), simulate(settings)
    other = simulate(config(strategy, fleet=ROUGH, run={"seed": 1}))
    assert digests(written) == digests(again)
    assert written.history == again.history
    assert written.versions > 2
    assert written.model_sha256 != other.model_sha256


@pytest.mark.parametrize("strategy", ["fedasync", pytest.param("fedavg", marks=pytest.mark.prove)])
def test_processes_give_the_serial_digests(strategy: str) -> None:
    settings = config(strategy, fleet=ROUGH, run={"evaluate_every_s": 10.0})
    serial, parallel = simulate(settings), simulate(settings, workers=2)
    assert digests(serial) == digests(parallel)
    assert serial.history == parallel.history


def test_digests_of_payloads_change_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    small = simulate(config(fleet=ROUGH, run={"payload_digest": "blake3"}))
    monkeypatch.setattr(content, "BLAKE3_FROM_BYTES", 1)
    plain = simulate(config(fleet=ROUGH))
    settings = config(fleet=ROUGH, run={"payload_digest": "blake3"})
    written, parallel = simulate(settings, tmp_path), simulate(settings, workers=1)
    assert digests(written) == digests(parallel)
    assert written.model_sha256 == plain.model_sha256
    assert written.journal_sha256 != plain.journal_sha256
    assert written.history == plain.history
    assert small.model_sha256 == plain.model_sha256
    assert len({run.journal_sha256 for run in (small, plain, written)}) == 3, "the setting is in the journal"
    assert replay_run(tmp_path).matches
    with zipfile.ZipFile(tmp_path / PAYLOADS) as payloads:
        names = payloads.namelist()
        assert names
        assert all(name == named(payloads.read(name), "blake3") for name in names)


def test_updates_without_names_change_the_journal_and_nothing_else(tmp_path: Path) -> None:
    run = {"payload_digest": "none", "keep_payloads": False}
    plain, written = simulate(config(fleet=ROUGH)), simulate(config(fleet=ROUGH, run=run), tmp_path)
    assert digests(written) == digests(simulate(config(fleet=ROUGH, run=run), workers=1))
    assert (written.model_sha256, written.history) == (plain.model_sha256, plain.history)
    assert written.journal_sha256 != plain.journal_sha256
    records = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    updates = [record["payload"] for record in records if record["kind"] == "update"]
    assert len(updates) == written.updates_applied + written.updates_rejected > 2
    assert all(payload["sha256"] == "" and payload["size_bytes"] > 0 for payload in updates)
    outcome = replay_run(tmp_path)
    assert outcome.matches
    assert outcome.way == "simulation"


def test_without_names_nothing_of_a_payload_can_be_kept_or_served(tmp_path: Path) -> None:
    unnamed = {"payload_digest": "none"}
    with pytest.raises(ConfigError, match=r"set run\.keep_payloads = false"):
        simulate(config(run=unnamed), tmp_path)
    assert not any(tmp_path.iterdir())
    simulate(config(run=unnamed), tmp_path, keep_payloads=False)
    masked = {"secagg": {"mode": "keeper", "keepers": ["north"], "clip": 2.0, "cohort_min": 2}}
    wanted = r"'none' is for runs without \[faults\], .* and without \[secagg\]"
    for more in ({"faults": {"loss": 0.1}}, masked):
        with pytest.raises(ConfigError, match=wanted):
            simulate(config(run=unnamed, **more))
    with open_simulation(config()) as simulation:
        spec = simulation.engine.spec
    with pytest.raises(ConfigError, match="'none' is for simulations that keep no payloads"):
        Blueprint.of(config(run=unnamed), spec)


def test_a_run_says_at_its_start_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package()
    settings = config(run={"payload_digest": "blake3"})
    simulate(settings, tmp_path)
    monkeypatch.setattr(content, "blake3", None)
    with pytest.raises(ConfigError, match=r'pip install "anabranch\[blake3\]"'):
        simulate(settings)
    with pytest.raises(ConfigError, match=r'pip install "anabranch\[blake3\]"'):
        replay_run(tmp_path)
    simulate(config())


@pytest.mark.parametrize(
    ("strategy", "keep_payloads"),
    [
        pytest.param(strategy, keep, marks=[] if keep == (place % 2 == 0) else [pytest.mark.prove])
        for place, strategy in enumerate(STRATEGIES)
        for keep in (True, False)
    ],
)
def test_a_folder_replays(strategy: str, keep_payloads: bool, tmp_path: Path) -> None:
    settings = config(strategy, fleet=ROUGH, run={"keep_payloads": keep_payloads})
    _, expected = recorded(settings, tmp_path)
    outcome = replay_run(tmp_path)
    assert outcome.matches
    assert outcome.way == ("payloads" if keep_payloads else "simulation")
    assert (tmp_path / PAYLOADS).exists() == keep_payloads
    assert outcome.state_sha256 == expected


def test_a_changed_result_does_not_match(tmp_path: Path) -> None:
    result = simulate(config(), tmp_path)
    dataclasses.replace(result, model_sha256="00" * 32).write(tmp_path)
    assert not replay_run(tmp_path).matches


def test_a_changed_journal_does_not_match(tmp_path: Path) -> None:
    simulate(config(), tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines()
    last = json.loads(lines[-1])
    lines[-1] = json.dumps({**last, "now": last["now"] + 1.0}, sort_keys=True, separators=(",", ":"))
    journal.write_text("\n".join(lines) + "\n")
    assert not replay_run(tmp_path).matches


def test_a_live_run_without_payloads_cannot_be_replayed(tmp_path: Path) -> None:
    result = simulate(config(run={"keep_payloads": False}), tmp_path)
    dataclasses.replace(result, kind="live").write(tmp_path)
    with pytest.raises(DataError, match="without its payloads"):
        replay_run(tmp_path)


def test_payloads_of_another_run_are_found_out(tmp_path: Path) -> None:
    for seed in (1, 0):
        simulate(config(run={"seed": seed}), tmp_path / str(seed))
    (tmp_path / "1" / PAYLOADS).replace(tmp_path / "0" / PAYLOADS)
    with pytest.raises(StoreCorrupt, match="not in the run's folder"):
        replay_run(tmp_path / "0")


def test_an_app_may_be_given_and_the_wire_is_counted(tmp_path: Path) -> None:
    settings = config("fedbuff", run={"keep_payloads": False})
    result = simulate(settings, tmp_path, app=Ones())
    assert result.workload == "ones"
    assert digests(result) == digests(simulate(settings, app=Ones(), workers=1))
    assert result.uplink_bytes == 16 * (result.updates_applied + result.updates_rejected)
    assert result.uplink_bytes_raw == result.uplink_bytes
    assert result.downlink_bytes_full_equivalent == result.downlink_bytes > 0
    assert replay_run(tmp_path, app=Ones()).matches


def test_a_failure_in_training_is_not_hidden() -> None:
    for workers in (0, 1):
        with pytest.raises(AppError, match=r"Broken\.train .* on device-\d+: ZeroDivisionError: by design"):
            simulate(config(), app=Broken(), workers=workers)


def test_no_workers_is_not_a_pool() -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        ProcessesExecutor(ProblemSource(config()), 0)


def test_the_numpy_problem_needs_no_torch() -> None:
    settings = config(run={"virtual_s_max": 5.0})
    code = (
        "import sys; sys.modules['torch'] = None; from fleets import config;"
        "from anabranch.simulation.run import simulate;"
        "print(simulate(config(run={'virtual_s_max': 5.0})).model_sha256)"
    )
    path = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({path!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == simulate(settings).model_sha256


def test_the_digest_is_that_of_the_engine() -> None:
    with open_simulation(config()) as simulation:
        simulation.run()
        assert simulation.result(0.0).model_sha256 == digest(simulation.engine.vector)
