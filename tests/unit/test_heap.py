"""How the process takes its memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOOK = """
from anabranch.support.heap import use_small_pages
use_small_pages()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_a_server_takes_no_large_pages() -> None:
    said = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout
    assert "THP_enabled:\t0" in said


OFF = """
import gc
from anabranch.support.heap import uncollected
gc.disable()
kept = []
for _ in range(2):
    before = gc.get_freeze_count()
    try:
        with uncollected():
            assert not gc.isenabled()
            kept += [[n] for n in range(1000)]
            raise ImportError
    except ImportError:
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + 1000
"""


def test_the_collector_is_off_while_modules_come_and_on_again_whatever_they_do() -> None:
    subprocess.run([sys.executable, "-c", OFF], check=True)


OTHERS = """
import gc
kept = [[n] for n in range(1000)]
gc.freeze()
frozen = gc.get_freeze_count()
from anabranch.support.heap import uncollected
with uncollected():
    assert gc.isenabled()
    kept += [[n] for n in range(1000)]
assert gc.isenabled()
assert gc.get_freeze_count() <= frozen
gc.freeze()  # later than the module came
with uncollected():
    assert gc.isenabled()
"""


def test_the_collector_of_others_is_left_alone() -> None:
    subprocess.run([sys.executable, "-c", OTHERS], check=True)


FLEET = """
import gc
gc.disable()
from anabranch.support.heap import uncollected
with uncollected():
    from anabranch.simulation.collector import passed_over
imported = gc.get_freeze_count()
assert imported > 1000
fleet = [[n] for n in range(1000)]
with passed_over():
    assert gc.get_freeze_count() >= imported + 1000
assert gc.get_freeze_count() == 0
with uncollected():
    pass
with passed_over():
    pass
assert gc.get_freeze_count() == 0
gc.freeze()
others = gc.get_freeze_count()
with passed_over():
    assert gc.get_freeze_count() == others
assert gc.get_freeze_count() == others
"""


def test_a_large_fleet_is_passed_over_beside_what_a_command_imported_and_not_what_others_froze() -> None:
    subprocess.run([sys.executable, "-c", FLEET], check=True)
