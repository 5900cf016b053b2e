"""A real link that is cut, lossy and slow: work goes on within two seconds, nothing lost, nothing twice.

Needs root and Linux: two network namespaces, iptables, and tc for the slow link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from netlab import lab

pytestmark = pytest.mark.prove

ANSWERED = ("granted", "refused", "pushed", "enrolled")
PARTITION_S = 15.0
RESUMED_S = 2.0
BOTH, ANSWERS, REQUESTS = ("INPUT", "OUTPUT"), ("INPUT",), ("OUTPUT",)
LARGE = '''
import numpy as np
from anabranch.workloads.synthetic import Synthetic

class Large(Synthetic):
    """775,010 parameters, 3.1 MB."""

    def model(self, seed=0):
        small = super().model(seed)
        times = 25_000 // len(small["hidden.bias"]) + 1
        wide = {"hidden.weight": 1, "hidden.bias": 0, "output.weight": 0}
        for name, axis in wide.items():
            repeated = np.repeat(small[name], times, axis)
            small[name] = np.ascontiguousarray(np.take(repeated, range(25_000), axis))
        return small
'''
LARGE_BYTES = 4 * 775_010

Figure = Callable[[str], None]


@pytest.mark.parametrize("ways", [BOTH, ANSWERS, REQUESTS], ids=["both ways", "answers", "requests"])
def test_a_partition_of_15_seconds(ways: tuple[str, ...], tmp_path: Path, figure: Figure) -> None:
    with lab(tmp_path, 4) as running:
        before = running.updates()
        running.link.cut(*ways)
        time.sleep(PARTITION_S)
        during = running.updates() - before
        healed = running.link.heal()
        resumed = running.resumed_s(healed, *ANSWERED)
        assert running.await_that(lambda: running.updates() > before + during + 20, 60.0)
    figure(
        f"resumed {min(resumed):.2f} to {max(resumed):.2f} s after the healing, {during} updates during it"
    )
    assert running.broken_promises() == []
    assert max(resumed) < RESUMED_S


def test_a_third_of_all_packets_lost(tmp_path: Path, figure: Figure) -> None:
    with lab(tmp_path, 4) as running:
        before, began = running.updates(), time.monotonic()
        running.link.lose(0.3)
        time.sleep(30.0)
        during, took_s = running.updates() - before, time.monotonic() - began
        running.link.heal()
    figure(f"{during} updates in {took_s:.0f} s with 30 % of the packets lost each way")
    assert running.broken_promises() == []
    assert during >= 10


def test_a_link_of_8_mbit_that_is_cut_in_the_middle_of_uploads(tmp_path: Path, figure: Figure) -> None:
    app = tmp_path / "app.py"
    app.write_text(LARGE)
    with lab(tmp_path, 2, f"{app}:Large", mbit=8) as running:
        before, began = running.updates(), time.monotonic()
        assert running.await_that(lambda: running.updates() >= before + 4, 90.0)
        each_s = (time.monotonic() - began) / 4
        device = running.devices[0]
        trained = time.monotonic()
        assert running.await_that(lambda: device.first(trained, "trained") is not None, 60.0)
        time.sleep(1.5)  # its upload is under way
        running.link.cut(*BOTH)
        time.sleep(PARTITION_S)
        healed = running.link.heal()
        after = running.updates()
        assert running.await_that(lambda: running.updates() >= after + 4, 90.0)
        first_s = min(at - healed for d in running.devices if (at := d.first(healed, "pushed")) is not None)
    share = (2 * LARGE_BYTES * 8 / 8e6) / (2 * each_s)
    figure(
        f"an update of 3.1 MB every {each_s:.1f} s over 8 Mbit ({share:.0%} of the link each way), "
        f"the first one {first_s:.1f} s after the healing"
    )
    assert running.broken_promises() == []
