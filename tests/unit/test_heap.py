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
