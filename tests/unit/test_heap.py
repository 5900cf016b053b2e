"""How the process takes its memory."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from anabranch.support.heap import uncollected

LOOK = """
from anabranch.support.heap import use_small_pages
use_small_pages()
print(open("/proc/self/status").read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux")
def test_a_server_takes_no_large_pages() -> None:
    said = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout
    assert "THP_enabled:\t0" in said


def test_the_collector_is_off_while_modules_come_and_on_again_whatever_they_do() -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()
