"""A server process that is killed and started again while its machine's clock is set back and forth."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
from crash import write_model
from crash_server import CLOCK
from crash_writer import VALUES
from server_process import Plan, ServerProcess
from wire import CALL_S, QUICK, Device

from anabranch.server.verify import verify

HOUR_S = 3600.0
# Forward, back beyond the beginning, and to where it was: while it serves, and while it is dead.
AHEAD_S = (24 * HOUR_S, -48 * HOUR_S, 0.0)


def test_a_task_outlives_every_step_of_the_clock(tmp_path: Path) -> None:
    plan = Plan()
    spec = write_model(tmp_path, np.zeros(VALUES, np.float32), plan)
    server, clock = ServerProcess(tmp_path, plan), tmp_path / CLOCK
    server.start()
    with grpc.insecure_channel(server.address, options=QUICK) as channel:
        device, other = (Device(channel, spec, name) for name in ("device-1", "device-2"))
        device.enrol()
        other.enrol()
        task = device.task()
        times = [device.heartbeat(task.task_id, progress=0.0).server_time_s]
        for ahead_s in AHEAD_S:
            for dead in (False, True):
                if dead:
                    server.kill()
                clock.write_text(str(ahead_s if dead else -ahead_s))
                if dead:
                    server.start()
                other.work()  # its lease is a timer that the server looks at
                beat = device.heartbeat(task.task_id, progress=0.0)
                times.append(beat.server_time_s)
                assert beat.expires_at_s > beat.server_time_s, server.log_tail()
        answer = device.answer(task)
    assert (answer.decision.reason, answer.decision.staleness) == ("", 2 * len(AHEAD_S))
    steps = np.diff(times)
    # A moment that no event has had, such as a heartbeat's, may come again after a kill, and none before it.
    assert (steps > -CALL_S).all()
    assert (steps[::2] > 0).all()
    # Nobody was away for longer than the clock has said at a start, and for no time while the server lived.
    assert (steps[::2] < CALL_S).all()
    assert server.drain() == 0
    assert verify(server.data_dir).problems == ()
    said = server.log()
    assert [said.count(f"clock was set {way} by") for way in ("back", "forward")] == [1, 2], said
