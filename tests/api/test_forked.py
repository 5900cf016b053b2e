"""A program that forks: what it runs in threads stays with it, and so do its locks and temporary folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from proving import in_slices

BEGIN = """
import os, sys, signal
import numpy as np
import anabranch as ab

def forked(child):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

def refused(call):
    try:
        call()
    except ab.AnabranchError as error:
        print("refused:", error, flush=True)

def ones():
    return {"w": np.ones(3)}
"""
LOOP = (
    BEGIN
    + """
def another():
    refused(lambda: next(iter(ab.join(server.address, ones(), id="other", state_dir="other"))))

with ab.Server(ones, strategy="fedasync", until=ab.Until(updates=4)) as server:
    fed = ab.join(server.address, ones(), id="script", state_dir="script")
    tasks = iter(fed)
    next(tasks)
    forked(lambda: refused(lambda: fed.push(examples=1)))
    fed.push(examples=1)
    while fed._script.handed.empty():  # the next task is at hand, and the copy has it as well
        os.sched_yield()
    forked(lambda: refused(lambda: next(tasks)))
    forked(fed.close)
    forked(another)
    forked(lambda: refused(server.wait))
    for _ in tasks:
        fed.push(examples=1)
print("applied", fed.summary.applied)
"""
)
FOLDER = (
    BEGIN
    + """
run = ab.simulate("synthetic", fleet=ab.Fleet(clients=2), until=ab.Until(updates=2))
forked(sys.exit)  # as a script ends, with all that is to run then
print("updates", len(run.events("decided")))
"""
)
LOCKS = {
    "script": """
fed = ab.join(ab.Server(ones).start().address, ones(), id="a", state_dir="device")
next(iter(fed))
""",
    "server": "server = ab.Server(ones, data_dir='data').start()",
}
KILLED = """
if os.fork() == 0:
    os.read(0, 1)  # until this test is done
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def said(script: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_loop_is_of_the_process_that_began_it(tmp_path: Path) -> None:
    """What its copy pushed came nowhere, and the copy's loop ended as if the run had."""
    *refused, last = said(LOOP, tmp_path)
    assert len(refused) == 4
    assert "forked from one that spoke to a server" in refused.pop(2)
    for line in refused:
        assert "goes on in process" in line
        assert "was forked from it" in line
    assert last == "applied 4"


def test_a_copy_that_ends_takes_no_folder_along(tmp_path: Path) -> None:
    """The run lies in a temporary folder, which goes with the process that made it."""
    assert said(FOLDER, tmp_path) == ["updates 2"]


@pytest.mark.parametrize("what", in_slices(LOCKS, (), ["server"]))
def test_a_copy_that_lives_on_holds_no_lock(what: str, tmp_path: Path) -> None:
    """As a worker that was forked does, where the process that began it was killed."""
    script = BEGIN + LOCKS[what] + KILLED
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "forked\n"
        first.wait(600)
        assert said(BEGIN + LOCKS[what] + "\nprint('again')", tmp_path) == ["again"]
