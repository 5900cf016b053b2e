"""Executors by name; see `core/parts.py` for those of others."""

from __future__ import annotations

from anabranch.core.model.chains import AUTO
from anabranch.core.parts import PartKind

SERIAL, BATCHED, COMPILED, PROCESSES, RAY = "serial", "batched", "compiled", "processes", "ray"
BUILT_IN = {
    SERIAL: "anabranch.simulation.executors.serial:SerialExecutor",
    PROCESSES: "anabranch.simulation.executors.processes:ProcessesExecutor",
    BATCHED: "anabranch.simulation.executors.batched:BatchedExecutor",
    COMPILED: "anabranch.simulation.executors.batched:CompiledExecutor",
    RAY: "anabranch.simulation.executors.ray:RayExecutor",
}
EXECUTORS = PartKind(
    "executor",
    "executors",
    ("fleet.executor",),
    BUILT_IN,
    ("of", "exact", "train", "evaluate", "close"),
    also=(AUTO,),
)
