"""Every page is typed, every kind of person walks: as `walks/` has it.

All of them in blank environments, which pip fills as the pages say, for `make journeys`. The upgrade of what
an older release has left is in `make slow` too, with the environment of the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import walks
from walking import Walk
from walks.people import UPGRADE


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_an_upgrade(go: Callable[[Walk, Path], None]) -> None:
    go(UPGRADE, Path(sys.prefix))


@pytest.mark.journeys
@pytest.mark.timeout(7200)  # with the environment, for the first walk that needs it
@pytest.mark.parametrize("walk", walks.ALL, ids=lambda walk: walk.name)
def test_walk(walk: Walk, environment: Callable[[str], Path], go: Callable[[Walk, Path], None]) -> None:
    go(walk, environment(walk.needs))
