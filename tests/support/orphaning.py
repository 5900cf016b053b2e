"""A process that is killed while one of its own waits for work: what a test of such orphans starts."""

from __future__ import annotations

import os
import signal

from anabranch.api.pool import run_processes

if __name__ == "__main__":
    with run_processes(2) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
        os.kill(os.getpid(), signal.SIGKILL)
