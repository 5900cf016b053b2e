"""Processes in which runs are simulated side by side. They end with the one that has started them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process

from anabranch.core.errors import ConfigError
from anabranch.workloads.app import App

ORPHAN = 1  # the exit code of one whose parent was killed


@contextmanager
def run_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many of them; what nobody has begun is given up where something is raised inside."""
    # Not forked: neither torch's threads nor gRPC's survive that.
    with ProcessPoolExecutor(count, get_context("spawn"), _end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def check_seen(apps: Iterable[App | None], call: str) -> None:
    """Raises `ConfigError` where other processes would not find the code of an App."""
    main = sys.modules["__main__"]
    if any(type(app).__module__ == "__main__" for app in apps) and not hasattr(main, "__file__"):
        raise ConfigError(
            f"{call}: other processes cannot see what a notebook defines: put the App in a file"
        )


def _end_with_parent() -> None:
    """A killed parent tells nobody: who waits for its next order would wait for ever, or hold a folder."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(ORPHAN)
