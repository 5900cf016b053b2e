"""A Ray of a module's own, whose open ends are no failures of our tests."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from anabranch.simulation.executors.ray import on_this_machine


@contextmanager
def ray_cluster(**resources: Any) -> Iterator[None]:
    """It has these as long as the context lasts."""
    import ray

    with warnings.catch_warnings(action="ignore"):  # its own start-up's
        ray.init(log_to_driver=False, logging_level="error", **on_this_machine(), **resources)
        gc.collect()  # files that it leaves open in circles, else some later test's to be told of
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):  # it does not wait for the processes that it ends
            ray.shutdown()
            gc.collect()
