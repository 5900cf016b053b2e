"""An honest fleet beside a hostile one, in short: nobody starves, and every honest update is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HONEST, HOSTILE, UPDATES = 30, 11, 3  # of each way to be hostile one
# What each of them hears at least: it did what it is named for, and the server saw to it.
HEARS = {
    "Crashing": {"task"},
    "Holding": {"beat"},
    "Cutting": {"cut"},
    "Alternating": {"OK"},
    "Copied": {"task", "another_session"},
    "Poisoning": {"INVALID_ARGUMENT"},
    "Forging": {"held", "ALREADY_EXISTS"},
    "Inventing": {"OK", "INVALID_ARGUMENT"},
    "FloodingAsks": {"task"},
    "FloodingBeats": {"beat"},
    "Lying": {"INVALID_ARGUMENT", "rejected"},
}


def test_an_honest_fleet_beside_a_hostile_one() -> None:
    command = [sys.executable, "-m", "benchmarks.hostile_fleet", "--json", "--updates", str(UPDATES)]
    command += ["--devices", str(HONEST + HOSTILE), "--hostile", str(HOSTILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    fared = json.loads(done.stdout)
    assert fared["accepted"] == [UPDATES] * HONEST
    assert set(fared["heard"]["verdicts"]) == {"held", "published"}
    assert fared["problems"] == []
    for kind, words in HEARS.items():
        assert words <= set(fared["told"].pop(kind)), kind
    assert fared["told"] == {}
