"""A command whose devices seal their boxes for something else than they say: no keeper can open them.

python lying_command.py WORDS...
"""

from __future__ import annotations

import sys

from anabranch.cli.main import main
from anabranch.client import masking

if __name__ == "__main__":
    masking.seal_info = lambda *_: b"something else"  # type: ignore[attr-defined]
    sys.argv = ["anabranch", *sys.argv[1:]]
    main()
