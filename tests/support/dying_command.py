"""A command that kills its own process at a failpoint of the server.

python dying_command.py NAME:N WORDS...
"""

from __future__ import annotations

import sys

from crash_server import die_at

from anabranch.cli.main import main

if __name__ == "__main__":
    point, number = sys.argv[1].split(":")
    die_at(point, int(number))
    sys.argv = ["anabranch", *sys.argv[2:]]
    main()
