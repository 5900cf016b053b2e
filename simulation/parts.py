"""The kinds of part that a simulation is made of."""

from __future__ import annotations

from anabranch.host.parts import ENGINE_PARTS
from anabranch.reports.trackers import TRACKERS
from anabranch.simulation.attacks import ATTACKS
from anabranch.simulation.executors.names import EXECUTORS
from anabranch.workloads.splits import SPLITS

PARTS = (*ENGINE_PARTS, SPLITS, ATTACKS, EXECUTORS, TRACKERS)
