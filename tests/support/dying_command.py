"""A command that kills its own process at a failpoint of the server.

python dying_command.py NAME:N WORDS...
"""

from __future__ import annotations

import itertools
import os
import signal
import sys

from anabranch.cli.main import main
from anabranch.server import failpoints


def die_at(name: str, nth: int) -> None:
    """End like a pulled plug when this failpoint is reached for the n-th time."""
    assert name in (*failpoints.POINTS, *failpoints.MASKED_POINTS), name
    reached = itertools.count(1)

    def hook(here: str) -> None:
        if here == name and next(reached) == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.arm(hook)


if __name__ == "__main__":
    point, number = sys.argv[1].split(":")
    die_at(point, int(number))
    sys.argv = ["anabranch", *sys.argv[2:]]
    main()
