"""What the orders of operators answer, where the answer is not the plain one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import anabranch, answer, serving

from anabranch.core.errors import OUTCOMES, ConfigError

LOCAL = ("--address", "127.0.0.1:0", "--admin-address", "127.0.0.1:0")
SHORT = ("--set", "run.workload=synthetic", "--set", "run.updates_max=2")


def test_a_pause_of_a_run_that_has_ended_says_so(tmp_path: Path) -> None:
    """It is no idle order: a run that goes on by a larger budget is still paused."""
    answer(anabranch(tmp_path, "init", "synthetic", "--out", "model", "--json"))
    with serving(tmp_path, "--model", "model", *SHORT, *LOCAL) as said:
        at = ("--admin", said["admin_address"])
        assert anabranch(tmp_path, "admin", "pause", *at).stdout == "paused\n"
        assert answer(anabranch(tmp_path, "admin", "resume", *at, "--json")) == {
            "paused": False,
            "finished": "",
        }
        anabranch(tmp_path, "client", "synthetic", "--server", said["address"], "--id", "device-1")

        paused = anabranch(tmp_path, "admin", "pause", *at).stdout
        assert paused.startswith("paused: the run has ended ("), paused
        assert "resumed: but the run has ended (" in anabranch(tmp_path, "admin", "resume", *at).stdout
        assert answer(anabranch(tmp_path, "admin", "pause", *at, "--json"))["finished"]
        answer(anabranch(tmp_path, "admin", "set", "run.updates_max=4", *at, "--json"))
        status = answer(anabranch(tmp_path, "admin", "status", *at, "--json"))
        assert (status["paused"], status["finished"]) == (True, "")


def test_a_rollback_of_nobody_names_the_options(tmp_path: Path) -> None:
    done = anabranch(tmp_path, "admin", "rollback", "--to", 1, "--admin", "127.0.0.1:1")
    assert done.returncode == OUTCOMES[ConfigError].exit_code
    assert "--without CLIENT" in done.stderr
    assert "--everyone" in done.stderr


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("pause", "interrupted: the order may be carried out yet: look before it is given again\n"),
        ("status", "interrupted\n"),
    ],
)
def test_an_order_that_is_interrupted_may_be_carried_out_yet(order: str, said: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "anabranch.cli.main", "admin", order, "--admin", at]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
            caller, _ = silent.accept()  # it is under way
            with caller:
                process.send_signal(signal.SIGINT)
                _, told = process.communicate(timeout=600)
    assert (process.returncode, told) == (130, said)
