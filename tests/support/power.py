"""A disk whose power can be cut: a file system of its own, in a file, that is shut down at one moment.

ext4 has a call for this, made for tests (`EXT4_IOC_SHUTDOWN` without a flush of its journal, as xfstests uses
it): from that moment on nothing is written to the device any more, and what was in memory alone is gone. Then
the file system is mounted again, which repairs it from its journal, as a machine does when power is back.
What was handed to the device counts as written: a device that lies about a flush is not part of it.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from crash import Outcome, abandon, broken_promises, expected_model, write_model
from crash_writer import PASSING, VALUES, Writer
from server_process import NotServing, Plan, ServerProcess

IMAGE_BYTES = 512 * 1024 * 1024
EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
# The journal is written when somebody asks for it, and not every 5 s by itself.
OPTIONS = "commit=600"


class DiskWriter(Writer):
    """A device whose server's disk fails: a real one goes on after an error that is the server's own, too."""

    passing = (*PASSING, grpc.StatusCode.INTERNAL)


class Disk:
    """A mounted file system at `folder`."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._image, self.folder = image, folder
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        folder.mkdir()
        _run("mkfs.ext4", "-q", str(image))
        self.mount()

    def mount(self) -> None:
        """The power is back. Always a loop device of its own: what was shut down may linger for a moment."""
        self._device = _run("losetup", "--find", "--show", str(self._image))
        try:
            _run("mount", "-o", OPTIONS, self._device, str(self.folder))
        except subprocess.CalledProcessError:
            _run("losetup", "--detach", self._device)
            raise

    def unmount(self) -> None:
        """Nobody may have a file open there."""
        _run("umount", str(self.folder))
        _run("losetup", "--detach", self._device)

    def cut(self) -> None:
        """From now on nothing gets onto the disk."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(descriptor)


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A disk of its own. Skips the test where it cannot be made."""
    try:
        made = Disk(folder / "disk.img", folder / "disk")
        made.cut()
        made.unmount()
        made.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        pytest.skip(f"a file system whose power can be cut needs root, mkfs.ext4 and a loop device: {why}")
    try:
        yield made
    finally:
        made.unmount()


def run(folder: Path, plan: Plan) -> Outcome:
    """Serve and write; cut the power `plan.kills` times while at work; then check every promise."""
    with disk(folder) as ground:
        server = ServerProcess(folder, plan, data_dir=ground.folder / "data")
        try:
            return _run_on(ground, server, folder, plan)
        finally:
            server.kill()  # else the disk is in use, and stays


def _run_on(ground: Disk, server: ServerProcess, folder: Path, plan: Plan) -> Outcome:
    first = np.random.default_rng(plan.seed).integers(-100, 101, VALUES).astype(np.float32)
    spec, outcome = write_model(folder, first, plan), Outcome()
    server.start()
    shares = [len(range(n, plan.updates, plan.writers)) for n in range(plan.writers)]
    writers = [DiskWriter(n, share, server.address, spec, plan.seed) for n, share in enumerate(shares)]
    for writer in writers:
        writer.start()
    try:
        _cut_at_random(ground, server, writers, plan, outcome)
    except NotServing as error:
        outcome.problems.append(str(error))
        abandon(writers)
        return outcome
    for writer in writers:
        writer.join()
        outcome.problems += writer.problems
    outcome.acknowledged = sum(len(w.acknowledged) for w in writers)
    if (code := server.drain()) != 0:
        outcome.problems.append(f"the drain ended with exit code {code}:\n{server.log_tail()}")
    applied = [update for w in writers for update in w.applied]
    expected = expected_model(server.data_dir, plan, spec, first, applied)
    outcome.problems += broken_promises(server.data_dir, plan, writers, expected)
    return outcome


def _cut_at_random(
    ground: Disk, server: ServerProcess, writers: Sequence[Writer], plan: Plan, outcome: Outcome
) -> None:
    chance = random.Random(f"{plan.seed} cuts")
    for moment in sorted(chance.sample(range(plan.updates * 19 // 20), plan.kills)):
        while sum(len(w.acknowledged) for w in writers) < moment and any(w.is_alive() for w in writers):
            time.sleep(0.001)
        time.sleep(chance.uniform(0.0, 0.03))
        ground.cut()
        time.sleep(chance.choice((0.0, 0.1)))  # the server may notice, and must not acknowledge anything
        server.kill()
        ground.unmount()
        ground.mount()
        outcome.restarts_s.append(server.start())


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
