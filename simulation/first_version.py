"""A simulated run that learns nothing, or slowly, says so at its first version, and not by its last curve.

An App's `train` that computes new weights beside the model, and does not write them into it, fails nowhere;
nor does a buffer that is large beside its fleet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from anabranch.core import events as ev
from anabranch.core.config.tables import Config
from anabranch.core.effects import Effect, Published
from anabranch.host import rare_versions
from anabranch.host.build import warn_once
from anabranch.simulation.problem import Problem
from anabranch.simulation.versions import Versions

log = logging.getLogger(__name__)

UNMOVED = (
    "version %d has the weights that the run began with: no update has moved one, to the bit. Unless that "
    "is meant, as of a warm-up from nothing: `train` has to change the model that it is given in place, see "
    "`anabranch check`"
)


class FirstVersion:
    """Looks at the first version that is published; it changes nothing in the run."""

    def __init__(self, versions: Versions, problem: Problem, config: Config) -> None:
        self._versions, self._problem, self._over = versions, problem, False
        self._devices = config.fleet.clients

    def observe(self, event: ev.Event, effects: Sequence[Effect]) -> None:  # noqa: ARG002
        """Warn where it is the model of before, or took more updates than there are devices."""
        if self._over:
            return
        published = next((effect for effect in effects if isinstance(effect, Published)), None)
        if published is None:
            return
        self._over = True
        if np.array_equal(self._versions.engine.vector, self._problem.spec.flatten(self._problem.initial)):
            log.warning(UNMOVED, published.version)
        warn_once(rare_versions.said_of(published, self._devices))  # a sweep has many runs of one fleet
