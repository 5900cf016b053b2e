"""Become a user who is not root, then the program named: it ends with the process that started it.

`subprocess` could do both between fork and exec (`user=`, `preexec_fn=`). But a fork of a process with
threads (gRPC's, a browser's, a library's of algebra) may wait for ever for a lock that no thread of the copy
will give back, before any time limit of a test can reach it. Started plainly, nothing is copied.
"""

import ctypes
import os
import signal
import sys

NOBODY = 65534
PR_SET_PDEATHSIG = 1


def main(program: str, *arguments: str) -> None:
    """Never returns. Raises `OSError` (the process ends with 1) where that user may not run the program."""
    kernel = ctypes.CDLL(None) if sys.platform == "linux" else None
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if kernel is not None:  # last: the kernel forgets it when the user changes
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
