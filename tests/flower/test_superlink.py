"""Our strategies on Flower's own runtime: a SuperLink, SuperNodes, `flwr run`, all as processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'anabranch[flower]'")

import psutil
from commands import anabranch
from flower_apps import write_app
from superlinks import Deployment, deployed

from anabranch.reports.result import Result
from anabranch.simulation.replay import replay_run

RUN_S = 1500.0  # hangs: Flower starts a process for each task, which a busy machine takes its time for


def packed(app: Path, out: Path, run: Path, *more: str) -> Path:
    done = anabranch(out.parent, "flower", "pack", app, "--out", out, "--run", run, *more)
    assert done.returncode == 0, done.stderr
    return out


def asynchronous(app: Path, folder: Path, *more: str) -> Path:
    given = ["strategy.name=fedasync", "run.updates_max=4", "run.evaluate_every_versions=0", *more]
    return packed(app, folder / "packed", folder / "run", *(w for text in given for w in ("--set", text)))


@pytest.mark.prove
def test_our_strategies_run_on_a_superlink(tmp_path: Path) -> None:
    ours = asynchronous(write_app(tmp_path), tmp_path)
    with deployed(tmp_path / "flower", 2) as superlink:
        superlink.run(ours, RUN_S)
    result = Result.read(tmp_path / "run")
    assert (result.updates_applied, result.versions, len(result.clients)) == (4, 4, 2)
    assert {share.examples // share.updates for share in result.clients.values()} == {10, 20}
    assert result.final_accuracy == pytest.approx(0.1 * 20 / 30)
    assert replay_run(tmp_path / "run").matches


@pytest.mark.prove
def test_a_server_app_that_was_killed_goes_on_in_the_next_run(tmp_path: Path) -> None:
    ours = asynchronous(write_app(tmp_path), tmp_path, "run.updates_max=6")
    journal = tmp_path / "run" / "journal.jsonl"
    with deployed(tmp_path / "flower", 2) as superlink:
        command = [str(Path(sys.executable).parent / "flwr"), "run", str(ours), "here"]
        subprocess.run(command, env=superlink.environment, check=True, timeout=600, capture_output=True)
        await_updates(journal, 2, superlink)
        victim = server_app_process(superlink)
        os.kill(victim, signal.SIGKILL)
        before = journal.read_text().count('"kind":"update"')
        superlink.run(ours, RUN_S)
    result = Result.read(tmp_path / "run")
    assert result.updates_applied == 6
    assert 2 <= before < 6
    assert replay_run(tmp_path / "run").matches
    records = map(json.loads, journal.read_text().splitlines())
    tasks = [record["task_id"] for record in records if record["kind"] == "update"]
    assert len(tasks) == len(set(tasks)) >= 6  # nothing was applied twice


EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-quickstart-numpy"
WHOLE_BYTES = 650 * 4
TWENTY_VERSIONS = {
    "fedbuff": ["strategy.name=fedbuff", "strategy.buffer_size=2"],
    "teasq": ["strategy.name=teasq", "strategy.cache_size=2", "strategy.concurrency_fraction=1.0"],
    "teasq-whole": [
        *["strategy.name=teasq", "strategy.cache_size=2", "strategy.concurrency_fraction=1.0"],
        *["strategy.kept=0.3", "uplink.codec=auto"],  # its own choice: the mod is in the packed app
    ],
}


@pytest.mark.prove
@pytest.mark.timeout(3 * RUN_S)
@pytest.mark.parametrize("simulated", [True, False], ids=["simulation", "supernodes"])
def test_twenty_versions_without_rounds(simulated: bool, tmp_path: Path) -> None:
    if simulated and importlib.util.find_spec("ray") is None:
        pytest.skip("Flower's simulation needs Ray: pip install 'flwr[simulation]'")
    pytest.importorskip("sklearn", reason="the example's data comes with scikit-learn")
    with deployed(tmp_path / "flower", 4, simulated) as superlink:
        for name, settings in TWENTY_VERSIONS.items():
            given = [*settings, "run.versions_max=20", "run.evaluate_every_versions=0"]
            out, run = tmp_path / f"packed-{name}", tmp_path / name
            superlink.run(packed(EXAMPLE, out, run, *(w for text in given for w in ("--set", text))), RUN_S)
            result, took_s = Result.read(run), span_s(run / "journal.jsonl")
            assert replay_run(run).matches
            assert (result.versions, result.updates_applied, len(result.clients)) == (20, 40, 4)
            assert result.staleness.max >= 1
            sent = result.updates_applied + result.updates_rejected
            assert (result.uplink_bytes < 0.6 * sent * WHOLE_BYTES) is (name == "teasq-whole")
            sys.stdout.write(
                f"\n{name}: {40 / took_s:.2f} updates/s, staleness {result.staleness.mean:.2f} (most "
                f"{result.staleness.max}), accuracy {result.final_accuracy:.1%}, {result.uplink_bytes} B up, "
                f"{result.downlink_bytes} B down\n"
            )


def span_s(journal: Path) -> float:
    """Seconds from the first task to the last update."""
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    times = [record["now"] for record in records if record["kind"] in ("asked", "update")]
    return float(times[-1] - times[0])


@pytest.mark.prove
@pytest.mark.parametrize("simulated", [False, True], ids=["supernodes", "simulation"])
def test_the_baseline_is_written_down(simulated: bool, tmp_path: Path) -> None:
    if simulated and importlib.util.find_spec("ray") is None:
        pytest.skip("Flower's simulation needs Ray: pip install 'flwr[simulation]'")
    app = write_app(tmp_path)
    theirs = packed(app, tmp_path / "theirs", tmp_path / "baseline", "--baseline")
    ours = asynchronous(app, tmp_path)
    with deployed(tmp_path / "flower", 2, simulated) as superlink:
        superlink.run(theirs, RUN_S)
        superlink.run(ours, RUN_S)
    baseline, result = Result.read(tmp_path / "baseline"), Result.read(tmp_path / "run")
    assert (baseline.versions, baseline.updates_applied) == (3, 6)
    assert [p.version for p in baseline.history] == [1, 2, 3]
    assert baseline.final_accuracy == result.final_accuracy == pytest.approx(0.1 * 20 / 30)


def await_updates(journal: Path, count: int, superlink: Deployment) -> None:
    deadline = time.monotonic() + RUN_S
    while not journal.exists() or journal.read_text().count('"kind":"update"') < count:
        assert time.monotonic() < deadline, superlink.logs()
        time.sleep(0.2)


def server_app_process(superlink: Deployment) -> int:
    """The process of the ServerApp, which the SuperLink has started somewhere below itself."""
    home = superlink.environment["FLWR_HOME"]

    def is_ours(process: Any) -> bool:
        try:
            named = any("flwr-serverapp" in word for word in process.cmdline())
            return named and process.environ().get("FLWR_HOME") == home
        except psutil.Error:
            return False

    (found,) = [p.pid for p in psutil.process_iter() if is_ours(p)]
    return found
