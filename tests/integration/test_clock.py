"""A served run whose machine has its clock set, while it serves and between two lives."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest
from wire import CALL_S, Device, Served, server_config

from anabranch.api.cockpit_live import ServedRun
from anabranch.reports.picture.picture import Picture
from anabranch.server.manifest import Manifest

DAY_S = 86400.0
LONG = {"lease_s": 600.0, "lease_min_s": 600.0}


class Wall:
    """The machine's clock, which somebody sets."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def beat(device: Device, task_id: str) -> tuple[float, float]:
    """A heartbeat that tells of no progress: the server's time, and what is left of the lease."""
    answer = device.heartbeat(task_id, progress=0.0)
    return answer.server_time_s, answer.expires_at_s - answer.server_time_s


@pytest.mark.parametrize("step_s", [-DAY_S, DAY_S])
def test_a_step_ends_no_lease_and_freezes_none(
    tmp_path: Path, manifest: Manifest, step_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    with (
        caplog.at_level(logging.WARNING),
        Served(server_config(tmp_path / "data", server=LONG), manifest, wall=wall) as served,
    ):
        device, other = served.device(), served.device("device-2")
        task = device.task()
        before, left_s = beat(device, task.task_id)
        wall.ahead_s = step_s
        other.task()  # the server looks at its timers again
        after, still_s = beat(device, task.task_id)
        assert before < after < before + CALL_S
        assert 0 < still_s < left_s
        assert device.answer(task).decision.reason == ""
    way = "forward" if step_s > 0 else "back"
    (said,) = [r for r in caplog.records if "clock was set" in r.getMessage()]
    assert f"this machine's clock was set {way} by 24.0 h" in said.getMessage()
    assert said.fields["seconds"] == pytest.approx(step_s, abs=1.0)  # type: ignore[attr-defined]


def test_an_old_buffer_is_applied_in_time_after_a_step_back(tmp_path: Path, manifest: Manifest) -> None:
    wall, flushing = Wall(), {"name": "fedbuff", "buffer_size": 100, "flush_s": 0.2}
    with Served(server_config(tmp_path / "data", strategy=flushing), manifest, wall=wall) as served:
        device = served.device()
        wall.ahead_s = -DAY_S
        device.work()
        until = time.monotonic() + CALL_S
        while not device.fetch(newer_than=0)[1]:
            assert time.monotonic() < until, "the flush has not come"


@pytest.mark.parametrize("step_s", [-DAY_S, DAY_S])
def test_leases_live_through_a_restart_on_another_clock(
    tmp_path: Path, manifest: Manifest, step_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    config = server_config(tmp_path / "data", server=LONG, strategy={"name": "fedasync"})
    with Served(config, manifest, wall=wall) as served:
        device = served.device()
        task = device.task()
        before, _ = beat(device, task.task_id)
        device_2 = served.device("device-2")
        device_2.work()  # the base of the first one's task is not the newest any more
    wall.ahead_s = step_s
    with caplog.at_level(logging.WARNING), Served(config, manifest, wall=wall) as served:
        device = served.device()
        after, left_s = beat(device, task.task_id)
        assert before < after
        assert CALL_S < left_s <= LONG["lease_s"]
        assert device.answer(task).decision.reason == ""  # a strategy that needs the base has kept it
    behind = [r for r in caplog.records if "behind the run" in r.getMessage()]
    assert len(behind) == (step_s < 0)


def test_a_cockpit_goes_by_the_clock_of_the_run(tmp_path: Path, manifest: Manifest) -> None:
    wall, picture, stop = Wall(), Picture(), threading.Event()
    wall.ahead_s = -DAY_S  # beside the clock of whoever looks on
    with Served(server_config(tmp_path / "data"), manifest, wall=wall) as served, served.admin() as operator:
        served.device().work()
        shown = ServedRun(operator)
        following = threading.Thread(target=shown.follow, args=(picture, stop, stop.set))
        following.start()
        following.join()
    assert 0 < picture.now_s < DAY_S / 2
