"""Every page is typed, every kind of person walks: as `walks/` has it.

The quick ones with packages that are there already, for `make test`; all of them in blank environments, which
pip fills as the pages say, for `make journeys`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import walks
from walking import Walk

QUICK = [walk for walk in walks.ALL if walk.quick]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("walk", QUICK, ids=lambda walk: walk.name)
def test_quick(walk: Walk, borrowed: Path, go: Callable[[Walk, Path], None]) -> None:
    go(walk, borrowed)


@pytest.mark.journeys
@pytest.mark.timeout(7200)  # with the environment, for the first walk that needs it
@pytest.mark.parametrize("walk", walks.ALL, ids=lambda walk: walk.name)
def test_walk(walk: Walk, environment: Callable[[str], Path], go: Callable[[Walk, Path], None]) -> None:
    go(walk, environment(walk.needs))
