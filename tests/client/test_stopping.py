"""Waiting, trying again, and the device's own folder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import anabranch
from virtual import VirtualTime

from anabranch.client.jobs import serve_jobs
from anabranch.client.lease import WorkProgress
from anabranch.client.pulse import Pulse
from anabranch.client.run import ClientOptions, run_client
from anabranch.client.signals import ended_by_interrupt
from anabranch.client.state import device_id, fresh_id, locked
from anabranch.client.stopping import Bell, Interrupted, interruptible, persist
from anabranch.core.errors import (
    AnabranchError,
    ConfigError,
    InvalidUpdate,
    Overloaded,
    StoreLocked,
    Unavailable,
)


def test_a_call_is_repeated_while_its_errors_pass() -> None:
    time = VirtualTime()
    heard: list[AnabranchError] = []
    answers: list[AnabranchError | int] = [
        Unavailable("a"),
        Overloaded("b", (5.0, 6.0)),
        Unavailable("c"),
        42,
    ]

    def call() -> int:
        answer = answers.pop(0)
        if isinstance(answer, AnabranchError):
            raise answer
        return answer

    assert persist(call, time.bell, 0, 0.5, 60.0, heard.append) == 42
    assert [str(e) for e in heard] == ["a", "b", "c"]
    first, second, third = time.rests
    assert 0 <= first <= 1
    assert 5 <= second <= 6  # the server's window
    assert 0 <= third <= 4


def test_pauses_double_up_to_their_cap_and_each_is_drawn_anew() -> None:
    """Of thirty devices, as of each one: none waits longer than it may, and they do not come at a time."""

    def rests(seed: int) -> list[float]:
        time, heard = VirtualTime(), list[AnabranchError]()

        def call() -> None:
            if len(heard) < 5:
                raise Unavailable("away")

        persist(call, time.bell, seed, 0.5, 6.0, heard.append)
        return time.rests

    for each, most in zip(zip(*map(rests, range(30)), strict=True), (1.0, 2.0, 4.0, 6.0, 6.0), strict=True):
        assert len(set(each)) == 30
        assert min(each) < 0.3 * most
        assert 0.7 * most < max(each) <= most


def test_an_error_that_does_not_pass_is_raised() -> None:
    def call() -> None:
        raise InvalidUpdate("no")

    with pytest.raises(InvalidUpdate):
        persist(call, VirtualTime().bell, 0, 0.5, 60.0, lambda _: None)


def test_another_thread_ends_a_rest() -> None:
    bell = Bell()
    bell.ring()
    bell.rest(3600.0)  # rung before: it does not even begin
    threading.Timer(0.01, bell.stop).start()
    with pytest.raises(Interrupted):
        bell.rest(3600.0)


def test_a_signal_leaves_no_lock_behind() -> None:
    """As gRPC takes its own: the signal arrives with the lock in hand, before there is a block to leave."""
    events: list[str] = []
    lock: Any = SimpleNamespace(acquire=None, release=None)
    lock.__enter__ = partial(os.kill, os.getpid(), signal.SIGTERM)
    lock.__exit__ = lambda *_: events.append("given back")
    condition = threading.Condition(lock)

    def locked_and_rested() -> None:
        with interruptible(Bell()):
            with condition:
                events.append("held")
            Bell().rest(600.0)

    with pytest.raises(Interrupted, match="SIGTERM"):
        locked_and_rested()
    assert events == ["held", "given back"]


def test_a_signal_that_strikes_a_wait_leaves_no_lock_behind() -> None:
    """As gRPC's next message is awaited: the lock is given back, and nothing takes it again by itself yet."""
    events: list[str] = []
    lock: Any = SimpleNamespace(acquire=None, release=None, __enter__=None, __exit__=None)
    lock._is_owned = lambda: True
    lock._release_save = partial(os.kill, os.getpid(), signal.SIGINT)
    lock._acquire_restore = lambda _: events.append("taken again")
    condition = threading.Condition(lock)

    def waited() -> None:
        with interruptible(Bell()):
            condition.wait(600.0)

    with pytest.raises(Interrupted, match="SIGINT"):
        waited()
    assert events == ["taken again"]


def test_a_signal_is_not_lost_in_a_finalizer() -> None:
    """As a DataLoader's waits for its workers: what is raised there, Python prints and forgets."""
    events: list[str] = []

    class Iterating:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            events.append("its workers have ended")

    def trained() -> None:
        with interruptible(Bell()):
            Iterating()
            Bell().rest(600.0)

    with pytest.raises(Interrupted, match="SIGTERM"):
        trained()
    assert events == ["its workers have ended"]


