"""A device process that tells what it hears as JSON lines, and may kill itself when it hears something.

    python telling_device.py OPTIONS [KIND COUNT]

OPTIONS are those of `ClientOptions`, as a JSON object. It kills itself at the COUNT-th event of a kind. The
last line of one that ends by itself is its summary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from nursery import PIPE, Process

from anabranch.client import agent
from anabranch.client.run import ClientOptions, run_client


def device(address: str, state_dir: Path, die_at: str = "", count: int = 1, **options: Any) -> Process:
    """One life of a device, of the synthetic App unless the options say otherwise."""
    given = {"app": "synthetic", "server": address, "state_dir": str(state_dir), **options}
    end = (die_at, count) if die_at else ()
    return Process(__file__, json.dumps(given), *end, stdout=PIPE, stderr=PIPE)


def told(life: Process) -> list[dict[str, Any]]:
    """What a device told until it ended: by itself, or by SIGKILL."""
    with life:
        out, err = life.communicate(timeout=600)
        assert life.returncode in (0, -signal.SIGKILL), err
        return [json.loads(line) for line in out.splitlines()]


def main(options: str, die_at: str = "", count: str = "0") -> None:
    """Work until it is told to end."""
    given, heard = json.loads(options), Counter[str]()
    agent.GOODBYE_S = 600.0  # a task is given back on a slow machine as well
    telling = threading.Lock()  # it trains and pushes at once: what it dies at is the last that it tells

    def tell(kind: str, **data: Any) -> None:
        with telling:
            heard[kind] += 1
            sys.stdout.write(json.dumps({"kind": kind, **data}) + "\n")
            sys.stdout.flush()
            if kind == die_at and heard[kind] == int(count):
                os.kill(os.getpid(), signal.SIGKILL)

    state_dir, shard = Path(given.pop("state_dir")), given.pop("shard", None)
    known = ClientOptions(**given, state_dir=state_dir, shard=shard and tuple(shard))
    summary = run_client(known, tell)
    tell("summary", why=summary.why, answered=summary.answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
