"""A process of the nursery does what one does that an interpreter is started for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import nursery
import psutil
import pytest
from nursery import PIPE, Process, run
from waits import until

PROGRAMS = {
    "code": "import sys; print(sys.argv[1:], __name__); sys.exit(3)",
    "words": "raise SystemExit('it cannot be')",
    "error": "1 / 0",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "place": "import os; print(os.getcwd(), os.environ['PLACE'], 'HOME' in os.environ)",
    "end": (
        "import atexit, threading\n"
        "atexit.register(print, 'over')\n"
        "threading.Timer(0.05, print, ['a thread']).start()\n"
        "print('no more')"
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_if_it_was_started(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    env = {"PLACE": "here", "PATH": os.environ["PATH"]}
    forked = run(program, "a b", 7, cwd=tmp_path, env=env)
    command = [sys.executable, str(program), "a b", "7"]
    started = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]  # of a traceback


def test_what_is_stopped_is_waited_for_and_what_ends_says_how(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal; print('here', flush=True); signal.pause()")
    with Process(tmp_path / "program.py", stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.kill(process.pid, 0)
        process.kill()
        assert process.wait(600) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_test_that_fails_stops_what_it_started_and_reads(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal; print('here', flush=True); signal.pause()")
    process = Process(tmp_path / "program.py", stdout=PIPE)

    def fail() -> None:
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            raise AssertionError

    with pytest.raises(AssertionError):
        fail()
    assert process.returncode == -signal.SIGKILL


STARTS = """
import os, sys
from nursery import Process

with open(sys.argv[2], "w") as other:
    print(Process(sys.argv[1], stdout=other).pid, flush=True)
os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a parent has ended")
def test_nothing_outlives_tests_that_are_killed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import signal; signal.pause()")
    command = [sys.executable, "-c", STARTS, str(tmp_path / "program.py"), str(tmp_path / "said")]
    path = {**os.environ, "PYTHONPATH": nursery.__file__.removesuffix("nursery.py")}
    killed = subprocess.run(command, capture_output=True, text=True, env=path, timeout=600)
    assert killed.returncode == 1, killed.stderr
    until(lambda: not psutil.pid_exists(int(killed.stdout)))