def test_what_is_told_of_children_is_not_raised_in_the_place_of_a_stop() -> None:
    """As torch does of a DataLoader's workers, which a stop of the whole process group ends as well."""
    events: list[str] = []

    def told(*_: object) -> None:
        events.append("a worker has ended")
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    def trained(bell: Bell) -> None:
        with interruptible(bell):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                bell.rest(600.0)
            finally:
                os.kill(os.getpid(), signal.SIGCHLD)

    before = signal.signal(signal.SIGCHLD, told)
    try:
        with pytest.raises(RuntimeError):
            os.kill(os.getpid(), signal.SIGCHLD)
        for _ in range(2):
            with pytest.raises(Interrupted, match="SIGTERM"):
                trained(Bell())
        os.kill(os.getpid(), signal.SIGCHLD)  # a worker that ends late
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert events == ["a worker has ended"] * 4


def test_a_signal_that_the_users_code_has_eaten_is_heard_at_the_next_look() -> None:
    bell = Bell()
    with interruptible(bell):
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            bell.rest(600.0)
        with pytest.raises(Interrupted, match="SIGTERM"):
            bell.check()


def _struck(number: int) -> None:
    """In a process that was forked."""
    try:
        os.kill(os.getpid(), number)
        Bell().rest(600.0)
    except KeyboardInterrupt:  # as a DataLoader's worker does: it ends without a word
        os._exit(42)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 42), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_forked_process_ends_by_a_signal_as_it_would_without_us(number: int, code: int) -> None:
    # Another library may have left handlers in this process: Ray exits by SIGTERM's number.
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    before = {each: signal.signal(each, handler) for each, handler in usual.items()}
    bell = Bell()
    try:
        with interruptible(bell):
            worker = get_context("fork").Process(target=_struck, args=(number,))
            worker.start()
            worker.join()
        assert worker.exitcode == code
        bell.check()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_a_signal_that_strikes_the_log_leaves_no_lock_behind() -> None:
    events: list[str] = []
    lock: Any = SimpleNamespace(acquire=None, release=partial(events.append, "given back"))
    lock.acquire = partial(os.kill, os.getpid(), signal.SIGTERM)
    handler = logging.Handler()
    handler.lock = lock

    def told() -> None:
        with interruptible(Bell()):
            handler.acquire()
            try:
                events.append("told")
            finally:
                handler.release()
            Bell().rest(600.0)

    with pytest.raises(Interrupted, match="SIGTERM"):
        told()
    assert events == ["told", "given back"]


# The signal comes within the fork, where no line of Python is run, so that it strikes in the next one. What
# is registered first is done last of what goes before a fork, and `logging` takes its lock there.
FORKED = """
import ctypes, os, signal, threading
from functools import partial

os.register_at_fork(before=partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGTERM))

import logging
from anabranch.client.stopping import Bell, Interrupted, interruptible

try:
    with interruptible(Bell()):
        if not os.fork():
            os._exit(0)
        Bell().rest(600.0)
except Interrupted as stop:
    threading.Thread(target=logging.warning, args=("stopped by %s", stop)).start()
"""


def test_a_signal_that_strikes_a_fork_leaves_the_log_to_other_threads() -> None:
    quiet = [sys.executable, "-W", "ignore"]  # of a fork beside numpy's threads, since Python 3.12
    done = subprocess.run([*quiet, "-c", FORKED], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "WARNING:root:stopped by SIGTERM\n")


def test_what_is_ended_by_an_interrupt_is_left_in_its_own_way() -> None:
    before = signal.getsignal(signal.SIGINT)
    ended, done = threading.Event(), []

    def waited() -> None:
        with ended_by_interrupt(ended.set):
            os.kill(os.getpid(), signal.SIGINT)
            done.append(ended.wait(600.0))
            raise Unavailable("cut off")

    with pytest.raises(KeyboardInterrupt):
        waited()
    assert done == [True], "nothing was raised where it waited"
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(Unavailable), ended_by_interrupt(ended.clear):
        raise Unavailable("cut off by the server")
    assert ended.is_set(), "nobody has interrupted"


def test_a_signal_interrupts_but_not_what_is_patient() -> None:
    before = signal.getsignal(signal.SIGTERM)
    bell = Bell()

    def interrupted_rest() -> None:
        with interruptible(bell):
            os.kill(os.getpid(), signal.SIGTERM)
            bell.rest(10.0)

    with pytest.raises(Interrupted, match="SIGTERM"):
        interrupted_rest()
    with interruptible(bell):
        bell.patient = True
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            bell.check()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_stops_a_device_in_order_but_not_under_nohup() -> None:
    before = signal.getsignal(signal.SIGHUP)

    def struck() -> None:
        bell = Bell()
        with interruptible(bell):
            os.kill(os.getpid(), signal.SIGHUP)
            bell.rest(0.0)

    try:
        signal.signal(signal.SIGHUP, lambda *_: pytest.fail("the process would have ended here"))
        with pytest.raises(Interrupted, match="SIGHUP"):
            struck()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        struck()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_pulse_beats_when_the_moment_has_come() -> None:
    beats = threading.Semaphore(0)
    time = VirtualTime()
    pulse = Pulse(lambda: beats.release(), time.now)  # noqa: PLW0108
    pulse.start()
    for _ in range(3):
        pulse.set(time.now())
        assert beats.acquire(timeout=600)
    pulse.set(time.now() + 3600.0)
    pulse.stop()
    assert not beats.acquire(blocking=False)


