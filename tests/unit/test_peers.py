"""The benchmark beside other simulators: our own script as it is called, and what the table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from measuring import benchmark

from anabranch.workloads.digits import Digits

peers = benchmark("peers")


def test_our_script_trains_all_devices_and_learns(tmp_path: Path) -> None:
    task = tmp_path / "task.npz"
    peers.write_task(task, peers.PeerProblem(Digits(), 2, 0.2))
    with np.load(task) as file:
        assert file["x"].shape == (peers.DEVICES, peers.EXAMPLES, 64)
        assert file["test_x"].shape == (359, 64)
    turn = peers.take_turn([sys.executable, str(peers.SCRIPTS / "with_anabranch.py"), str(task)])
    assert turn.tasks == 2 * peers.DEVICES
    assert turn.accuracy > 0.4, "ten classes: by chance it is 0.1"
    assert turn.wall_s > 0.0
    assert turn.cpu_s > 0.0


def test_a_script_that_fails_is_no_turn() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        peers.take_turn([sys.executable, str(peers.SCRIPTS / "with_anabranch.py"), "nothing.npz"])


def test_a_simulator_that_does_not_install_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = peers.OtherSimulator("Nobody", "with_nobody.py", ("--no-index nobody-has-this",))
    for _ in range(2):  # what is there of a failed try is not taken for an environment
        assert peers.interpreter(peer, tmp_path) is None
        assert "Nobody is left out" in capsys.readouterr().err


def test_the_ratio_is_of_processor_time_turn_by_turn() -> None:
    ours = [peers.PeerTurn(100, 9.0, cpu_s, 0.9) for cpu_s in (1.0, 2.0, 4.0)]
    theirs = [peers.PeerTurn(100, 1.0, cpu_s, 0.8) for cpu_s in (3.0, 2.0, 2.0)]
    row = peers.table({"anabranch": ours, "other": theirs}).splitlines()[-1]
    assert row == "| other | 100 | 50 | 0.800 | **1.00** (0.50 to 3.00) |"
