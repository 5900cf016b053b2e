"""Parts of one's own as a user names them: by path, by entry point, simulated, live, replayed elsewhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import anabranch, answer, serving, started
from own_parts import FOLDER, STAGE, STRATEGY, TRACKER, install

from anabranch.core.errors import OUTCOMES, AppError, StoreError

MINE = """
[run]
name = "mine"
workload = "synthetic"
updates_max = 8
trackers = ["{tracker}", "jsonl"]
[fleet]
clients = 2
examples_per_client = 40
split = "{split}"
[strategy]
name = "{strategy}"
warm_up = 3
[uplink]
codec = "signs|zstd"
{stages}
"""
BY_PATH = {
    "strategy": "./strategy.py:WarmUp",
    "tracker": "./tracker.py:Csv",
    "split": "./split.py:steps",
    "stages": 'stages = ["./stage.py:Signs"]',
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A user's folder, with the files of examples/extending in it."""
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "mine.toml").write_text(MINE.format(**BY_PATH))
    return tmp_path


def test_by_path_in_a_simulation_and_its_replay_in_another_process(here: Path) -> None:
    result = answer(anabranch(here, "simulate", "mine.toml", "--json"))
    assert result["strategy"] == BY_PATH["strategy"]
    assert result["uplink_bytes"] < result["uplink_bytes_raw"] / 4
    folder = here / "runs" / "mine-WarmUp-seed0"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [point["version"] for point in result["history"]]
    assert (folder / "metrics.csv").read_text().count("accuracy=") == len(rows)

    refused = anabranch(here, "replay", folder)
    assert refused.returncode != 0
    assert "has strategy.name = './strategy.py:WarmUp', which is code" in refused.stderr
    assert "--load-code" in refused.stderr
    replayed = answer(anabranch(here, "replay", folder, "--load-code", "--json"))
    assert replayed["model_sha256"] == result["model_sha256"]


def test_a_run_that_was_told_to_a_tracker_of_ones_own_replays_without_its_code(here: Path) -> None:
    told = "--set", 'run.trackers=["tracker.py:Csv"]', "--out", "run"
    simulated = anabranch(here, "simulate", "synthetic", "--updates", 12, *told)
    assert simulated.returncode == 0, simulated.stderr
    assert "anabranch replay run\n" in simulated.stdout + "\n"
    (here / "tracker.py").unlink()
    replayed = anabranch(here, "replay", "run")
    assert replayed.returncode == 0, replayed.stderr


def test_a_tracker_is_told_of_a_run_that_has_ended(here: Path) -> None:
    result = answer(anabranch(here, "simulate", "synthetic", "--updates", 20, "--out", "run", "--json"))
    told = ("--tracker", "tracker.py:Csv", "--tracker", "jsonl")
    done = anabranch(here, "report", "run", *told)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    history = [(p["version"], p["accuracy"], p["loss"]) for p in result["history"]]
    assert [(r["version"], r["accuracy"], r["loss"]) for r in rows] == history
    assert len((here / "run" / "metrics.csv").read_text().splitlines()) == len(history) > 1

    (here / "failing.py").write_text((here / "tracker.py").read_text().replace("writerow", "no_such_method"))
    failed = anabranch(here, "report", "run", "--tracker", "failing.py:Csv")
    assert failed.returncode == OUTCOMES[AppError].exit_code
    assert "Csv.metrics (failing.py:" in failed.stderr
    unknown = anabranch(here, "report", "run", "--tracker", "nobody")
    assert "run.trackers must be one of jsonl, tensorboard, mlflow, wandb, prometheus" in unknown.stderr


