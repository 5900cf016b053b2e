"""Two servers on one PostgreSQL, whatever becomes of the leader: nothing acknowledged lost, nothing twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crash import SERVING
from crash_server import LEASE_S
from failover import LOST, NOT_SERVING, Federation, federation, health

# Under load the processes of the test need time of their own; on a machine at rest it is well under a second.
SLACK_S = 8.0
KILLED_S = SLACK_S  # the lock goes with the process
SILENT_S = LEASE_S + 2.0 + SLACK_S


def kill(run: Federation) -> None:
    """SIGKILL: the other one takes over at once."""
    leader, began = run.leader(), time.monotonic()
    leader.kill()
    run.hand_over(leader, began)
    assert run.takeovers_s[-1] < KILLED_S
    run.restart(leader)


def pause(run: Federation) -> None:
    """SIGSTOP for longer than the lease, then SIGCONT: the old leader finds that it leads no more."""
    leader, began = run.leader(), time.monotonic()
    leader.signal(signal.SIGSTOP)
    run.hand_over(leader, began)
    assert run.takeovers_s[-1] < SILENT_S
    leader.signal(signal.SIGCONT)
    assert leader.ended(SILENT_S) == LOST
    assert "leads this run now" in leader.log_tail()
    run.restart(leader)


def kill_both(run: Federation) -> None:
    """The standby too: whichever starts first leads."""
    leader = run.leader()
    leader.kill()
    run.other(leader).kill()
    leader.launch()
    run.other(leader).launch()
    deadline = time.monotonic() + 60.0
    while sorted(str(health(s.address)) for s in run.servers) != sorted(map(str, (SERVING, NOT_SERVING))):
        assert time.monotonic() < deadline, [s.log_tail() for s in run.servers]
        time.sleep(0.05)


def drain(run: Federation) -> None:
    """SIGTERM: the leader ends in order, the other one goes on."""
    leader, began = run.leader(), time.monotonic()
    assert leader.drain() == 0
    run.hand_over(leader, began)
    run.restart(leader)


@pytest.mark.timeout(400)
def test_the_leader_is_killed_paused_drained_and_both_are_killed(tmp_path: Path, postgresql_url: str) -> None:
    with federation(tmp_path, postgresql_url, seed=31) as run:
        for misfortune in (kill, pause, drain, kill_both, kill):
            run.await_updates(20)
            misfortune(run)
        assert run.finish() == []
        assert run.acknowledged > 100
        assert sum(writer.resent for writer in run.writers) > 0


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(41, 44))
def test_twenty_misfortunes_in_any_order(
    seed: int, tmp_path: Path, postgresql_url: str, figures: Callable[[str], None]
) -> None:
    chance = random.Random(seed)
    with federation(tmp_path, postgresql_url, seed=seed) as run:
        for _ in range(20):
            run.await_updates(chance.randrange(1, 200))
            chance.choice((kill, kill, pause, drain, kill_both))(run)
        assert run.finish() == []
    taken = sorted(run.takeovers_s)
    middle, longest = taken[len(taken) // 2], taken[-1]
    figures(f"{run.acknowledged} updates, takeovers: median {middle:.2f} s, longest {longest:.2f} s")
