"""A server process of the soak: `python soak_server.py CONFIG MODEL`.

It says that it serves in the file `serving` beside CONFIG: its process id. The machine's clock is ahead by as
many seconds as the file `clock` there says, if it is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

from anabranch.core.config.tables import merge
from anabranch.core.errors import AnabranchError, outcome_of
from anabranch.server.app import ServerInfo, serve
from anabranch.server.manifest import read_manifest

SERVING, CLOCK = "serving", "clock"


def main(config_path: str, model: str) -> int:
    """Serve until a signal comes; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    here = Path(config_path).parent
    config = merge([("soak", json.loads(Path(config_path).read_text()))])

    def tell(info: ServerInfo) -> None:
        (here / SERVING).write_text(str(os.getpid()))

    def wall() -> float:
        clock = here / CLOCK
        return time.time() + (float(clock.read_text()) if clock.exists() else 0.0)

    try:
        return asyncio.run(serve(config, read_manifest(Path(model)), ready=tell, wall=wall))
    except AnabranchError as error:
        logging.error("%s: %s", type(error).__name__, error)  # noqa: TRY400 - as the command line says it
        return outcome_of(error).exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