def test_by_entry_point_in_a_simulation_that_replays_without_a_word(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install(tmp_path_factory.mktemp("site"), STRATEGY, STAGE, TRACKER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    names = {"strategy": "warm_up", "tracker": "csv", "split": "iid", "stages": ""}
    (here / "installed.toml").write_text(MINE.format(**names))
    result = answer(started(here, "simulate", "installed.toml", "--out", "run", "--json"))
    assert result["uplink_bytes"] < result["uplink_bytes_raw"] / 4
    assert answer(started(here, "replay", "run", "--json"))["model_sha256"] == result["model_sha256"]

    assert "own_parts_package.stage:Signs" in result["code"]
    (part,) = site.glob("*/strategy.py")  # its next release
    part.write_text(part.read_text().replace("(1.0 + context.staleness)", "(2.0 + context.staleness)"))
    changed = "the code of own_parts_package.strategy:WarmUp has changed"
    assert f"says otherwise: {changed} since" in started(here, "replay", "run").stderr
    assert changed in started(here, "simulate", "installed.toml", "--out", "run", "--resume").stderr
    answer(started(here, "simulate", "installed.toml", "--out", "next", "--json"))
    rows = answer(started(here, "compare", "run", "next", "--json"))["rows"]
    assert [row["seeds"] for row in rows] == [[0], [0]]


def test_by_option_wherever_an_app_s_path_is(here: Path) -> None:
    done = anabranch(
        here, "simulate", "app.py:Line", "--strategy", "./strategy.py:WarmUp", "--updates", 4,
        "--executor", "executor.py:Counting", "--out", "run",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "./strategy.py:WarmUp on app.py:Line" in done.stdout
    assert "anabranch replay run --load-code" in done.stdout
    near = anabranch(here, "simulate", "synthetic", "--strategy", "./strategy.py:Warmup", "--updates", 4)
    assert "strategy.py has no attribute 'Warmup'; did you mean 'WarmUp'?" in near.stderr
    other = anabranch(here, "simulate", "synthetic", "--strategy", "./split.py:steps", "--updates", 4)
    assert "./split.py:steps is no strategy: it lacks name, state_type, " in other.stderr


def test_live_with_devices_that_have_the_parts_and_one_that_has_not(here: Path) -> None:
    assert anabranch(here, "init", "synthetic", "--out", "model").returncode == 0
    local = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
    with serving(here, "mine.toml", "--model", "model", *local) as served:

        def device(name: str, *parts: object) -> Any:
            device = ("--server", served["address"], "--id", name, "--tasks-max", 4)
            return anabranch(here, "client", "synthetic", *device, *parts)

        bare = device("device-0")
        assert bare.returncode != 0
        assert "fleet.split must be one of iid, dirichlet" in bare.stderr
        assert "not 'steps'" in bare.stderr
        assert "--part split=PATH" in bare.stderr
        split = ("--part", "split=split.py:steps")
        raw = device("device-0", *split)
        assert raw.returncode == 0, raw.stderr
        both = device("device-1", *split, "--part", "stage=stage.py:Signs")
        assert both.returncode == 0, both.stderr
        measured = anabranch(
            here, "evaluate", "synthetic", "--server", served["address"], "--admin", served["admin_address"],
            "--once",
        )  # fmt: skip
        assert measured.returncode == 0, measured.stderr
    log = (here / "server.log").read_text()
    assert "client=device-0 has no codec stage signs of uplink.codec and sends raw" in log
    assert "client=device-1 has no" not in log
    (measured_row,) = (here / "anabranch-data" / "metrics.csv").read_text().splitlines()
    assert measured_row.startswith("8,")
    assert "accuracy=" in measured_row

    refused = anabranch(here, "verify", "anabranch-data")
    assert "which is code: look at it, then say --load-code" in refused.stderr
    verified = answer(anabranch(here, "verify", "anabranch-data", "--load-code", "--json"))
    assert (verified["version"], verified["problems"]) == (8, [])
    result = answer(anabranch(here, "report", "anabranch-data", "--load-code", "--json"))
    assert result["model_sha256"] == verified["model_sha256"]
    sent = {share["updates"]: share["uplink_bytes"] for share in result["clients"].values()}
    assert result["uplink_bytes"] < result["uplink_bytes_raw"], sent


BROKEN = """
from anabranch.server.store.memory import MemoryStore

class Mine(MemoryStore):
    name = "mine"

    @classmethod
    def of(cls, *_):
        raise KeyError("BUCKET")
"""


def test_what_a_store_raises_is_told_with_its_lines_and_tried_again_by_a_service(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "data").mkdir()
    done = anabranch(tmp_path, "verify", "data", "--database", "./mine.py:Mine")
    assert done.returncode == OUTCOMES[StoreError].exit_code
    assert "error: store Mine.of (mine.py:9): KeyError: 'BUCKET'" in done.stderr
    assert "Traceback" not in done.stderr