def test_progress_counts_steps_where_there_are_any_and_seconds_elsewhere() -> None:
    time = VirtualTime()
    progress = WorkProgress(time.now)
    progress.begin()
    time.pass_s(5.0)
    assert progress.value() == 5.0
    progress.step()
    time.pass_s(100.0)  # a step that hangs is no progress
    assert progress.value() == 6.0
    progress.begin()
    time.pass_s(2.0)
    assert progress.value() == 8.0


def test_a_device_keeps_its_id(tmp_path: Path) -> None:
    made_up = device_id(tmp_path / "a")
    assert device_id(tmp_path / "a") == made_up == device_id(tmp_path / "a", made_up)
    assert device_id(tmp_path / "b") != made_up
    assert device_id(tmp_path / "c", "kiln-7") == "kiln-7" == device_id(tmp_path / "c")
    with pytest.raises(ConfigError, match="belongs to device 'kiln-7'"):
        device_id(tmp_path / "c", "kiln-8")
    with pytest.raises(ConfigError, match="--id must be"):
        device_id(tmp_path / "d", "no spaces")
    assert fresh_id() != fresh_id()


@pytest.mark.parametrize("junk", [b"\x99\xff", b"no spaces", b"a" * 200])
def test_a_file_that_holds_no_name_is_named(junk: bytes, tmp_path: Path) -> None:
    (tmp_path / "client_id").write_bytes(junk)
    for given in ("", "kiln-7"):
        with pytest.raises(ConfigError, match="client_id is damaged, it holds no name: remove it"):
            device_id(tmp_path, given)


def test_a_name_that_was_made_up_for_nothing_gives_way(tmp_path: Path) -> None:
    """As of a first start without a token: what the token brings is the device's name."""
    made_up = device_id(tmp_path)
    assert device_id(tmp_path, "kiln-7") == "kiln-7" == device_id(tmp_path)
    with pytest.raises(ConfigError, match="belongs to device 'kiln-7'"):
        device_id(tmp_path, made_up)


@pytest.mark.parametrize("left", ["outbox/a", "memory/a", "kept/a", "held.safetensors", "jobs/run/client_id"])
def test_a_name_under_which_there_is_work_does_not(left: str, tmp_path: Path) -> None:
    made_up = device_id(tmp_path)
    (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / left).touch()
    with pytest.raises(ConfigError, match=f"belongs to device '{made_up}'"):
        device_id(tmp_path, "kiln-7")


class Stopping(logging.Handler):
    """Has the process stopped as soon as it says that nobody is there to join."""

    def emit(self, record: logging.LogRecord) -> None:
        """Each line."""
        if "nobody answers there as a server to join" in record.getMessage():
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("jobs", [False, True], ids=["run", "jobs"])
def test_a_device_that_waits_to_join_is_stopped_as_any_other(jobs: bool, tmp_path: Path) -> None:
    options = ClientOptions(
        "synthetic",
        "127.0.0.1:1",
        state_dir=tmp_path,
        token=f"{'a' * 16}.{'b' * 43}",
        ca_sha256="ab" * 32,
        join="127.0.0.1:1",
    )
    stopping, log = Stopping(), logging.getLogger("anabranch.client.waiting")
    log.addHandler(stopping)
    try:
        if jobs:
            serve_jobs(options, lambda *_: pytest.fail("there is no server"), lambda *_, **__: None, Bell())
        else:
            assert run_client(options).why == "SIGTERM"
    finally:
        log.removeHandler(stopping)


@pytest.mark.parametrize("jobs", [(), ("--jobs",)], ids=["run", "jobs"])
def test_a_device_whose_starter_is_gone_ends(jobs: tuple[str, ...], tmp_path: Path) -> None:
    """Its standard input has nobody at its other end, from the first on."""
    done = anabranch(tmp_path, "client", "synthetic", *jobs, "--until-eof", "--server", "127.0.0.1:1")
    assert (done.returncode, "stopped" in done.stdout) == (0, True), done.stderr


def test_a_folder_has_one_agent(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(StoreLocked, match=rf"another device \(process {os.getpid()} on .*\) has"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_a_device_says_that_the_one_before_it_was_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    with locked(tmp_path):
        assert caplog.messages == [], "which an error is not"
    code = (
        "import os, signal, sys; from pathlib import Path; from anabranch.client.state import locked\n"
        "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, tmp_path])
    assert killed.wait(600) == -signal.SIGKILL
    with pytest.raises(StoreLocked), locked(tmp_path), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}: process {killed.pid} on ")
